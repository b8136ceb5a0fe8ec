"""Starts the ranks of a run and ends them together.

Torch is imported inside the functions: `fork` has settings to make before torch is loaded.
"""

from __future__ import annotations

import gc
import math
import multiprocessing as mp
import os
import pickle
import select
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

from meshwright.engine.faults import (
    RunError,
    blames_another,
    explain,
    explain_death,
    guard,
    interrupted,
    leave,
)
from meshwright.engine.process_group import COLLECTIVE_TIMEOUT_S, join
from meshwright.engine.rank_env import DeviceType, Process, detect, hosts
from meshwright.engine.warning_filters import no_enum_warnings
from meshwright.errors import InputError, MeshwrightError

__all__ = ["Process", "detect", "fork", "hosts", "join", "start"]

GRACE_S = 5.0  # between asking a rank to end and ending it
SETTLE_S = 1.0  # after the first bad news: the rank that caused it may be the second to be heard
TICK_S = 0.5  # a rank's own children can hide its end from the pipe that tells it, so its exit code is looked at too
PROBE_S = 3.0
PRELOADED = ("torch", "torch.distributed", "torch._dynamo")  # dynamo: AdamW imports it, 1.6 s on every rank
PR_SET_PDEATHSIG = 1
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
ASKING_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
SAME_S = 1.0  # a SIGTERM may come twice, from a scheduler that tells every process and one that passes it on

Work = Callable[..., Any]


def start(
    work: Work,
    *args: Any,
    nproc: int | None = None,
    device_type: DeviceType = "auto",
    timeout_s: float = COLLECTIVE_TIMEOUT_S,
    preload: Sequence[str] = (),
    grace_s: float | None = None,
) -> list[Any]:
    """Runs `work(process, *args)` as this process was started: one rank of torchrun or SLURM, `nproc` ranks, or alone.

    Gives the results of the ranks started here, by rank. `grace_s`: see `fork`.
    """
    process = detect()
    if process is not None and process.world > 1 and nproc is not None and nproc != process.local_world:
        raise InputError(
            f"{process.how} already started {process.local_world} ranks on this machine",
            field="--nproc",
            value=nproc,
            fix=("leave --nproc out",),
        )
    if nproc is not None and nproc > 1 and (process is None or process.world == 1):
        return fork(
            nproc,
            work,
            *args,
            device_type=device_type,
            collective_timeout_s=timeout_s,
            preload=preload,
            grace_s=grace_s,
        )
    process = replace(process or Process(), device_type=device_type)
    with guard(process), join(process, timeout_s=timeout_s), guard(process):
        return [work(process, *args)]


@dataclass(frozen=True)
class RankMessage:
    """What a rank tells the process that started it."""

    rank: int
    at: float  # on the clock all processes of a machine share
    result: Any = None
    error: MeshwrightError | None = None


@dataclass(frozen=True)
class _Job:
    """What every rank is started with."""

    work: Work
    args: tuple[Any, ...]
    threads: int
    collective_timeout_s: float
    listens: bool  # it will listen for requests to end: until then they wait


@dataclass(frozen=True)
class _Rank:
    """A rank as the process that started it sees it."""

    place: Process
    process: BaseProcess
    pipe: Connection


def fork(
    nproc: int,
    work: Work,
    *args: Any,
    timeout: float | None = None,
    device_type: DeviceType = "auto",
    collective_timeout_s: float = COLLECTIVE_TIMEOUT_S,
    preload: Sequence[str] = (),
    grace_s: float | None = None,
) -> list[Any]:
    """Runs `work(process, *args)` on `nproc` ranks of this machine: the results by rank.

    The first rank that fails ends the others and is named in the error. `preload` are modules that all ranks need:
    they are imported once, before the ranks part. Where this process has already used CUDA or OpenMP threads the
    ranks cannot be forked from it; they are started afresh, which takes seconds longer.

    A signal that asks this process to end, ends the ranks. With `grace_s` they are asked to end by themselves, within
    that many seconds, when it is the first SIGTERM or SIGUSR1.
    """
    if nproc < 1:
        raise InputError("must be at least 1", field="--nproc", value=nproc)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="meshwright-") as folder,
            _environment({"OMP_NUM_THREADS": str(_threads(nproc)), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}),
            _ends_when_told(grace_s) as request,
        ):
            for module in (*PRELOADED, *preload):
                import_module(module)
            ranks = [
                Process(rank, nproc, rank, nproc, how="nproc", gpu=rank, device_type=device_type, folder=folder)
                for rank in range(nproc)
            ]
            return _run(
                ranks, _Job(work, args, _threads(nproc), collective_timeout_s, grace_s is not None), timeout, request
            )
    except KeyboardInterrupt:
        raise interrupted() from None


