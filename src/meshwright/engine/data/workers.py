"""Work that processes share, its results in the order of the work."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, TypeVar

Given = TypeVar("Given")
Made = TypeVar("Made")


def worker_pool(workers: int, **start: Any) -> ProcessPoolExecutor:
    """Processes of their own: a fork would copy the locks of threads that tokenizers or torch have started."""
    return ProcessPoolExecutor(workers, get_context("spawn"), **start)


def in_turn(
    pool: ProcessPoolExecutor, work: Callable[[Given], Made], given: Iterable[Given], ahead: int
) -> Iterator[tuple[Given, Made]]:
    """What was given with what was made of it, in order; a bounded number is under way, as reading is much faster."""
    under_way: deque[tuple[Given, Future[Made]]] = deque()
    for one in given:
        under_way.append((one, pool.submit(work, one)))
        if len(under_way) > ahead:
            first, made = under_way.popleft()
            yield first, made.result()
    for first, made in under_way:
        yield first, made.result()
