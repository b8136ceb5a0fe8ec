"""Linear layers whose three products run in fp8, each operand scaled by its largest magnitude of this very step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ACTIVATION = torch.float8_e4m3fn
GRADIENT = torch.float8_e5m2  # gradients spread over more magnitudes than three mantissa bits' format holds
SMALLEST = 1e-12
MULTIPLE = 16  # what the products ask of every dimension


def to_fp8(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The tensor in fp8 and the fp32 number that each of its elements counts."""
    largest = torch.finfo(dtype).max
    # Rows first: the compiler then finds each row's maximum in the kernel that makes the row.
    scale = largest / tensor.abs().amax(-1).amax().float().clamp(min=SMALLEST)
    return (tensor.float() * scale).clamp(-largest, largest).to(dtype), scale.reciprocal()


def fp8_linear(hidden: Tensor, weight: Tensor, exact_gradients: bool) -> Tensor:
    """The product of hidden states [tokens, inner] and a weight [outer, inner], in fp8 both ways.

    Sums of the forward pass are kept in the tensor cores' own short format; those of the backward pass in fp32 with
    `exact_gradients`.
    """
    out: Tensor = _Fp8Linear.apply(hidden, weight, exact_gradients)  # type: ignore[no-untyped-call]  # torch's
    return out


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(hidden: Tensor, weight: Tensor, exact_gradients: bool) -> Tensor:
        narrow, unit = to_fp8(hidden, ACTIVATION)
        narrow_weight, weight_unit = to_fp8(weight, ACTIVATION)
        return _product(narrow, narrow_weight, unit, weight_unit, hidden.dtype, False)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        hidden, weight, ctx.exact = inputs
        ctx.save_for_backward(hidden, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        # Written as if cast again; the compiler sees that the casts are those of the forward pass and keeps the
        # cheaper of the two, the fp8 copy or its source.
        hidden, weight = ctx.saved_tensors
        narrow, unit = to_fp8(hidden, ACTIVATION)
        narrow_weight, weight_unit = to_fp8(weight, ACTIVATION)
        narrow_gradient, gradient_unit = to_fp8(gradient, GRADIENT)
        by_hidden = _product(
            narrow_gradient, narrow_weight.t().contiguous(), gradient_unit, weight_unit, gradient.dtype, ctx.exact
        )
        by_weight = _product(
            narrow_gradient.t().contiguous(), narrow.t().contiguous(), gradient_unit, unit, gradient.dtype, ctx.exact
        )
        return by_hidden, by_weight, None


def _product(
    left: Tensor, right: Tensor, left_unit: Tensor, right_unit: Tensor, dtype: torch.dtype, exact: bool
) -> Tensor:
    """left @ right.T; the tensor cores read fp8 along the summed dimension alone, so both come with it last."""
    return torch._scaled_mm(
        left, right.t(), scale_a=left_unit, scale_b=right_unit, out_dtype=dtype, use_fast_accum=not exact
    )
