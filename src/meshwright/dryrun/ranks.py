"""Traces ranks in parallel processes, which end with the process that started them."""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, TypeVar

from meshwright.dryrun.cpu_budget import cores
from meshwright.engine.processes import end_with
from meshwright.engine.spawned import spawn_context
from meshwright.errors import MeshwrightError

Task = TypeVar("Task")
Result = TypeVar("Result")
GRACE_S = 2.0
TICK_S = 1.0  # between reports of progress


def run_parallel(
    trace_rank: Callable[[Task], Result],
    tasks: Sequence[Task],
    processes: int | None,
    progress: Callable[[str], None],
    label_of: Callable[[Task], str],
    activity: str = "tracing",
    children: Literal["", "fork", "spawn"] = "",
) -> list[Result]:
    """Return the results in order; run as many at a time as there are cores unless `processes` is set.

    A single task runs in this process, unless `children` says how its process is started. Several run in one process
    each: torch keeps state of destroyed process groups. Tasks that use a GPU are spawned: once anything here has asked
    for the number of GPUs, a forked process cannot use them.
    """
    if len(tasks) == 1 and not children:
        with _repeated(progress, f"{activity} {label_of(tasks[0])}"):
            return [trace_rank(tasks[0])]
    context: Any = spawn_context() if children == "spawn" else mp.get_context("fork")
    return _Workers(trace_rank, tasks, progress, label_of, activity, context).run(processes or cores())


@contextmanager
def _repeated(progress: Callable[[str], None], text: str) -> Iterator[None]:
    """Report the same work every second, from a thread: the work itself reports nothing for minutes."""
    progress(text)
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(TICK_S):
            progress(text)

    thread = threading.Thread(target=repeat, name="meshwright-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class _Workers:
    """Processes that trace one rank each."""

    def __init__(
        self,
        trace_rank: Any,
        tasks: Sequence[Any],
        progress: Callable[[str], None],
        label_of: Any,
        activity: str,
        context: Any,
    ) -> None:
        self.trace_rank, self.tasks, self.progress, self.label_of = trace_rank, tasks, progress, label_of
        self.activity, self.context = activity, context
        self.running: dict[Connection, tuple[int, Any]] = {}
        self.results: dict[int, Any] = {}

    def run(self, limit: int) -> list[Any]:
        waiting = list(range(len(self.tasks)))
        try:
            while waiting or self.running:
                while waiting and len(self.running) < limit:
                    self._start(waiting.pop(0))
                self._report()
                for pipe in wait(list(self.running), TICK_S):
                    self._receive(pipe)
        finally:
            self._terminate()
        return [self.results[i] for i in range(len(self.tasks))]

    def _report(self) -> None:
        labels = ", ".join(self.label_of(self.tasks[number]) for number, _ in self.running.values())
        self.progress(f"{self.activity} {labels} ({len(self.results)} of {len(self.tasks)} kinds of ranks done)")

    def _start(self, number: int) -> None:
        ours, theirs = self.context.Pipe(duplex=False)
        process = self.context.Process(target=_child, args=(os.getpid(), self.trace_rank, self.tasks[number], theirs))
        # Ctrl-C in one of Python's hooks around fork would be printed and lost; it is delivered after them instead.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
        try:
            process.start()
            theirs.close()
            self.running[ours] = number, process
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _receive(self, pipe: Any) -> None:
        number, process = self.running.pop(pipe)
        try:
            result, error = pipe.recv()
        except EOFError:
            process.join()
            code = process.exitcode
            label = self.label_of(self.tasks[number])
            raise RuntimeError(f"{label} exited without a result (exit code {code})") from None
        finally:
            pipe.close()
        process.join()
        if error is not None:
            raise error
        self.results[number] = result

    def _terminate(self) -> None:
        for pipe, (_, process) in self.running.items():
            process.terminate()
            process.join(GRACE_S)
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()
        self.running.clear()


def _child(parent: int, trace_rank: Any, task: Any, pipe: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends this one
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with(parent)
    gc.freeze()  # keep the garbage collector off imported modules: touching them would copy shared pages
    try:
        message: tuple[Any, BaseException | None] = trace_rank(task), None
    except MeshwrightError as error:
        message = None, error
    except BaseException as error:
        stack = "".join(traceback.format_exception(error))
        message = None, RuntimeError(f"{type(error).__name__}: {error}\n{stack}")
    with suppress(OSError):
        pipe.send(message)
    pipe.close()
    os._exit(0)
