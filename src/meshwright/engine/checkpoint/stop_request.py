"""Stop requests (preemption): signals that make a run save a checkpoint and exit to be restarted."""

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
SAME_S = 1.0  # a signal may arrive twice: from the scheduler, and forwarded by the parent process


class StopRequest:
    """Handles stop signals while its block runs.

    A thread receives the signals, so that a rank blocked in a collective notices them too. The first signal is a
    request; a second SIGTERM ends this process immediately. If the block is still running after `grace_s` seconds,
    `too_late` is called.
    """

    def __init__(self, grace_s: float, too_late: Callable[[str], None]) -> None:
        self.grace_s, self._too_late = grace_s, too_late
        self.name = ""  # of the signal that requested the stop
        self._requested_at = 0.0
        self._terminated_at = 0.0
        self._before: dict[signal.Signals, Any] = {}
        self._wake = -1
        self._pipe = (-1, -1)
        self._thread: threading.Thread | None = None

    @property
    def requested(self) -> bool:
        """Whether this process received a stop signal."""
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
        self._before = {number: signal.signal(number, _no_op) for number in STOP_SIGNALS}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # blocked in ranks of --nproc until here
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wake)
        reader, writer = self._pipe
        os.close(writer)  # ends the listener's read
        self._thread.join(1.0)
        with suppress(OSError):
            os.close(reader)
        self._thread = None

    def _listen(self) -> None:
        reader = self._pipe[0]
        while True:
            left = None if not self.requested else max(0.0, self._requested_at + self.grace_s - time.monotonic())
            ready, _, _ = select.select([reader], [], [], left)
            if not ready:
                self._too_late(self.name)
                return
            received = os.read(reader, 64)
            if not received:
                return
            for number in received:
                if number in STOP_SIGNALS:
                    self._on_signal(signal.Signals(number))

    def _on_signal(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if not self.requested:
            self._requested_at, self.name = now, number.name
        if number == signal.SIGTERM:
            if self._terminated_at and now - self._terminated_at > SAME_S:
                os._exit(128 + number)
            self._terminated_at = self._terminated_at or now


def _no_op(number: int, frame: FrameType | None) -> None:
    """Do nothing: the wake-up pipe, which the thread reads, is only written to if a handler exists."""
