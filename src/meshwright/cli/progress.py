"""The progress of long work on stderr: one line that changes on a terminal.

Elsewhere nothing is written, but for dry runs and rehearsals, which last for minutes: a line every few seconds.
"""

from __future__ import annotations

import gc
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread

from meshwright import stages

SHOWN_AFTER_S = 2.0  # of work; shorter work shows nothing
TICK_S = 0.5
LOG_EVERY_S = 10.0  # between lines where there is no terminal
START_OF_LINE = "\r\x1b[2K"  # return, and clear the line


class Interrupted(Exception):  # noqa: N818  # Ctrl-C is not an error
    """A command was ended by Ctrl-C; click would print an empty line for KeyboardInterrupt."""


@contextmanager
def progress_line(wanted: bool = True) -> Iterator[Callable[[str], None] | None]:
    """Yield a function that shows what is being done, and for how long; it is called again and again."""
    if not wanted:
        yield None
        return
    gc.enable()  # tensors are held in cycles
    try:
        if _is_terminal():
            with waiting_line("starting", shown_after_s=0) as show:
                yield show
        else:
            yield _Log().show
    except KeyboardInterrupt:
        raise Interrupted("interrupted; no files were written") from None


@contextmanager
def waiting_line(text: str, shown_after_s: float = SHOWN_AFTER_S) -> Iterator[Callable[[str], None] | None]:
    """Show on a terminal what is being done and for how long, once it has taken a while; stages change the text."""
    if not _is_terminal():
        yield None
        return
    line = _Line(text, shown_after_s)
    line.start()
    try:
        with stages.listening(line.show):
            yield line.show
    finally:
        line.end()


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


class _Line(Thread):
    """One line that changes: the time goes on also while the work names no new stage."""

    def __init__(self, text: str, shown_after_s: float) -> None:
        super().__init__(daemon=True)
        self.text, self.shown_after_s, self.since = text, shown_after_s, time.monotonic()
        self.ended = Event()
        self.shown = False

    def show(self, text: str) -> None:
        """Show what is being done."""
        self.text = text

    def run(self) -> None:
        """Write the line again and again."""
        wait = self.shown_after_s or 0.01
        while not self.ended.wait(wait):
            wait = TICK_S
            width = shutil.get_terminal_size().columns - 1
            _write(START_OF_LINE + f"{time.monotonic() - self.since:.0f} s: {self.text}"[:width])
            self.shown = True

    def end(self) -> None:
        """Clear the line."""
        self.ended.set()
        self.join()
        if self.shown:
            _write(START_OF_LINE)


class _Log:
    """A new line every few seconds, for logs of long work."""

    def __init__(self) -> None:
        self.start = self.written = time.monotonic()

    def show(self, text: str) -> None:
        """Write what is being done if the last line is old."""
        now = time.monotonic()
        if now - self.written >= LOG_EVERY_S:
            self.written = now
            _write(f"{now - self.start:.0f} s: {text}\n")


def _write(text: str) -> None:
    with suppress(OSError, ValueError, AttributeError):  # stderr is closed
        sys.stderr.write(text)
        sys.stderr.flush()
