"""Pipeline parallelism: the split of the model into stages, and the schedule that runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from meshwright.costs.stages import chunk_layers
from meshwright.engine import shared_gpu
from meshwright.engine.mesh import GroupInfo
from meshwright.engine.metrics.jsonl import warn
from meshwright.engine.model.stage import Stage
from meshwright.recipes.capabilities import V_SHAPED
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
ZERO_BUBBLE = ("interleaved_zero_bubble", *V_SHAPED)
# Before 2.13 torch loses the graph of Python autograd functions between the two parts of a split backward pass, and
# counts gradients twice where a weight is used by several operations.
SPLITS_BACKWARD = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)


def stage_numbers(layout: Layout, pp: GroupInfo) -> list[int]:
    """Return this rank's stage numbers: every pp-th one, or the two ends of a V."""
    if layout.pp == 1:
        return [0]
    if layout.pp_schedule in V_SHAPED:
        return [pp.rank, 2 * pp.size - 1 - pp.rank]
    return [pp.rank + lap * pp.size for lap in range(layout.vp)]


def stage_layers(layout: Layout, layers: int) -> list[range]:
    """Return the layers of every stage in order."""
    chunks = layout.pp * layout.vp if layout.pp > 1 else 1
    explicit = layout.stage_layers if layout.pp > 1 else ()
    counts = chunk_layers(layers, explicit, chunks, int(layout.embedding_as_layer), int(layout.head_as_layer))
    ends = [int(sum(counts[: i + 1])) for i in range(chunks)]
    return [range(end - int(count), end) for end, count in zip(ends, counts, strict=True)]


def split_stages(models: list[nn.Module], layout: Layout, layers: int, pp: GroupInfo) -> list[Stage]:
    """Return this rank's stages, each from a full model on the meta device whose other layers are dropped."""
    by_stage = stage_layers(layout, layers)
    numbers = stage_numbers(layout, pp)
    return [
        Stage(model, by_stage[number], first=number == 0, last=number == len(by_stage) - 1)
        for model, number in zip(models, numbers, strict=True)
    ]


