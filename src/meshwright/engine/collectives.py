"""Differentiable collectives on plain tensors: the four conjugate pairs of tensor parallelism.

Gradients are summed over ranks, never averaged: the loss is already divided by the global normalizer.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from meshwright.engine.mesh import GroupInfo

# torch 2.13 renamed these two; 2.11 has only the old names.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def copy_in(x: torch.Tensor, axis: GroupInfo) -> torch.Tensor:
    """Identity in the forward pass; all-reduce of the gradient in the backward pass."""
    return _applied(_CopyIn, x, axis)


def sum_out(x: torch.Tensor, axis: GroupInfo) -> torch.Tensor:
    """All-reduce in the forward pass; identity in the backward pass."""
    return _applied(_SumOut, x, axis)


def gather(x: torch.Tensor, axis: GroupInfo, dim: int) -> torch.Tensor:
    """All-gather along a dimension in the forward pass; reduce-scatter in the backward pass."""
    return _applied(_Gather, x, axis, dim)


def sum_scatter(x: torch.Tensor, axis: GroupInfo, dim: int) -> torch.Tensor:
    """Reduce-scatter along a dimension in the forward pass; all-gather in the backward pass."""
    return _applied(_SumScatter, x, axis, dim)


def _applied(function: Any, x: torch.Tensor, axis: GroupInfo, *dim: int) -> torch.Tensor:
    if axis.size == 1:
        return x
    apply = partial(_outside_graphs, function) if axis.through_host else function.apply
    out: torch.Tensor = apply(x, axis, *dim)
    return out


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch leaves it untyped
def _outside_graphs(function: Any, *args: Any) -> torch.Tensor:
    # Inside a compiled block gloo would read CUDA tensors whose memory the block has given back.
    out: torch.Tensor = function.apply(*args)
    return out


def total(x: torch.Tensor, *axes: GroupInfo) -> torch.Tensor:
    """Return the sum of a value over the ranks of some axes, without a gradient."""
    x = x.detach().clone()
    for axis in axes:
        if axis.size > 1:
            dist.all_reduce(x, group=axis.group)
    return x


def _all_gather(x: torch.Tensor, axis: GroupInfo, dim: int) -> torch.Tensor:
    parts = x.movedim(dim, 0).contiguous()
    full = parts.new_empty((axis.size * parts.shape[0], *parts.shape[1:]))
    all_gather(full, parts, group=axis.group)
    return full.movedim(0, dim).contiguous()


def _reduce_scatter(x: torch.Tensor, axis: GroupInfo, dim: int) -> torch.Tensor:
    full = x.movedim(dim, 0).contiguous()
    part = full.new_empty((full.shape[0] // axis.size, *full.shape[1:]))
    reduce_scatter(part, full, group=axis.group)
    return part.movedim(0, dim).contiguous()


def _all_reduce(x: torch.Tensor, axis: GroupInfo) -> torch.Tensor:
    x = x.contiguous().clone()
    dist.all_reduce(x, group=axis.group)
    return x


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: GroupInfo) -> torch.Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _all_reduce(grads[0], ctx.axis), None


class _SumOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: GroupInfo) -> torch.Tensor:
        return _all_reduce(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: GroupInfo, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _all_gather(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _reduce_scatter(grads[0], ctx.axis, ctx.dim), None, None


class _SumScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: GroupInfo, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _reduce_scatter(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _all_gather(grads[0], ctx.axis, ctx.dim), None, None
