"""Process pools with results in submission order."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from meshwright.engine.spawned import spawn_context

Item = TypeVar("Item")
Result = TypeVar("Result")


@contextmanager
def worker_pool(workers: int, **start: Any) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of spawned processes, which are ended at once after an error or Ctrl-C.

    A fork would copy the locks of tokenizer and torch threads.
    """
    pool = ProcessPoolExecutor(workers, spawn_context(), **start)
    try:
        yield pool
    except BaseException:
        for process in list((pool._processes or {}).values()):  # they may still be importing
            process.kill()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def map_in_order(
    pool: ProcessPoolExecutor, work: Callable[[Item], Result], items: Iterable[Item], ahead: int
) -> Iterator[tuple[Item, Result]]:
    """Yield items with their results, in order; at most `ahead` are pending, because reading outruns the work."""
    pending: deque[tuple[Item, Future[Result]]] = deque()
    for item in items:
        pending.append((item, _submit(pool, work, item)))
        if len(pending) > ahead:
            first, future = pending.popleft()
            yield first, future.result()
    for first, future in pending:
        yield first, future.result()


def _submit(pool: ProcessPoolExecutor, work: Callable[[Item], Result], item: Item) -> Future[Result]:
    """Submit work; processes that are started for it inherit a blocked Ctrl-C, because their parent handles it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        return pool.submit(work, item)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
