"""Runs a pipeline schedule and skips the passes of most micro batches, which repeat the second one.

The schedule itself, with its order of passes, buffers and sends, is torch's own and runs completely.
"""

from __future__ import annotations

from typing import Any

import torch

from meshwright.dryrun.allocation_log import SegmentKey
from meshwright.dryrun.trace_hooks import REPLAYED, Chunk, TraceHooks
from meshwright.engine.kernels.device_caps import DRY
from meshwright.engine.trainer import Trainer

UNSPLIT_BACKWARD = ("1f1b", "gpipe", "interleaved_1f1b", "looped_bfs")  # schedules that do not split the backward pass


def can_skip_micro_batches(trainer: Trainer) -> bool:
    """Return whether passes of this trainer's micro batches may be skipped."""
    return trainer.recipe.layout.pp_schedule in UNSPLIT_BACKWARD


def trace_pipeline(trainer: Trainer, hooks: TraceHooks, kept: list[int]) -> None:
    """Record which micro batch each stage runs, and skip those that are not kept."""
    schedule: Any = trainer.pipeline.schedule if trainer.pipeline is not None else None
    stages = getattr(schedule, "_stages", None) or [schedule._stage]
    for chunk, stage in zip(hooks.chunks, stages, strict=True):
        _TracedStage(stage, chunk, hooks, kept)


class _TracedStage:
    """One torch stage whose passes are recorded or skipped."""

    def __init__(self, stage: Any, chunk: Chunk, hooks: TraceHooks, kept: list[int]) -> None:
        self.stage, self.chunk, self.hooks, self.kept = stage, chunk, hooks, kept
        self.forward, self.backward = stage.forward_one_chunk, stage.backward_one_chunk
        self.template: dict[tuple[int, str], list[tuple[torch.Size, torch.dtype, int] | None]] = {}
        stage.forward_one_chunk, stage.backward_one_chunk = self.run_forward, self.run_backward
        stage.get_fwd_recv_ops = self._record_received("forward", stage.get_fwd_recv_ops)
        stage.get_bwd_recv_ops = self._record_received("backward", stage.get_bwd_recv_ops)

    def _record_received(self, phase: str, receive: Any) -> Any:
        """Record for which pass a block is received: skipped passes receive theirs too."""

        def recording(number: int) -> Any:
            operations = receive(number)
            log, key = self.hooks.log, SegmentKey(self.hooks.step, phase, self.chunk.number, number)
            log.received.update((log.block_of(one.tensor), key) for one in operations)
            return operations

        return recording

    def run_forward(self, number: int, *args: Any, **kwargs: Any) -> Any:
        """Run or skip the forward pass of a micro batch."""
        self.chunk.forward_micro_batch = number
        if number in self.kept:
            out = self.forward(number, *args, **kwargs)
            self._keep_template("forward", number, (out,))
        else:
            (out,) = self._placeholders("forward", number)
            inputs = [] if self.stage.is_first else list(self.stage._retrieve_recv_activations(number))
            self.stage.fwd_cache[number] = ((out,), inputs)
            if self.stage.is_last:
                self.stage.output_chunks.append(out)
        self._end_pass(number)
        return out

    def run_backward(self, number: int, *args: Any, **kwargs: Any) -> None:
        """Run or skip the backward pass of a micro batch."""
        if number in self.kept:
            self.backward(number, *args, **kwargs)
            self._keep_template("backward", number, self.stage.bwd_cache[number])
        else:
            self.stage.bwd_cache[number] = self._placeholders("backward", number)
            self.stage.fwd_cache.pop(number)
            if not self.stage.is_last:
                self.stage._retrieve_recv_grads(number)
        self._end_pass(number)

    def _keep_template(self, phase: str, number: int, tensors: Any) -> None:
        """Keep the shapes that the second micro batch outputs, as templates for skipped passes."""
        if len(self.kept) > 1 and number == self.kept[1]:
            self.template[self.hooks.step, phase] = [
                None if one is None else (one.shape, one.dtype, self.hooks.log.block_of(one)) for one in tensors
            ]

    def _placeholders(self, phase: str, number: int) -> tuple[Any, ...]:
        """Return tensors shaped like the output of a skipped pass."""
        log, key = self.hooks.log, SegmentKey(self.hooks.step, phase, self.chunk.number, number, REPLAYED)
        log.begin(key)
        tensors: list[Any] = []
        for template in self.template[self.hooks.step, phase]:
            if template is None:
                tensors.append(None)
                continue
            tensors.append(torch.empty(template[0], dtype=template[1], device=DRY))
            log.represents[log.block_of(tensors[-1])] = (key, template[2])
        return tuple(tensors)

    def _end_pass(self, number: int) -> None:
        self.hooks.log.begin(SegmentKey(self.hooks.step, "between", self.chunk.number, number))
