"""Cutting the model into pipeline stages, and the schedule that runs them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from meshwright.costs.stages import chunk_layers
from meshwright.engine.mesh import Axis
from meshwright.engine.model.stage import Stage
from meshwright.recipes.types import Layout

SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved_1f1b": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "interleaved_zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipe_v": "DualPipeV",
}
V_SHAPED = ("zbv", "dualpipe_v")


def stage_numbers(layout: Layout, pp: Axis) -> list[int]:
    """The stage chunks this rank holds: every pp-th one, or the two ends of a V."""
    if layout.pp == 1:
        return [0]
    if layout.pp_schedule in V_SHAPED:
        return [pp.rank, 2 * pp.size - 1 - pp.rank]
    return [pp.rank + lap * pp.size for lap in range(layout.vp)]


def stage_layers(layout: Layout, layers: int) -> list[range]:
    """The layers of every stage chunk in order."""
    chunks = layout.pp * layout.vp if layout.pp > 1 else 1
    given = layout.stage_layers if layout.pp > 1 else ()
    counts = chunk_layers(layers, given, chunks, int(layout.embedding_as_layer), int(layout.head_as_layer))
    ends = [int(sum(counts[: i + 1])) for i in range(chunks)]
    return [range(end - int(count), end) for end, count in zip(ends, counts, strict=True)]


def split(models: list[nn.Module], layout: Layout, layers: int, pp: Axis) -> list[Stage]:
    """The stages of this rank; each is made of its own whole meta model, of which the rest is dropped."""
    cuts = stage_layers(layout, layers)
    numbers = stage_numbers(layout, pp)
    return [
        Stage(model, cuts[number], first=number == 0, last=number == len(cuts) - 1)
        for model, number in zip(models, numbers, strict=True)
    ]


class Pipeline:
    """The schedule of a pipeline: runs the forward and backward pass of all micro batches of a step."""

    def __init__(
        self,
        stages: list[Stage],
        layout: Layout,
        pp: Axis,
        micro_batches: int,
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        device: torch.device,
    ) -> None:
        """`hidden` and `tokens` are meta tensors of the shapes that travel between stages and enter the first.

        They travel between devices, wherever weights wait.
        """
        numbers, count = stage_numbers(layout, pp), layout.pp * layout.vp
        loss = torch.empty(1, device="meta", requires_grad=True)
        torch_stages = [
            PipelineStage(
                stage,
                number,
                count,
                device,
                # Shapes are told, so that nothing is run just to find them out.
                input_args=tokens if stage.first else hidden,
                output_args=loss if stage.last else hidden,
                group=pp.group,
            )
            for stage, number in zip(stages, numbers, strict=True)
        ]
        kind = get_schedule_class(SCHEDULES[layout.pp_schedule])
        several = issubclass(kind, PipelineScheduleMulti)
        self.multiplier = 1.0  # of the loss: fp16 training scales it up
        self.first, self.last = stages[0].first, any(stage.last for stage in stages)
        self.schedule: Any = kind(
            torch_stages if several else torch_stages[0],
            n_microbatches=micro_batches,
            loss_fn=lambda loss, _: loss.sum() * self.multiplier,  # the last stage computes it
            scale_grads=False,  # the loss is already divided by the global normaliser
        )

    def step(self, tokens: torch.Tensor, told: dict[str, torch.Tensor], multiplier: float = 1.0) -> None:
        """Forward and backward of all micro batches; the head collects their losses."""
        self.multiplier = multiplier
        self.schedule.step(*self._inputs(tokens), **self._target(tokens), **told)

    def evaluate(self, tokens: torch.Tensor, told: dict[str, torch.Tensor]) -> None:
        """Forward of all micro batches; the head collects their losses."""
        self.schedule.eval(*self._inputs(tokens), **self._target(tokens), **told)

    def _inputs(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (tokens,) if self.first else ()

    def _target(self, tokens: torch.Tensor) -> dict[str, Any]:
        return {"target": tokens, "losses": []} if self.last else {}
