"""A line on the terminal that shows the progress of long work."""

from __future__ import annotations

import gc
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

START_OF_LINE = "\r\x1b[2K"  # return, and clear the line


class Interrupted(Exception):  # noqa: N818  # Ctrl-C is not an error
    """A command was ended by Ctrl-C; click would print an empty line for KeyboardInterrupt."""


@contextmanager
def progress_line(wanted: bool = True) -> Iterator[Callable[[str], None] | None]:
    """Yield a function that shows a line on a terminal's stderr; the line is cleared afterwards."""
    if not wanted:
        yield None
        return
    gc.enable()  # tensors are held in cycles
    terminal = sys.stderr is not None and sys.stderr.isatty()
    try:
        yield _show if terminal else None
    except KeyboardInterrupt:
        raise Interrupted("interrupted; no files were written") from None
    finally:
        _write(START_OF_LINE * terminal)


def _show(text: str) -> None:
    _write(START_OF_LINE + text[: shutil.get_terminal_size().columns - 1])


def _write(text: str) -> None:
    with suppress(OSError, ValueError, AttributeError):  # stderr is closed
        sys.stderr.write(text)
        sys.stderr.flush()
