"""Ranks traced in processes of their own, side by side; they end with the process that started them."""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import signal
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from meshwright.dryrun.cpu_budget import cores
from meshwright.engine.processes import end_with
from meshwright.errors import MeshwrightError

Given = TypeVar("Given")
Found = TypeVar("Found")
GRACE_S = 2.0


def side_by_side(
    work: Callable[[Given], Found],
    told: Sequence[Given],
    processes: int | None,
    progress: Callable[[str], None],
    named: Callable[[Given], str],
) -> list[Found]:
    """The results in order; several at once, as many as there are cores unless said otherwise.

    One alone is found in this process; of several each has its own: torch remembers groups of ranks that were left.
    """
    if len(told) == 1:
        progress(f"tracing {named(told[0])}")
        return [work(told[0])]
    return _Crew(work, told, progress, named).run(processes or cores())


class _Crew:
    """Processes that trace one rank each."""

    def __init__(self, work: Any, told: Sequence[Any], progress: Callable[[str], None], named: Any) -> None:
        self.work, self.told, self.progress, self.named = work, told, progress, named
        self.context: Any = mp.get_context("fork")
        self.running: dict[Connection, tuple[int, Any]] = {}
        self.found: dict[int, Any] = {}

    def run(self, at_once: int) -> list[Any]:
        waiting = list(range(len(self.told)))
        try:
            while waiting or self.running:
                while waiting and len(self.running) < at_once:
                    self._start(waiting.pop(0))
                for pipe in wait(list(self.running)):
                    self._hear(pipe)
        finally:
            self._end()
        return [self.found[i] for i in range(len(self.told))]

    def _start(self, number: int) -> None:
        self.progress(f"tracing {self.named(self.told[number])} ({len(self.found)} of {len(self.told)} done)")
        ours, theirs = self.context.Pipe(duplex=False)
        process = self.context.Process(target=_child, args=(os.getpid(), self.work, self.told[number], theirs))
        process.start()
        theirs.close()
        self.running[ours] = number, process

    def _hear(self, pipe: Any) -> None:
        number, process = self.running.pop(pipe)
        try:
            result, error = pipe.recv()
        except EOFError:
            process.join()
            code = process.exitcode
            raise RuntimeError(f"{self.named(self.told[number])} ended without a word (exit code {code})") from None
        finally:
            pipe.close()
        process.join()
        if error is not None:
            raise error
        self.found[number] = result

    def _end(self) -> None:
        for pipe, (_, process) in self.running.items():
            process.terminate()
            process.join(GRACE_S)
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()
        self.running.clear()


def _child(parent: int, work: Any, told: Any, pipe: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal tells everybody; the parent ends us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with(parent)
    gc.freeze()  # what was imported before the fork is here for good: not looked at again, not copied
    try:
        news: tuple[Any, BaseException | None] = work(told), None
    except MeshwrightError as error:
        news = None, error
    except BaseException as error:
        said = "".join(traceback.format_exception(error))
        news = None, RuntimeError(f"{type(error).__name__}: {error}\n{said}")
    with suppress(OSError):
        pipe.send(news)
    pipe.close()
    os._exit(0)
