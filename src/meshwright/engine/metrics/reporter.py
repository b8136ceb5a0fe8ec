"""Gathers what a step has to tell and hands it on, without making the GPU wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwright.engine.metrics.clock import Clock, Timing
from meshwright.engine.metrics.meter import Meter
from meshwright.engine.metrics.record import StepRecord
from meshwright.engine.metrics.sinks import Sink

if TYPE_CHECKING:
    import torch

LAG = 2  # steps that may wait for the GPU before they are told


class _Waiting(NamedTuple):
    step: int
    timing: Timing
    values: dict[str, Any]
    extra: dict[str, Any]
    lr: float
    tokens: int | None
    computed: int | None
    skipped: bool


class Reporter:
    """Tells the steps of a run to its sinks; ranks other than 0 are given none and only keep time.

    A step is told when the GPU has come to its end, at most `LAG` steps later, so that nobody waits for a number.
    """

    def __init__(
        self, meter: Meter, clock: Clock, sinks: Sequence[Sink], memory: Callable[[], Mapping[str, float]] | None = None
    ) -> None:
        self.meter, self.clock = meter, clock
        self.last: StepRecord | None = None  # the newest step that was told
        self._sinks, self._memory = tuple(sinks), memory
        self._waiting: deque[_Waiting] = deque()

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
        """Ends the step that `clock.start()` began; tensors may still be on their way.

        Throughput is of the tokens that were computed, of which those that count in the loss may be a few.
        """
        values = {"loss": _copied(loss), "grad_norm": _copied(grad_norm)}
        more = {name: _copied(value) for name, value in (extra or {}).items()}
        self._waiting.append(_Waiting(step, self.clock.finish(), values, more, lr, tokens, computed, skipped))
        while self._waiting and (len(self._waiting) > LAG or self._waiting[0].timing.ready()):
            self._tell(self._waiting.popleft())

    def flush(self) -> None:
        """Tells every step that is still waiting."""
        while self._waiting:
            self._tell(self._waiting.popleft())

    def close(self) -> None:
        """Tells the rest and closes the sinks."""
        self.flush()
        for sink in self._sinks:
            sink.close()

    def _tell(self, one: _Waiting) -> None:
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
            skipped=one.skipped,
            extra={name: float(value) for name, value in one.extra.items()},
        )
        for sink in self._sinks:
            sink.step(self.last)


def _copied(value: Any) -> Any:
    """A number, or a host copy that is filled when the GPU gets there: reading it later waits for nothing else."""
    if value is None or isinstance(value, float | int):
        return value
    import torch

    plain = value.detach()
    if plain.device.type != "cuda":
        return plain.clone()  # the training goes on and may reuse it
    host = torch.empty_like(plain, device="cpu", pin_memory=True)
    return host.copy_(plain, non_blocking=True)
