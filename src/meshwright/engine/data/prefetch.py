"""Steps prepared ahead by threads, handed over in the same order on every rank.

What is prepared, and in which order, follows from the calls of `get` alone and not from how fast a rank is: preparing a
step may use collectives, which must meet their counterparts on the other ranks.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from meshwright.engine.data.sampler import Source

Read = TypeVar("Read")
Made = TypeVar("Made")
PATIENCE_S = 5.0  # how long closing waits for work that may hang on a rank that is gone


class Prefetcher(Generic[Read, Made]):
    """Keeps some steps ready behind the one that was asked for last.

    `read` runs in one of several threads (in the one that finishes, for sources that are read in order); `finish` gets
    what was read or the error of reading it, in one thread and in the order in which steps were scheduled.
    """

    def __init__(
        self,
        read: Callable[[Source, int], Read],
        finish: Callable[[int, Read | BaseException], Made],
        steps: int,
        readers: int,
    ) -> None:
        self._read, self._finish, self._steps, self._readers = read, finish, steps, max(readers, 1)
        self._ready: dict[tuple[int, int], tuple[Source, Future[Made]]] = {}
        self._to_read: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._to_finish: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def get(self, source: Source, step: int) -> Made:
        """What was made of a step of a source; the error of making it is raised here."""
        if not self._steps:
            return self._finish(step, _outcome(self._read, source, step))
        self._start()
        wanted = range(step, step + self._steps + 1)
        for number in wanted:
            if (id(source), number) not in self._ready:
                self._ready[id(source), number] = (source, self._schedule(source, number))
        made = self._ready.pop((id(source), step))[1]
        self._forget(lambda of, number: of is source and number not in wanted)
        return made.result()

    def keep_only(self, *sources: Source) -> None:
        """Forgets what was prepared of other sources."""
        self._forget(lambda of, _: all(of is not source for source in sources))

    def close(self) -> None:
        """Ends the threads when what they were given is done; a thread that hangs is left behind."""
        for _ in self._threads[:-1]:
            self._to_read.put(None)
        if self._threads:
            self._to_finish.put(None)
        for thread in self._threads:
            thread.join(PATIENCE_S)
        self._threads = []
        self._ready.clear()

    def _forget(self, gone: Callable[[Source, int], bool]) -> None:
        # What is scheduled still runs, so that ranks stay in step; only its result is dropped.
        self._ready = {key: item for key, item in self._ready.items() if not gone(item[0], key[1])}

    def _start(self) -> None:
        if self._threads:
            return
        works = [*[self._to_read] * min(self._readers, self._steps + 1), self._to_finish]
        self._threads = [
            threading.Thread(target=_work, args=(work,), name=f"meshwright-data-{i}", daemon=True)
            for i, work in enumerate(works)
        ]
        for thread in self._threads:
            thread.start()

    def _schedule(self, source: Source, step: int) -> Future[Made]:
        made: Future[Made] = Future()
        if getattr(source, "in_order", False):
            self._to_finish.put(lambda: self._make(made, step, _outcome(self._read, source, step)))
            return made
        outcome: Future[Any] = Future()
        self._to_read.put(lambda: outcome.set_result(_outcome(self._read, source, step)))
        self._to_finish.put(lambda: self._make(made, step, outcome.result()))
        return made

    def _make(self, made: Future[Made], step: int, outcome: Read | BaseException) -> None:
        try:
            made.set_result(self._finish(step, outcome))
        except BaseException as error:  # raised where the step is asked for
            made.set_exception(error)


def _outcome(read: Callable[[Source, int], Read], source: Source, step: int) -> Read | BaseException:
    try:
        return read(source, step)
    except Exception as error:
        return error


def _work(tasks: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := tasks.get()) is not None:
        with suppress(Exception):  # tasks hand their errors over themselves
            task()
