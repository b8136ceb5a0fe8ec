"""Prefetches steps in background threads, in the same order on every rank.

The prefetch order follows from the calls of `get` alone, never from timing: preparing a step may run collectives, which
must be issued in the same order on all ranks.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from meshwright.engine.data.sample_types import Source

Read = TypeVar("Read")
Result = TypeVar("Result")
CLOSE_TIMEOUT_S = 5.0  # per thread: a collective with a dead rank may never return


class Prefetcher(Generic[Read, Result]):
    """Keeps the next steps ready.

    `read` runs in one of several reader threads (for in-order sources, in the finisher thread). `finish` receives the
    result or the error of `read`, in a single thread and in the order in which steps were scheduled.
    """

    def __init__(
        self,
        read: Callable[[Source, int], Read],
        finish: Callable[[int, Read | BaseException], Result],
        steps: int,
        readers: int,
    ) -> None:
        self._read, self._finish, self._steps, self._readers = read, finish, steps, max(readers, 1)
        self._ready: dict[tuple[int, int], tuple[Source, Future[Result]]] = {}
        self._to_read: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._to_finish: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def get(self, source: Source, step: int) -> Result:
        """Return a prepared step of a source, or raise the error of preparing it."""
        if not self._steps:
            return self._finish(step, _read_or_error(self._read, source, step))
        self._start()
        window = range(step, step + self._steps + 1)
        for number in window:
            if (id(source), number) not in self._ready:
                self._ready[id(source), number] = (source, self._schedule(source, number))
        result = self._ready.pop((id(source), step))[1]
        self._drop(lambda other, number: other is source and number not in window)
        return result.result()

    def keep_only(self, *sources: Source) -> None:
        """Drop prepared steps of other sources."""
        self._drop(lambda other, _: all(other is not source for source in sources))

    def close(self) -> None:
        """Stop the threads after their queued tasks; a hanging thread is abandoned."""
        for _ in self._threads[:-1]:
            self._to_read.put(None)
        if self._threads:
            self._to_finish.put(None)
        for thread in self._threads:
            thread.join(CLOSE_TIMEOUT_S)
        self._threads = []
        self._ready.clear()

    def _drop(self, should_drop: Callable[[Source, int], bool]) -> None:
        # Scheduled tasks still run so that collectives match across ranks; only their results are dropped.
        self._ready = {key: item for key, item in self._ready.items() if not should_drop(item[0], key[1])}

    def _start(self) -> None:
        if self._threads:
            return
        queues = [*[self._to_read] * min(self._readers, self._steps + 1), self._to_finish]
        self._threads = [
            threading.Thread(target=_run_tasks, args=(tasks,), name=f"meshwright-data-{i}", daemon=True)
            for i, tasks in enumerate(queues)
        ]
        for thread in self._threads:
            thread.start()

    def _schedule(self, source: Source, step: int) -> Future[Result]:
        result: Future[Result] = Future()
        if getattr(source, "in_order", False):
            self._to_finish.put(lambda: self._finish_step(result, step, _read_or_error(self._read, source, step)))
            return result
        outcome: Future[Any] = Future()
        self._to_read.put(lambda: outcome.set_result(_read_or_error(self._read, source, step)))
        self._to_finish.put(lambda: self._finish_step(result, step, outcome.result()))
        return result

    def _finish_step(self, result: Future[Result], step: int, outcome: Read | BaseException) -> None:
        try:
            result.set_result(self._finish(step, outcome))
        except BaseException as error:  # re-raised by get()
            result.set_exception(error)


def _read_or_error(read: Callable[[Source, int], Read], source: Source, step: int) -> Read | BaseException:
    try:
        return read(source, step)
    except Exception as error:
        return error


def _run_tasks(tasks: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := tasks.get()) is not None:
        with suppress(Exception):  # tasks store their errors in futures
            task()
