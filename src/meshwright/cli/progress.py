"""The progress of long work on stderr: one line that changes on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import gc
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

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
    terminal = sys.stderr is not None and sys.stderr.isatty()
    try:
        yield _Line(terminal).show
    except KeyboardInterrupt:
        raise Interrupted("interrupted; no files were written") from None
    finally:
        _write(START_OF_LINE * terminal)


class _Line:
    """One line that changes on a terminal; elsewhere a new line every few seconds."""

    def __init__(self, terminal: bool) -> None:
        self.terminal, self.start = terminal, time.monotonic()
        self.written = self.start

    def show(self, text: str) -> None:
        """Show what is being done."""
        now = time.monotonic()
        if self.terminal:
            width = shutil.get_terminal_size().columns - 1
            _write(START_OF_LINE + f"{now - self.start:.0f} s: {text}"[:width])
        elif now - self.written >= LOG_EVERY_S:
            self.written = now
            _write(f"{now - self.start:.0f} s: {text}\n")


def _write(text: str) -> None:
    with suppress(OSError, ValueError, AttributeError):  # stderr is closed
        sys.stderr.write(text)
        sys.stderr.flush()
