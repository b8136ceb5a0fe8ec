"""Runs functions in forked children, for code that joins a process group, prints to stderr or exits."""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo  # before the fork: it costs every child 1.6 s otherwise
import torch.distributed

from meshwright.engine.rank_env import Process


class Ended(NamedTuple):
    """Exit code, stderr and result of a child."""

    code: int | None  # None: it was killed after the timeout
    stderr: str
    result: Any


def children(folder: Path, *works: Callable[[], Any], timeout: float = 20.0) -> list[Ended]:
    """Run every function in its own child, concurrently; return how each ended."""
    context = mp.get_context("fork")
    started = []
    for number, work in enumerate(works):
        ours, theirs = context.Pipe(duplex=False)
        stderr = folder / f"stderr_{number}"
        child = context.Process(target=_child, args=(work, stderr, theirs))
        child.start()
        theirs.close()
        started.append((child, stderr, ours))
    ended = []
    for child, stderr, ours in started:
        result = _received(ours, timeout)
        child.join(timeout)
        code = child.exitcode
        child.kill()
        child.join()
        ended.append(Ended(code, stderr.read_text() if stderr.exists() else "", result))
    return ended


def child(folder: Path, work: Callable[[], Any], timeout: float = 20.0) -> Any:
    """Return the result of a function run in a child."""
    (ended,) = children(folder, work, timeout=timeout)
    assert ended.code == 0, f"ended with {ended.code}: {ended.stderr}"
    return ended.result


def _received(pipe: Any, timeout: float) -> Any:
    try:
        return pipe.recv() if pipe.poll(timeout) else None
    except EOFError:
        return None


def _child(work: Callable[[], Any], stderr: Path, pipe: Any) -> None:
    gc.freeze()  # objects of the parent may belong to threads that do not exist in the fork
    # The file descriptor too: a rank that calls os._exit must have written to the real file.
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT, 0o600), 2)
    import sys

    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    try:
        pipe.send(work())
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(99)


def rank_of_world(process: Process) -> str:
    """Return rank and world; a spawned rank can import this function."""
    return f"{process.rank} of {torch.distributed.get_world_size()}"
