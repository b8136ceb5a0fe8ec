"""Progress output: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, TextIO

from meshwright.engine.metrics.memory import estimated_peak
from meshwright.engine.metrics.meter import Constants
from meshwright.engine.metrics.record import StepRecord, ValidationRecord

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

REFRESH_S = 0.25
QUIET_S = 30.0  # most time without a line in a log: long steps are all written, whatever train.log_every is
SHORT = {"data": "data", "forward_backward": "fwd+bwd", "optimizer": "optimizer", "other": "other"}


class ConsoleSink:
    """Prints progress to stdout, or to stderr if stdout carries a JSON result."""

    def __init__(
        self,
        constants: Constants,
        log_every: int = 10,
        json: bool = False,
        stream: TextIO | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._constants, self._log_every, self._now = constants, max(1, log_every), now
        self._stream = stream if stream is not None else (sys.stderr if json else sys.stdout)
        self._live: Live | None = None
        self._shown_at, self._works, self._first = 0.0, True, True
        self._last: StepRecord | None = None

    def step(self, record: StepRecord) -> None:
        """Show a step if one is due."""
        self._last = record
        try:
            if self._works and self._stream.isatty():
                self._show_live(record, last=record.step == self._constants.steps)
            elif self._works and self._is_due(record):
                print(line(record, self._constants, self._now()), file=self._stream, flush=True)
        except (OSError, ValueError):  # closed pipe or full disk: training continues without output
            self._works = False
        self._first = False

    def validation(self, record: ValidationRecord) -> None:
        """Show the result of a validation."""
        text = validation_line(record, self._constants)
        try:
            if self._works and self._live is not None:
                self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
            elif self._works:
                print(text, file=self._stream, flush=True)
        except (OSError, ValueError):
            self._works = False

    def close(self) -> None:
        """Show the last step and stop the live panel."""
        try:
            if self._live is not None and self._last is not None:
                self._live.update(panel(self._last, self._constants, self._now()), refresh=True)
                self._live.stop()
        except (OSError, ValueError):
            self._works = False
        self._live = None

    def _is_due(self, record: StepRecord) -> bool:
        last = self._constants.steps
        quiet_s = time.monotonic() - self._shown_at
        due = self._first or record.skipped or record.step % self._log_every == 0 or record.step == last
        if due or quiet_s >= QUIET_S:
            self._shown_at = time.monotonic()
            return True
        return False

    def _show_live(self, record: StepRecord, last: bool) -> None:
        from rich.console import Console
        from rich.live import Live

        if self._live is None:
            self._live = Live(console=Console(file=self._stream), auto_refresh=False)
            self._live.start()
        if last or time.monotonic() - self._shown_at >= REFRESH_S:
            self._live.update(panel(record, self._constants, self._now()), refresh=True)
            self._shown_at = time.monotonic()


def line(record: StepRecord, constants: Constants, now: datetime) -> str:
    """Format one step as a plain line."""
    return "  ".join(f"{name} {value}".strip() for name, value in facts(record, constants, now))


def validation_line(record: ValidationRecord, constants: Constants) -> str:
    """Format the result of a validation as a plain line."""
    step = f"{record.step}/{constants.steps}" if constants.steps else str(record.step)
    shown = f"validation  step {step}  loss {record.loss:.4f}"
    if record.perplexity is not None:
        shown += f"  perplexity {record.perplexity:.4g}"
    samples = f"{record.samples:,} sample{'s' * (record.samples != 1)}"
    shown += f"  over {record.tokens:,} tokens of {samples} in {duration(record.seconds)}"
    return shown + "  (best so far)" * record.best


def panel(record: StepRecord, constants: Constants, now: datetime) -> Table:
    """Format one step as the live panel of a terminal."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    if constants.steps:
        table.add_row("", ProgressBar(total=constants.steps, completed=record.step, width=40))
    for name, value in facts(record, constants, now):
        bad = name == "loss" and (record.skipped or record.loss != record.loss)
        table.add_row(name, f"[bold red]{value}[/]" if bad else value)
    return table


def facts(record: StepRecord, constants: Constants, now: datetime) -> list[tuple[str, str]]:
    """Return what is shown of a step, in order, as names and texts."""
    shown = [
        ("step", f"{record.step}/{constants.steps}" if constants.steps else str(record.step)),
        *_epoch(record, constants),
        ("loss", f"{record.loss:.4f}" + (" (skipped)" if record.skipped else "")),
        ("lr", f"{record.lr:.2e}"),
    ]
    if record.grad_norm is not None:
        shown.append(("grad norm", f"{record.grad_norm:.3g}"))
    shown.append(("tokens/s/GPU" if record.mfu is not None else "tokens/s/rank", f"{record.tokens_per_s_per_gpu:,.0f}"))
    if record.mfu is not None:
        shown.append(("MFU", f"{record.mfu:.1%}"))
    shown.append(("step time", _with_estimate(record.step_s, constants.estimate_step_s, "s")))
    if "peak" in record.memory_gib:
        shown.append(
            ("memory", _with_estimate(record.memory_gib["peak"], estimated_peak(constants.estimate_memory_gib), "GiB"))
        )
    shown.append(("parts", parts(record)))
    if record.remaining_s is not None:
        end = now + timedelta(seconds=record.remaining_s)
        shown.append(("ends", f"{end:%Y-%m-%d %H:%M} (in {duration(record.remaining_s)})"))
    return shown


def _epoch(record: StepRecord, constants: Constants) -> list[tuple[str, str]]:
    if record.epoch is None or not constants.samples_per_epoch:
        return []
    samples = constants.total_samples or (constants.steps or 0) * constants.samples_per_step
    total = samples / constants.samples_per_epoch
    return [("epoch", f"{record.epoch:.2f}/{total:.2f}" if total else f"{record.epoch:.2f}")]


def parts(record: StepRecord) -> str:
    """Format the parts of a step as percentages of it."""
    shares = ((SHORT.get(name, name), seconds / record.step_s) for name, seconds in record.parts_s.items())
    return " · ".join(f"{name} {share:.0%}" for name, share in shares)


def duration(seconds: float) -> str:
    """Format seconds: 45 s, 3 min, 2 h 05 min, 3 d 4 h."""
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded} s"
    minutes = round(rounded / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(minutes / 60)
    return f"{hours // 24} d {hours % 24} h"


def _with_estimate(measured: float, estimate: float | None, unit: str) -> str:
    expected = f" (estimate {estimate:.3g})" if estimate else ""
    return f"{measured:.3g} {unit}{expected}"
