"""The product of a frozen linear layer with its adapter: one pass over inputs and outputs less than written out.

y = x·Wᵀ + s·(x·Aᵀ)·Bᵀ. The low-rank part is made first and handed to the large product, which adds it before it rounds;
the backward pass does the same with dx = dy·W + s·(dy·B)·A. W has no gradient. Kept are x, W, A, B and s·x·Aᵀ; of a
weight in four bits only its codes and scales, and each pass unpacks it for itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.engine.kernels.matmul import product_add
from meshwright.engine.kernels.nf4 import unpack

Gradients = tuple[Tensor | None, ...]


def adapted_linear(
    x: Tensor,
    matrix: Tensor,
    scales: Tensor | None,
    a: Tensor,
    b: Tensor,
    scale: float,
    inputs_first: bool = False,
    tuned: bool = False,
) -> Tensor:
    """What a frozen weight and its adapter A [rank, in], B [out, rank] make of x [..., in].

    The weight is a matrix [out, in], or [in, out] where inputs come first; with `scales` it is the codes of one.
    `tuned` sends the large products through the kernels that hold their speed on Hopper GPUs.
    """
    rows = x.flatten(0, -2)
    out, _ = _Adapted.apply(rows, matrix, scales, a, b, scale, inputs_first, tuned)  # type: ignore[no-untyped-call]  # torch's
    made: Tensor = out.view(*x.shape[:-1], b.shape[0])
    return made


def packed_linear(x: Tensor, codes: Tensor, scales: Tensor, inputs_first: bool = False) -> Tensor:
    """What a frozen weight in four bits makes of x [..., in]."""
    out: Tensor = _Packed.apply(x.flatten(0, -2), codes, scales, inputs_first)  # type: ignore[no-untyped-call]  # torch's
    return out.view(*x.shape[:-1], out.shape[-1])


class _Adapted(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Tensor,
        matrix: Tensor,
        scales: Tensor | None,
        a: Tensor,
        b: Tensor,
        scale: float,
        inputs_first: bool,
        tuned: bool,
    ) -> tuple[Tensor, Tensor]:
        weight = _numbers(matrix, scales, again=False)
        low = (x @ a.t()) * scale
        return _plus(low @ b.t(), x, weight, not inputs_first, tuned), low

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, matrix, scales, a, b, ctx.scale, ctx.inputs_first, ctx.tuned = inputs
        ctx.save_for_backward(x, matrix, scales, a, b, output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Gradients:
        x, matrix, scales, a, b, low = ctx.saved_tensors
        weight = _numbers(matrix, scales, again=True)
        gradient = gradient.contiguous()
        by_low = (gradient @ b) * ctx.scale
        by_x = _plus(by_low @ a, gradient, weight, ctx.inputs_first, ctx.tuned)
        return by_x, None, None, by_low.t() @ x, gradient.t() @ low, None, None, None


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, codes: Tensor, scales: Tensor, inputs_first: bool) -> Tensor:
        weight = _numbers(codes, scales, again=False)
        return x @ (weight if inputs_first else weight.t())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, codes, scales, ctx.inputs_first = inputs
        ctx.save_for_backward(codes, scales)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Gradients:
        codes, scales = ctx.saved_tensors
        weight = _numbers(codes, scales, again=True)
        return gradient @ (weight.t() if ctx.inputs_first else weight), None, None, None


def _numbers(matrix: Tensor, scales: Tensor | None, again: bool) -> Tensor:
    """The weight, unpacked where it is codes; `again` in the backward pass."""
    if scales is None:
        return matrix
    out: Tensor = unpack(matrix, scales, again)
    return out


def _plus(add: Tensor, left: Tensor, right: Tensor, transposed: bool, tuned: bool) -> Tensor:
    """left @ right (or its transpose) + add."""
    if tuned:
        out: Tensor = product_add(add, left, right, transposed)
        return out
    return torch.addmm(add, left, right.t() if transposed else right)
