"""Cutting the model into pipeline stages, and the schedule that runs them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from meshwright.costs.stages import chunk_layers
from meshwright.engine.mesh import GroupInfo
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


def stage_numbers(layout: Layout, pp: GroupInfo) -> list[int]:
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


def split_stages(models: list[nn.Module], layout: Layout, layers: int, pp: GroupInfo) -> list[Stage]:
    """The stages of this rank; each is made of its own whole meta model, of which the rest is dropped."""
    cuts = stage_layers(layout, layers)
    numbers = stage_numbers(layout, pp)
    return [
        Stage(model, cuts[number], first=number == 0, last=number == len(cuts) - 1)
        for model, number in zip(models, numbers, strict=True)
    ]


class ReceivingStage(PipelineStage):
    """A stage of torch's pipeline that holds what it receives only while the micro batch is under way.

    Torch makes room for everything that a step will receive before the first pass and keeps it for the whole run. Here
    only the shapes are kept, as tensors without memory. Memory is taken when a receive is about to start and belongs to
    the pass from the moment that the pass asks for it.

    Nothing is overwritten too early on a GPU. Memory is taken on the stream that computes; NCCL's stream waits for that
    one before it writes, and the schedule makes that one wait for NCCL's before a pass reads. So whatever used the
    memory before is done, and it is freed on the stream that used it last.
    """

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._without_memory():
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._without_memory():
            return super()._prepare_backward_infra(*args, **kwargs)

    @contextmanager
    def _without_memory(self) -> Iterator[None]:
        """Torch makes its receive buffers on the stage's device: on "meta" they are only shapes."""
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """What opens the connections to both neighbours; torch 2.11 would connect a rank with itself in a V."""
        return [one for one in super()._get_init_p2p_neighbors_ops() if one.group_peer != self.group_rank]

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """What receives the input of a micro batch, with room for it."""
        self._take(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """What receives the gradient of a micro batch's output, with room for it."""
        if self.has_backward:
            self._take(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
        received = super()._retrieve_recv_activations(fwd_chunk_id)
        self._let_go(self.args_recv_info[fwd_chunk_id])
        return received

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        received = super()._retrieve_recv_grads(bwd_chunk_id)
        self._let_go(self.grad_recv_info[bwd_chunk_id])
        return received

    def _take(self, places: Iterable[Any]) -> None:
        for place in _received(places):
            place.buffer = _like(place.buffer, self.device)

    def _let_go(self, places: Iterable[Any]) -> None:
        for place in _received(places):
            place.buffer = _like(place.buffer, torch.device("meta"))

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """The forward pass of a micro batch; without a backward pass its input is not needed any more."""
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if self.is_last and self.output_chunks:
            self.output_chunks[-1] = output.detach()
        if not self.has_backward:
            outputs, _ = self.fwd_cache[fwd_chunk_id]
            self.fwd_cache[fwd_chunk_id] = (outputs if self._sends() else (), [])
        return output

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: torch.Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """The backward pass of a micro batch; its loss, which the schedule keeps, lets go of how it was computed.

        Else the loss would hold the stage's input until the end of the step. Where weights have a backward pass of
        their own, torch lets go itself.
        """
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if loss is not None and full_backward:
            loss.detach_()

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """What sends the output of a micro batch; without a backward pass it is not needed any more.

        A schedule may wait for its sends at the end of the step: what is sent must not hold how it was computed, as it
        does in torch 2.11.
        """
        sends = super().get_fwd_send_ops(fwd_chunk_id)
        for send in sends:
            send.tensor = send.tensor.detach()
        if not self.has_backward:
            self.fwd_cache[fwd_chunk_id] = ((), [])
        return sends

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """The gradient for the stage before on the same rank; without a backward pass there is none to ask for."""
        if not self.has_backward:
            return ()
        return super().get_local_bwd_output(mb_index)  # type: ignore[no-untyped-call]  # torch's

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int) -> None:
        """The gradient from the stage after on the same rank; without a backward pass there is none."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def _sends(self) -> bool:
        """Whether outputs go to another rank: the two middle stages of a V are on the same one."""
        return not self.is_last and self.stage_index_to_group_rank[self.stage_index + 1] != self.group_rank


def _received(places: Iterable[Any]) -> Iterator[Any]:
    """Those of a stage's inputs that come from other stages: the batch is given, and has no buffer."""
    return (place for place in places if getattr(place, "buffer", None) is not None)


def _like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_like(tensor, device=device, requires_grad=tensor.requires_grad)


class Pipeline:
    """The schedule of a pipeline: runs the forward and backward pass of all micro batches of a step."""

    def __init__(
        self,
        stages: list[Stage],
        layout: Layout,
        pp: GroupInfo,
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
            ReceivingStage(
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
