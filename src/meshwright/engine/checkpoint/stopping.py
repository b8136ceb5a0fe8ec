"""A run that is told to end from outside: it saves first, and says that it should be started again."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

# SLURM sends what --signal names ahead of the time limit; SIGTERM comes from schedulers, torchrun and people.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
SAME_S = 1.0  # a signal may come twice: from the scheduler itself, and passed on by the process that started this one


class StopRequest:
    """Listens for signals that ask a run to end, for as long as the block lasts.

    Signals are heard by a thread, so that even a rank that waits in a collective notices. The first is a request. A
    second SIGTERM ends this process at once. When the grace is over and the block has not ended, `too_late` is called.
    """

    def __init__(self, grace_s: float, too_late: Callable[[str], None]) -> None:
        self.grace_s, self._too_late = grace_s, too_late
        self.name = ""  # of the signal that asked
        self._asked_at = 0.0
        self._terminated_at = 0.0
        self._before: dict[signal.Signals, Any] = {}
        self._wake = -1
        self._pipe = (-1, -1)
        self._thread: threading.Thread | None = None

    @property
    def asked(self) -> bool:
        """Whether this process was asked to end."""
        return bool(self.name)

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is not threading.main_thread():
            return self  # only the main thread may set handlers
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        self._pipe = (reader, writer)
        self._thread = threading.Thread(target=self._listen, name="meshwright-signals", daemon=True)
        self._thread.start()
        self._wake = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, _noted) for number in STOP_SIGNALS}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # ranks of --nproc hold them back until here
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._thread is None:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wake)
        reader, writer = self._pipe
        os.close(writer)  # the listener's read ends
        self._thread.join(1.0)
        with suppress(OSError):
            os.close(reader)
        self._thread = None

    def _listen(self) -> None:
        reader = self._pipe[0]
        while True:
            left = None if not self.asked else max(0.0, self._asked_at + self.grace_s - time.monotonic())
            ready, _, _ = select.select([reader], [], [], left)
            if not ready:
                self._too_late(self.name)
                return
            heard = os.read(reader, 64)
            if not heard:
                return
            for number in heard:
                if number in STOP_SIGNALS:
                    self._hear(signal.Signals(number))

    def _hear(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if not self.asked:
            self._asked_at, self.name = now, number.name
        if number == signal.SIGTERM:
            if self._terminated_at and now - self._terminated_at > SAME_S:
                os._exit(128 + number)
            self._terminated_at = self._terminated_at or now


def _noted(number: int, frame: FrameType | None) -> None:
    """The thread that reads the wake-up pipe acts; a handler must exist for the pipe to be written to."""
