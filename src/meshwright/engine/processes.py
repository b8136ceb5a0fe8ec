"""Starts the ranks of a run and ends them together.

Torch is imported inside the functions: `fork` sets environment variables that torch reads on import.
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

from meshwright.choices import Backend
from meshwright.engine.faults import RunError, blames_another, explain, explain_death, guard, interrupted, leave
from meshwright.engine.process_group import COLLECTIVE_TIMEOUT_S, join
from meshwright.engine.rank_env import DeviceType, Process, detect, hosts
from meshwright.engine.spawned import spawn_context
from meshwright.engine.stop_request import (
    STOP_SIGNALS,
    Presses,
    StopSignal,
    after_stop,
    exits_after_stop,
    handled_signals,
)
from meshwright.engine.warning_filters import no_needless_warnings
from meshwright.errors import InputError, MeshwrightError

__all__ = ["Process", "detect", "fork", "hosts", "join", "start"]

GRACE_S = 5.0  # between SIGTERM and SIGKILL
SETTLE_S = 1.0  # after the first error message: the rank that caused it may report second
TICK_S = 0.5  # a rank's children can keep its pipe open after it died, so its exit code is polled too
PROBE_S = 3.0
PRELOADED = ("torch", "torch.distributed", "torch._dynamo")  # dynamo: AdamW imports it, 1.6 s on every rank
PR_SET_PDEATHSIG = 1
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

Work = Callable[..., Any]


def start(
    work: Work,
    *args: Any,
    nproc: int | None = None,
    device_type: DeviceType = "auto",
    backend: Backend = "auto",
    timeout_s: float = COLLECTIVE_TIMEOUT_S,
    preload: Sequence[str] = (),
    grace_s: float | None = None,
) -> list[Any]:
    """Run `work(process, *args)` as one rank of torchrun or SLURM, on `nproc` new ranks, or in this process.

    Return the results of the ranks started here, by rank. `grace_s`: see `fork`.
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
            backend=backend,
            collective_timeout_s=timeout_s,
            preload=preload,
            grace_s=grace_s,
        )
    process = replace(process or Process(), device_type=device_type, backend=backend)
    with guard(process), join(process, timeout_s=timeout_s), guard(process):
        return [work(process, *args)]


@dataclass(frozen=True)
class RankMessage:
    """The result or error that a rank sends to the process that started it."""

    rank: int
    at: float  # time.monotonic(), which all processes of a machine share
    result: Any = None
    error: MeshwrightError | None = None


@dataclass(frozen=True)
class _RankTask:
    """What every rank runs, and with which settings."""

    work: Work
    args: tuple[Any, ...]
    threads: int
    collective_timeout_s: float
    handles_stop: bool  # `work` installs stop-signal handlers; until then the signals stay blocked


@dataclass(frozen=True)
class _Rank:
    """A rank, seen from the process that started it."""

    info: Process
    process: BaseProcess
    pipe: Connection


def fork(
    nproc: int,
    work: Work,
    *args: Any,
    timeout: float | None = None,
    device_type: DeviceType = "auto",
    backend: Backend = "auto",
    collective_timeout_s: float = COLLECTIVE_TIMEOUT_S,
    preload: Sequence[str] = (),
    grace_s: float | None = None,
) -> list[Any]:
    """Run `work(process, *args)` on `nproc` ranks of this machine and return the results by rank.

    The first rank that fails ends the others and is named in the error. `preload` are modules that all ranks need;
    they are imported once, before the fork. If this process has already used CUDA or OpenMP threads, the ranks cannot
    be forked and are spawned instead, which takes seconds longer.

    A signal that ends this process also ends the ranks. With `grace_s`, the first stop signal is forwarded to the
    ranks, which then have that many seconds to save and exit (after Ctrl-C as long as they need). Before there are
    ranks it raises StopSignal.
    """
    if nproc < 1:
        raise InputError("must be at least 1", field="--nproc", value=nproc)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="meshwright-") as folder,
            _environment({"OMP_NUM_THREADS": str(_threads(nproc)), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}),
            _stop_signals(grace_s) as request,
        ):
            for module in (*PRELOADED, *preload):
                import_module(module)
            ranks = [
                Process(
                    *(rank, nproc, rank, nproc, "nproc"),
                    gpu=rank,
                    device_type=device_type,
                    backend=backend,
                    folder=folder,
                )
                for rank in range(nproc)
            ]
            return _run(
                ranks,
                _RankTask(work, args, _threads(nproc), collective_timeout_s, grace_s is not None),
                timeout,
                request,
            )
    except StopSignal:
        raise
    except KeyboardInterrupt:
        raise interrupted() from None


