"""The product of a frozen linear layer with its adapter: one pass over inputs and outputs less than written out.

y = x·Wᵀ + s·(x·Aᵀ)·Bᵀ. The low-rank part is made first and handed to the large product, which adds it before it rounds;
the backward pass does the same with dx = dy·W + s·(dy·B)·A. W has no gradient. Kept are x, W, A, B and s·x·Aᵀ.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshwright.engine.kernels.matmul import product_add

Gradients = tuple[Tensor | None, None, Tensor | None, Tensor | None, None, None]


def adapted_linear(x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float, tuned: bool = False) -> Tensor:
    """What a frozen weight [out, in] and its adapter A [rank, in], B [out, rank] make of x [..., in].

    `tuned` sends the large products through the kernels that hold their speed on Hopper GPUs.
    """
    rows = x.flatten(0, -2)
    out, _ = _Adapted.apply(rows, weight, a, b, scale, tuned)  # type: ignore[no-untyped-call]  # torch's
    made: Tensor = out.view(*x.shape[:-1], weight.shape[0])
    return made


class _Adapted(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float, tuned: bool) -> tuple[Tensor, Tensor]:
        low = (x @ a.t()) * scale
        return _plus(low @ b.t(), x, weight, True, tuned), low

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, weight, a, b, ctx.scale, ctx.tuned = inputs
        ctx.save_for_backward(x, weight, a, b, output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Gradients:
        x, weight, a, b, low = ctx.saved_tensors
        gradient = gradient.contiguous()
        by_low = (gradient @ b) * ctx.scale
        by_x = _plus(by_low @ a, gradient, weight, False, ctx.tuned)
        return by_x, None, by_low.t() @ x, gradient.t() @ low, None, None


def _plus(add: Tensor, left: Tensor, right: Tensor, transposed: bool, tuned: bool) -> Tensor:
    """left @ right (or its transpose) + add."""
    if tuned:
        out: Tensor = product_add(add, left, right, transposed)
        return out
    return torch.addmm(add, left, right.t() if transposed else right)
