"""Times the passes of a step: marks are CUDA events on the compute stream, or readings of the host's clock."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from meshwright.engine.patching import Patch, apply
from meshwright.engine.trainer import StepCallbacks, Trainer

FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"


class Clock:
    """Sets marks and reads the seconds between them."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"

    def mark(self) -> Any:
        """Return a mark at the end of the work that was issued so far."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Return the time between two marks, after the device has passed both."""
        return float(end - start) if not self.cuda else float(start.elapsed_time(end)) / 1e3

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.cuda:
            torch.cuda.synchronize()

    def allocated(self) -> int:
        """Return the bytes that tensors hold on the device."""
        return int(torch.cuda.memory_allocated()) if self.cuda else 0


@dataclass
class StepMarks:
    """The marks of one step."""

    begin: Any = None
    end: Any = None
    parts: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # data, forward_backward, optimizer
    # Without a pipeline: start of each micro batch. With one: (kind, chunk, micro batch, start, end) of each pass.
    micro_batches: list[Any] = field(default_factory=list)
    passes: list[tuple[str, int, int, Any, Any]] = field(default_factory=list)
    layers: list[tuple[str, int, int, Any, int]] = field(default_factory=list)  # pass, chunk, layer, mark, bytes


class StepTimer(StepCallbacks):
    """Step callbacks that set the marks."""

    def __init__(self, trainer: Trainer, clock: Clock, by_layer: bool) -> None:
        self.trainer, self.clock = trainer, clock
        self.now = StepMarks()
        if trainer.pipeline is not None:
            schedule: Any = trainer.pipeline.schedule
            for stage in getattr(schedule, "_stages", None) or [schedule._stage]:
                self._time_passes(stage)
        else:
            trainer.stages[0].register_forward_pre_hook(self._on_micro_batch, prepend=True)
        if by_layer:
            for number, one in enumerate(trainer.stages):
                _mark_layers(one, number, self)

    def step(self, number: int) -> StepMarks:
        """Run a step and return its marks."""
        self.now = StepMarks(begin=self.clock.mark())
        self.trainer.step(number, self, figures=False)
        self.now.end = self.clock.mark()
        return self.now

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Mark a part of the step."""
        start = self.clock.mark()
        yield
        self.now.parts[name] = start, self.clock.mark()

    def _on_micro_batch(self, *_: Any) -> None:
        self.now.micro_batches.append(self.clock.mark())

    def _time_passes(self, stage: Any) -> None:
        forward, backward = stage.forward_one_chunk, stage.backward_one_chunk
        weight, chunk = getattr(stage, "backward_weight_one_chunk", None), stage.stage_index

        def timed(kind: str, number: int, run: Any, *args: Any, **kwargs: Any) -> Any:
            start = self.clock.mark()
            result = run(number, *args, **kwargs)
            self.now.passes.append((kind, chunk, number, start, self.clock.mark()))
            return result

        def run_backward(number: int, *args: Any, **kwargs: Any) -> Any:
            full = kwargs.get("full_backward", args[1] if len(args) > 1 else True)
            return timed(BACKWARD if full else INPUT, number, backward, *args, **kwargs)

        stage.forward_one_chunk = lambda number, *a, **k: timed(FORWARD, number, forward, *a, **k)
        stage.backward_one_chunk = run_backward
        if weight is not None:
            stage.backward_weight_one_chunk = lambda number, *a, **k: timed(WEIGHT, number, weight, *a, **k)


class MarkedLayers(Patch):
    """A stage whose layers set marks."""

    tag = "Marked"

    @property
    def decoder_layers(self: Any) -> dict[int, Any]:
        layers: dict[int, Any] = self.marked_layers
        return layers


class _Mark(torch.autograd.Function):
    """An identity function that sets a mark in both passes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, timer: StepTimer, chunk: int, before: int, after: int) -> torch.Tensor:
        ctx.at = timer, chunk, before
        timer.now.layers.append((FORWARD, chunk, after, timer.clock.mark(), timer.clock.allocated()))
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        timer, chunk, before = ctx.at
        timer.now.layers.append((BACKWARD, chunk, before, timer.clock.mark(), timer.clock.allocated()))
        return grads[0], None, None, None, None


NO_LAYER = -1


def _mark_layers(stage: Any, chunk: int, timer: StepTimer) -> None:
    """Mark the start of every layer in both passes; NO_LAYER marks the end of the layers.

    A mark between two layers starts the later one in the forward pass and the earlier one in the backward pass.
    """
    numbers = list(stage.decoder_layers)
    marked: dict[int, Any] = {}
    for place, number in enumerate(numbers):
        layer, before = stage.decoder_layers[number], numbers[place - 1] if place else NO_LAYER
        is_last = place == len(numbers) - 1
        marked[number] = _marked(layer, timer, chunk, before, number, is_last)
    stage.marked_layers = marked
    apply(stage, MarkedLayers)


def _marked(layer: Any, timer: StepTimer, chunk: int, before: int, number: int, is_last: bool) -> Any:
    mark: Any = _Mark.apply

    def run(hidden: torch.Tensor, **kwargs: Any) -> Any:
        out = layer(mark(hidden, timer, chunk, before, number), **kwargs)
        out = out[0] if isinstance(out, tuple) else out
        return mark(out, timer, chunk, number, NO_LAYER) if is_last else out

    return run