def _run(infos: list[Process], task: _RankTask, timeout: float | None, request: _StopRequest) -> list[Any]:
    context: Any = mp.get_context("fork") if _can_fork() else spawn_context((task, infos))
    ranks: list[_Rank] = []
    grace_s = 0.0
    try:
        for info in infos:
            with _signals_blocked():  # a signal between start and append would leave a rank running
                ranks.append(_start_rank(context, info, task))
                request.has_ranks = True
        results = _results(ranks, timeout, request)
        grace_s = GRACE_S
        return results
    finally:
        _end(ranks, grace_s, at_once=request.quits)


def _threads(nproc: int) -> int:
    """Return the OpenMP threads per rank: OMP_NUM_THREADS, else an equal share of the cores."""
    value = os.environ.get("OMP_NUM_THREADS", "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return int(value) if value.isdecimal() and int(value) > 0 else max(1, cores // nproc)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables that are not set yet, for the imports and the ranks."""
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


class _StopRequest:
    """A stop signal that this process received and forwards to its ranks."""

    def __init__(self, grace_s: float | None) -> None:
        self.grace_s = grace_s
        self.signal: signal.Signals | None = None
        self.has_ranks = self.quits = False
        self.deadline = math.inf  # when the ranks must have ended
        self._presses = Presses()
        self._forwarded: set[int] = set()  # process ids

    def on_signal(self, number: int, _: object) -> None:
        """Record the first stop signal for `forward`; raise to end a run that does not save, or has not started."""
        if self.grace_s is None:
            raise explain_death(0, 1, -number)
        self.quits |= self._presses.quits(number)
        if self.signal is None:
            self.signal = signal.Signals(number)
            if not self.has_ranks:
                raise StopSignal(self.signal.name)
            if number != signal.SIGINT:
                self.deadline = time.monotonic() + self.grace_s + GRACE_S
        elif self.quits:
            raise KeyboardInterrupt

    def forward(self, ranks: list[_Rank]) -> None:
        """Send the stop signal to the ranks that have not received it yet."""
        for one in ranks if self.signal is not None else ():
            pid = one.process.pid
            if pid and pid not in self._forwarded and one.process.is_alive():
                self._forwarded.add(pid)
                with suppress(ProcessLookupError):
                    os.kill(pid, self.signal or signal.SIGTERM)


@contextmanager
def _stop_signals(grace_s: float | None) -> Iterator[_StopRequest]:
    """Turn signals to this process into a stop request for its ranks, or into an error that ends them."""
    request = _StopRequest(grace_s)
    if threading.current_thread() is not threading.main_thread():
        yield request  # only the main thread may set handlers
        return
    handled = handled_signals() if grace_s is not None else (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, request.on_signal) for number in handled}
    try:
        yield request
    finally:
        if request.signal is not None:
            after_stop(before)
        for number, handler in before.items() if request.signal is None else ():
            signal.signal(number, handler)


def _can_fork() -> bool:
    """Whether a fork of this process can compute: tried in a child, because neither CUDA nor OpenMP reports it."""

    if not hasattr(os, "fork"):
        return False
    reader, writer = os.pipe()
    with _signals_blocked(), warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # Python 3.12 warns about forks with threads, which this tests
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
    """In a forked child, write y if an operation on all threads returns and CUDA can still be initialized."""
    with suppress(BaseException):
        import torch

        torch.ones(1 << 16).sum()
        if not torch.cuda._is_in_bad_fork():
            os.write(answer, b"y")
    os._exit(0)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block the ending signals; a rank inherits the mask and unblocks them after it has set its handlers."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_rank(context: Any, info: Process, task: _RankTask) -> _Rank:
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_rank, args=(info, os.getpid(), task, theirs), name=f"rank {info.rank}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    theirs.close()
    return _Rank(info, process, ours)


def _rank(info: Process, parent: int, task: _RankTask, pipe: Connection) -> None:
    """Run one rank, inside its own process."""
    _set_up_process(parent, task.handles_stop)
    gc.freeze()  # objects of the parent may belong to threads that do not exist in the fork
    no_needless_warnings()
    import torch

    try:
        torch.set_num_threads(task.threads)
        os.environ.update(
            RANK=str(info.rank),
            WORLD_SIZE=str(info.world),
            LOCAL_RANK=str(info.local_rank),
            LOCAL_WORLD_SIZE=str(info.local_world),
        )
        with join(info, timeout_s=task.collective_timeout_s):
            try:
                result = task.work(info, *task.args)
            except BaseException as error:  # sent before leaving the group, which makes the other ranks fail too
                _send_and_exit(pipe, info, error)
            _send(pipe, RankMessage(info.rank, time.monotonic(), result=result))
    except BaseException as error:
        _send_and_exit(pipe, info, error)