class ReceivingStage(PipelineStage):
    """A torch pipeline stage whose receive buffers exist only while their micro batch is in flight.

    torch allocates the buffers of all micro batches of a step before the first pass and keeps them for the whole run.
    Here they are meta tensors until a receive is posted, and belong to the pass that reads them.

    This is safe on GPU streams: a buffer is allocated on the compute stream, NCCL's stream waits for the compute stream
    before it writes, and the schedule makes the compute stream wait for NCCL before a pass reads. So the previous user
    of the memory has finished, and the buffer is freed on the stream that used it last.

    With gloo on a GPU, what is sent and received is in host memory.
    """

    @property
    def _through_host(self) -> bool:
        return shared_gpu.sends_through_host(self.device.type, self.group)

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._on_device("meta"):  # receive buffers
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._on_device("meta"):
            return super()._prepare_backward_infra(*args, **kwargs)

    def _warmup_forward_vote(self, *args: Any, **kwargs: Any) -> Any:
        """Vote on static shapes (torch 2.13)."""
        with self._on_device("cpu" if self._through_host else self.device):
            return super()._warmup_forward_vote(*args, **kwargs)

    def _warmup_backward_result(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the vote on static shapes (torch 2.13)."""
        with self._on_device("cpu" if self._through_host else self.device):
            return super()._warmup_backward_result(*args, **kwargs)

    @contextmanager
    def _on_device(self, other: str | torch.device) -> Iterator[None]:
        """Let torch allocate tensors on another device: it uses the stage's."""
        device, self.device = self.device, torch.device(other)
        try:
            yield
        finally:
            self.device = device

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Return the ops that connect both neighbors; torch 2.11 would connect a rank with itself in a V schedule."""
        with self._on_device("cpu" if self._through_host else self.device):
            return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Allocate the buffer for the input of a micro batch and return the ops that receive it."""
        self._allocate(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Allocate the buffer for the gradient of a micro batch's output and return the ops that receive it."""
        if self.has_backward:
            self._allocate(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
        self._move_received(self.args_recv_info[fwd_chunk_id])
        received = super()._retrieve_recv_activations(fwd_chunk_id)
        self._release(self.args_recv_info[fwd_chunk_id])
        return received

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        self._move_received(self.grad_recv_info[bwd_chunk_id])
        received = super()._retrieve_recv_grads(bwd_chunk_id)
        self._release(self.grad_recv_info[bwd_chunk_id])
        return received

    def _allocate(self, infos: Iterable[Any]) -> None:
        device = torch.device("cpu") if self._through_host else self.device
        for info in _with_buffer(infos):
            info.buffer = _like(info.buffer, device)

    def _move_received(self, infos: Iterable[Any]) -> None:
        """Move what arrived in host memory to the stage's device; a stage on the same rank leaves it there."""
        for info in _with_buffer(infos) if self._through_host else ():
            if info.buffer.device.type == "cpu":
                requires_grad = info.buffer.requires_grad
                info.buffer = info.buffer.detach().to(self.device).requires_grad_(requires_grad)

    def _release(self, infos: Iterable[Any]) -> None:
        for info in _with_buffer(infos):
            info.buffer = _like(info.buffer, torch.device("meta"))

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of a micro batch; in evaluation, free its input."""
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
        """Run the backward pass of a micro batch and detach its loss, which the schedule keeps.

        Otherwise the loss's graph would hold the stage's input until the end of the step. With a separate
        weight-gradient pass torch detaches it itself.
        """
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if loss is not None and (full_backward or not SPLITS_BACKWARD):
            loss.detach_()

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the ops that send the output of a micro batch; in evaluation, free the output.

        A schedule may wait for its sends at the end of the step, so the sent tensor must not hold its graph, as it does
        in torch 2.11.
        """
        sends = self._to_host(super().get_fwd_send_ops(fwd_chunk_id))
        for send in sends:
            send.tensor = send.tensor.detach()
        if not self.has_backward:
            self.fwd_cache[fwd_chunk_id] = ((), [])
        return sends

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the ops that send the gradient of a micro batch's input."""
        return self._to_host(super().get_bwd_send_ops(bwd_chunk_id))

    def _to_host(self, sends: list[dist.P2POp]) -> list[dist.P2POp]:
        for send in sends if self._through_host else ():
            send.tensor = shared_gpu.on_host(send.tensor)
        return sends

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Return the gradient for the previous stage on the same rank; none in evaluation."""
        if not self.has_backward:
            return ()
        return super().get_local_bwd_output(mb_index)  # type: ignore[no-untyped-call]  # torch's

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int) -> None:
        """Set the gradient from the next stage on the same rank; none in evaluation."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def _sends(self) -> bool:
        """Return whether outputs go to another rank: the two middle stages of a V are on the same one."""
        return not self.is_last and self.stage_index_to_group_rank[self.stage_index + 1] != self.group_rank


def _with_buffer(infos: Iterable[Any]) -> Iterator[Any]:
    """Yield the inputs that come from other stages: the first stage's batch has no buffer."""
    return (info for info in infos if getattr(info, "buffer", None) is not None)


def _no_weight_pass() -> Callable[[], None]:
    """Return the weight-gradient pass of a micro batch whose backward pass has computed all gradients."""
    return lambda: None


def _like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_like(tensor, device=device, requires_grad=tensor.requires_grad)


def _is_compiled(stages: list[Stage]) -> bool:
    """Return whether any block is compiled: its backward pass is one graph, which torch cannot split in two."""
    return any(module._compiled_call_impl is not None for stage in stages for module in stage.modules())


class Pipeline:
    """Runs the forward and backward passes of all micro batches of a step by a torch schedule."""

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
        """Build the schedule; `hidden` and `tokens` are meta tensors of the shapes between stages and of the input.

        `device` is the compute device, also when weights are offloaded.
        """
        numbers, count = stage_numbers(layout, pp), layout.pp * layout.vp
        splits = SPLITS_BACKWARD and not _is_compiled(stages)
        loss = torch.empty(1, device="meta", requires_grad=True)
        torch_stages = [
            ReceivingStage(
                stage,
                number,
                count,
                device,
                # Given shapes, so that torch does not run the stages to infer them.
                input_args=tokens if stage.first else hidden,
                output_args=loss if stage.last else hidden,
                group=pp.group,
                dw_builder=None if splits else _no_weight_pass,
            )
            for stage, number in zip(stages, numbers, strict=True)
        ]
        if layout.pp_schedule in ZERO_BUBBLE and not splits and dist.get_rank() == 0:
            passes, fix = (
                ("compiled backward passes", "kernels.compile=false")
                if SPLITS_BACKWARD
                else ("backward passes correctly", "torch 2.13")
            )
            warn(
                f"layout.pp_schedule={layout.pp_schedule}: torch {torch.__version__} cannot split {passes}; "
                f"they run whole, with larger bubbles. fix: {fix}"
            )
        schedule_class = get_schedule_class(SCHEDULES[layout.pp_schedule])
        multi_stage = issubclass(schedule_class, PipelineScheduleMulti)
        self.loss_scale = 1.0  # above 1 in fp16 training
        self.first, self.last = stages[0].first, any(stage.last for stage in stages)
        self.schedule: Any = schedule_class(
            torch_stages if multi_stage else torch_stages[0],
            n_microbatches=micro_batches,
            loss_fn=lambda loss, _: loss.sum() * self.loss_scale,  # the last stage returns the loss
            scale_grads=False,  # the loss is already divided by the global normalizer
        )

    def step(self, tokens: torch.Tensor, model_kwargs: dict[str, torch.Tensor], loss_scale: float = 1.0) -> None:
        """Run forward and backward of all micro batches; the head records their losses."""
        self.loss_scale = loss_scale
        self.schedule.step(*self._inputs(tokens), **self._target(tokens), **model_kwargs)

    def evaluate(self, tokens: torch.Tensor, model_kwargs: dict[str, torch.Tensor]) -> None:
        """Run forward of all micro batches; the head records their losses."""
        self.schedule.eval(*self._inputs(tokens), **self._target(tokens), **model_kwargs)

    def _inputs(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (tokens,) if self.first else ()

    def _target(self, tokens: torch.Tensor) -> dict[str, Any]:
        return {"target": tokens, "losses": []} if self.last else {}
