"""Context-parallel collectives with gradients: the all-to-all of heads and sequence, and the all-gather of keys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.engine.collectives import all_gather, reduce_scatter
from meshwright.errors import InputError


class _AllToAll(torch.autograd.Function):
    """Send row i to rank i of the group; the backward pass is another all-to-all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        out = torch.empty_like(grad, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, grad.contiguous(), group=ctx.group)
        return out, None


class _AllGather(torch.autograd.Function):
    """Stack the tensors of all ranks; the backward pass is a reduce-scatter in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        own = torch.empty(grad.shape[1:], dtype=torch.float32, device=grad.device)
        reduce_scatter(own, grad.float().flatten(0, 1).contiguous(), group=ctx.group)
        return own.to(grad.dtype), None


def heads_to_sequence(tensors: Sequence[Tensor], group: dist.ProcessGroup, parts: int) -> list[Tensor]:
    """Exchange all heads of a sequence shard for a shard of the heads over the group's full sequence.

    Each tensor is [batch, heads, tokens, width]; its tokens are `parts` runs, and each run is contiguous in the result.
    """
    size = dist.get_world_size(group)
    by_rank = [torch.unflatten(x, 1, (size, -1)).transpose(0, 1) for x in tensors]
    return [_by_runs(x, parts) for x in _all_to_all(by_rank, group)]


def sequence_to_heads(x: Tensor, group: dist.ProcessGroup, parts: int) -> Tensor:
    """Undo `heads_to_sequence`."""
    size = dist.get_world_size(group)
    runs = torch.unflatten(x, 2, (parts, size, -1)).movedim(3, 0).flatten(3, 4)
    (local,) = _all_to_all([runs], group)
    return local.transpose(0, 1).flatten(1, 2)


def repeat_kv_heads(kv: Tensor, q: Tensor, size: int) -> Tensor:
    """Repeat key or value heads as little as possible so that the ranks of an all-to-all divide them.

    Query heads are split in order, so a repeated head is next to its original and serves a part of its query group.
    """
    if q.shape[1] % size:
        divisors = [n for n in range(1, q.shape[1] + 1) if q.shape[1] % n == 0]
        raise InputError(
            f"an all-to-all over {size} ranks needs a multiple of {size} query heads; a tp rank has {q.shape[1]}",
            field="cp_comm",
            value="a2a",
            fix=("cp_comm=ring", f"an all-to-all over one of {divisors} ranks"),
        )
    copies = math.lcm(kv.shape[1], size) // kv.shape[1]
    return kv if copies == 1 else kv.repeat_interleave(copies, 1)


def gather_keys_values(k: Tensor, v: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Gather keys and values of the full sequence and put the ranks' early and late chunks in sequence order."""
    joined: Tensor = _AllGather.apply(torch.cat([k, v], -1), group)  # type: ignore[no-untyped-call]  # torch: untyped
    ordered = _in_order(joined, 3)
    return ordered[..., : k.shape[-1]], ordered[..., k.shape[-1] :]


def gather_documents(documents: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather document ids of the full sequence in sequence order."""
    return _in_order(_gathered(documents, group), 2)


def join_documents(documents: Tensor, group: dist.ProcessGroup, parts: int) -> Tensor:
    """Gather document ids over the group in the token order of `heads_to_sequence`."""
    return _by_runs(_gathered(documents, group)[:, :, None, :, None], parts)[:, 0, :, 0]


def _all_to_all(by_rank: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Exchange several tensors whose first dimension is the rank in one all-to-all."""
    shapes = [x.shape for x in by_rank]
    rows = torch.cat([x.flatten(1) for x in by_rank], 1)
    exchanged: Tensor = _AllToAll.apply(rows, group)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    tensors = exchanged.split_with_sizes([shape[1:].numel() for shape in shapes], 1)
    return [tensor.reshape(shape) for tensor, shape in zip(tensors, shapes, strict=True)]


def _by_runs(x: Tensor, parts: int) -> Tensor:
    """Reshape [rank, batch, heads, tokens, width] to [batch, heads, tokens of all ranks, width], run by run."""
    return torch.unflatten(x, 3, (parts, -1)).movedim(0, 3).flatten(2, 4)


def _in_order(by_rank: Tensor, dim: int) -> Tensor:
    """Concatenate the early chunks in rank order and the late chunks in reverse rank order (see cp_layout.py)."""
    early, late = by_rank.chunk(2, dim)
    chunks = torch.cat([early, late.flip(0)])
    return chunks.movedim(0, dim - 1).flatten(dim - 1, dim)


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    size = dist.get_world_size(group)
    out = x.new_empty(size * x.shape[0], *x.shape[1:])
    all_gather(out, x.contiguous(), group=group)
    return out.view(size, *x.shape)
