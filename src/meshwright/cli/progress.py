"""The progress of long work on stderr: one line that changes on a terminal, and new lines elsewhere.

Elsewhere is a pipe or a log file: the lines have no control characters, begin late, and come less often the longer the
work takes.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread

from meshwright import stages

SHOWN_AFTER_S = 2.0  # of work; shorter work shows nothing
TICK_S = 0.5
LOG_FIRST_S = 5.0  # until the first line where there is no terminal, and between the next ones
LATE_LOG_S = 10.0  # the same of commands that mostly take less
LOG_SHARE = 0.1  # of the time so far: the time between later lines
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
        with waiting_line("starting", 0, LOG_FIRST_S) as show:
            yield show
    except KeyboardInterrupt:
        raise Interrupted("interrupted; no files were written") from None


@contextmanager
def waiting_line(
    text: str, shown_after_s: float = SHOWN_AFTER_S, logged_after_s: float = LATE_LOG_S
) -> Iterator[Callable[[str], None]]:
    """Show what is being done and for how long, once it has taken a while; stages change the text.

    `shown_after_s` is for a terminal, `logged_after_s` for a pipe or a file.
    """
    line = _Line(text, shown_after_s) if _is_terminal() else _Log(text, logged_after_s)
    line.start()
    try:
        with stages.listening(line.show):
            yield line.show
    finally:
        line.end()


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


class _Shown(Thread):
    """Shows text and time again and again, also while the work names no new stage."""

    def __init__(self, text: str, first_s: float) -> None:
        super().__init__(daemon=True)
        self.text, self.first_s, self.since = text, first_s, time.monotonic()
        self.ended = Event()
        self.shown = False

    def show(self, text: str) -> None:
        """Show what is being done."""
        self.text = text

    def run(self) -> None:
        """Write the text again and again."""
        wait = self.first_s or 0.01
        while not self.ended.wait(wait):
            seconds = time.monotonic() - self.since
            self.write(f"{seconds:.0f} s: {self.text}")
            self.shown = True
            wait = self.next_wait(seconds)

    def end(self) -> None:
        """Stop."""
        self.ended.set()
        self.join()

    def write(self, text: str) -> None:
        """Write the text."""
        raise NotImplementedError

    def next_wait(self, seconds: float) -> float:
        """Return the time until the text is written again."""
        raise NotImplementedError


class _Line(_Shown):
    """One line of a terminal that changes."""

    def write(self, text: str) -> None:
        """Write over the last text."""
        import shutil  # here, not above: it takes milliseconds, and a quick command writes no progress

        _write(START_OF_LINE + text[: shutil.get_terminal_size().columns - 1])

    def next_wait(self, seconds: float) -> float:
        """Return a time in which seconds are seen to go on."""
        return TICK_S

    def end(self) -> None:
        """Stop, and clear the line."""
        super().end()
        if self.shown:
            _write(START_OF_LINE)


class _Log(_Shown):
    """New lines of a log."""

    def write(self, text: str) -> None:
        """Write a line without control characters."""
        _write("".join(one if one.isprintable() else " " for one in text) + "\n")

    def next_wait(self, seconds: float) -> float:
        """Return a time that grows, so that an hour of work has tens of lines and not hundreds."""
        return max(self.first_s, LOG_FIRST_S, LOG_SHARE * seconds)


def _write(text: str) -> None:
    with suppress(OSError, ValueError, AttributeError):  # stderr is closed
        sys.stderr.write(text)
        sys.stderr.flush()
