"""The collectives of the cp axis with their gradients: heads against sequence, and the gathering of keys and values."""

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
    """Row i goes to rank i of the group; the gradient takes the same way back."""

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
    """Everybody's tensor, stacked by rank; the gradient is summed over the ranks, in fp32."""

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
    """From all heads of a piece of the sequence to a share of the heads of all the group's sequence.

    Each tensor is [batch, heads, tokens, width]; its tokens are `parts` runs, and every run comes out whole.
    """
    size = dist.get_world_size(group)
    by_rank = [torch.unflatten(x, 1, (size, -1)).transpose(0, 1) for x in tensors]
    return [_by_runs(x, parts) for x in _swap(by_rank, group)]


def sequence_to_heads(x: Tensor, group: dist.ProcessGroup, parts: int) -> Tensor:
    """The way back of `heads_to_sequence`."""
    size = dist.get_world_size(group)
    runs = torch.unflatten(x, 2, (parts, size, -1)).movedim(3, 0).flatten(3, 4)
    (mine,) = _swap([runs], group)
    return mine.transpose(0, 1).flatten(1, 2)


def repeat_kv_heads(kv: Tensor, q: Tensor, size: int) -> Tensor:
    """Key or value heads repeated as little as lets every rank of an all-to-all take an equal share.

    Query heads are dealt out in order, so a repeated head stands beside its original and serves a part of its group.
    """
    if q.shape[1] % size:
        divisors = [n for n in range(1, q.shape[1] + 1) if q.shape[1] % n == 0]
        raise InputError(
            f"an all-to-all over {size} ranks deals out query heads equally, and there are {q.shape[1]} on a tp rank",
            field="cp_comm",
            value="a2a",
            fix=("cp_comm=ring", f"an all-to-all over one of {divisors} ranks"),
        )
    copies = math.lcm(kv.shape[1], size) // kv.shape[1]
    return kv if copies == 1 else kv.repeat_interleave(copies, 1)


def gather_keys_values(k: Tensor, v: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Keys and values of the whole sequence in its natural order, from early and late chunks by rank."""
    joined: Tensor = _AllGather.apply(torch.cat([k, v], -1), group)  # type: ignore[no-untyped-call]  # torch: untyped
    whole = _in_order(joined, 3)
    return whole[..., : k.shape[-1]], whole[..., k.shape[-1] :]


def gather_documents(documents: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Document ids of the whole sequence in its natural order, from early and late chunks by rank."""
    return _in_order(_gathered(documents, group), 2)


def join_documents(documents: Tensor, group: dist.ProcessGroup, parts: int) -> Tensor:
    """Document ids of all the group's sequence, run by run, as `heads_to_sequence` orders tokens."""
    return _by_runs(_gathered(documents, group)[:, :, None, :, None], parts)[:, 0, :, 0]


def _swap(by_rank: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """One all-to-all for several tensors whose first dimension is the rank."""
    shapes = [x.shape for x in by_rank]
    rows = torch.cat([x.flatten(1) for x in by_rank], 1)
    swapped: Tensor = _AllToAll.apply(rows, group)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    pieces = swapped.split_with_sizes([shape[1:].numel() for shape in shapes], 1)
    return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _by_runs(x: Tensor, parts: int) -> Tensor:
    """[rank, batch, heads, tokens, width] to [batch, heads, tokens of all ranks, width], each run kept together."""
    return torch.unflatten(x, 3, (parts, -1)).movedim(0, 3).flatten(2, 4)


def _in_order(by_rank: Tensor, dim: int) -> Tensor:
    """Early chunks in the order of the ranks, then late chunks in the reverse order."""
    early, late = by_rank.chunk(2, dim)
    chunks = torch.cat([early, late.flip(0)])
    return chunks.movedim(0, dim - 1).flatten(dim - 1, dim)


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    size = dist.get_world_size(group)
    out = x.new_empty(size * x.shape[0], *x.shape[1:])
    all_gather(out, x.contiguous(), group=group)
    return out.view(size, *x.shape)
