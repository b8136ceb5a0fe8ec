"""What a run does before its first step: one line that changes on a terminal, log lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress
from types import TracebackType

START_OF_LINE = "\r\x1b[2K"  # return, and clear the line
TERMINAL_TICK_S, LOG_TICK_S = 1.0, 30.0


class Status:
    """Shows the current phase on stderr, and how long it has taken."""

    def __init__(self, shown: bool = True) -> None:
        self._shown, self._text, self._since = shown, "", 0.0
        self._terminal = shown and _is_terminal()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Status:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.clear()

    def show(self, text: str, ticks: bool = True) -> None:
        """Show a phase; without `ticks` no thread is started, because the process is going to fork."""
        if not self._shown:
            return
        self._text, self._since = text, time.monotonic()
        _write(f"{START_OF_LINE}{text} …" if self._terminal else f"{text}\n")
        if ticks and self._thread is None:
            self._thread = threading.Thread(target=self._tick, name="meshwright-status", daemon=True)
            self._thread.start()

    def clear(self) -> None:
        """End the status; a line on a terminal is removed."""
        self._ended.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(1.0)
        if self._text and self._terminal:
            _write(START_OF_LINE)
        self._text, self._thread, self._ended = "", None, threading.Event()

    def _tick(self) -> None:
        ended = self._ended
        while not ended.wait(TERMINAL_TICK_S if self._terminal else LOG_TICK_S):
            seconds = time.monotonic() - self._since
            if self._terminal:
                _write(f"{START_OF_LINE}{self._text} … {seconds:.0f} s")
            elif seconds >= LOG_TICK_S:
                _write(f"{self._text}: {seconds:.0f} s so far\n")


def _is_terminal() -> bool:
    with suppress(ValueError, AttributeError):
        return sys.stderr.isatty()
    return False


def _write(text: str) -> None:
    with suppress(OSError, ValueError, AttributeError):  # a closed or full stderr must not end the training
        sys.stderr.write(text)
        sys.stderr.flush()