def _set_up_process(parent: int, handles_stop: bool) -> None:
    """Detach from the terminal's signals and make this process die with its parent."""
    with suppress(OSError):
        os.setpgid(0, 0)  # one process group per rank, so that its children are killed with it
    for number in ENDING_SIGNALS:  # without handlers, Ctrl-C is the parent's to handle
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT and not handles_stop else signal.SIG_DFL)
    exits_after_stop()
    still_blocked = STOP_SIGNALS if handles_stop else ()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number for number in ENDING_SIGNALS if number not in still_blocked])
    end_with(parent)


def end_with(parent: int) -> None:
    """Make this process end when its parent does."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _send_and_exit(pipe: Connection, info: Process, error: BaseException) -> NoReturn:
    _send(pipe, RankMessage(info.rank, time.monotonic(), error=explain(error, info)))
    leave(1)


def _send(pipe: Connection, message: RankMessage) -> None:
    try:
        data = pickle.dumps(message)
    except Exception as error:
        what = f"error ({error}): {message.error}" if message.error else f"result: {error}"
        unsent = RunError(f"rank {message.rank} cannot send its {what}")
        data = pickle.dumps(RankMessage(message.rank, message.at, error=unsent))
    with suppress(OSError):  # the parent is gone
        pipe.send_bytes(data)


def _results(ranks: list[_Rank], timeout: float | None, request: _StopRequest) -> list[Any]:
    """Return the results by rank; raise the root cause soon after the first rank failed."""
    received: dict[int, RankMessage] = {}
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    settled = math.inf
    while len(received) < len(ranks) and time.monotonic() < settled:
        if time.monotonic() >= deadline:
            missing = ", ".join(str(one.info.rank) for one in ranks if one.info.rank not in received)
            raise RunError(f"the run took longer than {timeout:g} s; rank {missing} is still running")
        if time.monotonic() >= request.deadline:
            raise RunError(f"the ranks did not exit within {request.grace_s:g} s after the stop request")
        request.forward(ranks)
        _receive([one for one in ranks if one.info.rank not in received], received)
        if settled == math.inf and any(message.error for message in received.values()):
            settled = time.monotonic() + SETTLE_S
    failures = [(blames_another(one.error), one.at, one.rank) for one in received.values() if one.error]
    if failures and (cause := received[min(failures)[2]].error):
        raise cause
    return [received[one.info.rank].result for one in ranks]


def _receive(ranks: list[_Rank], received: dict[int, RankMessage]) -> None:
    """Wait briefly for messages of these ranks; a rank that exited without one has failed."""
    wait([*(one.pipe for one in ranks), *(one.process.sentinel for one in ranks)], TICK_S)
    for one in ranks:
        code = one.process.exitcode  # read before the pipe: a message sent before the exit is still in the pipe
        if one.pipe.poll():
            with suppress(EOFError, OSError, pickle.UnpicklingError):
                received[one.info.rank] = pickle.loads(one.pipe.recv_bytes())
                continue
        if code is not None:
            received[one.info.rank] = RankMessage(one.info.rank, time.monotonic(), error=_exit_error(one.info, code))


def _exit_error(info: Process, code: int) -> RunError:
    """Return why a rank exited: the reason it wrote, else the meaning of its exit code."""
    with suppress(OSError, pickle.UnpicklingError, EOFError):
        reason: RunError = pickle.loads(info.exit_reason.read_bytes())
        return reason
    return explain_death(info.rank, info.world, code)


def _end(ranks: list[_Rank], grace_s: float, at_once: bool = False) -> None:
    """End all ranks: wait `grace_s`, then send SIGTERM, then SIGKILL."""
    try:
        if not at_once:
            _join_all(ranks, grace_s)
            _signal(ranks, signal.SIGTERM)
            _join_all(ranks, GRACE_S)
    finally:  # also after a second Ctrl-C
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
    """Send a signal to the ranks and their children."""
    for one in ranks:
        pid = one.process.pid
        try:
            os.killpg(pid or 0, number) if pid else None
        except (ProcessLookupError, PermissionError):  # it has not created its process group yet, or is gone
            with suppress(ProcessLookupError):
                if pid and one.process.is_alive():
                    os.kill(pid, number)