def _run(places: list[Process], job: _Job, timeout: float | None, request: _Request) -> list[Any]:
    how = "fork" if _can_fork() else "spawn"
    ranks: list[_Rank] = []
    grace_s = 0.0
    try:
        for place in places:
            with _undisturbed():  # a rank that was started and not noted could not be ended
                ranks.append(_started(how, place, job))
                request.pass_on(ranks)  # what was asked before this rank was there
        results = _results(ranks, timeout, request)
        grace_s = GRACE_S
        return results
    finally:
        _end(ranks, grace_s)


def _threads(nproc: int) -> int:
    """OpenMP threads of each rank: what the user set, else an equal share of the cores."""
    own = os.environ.get("OMP_NUM_THREADS", "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return int(own) if own.isdecimal() and int(own) > 0 else max(1, cores // nproc)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Sets what is not set yet, for the imports and the ranks to see."""
    own = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(own)
    try:
        yield
    finally:
        for name in own:
            os.environ.pop(name, None)


class _Request:
    """What this process was asked from outside, and to whom it passes that on."""

    def __init__(self, grace_s: float | None) -> None:
        self.grace_s = grace_s
        self.asked: signal.Signals | None = None
        self.deadline = math.inf  # when the ranks must have ended
        self._terminated_at = 0.0
        self._told: set[int] = set()  # process ids

    def hear(self, number: int, _: object) -> None:
        """A signal has come: the first request is noted for `pass_on`; anything else ends the run now."""
        now = time.monotonic()
        asks = number in ASKING_SIGNALS and self.grace_s is not None
        again = number == signal.SIGTERM and self._terminated_at and now - self._terminated_at > SAME_S
        if not asks or again:
            raise explain_death(0, 1, -number)
        if number == signal.SIGTERM:
            self._terminated_at = self._terminated_at or now
        if self.asked is None:
            self.asked = signal.Signals(number)
            self.deadline = now + (self.grace_s or 0.0) + GRACE_S

    def pass_on(self, ranks: list[_Rank]) -> None:
        """Asks the ranks that were not asked yet."""
        for one in ranks if self.asked is not None else ():
            pid = one.process.pid
            if pid and pid not in self._told and one.process.is_alive():
                self._told.add(pid)
                with suppress(ProcessLookupError):
                    os.kill(pid, self.asked or signal.SIGTERM)


@contextmanager
def _ends_when_told(grace_s: float | None) -> Iterator[_Request]:
    """Turns a signal that asks this process to end into a request to its ranks, or into an error that ends them."""
    request = _Request(grace_s)
    if threading.current_thread() is not threading.main_thread():
        yield request  # only the main thread may set handlers
        return
    heard = (signal.SIGTERM, signal.SIGHUP, *((signal.SIGUSR1,) if grace_s is not None else ()))
    before = {number: signal.signal(number, request.hear) for number in heard}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _can_fork() -> bool:
    """Whether a fork of this process could compute: tried out, because neither CUDA nor OpenMP can be asked."""

    if not hasattr(os, "fork"):
        return False
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads, which is what is tried here
        child = os.fork()
    if child == 0:
        os.close(reader)
        _try_to_compute(writer)
    os.close(writer)
    answered, _, _ = select.select([reader], [], [], PROBE_S)
    fine = bool(answered) and os.read(reader, 1) == b"y"
    os.close(reader)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return fine


def _try_to_compute(answer: int) -> None:
    """In a forked child: says y when an operation on all threads comes back and CUDA would still start."""
    with suppress(BaseException):
        import torch

        torch.ones(1 << 16).sum()
        if not torch.cuda._is_in_bad_fork():
            os.write(answer, b"y")
    os._exit(0)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Holds signals back; a rank starts with them held back until it has said what they shall do to it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _started(how: str, place: Process, job: _Job) -> _Rank:
    context: Any = mp.get_context(how)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_rank, args=(place, os.getpid(), job, theirs), name=f"rank {place.rank}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    theirs.close()
    return _Rank(place, process, ours)


def _rank(place: Process, parent: int, job: _Job, pipe: Connection) -> None:
    """The life of one rank, inside its own process."""
    _settle_in(parent, job.listens)
    gc.freeze()  # what the parent left behind may belong to threads that a fork does not have
    no_enum_warnings()
    import torch

    try:
        torch.set_num_threads(job.threads)
        os.environ.update(
            RANK=str(place.rank),
            WORLD_SIZE=str(place.world),
            LOCAL_RANK=str(place.local_rank),
            LOCAL_WORLD_SIZE=str(place.local_world),
        )
        with join(place, timeout_s=job.collective_timeout_s):
            try:
                result = job.work(place, *job.args)
            except BaseException as error:  # told before the group is left: that makes the other ranks fail, too
                _tell_and_leave(pipe, place, error)
            _send(pipe, RankMessage(place.rank, time.monotonic(), result=result))
    except BaseException as error:
        _tell_and_leave(pipe, place, error)


def _settle_in(parent: int, listens: bool) -> None:
    """Out of the terminal's reach, and never outliving the process that started it."""
    with suppress(OSError):
        os.setpgid(0, 0)  # one group per rank, so that the processes it starts end with it
    for number in ENDING_SIGNALS:
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
    held_back = ASKING_SIGNALS if listens else ()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number for number in ENDING_SIGNALS if number not in held_back])
    end_with(parent)


