"""Process pools with results in submission order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def worker_pool(workers: int, **start: Any) -> ProcessPoolExecutor:
    """Return a pool of spawned processes: a fork would copy the locks of tokenizer and torch threads."""
    return ProcessPoolExecutor(workers, get_context("spawn"), **start)


def map_in_order(
    pool: ProcessPoolExecutor, work: Callable[[Item], Result], items: Iterable[Item], ahead: int
) -> Iterator[tuple[Item, Result]]:
    """Yield items with their results, in order; at most `ahead` are pending, because reading outruns the work."""
    pending: deque[tuple[Item, Future[Result]]] = deque()
    for item in items:
        pending.append((item, pool.submit(work, item)))
        if len(pending) > ahead:
            first, future = pending.popleft()
            yield first, future.result()
    for first, future in pending:
        yield first, future.result()
