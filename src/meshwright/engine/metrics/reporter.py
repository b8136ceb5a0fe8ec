"""Collects the metrics of each step and sends them to the sinks, without synchronizing with the GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwright.engine.metrics.clock import Clock, Timing
from meshwright.engine.metrics.meter import Meter
from meshwright.engine.metrics.record import StepRecord, ValidationRecord
from meshwright.engine.metrics.sinks import Sink

if TYPE_CHECKING:
    import torch

LAG = 2  # steps that may be pending on the GPU before they are reported


class _PendingStep(NamedTuple):
    step: int
    timing: Timing
    values: dict[str, Any]
    extra: dict[str, Any]
    lr: float
    tokens: int | None
    computed: int | None
    skipped: bool


class Reporter:
    """Reports the steps of a run to its sinks; ranks other than 0 have no sinks and only keep time.

    A step is reported when the GPU has finished it, at most `LAG` steps later, so that reading a value never blocks.
    """

    def __init__(
        self, meter: Meter, clock: Clock, sinks: Sequence[Sink], memory: Callable[[], Mapping[str, float]] | None = None
    ) -> None:
        self.meter, self.clock = meter, clock
        self.last: StepRecord | None = None  # the latest reported step
        self._sinks, self._memory = tuple(sinks), memory
        self._pending: deque[_PendingStep] = deque()

    def end_step(
        self,
        step: int,
        *,
        loss: float | torch.Tensor,
        lr: float,
        grad_norm: float | torch.Tensor | None = None,
        tokens: int | None = None,
        computed: int | None = None,
        skipped: bool = False,
        extra: Mapping[str, float | torch.Tensor] | None = None,
    ) -> None:
        """End the step that `clock.start()` started; tensors may still be computed by the GPU.

        Throughput counts the tokens `computed`; `tokens` are those in the loss, which may be fewer.
        """
        values = {"loss": _to_host(loss), "grad_norm": _to_host(grad_norm)}
        extras = {name: _to_host(value) for name, value in (extra or {}).items()}
        self._pending.append(_PendingStep(step, self.clock.finish(), values, extras, lr, tokens, computed, skipped))
        while self._pending and (len(self._pending) > LAG or self._pending[0].timing.ready()):
            self._report(self._pending.popleft())

    def validation(self, record: ValidationRecord) -> None:
        """Report a validation, after the steps before it."""
        self.flush()
        for sink in self._sinks:
            sink.validation(record)

    def flush(self) -> None:
        """Report all pending steps."""
        while self._pending:
            self._report(self._pending.popleft())

    def close(self) -> None:
        """Report all pending steps and close the sinks."""
        self.flush()
        for sink in self._sinks:
            sink.close()

    def abort(self) -> None:
        """Close the sinks of a run that failed: a live panel that stays open hides the cursor."""
        for sink in self._sinks:
            with suppress(Exception):  # the run's own error is the one to report
                sink.close()

    def _report(self, one: _PendingStep) -> None:
        time = one.timing.read()
        speed = self.meter.add(time.step_s, one.computed)
        grad_norm = one.values["grad_norm"]
        self.last = StepRecord(
            step=one.step,
            loss=float(one.values["loss"]),
            lr=one.lr,
            grad_norm=None if grad_norm is None else float(grad_norm),
            tokens=self.meter.constants.tokens_per_step if one.tokens is None else one.tokens,
            step_s=time.step_s,
            tokens_per_s_per_gpu=speed.tokens_per_s_per_gpu,
            tflops_per_gpu=speed.tflops_per_gpu,
            mfu=speed.mfu,
            parts_s=time.parts_s,
            memory_gib=dict(self._memory()) if self._memory and self._sinks else {},
            remaining_s=self.meter.remaining_s(one.step),
            epoch=self.meter.epoch(one.step),
            skipped=one.skipped,
            extra={name: float(value) for name, value in one.extra.items()},
        )
        for sink in self._sinks:
            sink.step(self.last)


def _to_host(value: Any) -> Any:
    """Return a number as is, or an asynchronous host copy of a tensor."""
    if value is None or isinstance(value, float | int):
        return value
    import torch

    plain = value.detach()
    if plain.device.type != "cuda":
        return plain.clone()  # training may reuse the memory
    host = torch.empty_like(plain, device="cpu", pin_memory=True)
    return host.copy_(plain, non_blocking=True)
