"""A pipeline's schedule run for real, with the passes of most micro batches left out: they do what the second one does.

The schedule itself, its order of passes, its buffers and what it sends, is torch's own and runs whole.
"""

from __future__ import annotations

from typing import Any

import torch

from meshwright.dryrun.allocation_log import Key
from meshwright.dryrun.trace_hooks import REPLAYED, Chunk, Marks
from meshwright.engine.kernels.device_caps import DRY
from meshwright.engine.trainer import Trainer

WHOLE_BACKWARD = ("1f1b", "gpipe", "interleaved_1f1b", "looped_bfs")  # schedules that do not split the backward pass


def can_leave_out(trainer: Trainer) -> bool:
    """Whether passes of this trainer's micro batches may be left out."""
    return trainer.recipe.layout.pp_schedule in WHOLE_BACKWARD


def follow_pipeline(trainer: Trainer, marks: Marks, kept: list[int]) -> None:
    """Tells the marks which micro batch runs, and leaves out those that are not kept."""
    schedule: Any = trainer.pipeline.schedule if trainer.pipeline is not None else None
    stages = getattr(schedule, "_stages", None) or [schedule._stage]
    for chunk, stage in zip(marks.chunks, stages, strict=True):
        _Followed(stage, chunk, marks, kept)


class _Followed:
    """One torch stage, its passes marked or left out."""

    def __init__(self, stage: Any, chunk: Chunk, marks: Marks, kept: list[int]) -> None:
        self.stage, self.chunk, self.marks, self.kept = stage, chunk, marks, kept
        self.forward, self.backward = stage.forward_one_chunk, stage.backward_one_chunk
        self.like: dict[tuple[int, str], list[tuple[torch.Size, torch.dtype, int] | None]] = {}
        stage.forward_one_chunk, stage.backward_one_chunk = self.run_forward, self.run_backward
        stage.get_fwd_recv_ops = self._noted("forward", stage.get_fwd_recv_ops)
        stage.get_bwd_recv_ops = self._noted("backward", stage.get_bwd_recv_ops)

    def _noted(self, phase: str, receive: Any) -> Any:
        """Notes which pass a block is received for: what is received, is received in a shortened step too."""

        def receives(number: int) -> Any:
            found = receive(number)
            ledger, key = self.marks.ledger, Key(self.marks.step, phase, self.chunk.number, number)
            ledger.received.update((ledger.block_of(one.tensor), key) for one in found)
            return found

        return receives

    def run_forward(self, number: int, *args: Any, **kwargs: Any) -> Any:
        """The forward pass of a micro batch."""
        self.chunk.now = number
        if number in self.kept:
            out = self.forward(number, *args, **kwargs)
            self._remember("forward", number, (out,))
        else:
            (out,) = self._stand_in("forward", number)
            inputs = [] if self.stage.is_first else list(self.stage._retrieve_recv_activations(number))
            self.stage.fwd_cache[number] = ((out,), inputs)
            if self.stage.is_last:
                self.stage.output_chunks.append(out)
        self._between(number)
        return out

    def run_backward(self, number: int, *args: Any, **kwargs: Any) -> None:
        """The backward pass of a micro batch."""
        if number in self.kept:
            self.backward(number, *args, **kwargs)
            self._remember("backward", number, self.stage.bwd_cache[number])
        else:
            self.stage.bwd_cache[number] = self._stand_in("backward", number)
            self.stage.fwd_cache.pop(number)
            if not self.stage.is_last:
                self.stage._retrieve_recv_grads(number)
        self._between(number)

    def _remember(self, phase: str, number: int, tensors: Any) -> None:
        """What the second micro batch gives: the passes that are left out give the like of it."""
        if len(self.kept) > 1 and number == self.kept[1]:
            self.like[self.marks.step, phase] = [
                None if one is None else (one.shape, one.dtype, self.marks.ledger.block_of(one)) for one in tensors
            ]

    def _stand_in(self, phase: str, number: int) -> tuple[Any, ...]:
        """What a pass that is left out would give."""
        ledger, key = self.marks.ledger, Key(self.marks.step, phase, self.chunk.number, number, REPLAYED)
        ledger.mark(key)
        made: list[Any] = []
        for like in self.like[self.marks.step, phase]:
            if like is None:
                made.append(None)
                continue
            made.append(torch.empty(like[0], dtype=like[1], device=DRY))
            ledger.stands_for[ledger.block_of(made[-1])] = (key, like[2])
        return tuple(made)

    def _between(self, number: int) -> None:
        self.marks.ledger.mark(Key(self.marks.step, "between", self.chunk.number, number))
