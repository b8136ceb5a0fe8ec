"""Gradients after the backward pass: sums that FSDP and DDP do not make, the norm, and clipping."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright.engine.experts.expert_params import expert_blocks, replicated_adapters
from meshwright.engine.kernels.optimizer_kernels import sum_of_squares
from meshwright.engine.mesh import SOLO, GroupInfo, Mesh
from meshwright.engine.model.stage import Stage


def finish(stages: list[Stage], mesh: Mesh) -> None:
    """Sum partial gradients over tp and etp, and those of weights on both ends of the pipeline over the two ends."""
    partial = [p for s in stages for name, p in s.named_parameters() if name in s.partial_grads and p.grad is not None]
    _sum(partial, mesh.tp)
    replicated = [p for s in stages for block in expert_blocks(s) for p in replicated_adapters(block.experts)]
    _sum([p for p in replicated if p.grad is not None], mesh.etp)
    copied = [p for stage in stages for p in _copied_at_ends(stage) if p.grad is not None]
    if copied:
        _sum_copies(copied, _other_end(stages, mesh))


def _copied_at_ends(stage: Stage) -> list[nn.Parameter]:
    """Return the embedding if the last stage has a copy: as its tied head, or for multi-token prediction."""
    if stage.first == stage.last:
        return []
    tied, needed = stage.head_is_tied, stage.embedding_on_last_stage
    if stage.first:
        return [stage.embedding.weight] if tied or needed else []
    return [*([stage.get_parameter(stage.head_weight)] if tied else []), *([stage.embedding.weight] if needed else [])]


def _other_end(stages: list[Stage], mesh: Mesh) -> GroupInfo:
    """Return the group of both pipeline ends; a V-shaped schedule has both on one rank."""
    both = any(stage.first for stage in stages) and any(stage.last for stage in stages)
    return SOLO if both else mesh.ends


def _sum_copies(copied: list[nn.Parameter], ends: GroupInfo) -> None:
    """Set the gradients of all copies of a weight, here and at the other end, to their sum."""
    first, *others = (local_gradient(parameter) for parameter in copied)
    for other in others:
        first.add_(other)
    _sum(copied[:1], ends)
    for other in others:
        other.copy_(first)


def _sum(parameters: list[nn.Parameter], axis: GroupInfo) -> None:
    """All-reduce the gradients, flattened into one tensor per dtype."""
    if axis.size == 1:
        return
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
    for parameter in parameters:
        gradient = local_gradient(parameter)
        by_dtype[gradient.dtype].append(gradient)
    for gradients in by_dtype.values():
        flat = torch.cat([g.reshape(-1) for g in gradients])
        dist.all_reduce(flat, group=axis.group)
        for gradient, summed in zip(gradients, flat.split_with_sizes([g.numel() for g in gradients]), strict=True):
            gradient.copy_(summed.view_as(gradient))


def local_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a gradient."""
    gradient = parameter.grad
    assert gradient is not None
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def copies(parameter: torch.Tensor, mesh: Mesh) -> int:
    """Return how many ranks of the stage hold the same shard of a parameter."""
    if not isinstance(parameter, DTensor):
        return mesh.stage.size
    shards = 1
    for i, placement in enumerate(parameter.placements):
        shards *= parameter.device_mesh.size(i) if placement.is_shard() or hasattr(placement, "split_factor") else 1
    return mesh.stage.size // shards


def norm(stages: list[Stage], mesh: Mesh) -> torch.Tensor:
    """Return the norm of all gradients of the model, each counted once in every layout."""
    squares = torch.zeros((), dtype=torch.float32, device=_device(stages))
    by_copies: dict[int, list[torch.Tensor]] = defaultdict(list)
    for parameter in _counted(stages):
        by_copies[copies(parameter, mesh)].append(local_gradient(parameter).contiguous())
    for number, gradients in by_copies.items():
        squares += sum_of_squares(gradients).to(squares.device) / number
    if mesh.world.size > 1:
        dist.all_reduce(squares)
    return squares.sqrt()


def _counted(stages: list[Stage]) -> Iterable[nn.Parameter]:
    """Yield every parameter with a gradient, without second copies on the last pipeline stage."""
    for stage in stages:
        second = {id(p) for p in _copied_at_ends(stage)} if stage.last else set()
        for parameter in stage.parameters():
            if parameter.grad is not None and id(parameter) not in second:
                yield parameter


def clip_factor(total: torch.Tensor, limit: float) -> torch.Tensor:
    """Return the factor that clips gradients of norm `total` to `limit`; 0 means no clipping."""
    return (limit / (total + 1e-6)).clamp(max=1.0) if limit else torch.ones_like(total)


def scale(stages: list[Stage], factor: torch.Tensor) -> None:
    """Multiply all gradients by a factor."""
    gradients = local_gradients(stages)
    if gradients:
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))


def local_gradients(stages: list[Stage]) -> list[torch.Tensor]:
    """Return this rank's shards of all gradients."""
    return [local_gradient(p) for stage in stages for p in stage.parameters() if p.grad is not None]


def _device(stages: list[Stage]) -> torch.device:
    return next(b.device for s in stages for b in (*s.buffers(), *s.parameters()))
