"""Runs a function on several gloo ranks forked from this process, bounded in time.

Forking after the imports costs a tenth of a second per rank; spawning costs many. The parent must never compute with
torch itself (a fork of a process with OpenMP threads deadlocks), so references are computed inside rank 0.

Gloo has crashed in native code (in `wait_tensor`). Every rank is a process with its own result pipe and output file,
so that such a crash is reported as what it is, by the one test that started the rank: with the signal and the last
output. The run is repeated once, with a warning.
"""

from __future__ import annotations

import datetime
import faulthandler
import gc
import multiprocessing as mp
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo  # costs each rank 1.6 s when it is not imported before the fork
import torch.distributed as dist

NATIVE_SIGNALS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
SETTLE_S = 1.0  # after a first error: its cause may be another rank's crash, which is noticed later
OUTPUT_CHARACTERS = 4000
# Lines of a crash dump that a forked rank has from its parent, and the list of loaded libraries.
NOISE = ("/_pytest/", "/pytest/", "/pluggy/", "/xdist/", "/execnet/", "/multiprocessing/", "runpy>", "Extension modul")


class NativeCrashWarning(UserWarning):
    """A rank crashed in native code and the run was repeated."""


class NativeCrashError(AssertionError):
    """A rank was ended by a signal of native code."""


class _Rank(NamedTuple):
    process: Any
    pipe: Connection
    output: Path


def run(world: int, work: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """Return the results of `work(rank, world, *args)` by rank; raise the first failing rank's traceback.

    A run with a native crash is repeated once and leaves a warning; a second crash is an error.
    """
    try:
        return _run_once(world, work, args, timeout)
    except NativeCrashError as crash:
        warnings.warn(f"repeated after a native crash: {crash}", NativeCrashWarning, stacklevel=2)
    return _run_once(world, work, args, timeout)


def _run_once(world: int, work: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_start(rank, world, work, args, Path(folder), timeout) for rank in range(world)]
        try:
            return _collect(ranks, time.monotonic() + timeout)
        finally:
            for rank in ranks:
                if rank.process.is_alive():
                    rank.process.join(0.5)
                rank.process.kill()
                rank.process.join()
                rank.pipe.close()
                sys.stderr.write(rank.output.read_text(errors="replace"))  # where pytest captures it


def _start(rank: int, world: int, work: Callable[..., Any], args: Any, folder: Path, timeout: float) -> _Rank:
    context = mp.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    output = folder / f"output_{rank}"
    output.touch()
    process = context.Process(target=_rank, args=(rank, world, work, args, folder, writer, timeout), daemon=True)
    process.start()
    writer.close()
    return _Rank(process, reader, output)


def _collect(ranks: list[_Rank], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    ended: list[str] = []
    errors: list[str] = []  # of ranks that lived on: perhaps because another one had ended
    open_ranks = dict(enumerate(ranks))
    while open_ranks:
        wait([x for one in open_ranks.values() for x in (one.pipe, one.process.sentinel)], _left(deadline))
        for number, one in list(open_ranks.items()):
            exit_code = one.process.exitcode  # read before the pipe: a result sent before the exit is still in there
            if one.pipe.poll() and (message := _received(one.pipe)) is not None:
                error, results[number] = message
                if error:
                    errors.append(f"rank {number} of {len(ranks)} failed:\n{error}")
            elif exit_code is None:
                continue
            elif -exit_code in NATIVE_SIGNALS:
                raise NativeCrashError(_crash_message(number, len(ranks), exit_code, one.output))
            else:
                ended.append(f"rank {number} of {len(ranks)} ended with exit code {exit_code}")
            del open_ranks[number]
        if ended or errors:
            deadline = min(deadline, time.monotonic() + SETTLE_S)
        if time.monotonic() >= deadline:
            break
    if ended or errors:
        raise AssertionError((ended + errors)[0])
    if open_ranks:
        raise TimeoutError(f"ranks {sorted(open_ranks)} did not answer in time")
    return [results[number] for number in range(len(ranks))]


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.0)


def _received(pipe: Connection) -> tuple[str | None, Any] | None:
    """Return a rank's error and result; None where it ended before it had sent all of it."""
    try:
        message: tuple[str | None, Any] = pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError):
        return None
    return message


def _crash_message(rank: int, world: int, exit_code: int, output: Path) -> str:
    name = signal.Signals(-exit_code).name
    lines = [line for line in output.read_text(errors="replace").splitlines() if not any(x in line for x in NOISE)]
    last = "\n".join(lines)[-OUTPUT_CHARACTERS:]
    return f"rank {rank} of {world} crashed in native code ({name}); its last output:\n{last or '(none)'}"


def _rank(
    rank: int, world: int, work: Callable[..., Any], args: Any, folder: Path, pipe: Connection, timeout: float
) -> None:
    gc.freeze()  # what the parent left behind may belong to threads that a fork does not have
    _redirect_output(folder / f"output_{rank}")
    try:
        torch.set_num_threads(1)
        torch.backends.mkldnn.set_flags(True)  # torch switches it off for good after one bf16 product it cannot do
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
        limit = datetime.timedelta(seconds=timeout)
        store = dist.FileStore(str(folder / "store"), world)
        dist.init_process_group("gloo", rank=rank, world_size=world, store=store, timeout=limit)
        pipe.send_bytes(pickle.dumps((None, work(rank, world, *args))))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        pipe.send_bytes(pickle.dumps((traceback.format_exc()[-OUTPUT_CHARACTERS:], None)))
    os._exit(0)


def _redirect_output(path: Path) -> None:
    """Send stdout, stderr and the tracebacks of native crashes to a file, below Python as well."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=2)
