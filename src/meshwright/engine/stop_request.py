"""Stop requests (Ctrl-C, preemption): signals that make a run save a checkpoint and exit to be restarted."""

from __future__ import annotations

import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, Literal

# SLURM sends what --signal names ahead of the time limit; SIGTERM comes from schedulers, torchrun and people, SIGHUP
# from a closed terminal, SIGINT from Ctrl-C.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
SAME_S = 1.0  # signals within this time are one request: key repeats, or sent by the scheduler and the parent process
QUITS_AT = 3  # the Ctrl-C that ends a run without saving; all other signals may be repeated at will
STOP_CODES = (75, 128 + signal.SIGINT)  # exit codes of runs that were stopped
EARLY_S = 5.0  # for ranks to end together before the first step, when there is nothing to save

_enclosed: list[bool] = []  # blocks in this process that restore the handlers after a stop

Phase = Literal["building", "training", "finishing"]


class StopSignal(KeyboardInterrupt):  # like KeyboardInterrupt: no library catches it as an error
    """A stop signal that arrived while there was nothing to save."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class Presses:
    """Counts the presses of Ctrl-C of a user who does not want to wait for the checkpoint."""

    def __init__(self) -> None:
        self._count, self._first_at = 0, 0.0

    def quits(self, number: int) -> bool:
        """Count a signal; return whether it ends the run without saving."""
        if number != signal.SIGINT:
            return False
        self._count += 1
        self._first_at = self._first_at or time.monotonic()
        return self._count >= QUITS_AT and time.monotonic() - self._first_at > SAME_S


def handled_signals() -> tuple[signal.Signals, ...]:
    """Return the stop signals that this process does not ignore, as nohup and background jobs of scripts do.

    Ctrl-C counts for the foreground job of a terminal even if the program that started it ignores it.
    """
    return tuple(
        number
        for number in STOP_SIGNALS
        if signal.getsignal(number) != signal.SIG_IGN or (number == signal.SIGINT and _in_foreground())
    )


def _in_foreground() -> bool:
    with suppress(OSError, ValueError, AttributeError):
        return os.tcgetpgrp(0) == os.getpgrp()
    return False


@contextmanager
def stops_at_once(exits: bool = False) -> Iterator[None]:
    """Raise StopSignal in the main thread on the first stop signal; ignore the next ones while the run unwinds.

    With `exits`, they stay ignored afterwards: this process is about to exit with the code of the stop.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    raised = False

    def stop(number: int, _: FrameType | None) -> None:
        nonlocal raised
        if not raised:
            raised = True
            raise StopSignal(signal.Signals(number).name)

    before = {number: signal.signal(number, stop) for number in handled_signals()}
    _enclosed.append(True)
    try:
        yield
    except BaseException as error:
        if exits and getattr(error, "exit_code", None) in STOP_CODES:
            before = dict.fromkeys(before, signal.SIG_IGN)
        raise
    finally:
        _enclosed.pop()
        for number, handler in before.items():
            signal.signal(number, handler)


def after_stop(before: Mapping[signal.Signals, Any]) -> None:
    """Ignore further signals while a stopped run unwinds, if an enclosing block or the exit of this process ends that.

    Elsewhere the handlers `before` are restored.
    """
    for number, handler in before.items():
        signal.signal(number, signal.SIG_IGN if _enclosed else handler)


def exits_after_stop() -> None:
    """Note that this process, a rank, exits when its run ends."""
    _enclosed.append(True)


class StopRequest:
    """Handles stop signals while its block runs.

    A thread receives the signals, so that a rank blocked in a collective notices them too. The first one is a request
    that the training loop reads with `requested`; repeated signals change nothing, except that the third Ctrl-C calls
    `quit`. If the block is still running after `grace_s` seconds, `too_late` is called; Ctrl-C has no such limit,
    because nobody will kill the run.

    Before training there is nothing to save: a rank that runs alone gets StopSignal at once, ranks that others wait for
    have EARLY_S.
    """

    def __init__(
        self,
        grace_s: float,
        too_late: Callable[[str], None],
        *,
        alone: bool = False,
        on_request: Callable[[str], None] = lambda name: None,
        on_quit: Callable[[], None] = lambda: os._exit(128 + signal.SIGINT),
    ) -> None:
        self.grace_s, self._too_late = grace_s, too_late
        self.phase: Phase = "building"
        self.name = ""  # of the signal that requested the stop
        self._alone, self._on_request, self._on_quit = alone, on_request, on_quit
        self._presses = Presses()
        self._requested_at = 0.0
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
        self._before = {number: signal.signal(number, self._interrupt) for number in handled_signals()}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # blocked in ranks of --nproc until here
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        if self.requested:
            after_stop(self._before)
        for number, handler in self._before.items() if not self.requested else ():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wake)
        reader, writer = self._pipe
        os.close(writer)  # ends the listener's read
        self._thread.join(1.0)
        with suppress(OSError):
            os.close(reader)
        self._thread = None

    def _interrupt(self, number: int, _: FrameType | None) -> None:
        """Stop a run that has nothing to save; otherwise the thread handles the signal."""
        if self._alone and self.phase == "building":
            self._alone = False  # once: the next signals must not disturb the unwinding
            raise StopSignal(signal.Signals(number).name)

    def _listen(self) -> None:
        reader = self._pipe[0]
        while True:
            left = self._deadline() - time.monotonic()
            ready, _, _ = select.select([reader], [], [], None if left == math.inf else max(0.0, left))
            if not ready:
                if time.monotonic() < self._deadline():
                    continue  # training has started meanwhile, which has its own limit
                self._too_late(self.name)
                return
            received = os.read(reader, 64)
            if not received:
                return
            for number in received:
                if number in STOP_SIGNALS:
                    self._on_signal(signal.Signals(number))

    def _deadline(self) -> float:
        if not self.requested:
            return math.inf
        if self.phase == "building":
            return self._requested_at + min(self.grace_s, EARLY_S)
        return math.inf if self.name == signal.SIGINT.name else self._requested_at + self.grace_s

    def _on_signal(self, number: signal.Signals) -> None:
        if not self.requested:
            self._requested_at, self.name = time.monotonic(), number.name
            self._on_request(self.name)
        if self._presses.quits(number):
            self._on_quit()