def end_with(parent: int) -> None:
    """From now on this process ends when its parent does."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _tell_and_leave(pipe: Connection, place: Process, error: BaseException) -> NoReturn:
    _send(pipe, RankMessage(place.rank, time.monotonic(), error=explain(error, place)))
    leave(1)


def _send(pipe: Connection, news: RankMessage) -> None:
    try:
        data = pickle.dumps(news)
    except Exception as error:
        what = (
            f"its error cannot be sent ({error}): {news.error}" if news.error else f"its result cannot be sent: {error}"
        )
        data = pickle.dumps(RankMessage(news.rank, news.at, error=RunError(f"rank {news.rank}: {what}")))
    with suppress(OSError):  # nobody listens any more
        pipe.send_bytes(data)


def _results(ranks: list[_Rank], timeout: float | None, request: _Request) -> list[Any]:
    """The results by rank, as soon as all are there; the cause as an error, soon after the first rank failed."""
    heard: dict[int, RankMessage] = {}
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    settled = math.inf
    while len(heard) < len(ranks) and time.monotonic() < settled:
        if time.monotonic() >= deadline:
            missing = ", ".join(str(one.place.rank) for one in ranks if one.place.rank not in heard)
            raise RunError(f"the run took longer than {timeout:g} s; rank {missing} had not ended")
        if time.monotonic() >= request.deadline:
            raise RunError(f"the ranks were asked to end and had not done so after {request.grace_s:g} s")
        request.pass_on(ranks)
        _listen([one for one in ranks if one.place.rank not in heard], heard)
        if settled == math.inf and any(news.error for news in heard.values()):
            settled = time.monotonic() + SETTLE_S
    failures = [(blames_another(news.error), news.at, news.rank) for news in heard.values() if news.error]
    if failures and (cause := heard[min(failures)[2]].error):
        raise cause
    return [heard[one.place.rank].result for one in ranks]


def _listen(ranks: list[_Rank], heard: dict[int, RankMessage]) -> None:
    """Waits a moment for news of these ranks; one that ended without any has failed."""
    wait([*(one.pipe for one in ranks), *(one.process.sentinel for one in ranks)], TICK_S)
    for one in ranks:
        code = one.process.exitcode  # before the pipe is looked at: what was said before the end is still in there
        if one.pipe.poll():
            with suppress(EOFError, OSError, pickle.UnpicklingError):
                news = pickle.loads(one.pipe.recv_bytes())
                heard[one.place.rank] = news
                continue
        if code is not None:
            heard[one.place.rank] = RankMessage(one.place.rank, time.monotonic(), error=_death(one.place, code))


def _death(place: Process, code: int) -> RunError:
    """Why a rank ended: its own last words, else what its exit code says."""
    with suppress(OSError):
        return RunError(place.last_words.read_text())
    return explain_death(place.rank, place.world, code)


def _end(ranks: list[_Rank], grace_s: float) -> None:
    """Leaves none of the ranks behind: those still there after a grace are asked to end, then made to."""
    try:
        _join_all(ranks, grace_s)
        _signal(ranks, signal.SIGTERM)
        _join_all(ranks, GRACE_S)
    finally:  # also when Ctrl-C comes a second time
        _signal(ranks, signal.SIGKILL)
        for one in ranks:
            one.process.join()
            one.process.close()
            one.pipe.close()


def _join_all(ranks: list[_Rank], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for one in ranks:
        one.process.join(max(0.0, deadline - time.monotonic()))


def _signal(ranks: list[_Rank], number: signal.Signals) -> None:
    """Sends a signal to the ranks and to what they started."""
    for one in ranks:
        pid = one.process.pid
        try:
            os.killpg(pid or 0, number) if pid else None
        except (ProcessLookupError, PermissionError):  # it had no time to make a group of its own, or is gone
            with suppress(ProcessLookupError):
                if pid and one.process.is_alive():
                    os.kill(pid, number)
