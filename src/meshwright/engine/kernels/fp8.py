"""Linear layers whose three products run in 8 bits, every operand scaled by magnitudes of this very step.

tensor  one scale for a whole operand; gradients in e5m2
row     one scale for every row of the left operand and every column of the right one, powers of two; e4m3 throughout
mx      one scale for every 32 numbers along the summed dimension (kernels/mxfp8.py); e4m3 throughout
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from meshwright.engine.kernels import mxfp8
from meshwright.engine.kernels.device_caps import on_gpu
from meshwright.engine.kernels.fp8_weight import Fp8Weight

Scaling = Literal["tensor", "row", "mx"]

ACTIVATION = torch.float8_e4m3fn
# Under one scale, gradients spread over more magnitudes than the format with three bits of mantissa holds.
GRADIENT: dict[Scaling, torch.dtype] = {"tensor": torch.float8_e5m2, "row": ACTIVATION, "mx": ACTIVATION}
MULTIPLE: dict[Scaling, int] = {"tensor": 16, "row": 16, "mx": mxfp8.BLOCK}  # what products ask of every dimension
SMALLEST = 1e-12
EXPONENT = 0x7F800000  # the bits of an fp32 number without its sign and mantissa: the power of two below it


class Operand(NamedTuple):
    """A matrix [free, summed] in 8 bits, and the numbers that its elements count: one, or one for each row or block."""

    codes: Tensor
    unit: Tensor


def scale_for(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """What numbers are multiplied by so that the largest magnitude becomes the largest of the format."""
    return torch.finfo(dtype).max / largest.float().clamp(min=SMALLEST)


def scaled(tensor: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor times a scale, in fp8; what would overflow becomes the largest number."""
    largest = torch.finfo(dtype).max
    return (tensor.float() * scale).clamp(-largest, largest).to(dtype)


def to_fp8(tensor: Tensor, dtype: torch.dtype) -> Operand:
    """The tensor in fp8 and the fp32 number that each of its elements counts."""
    # Rows first: the compiler then finds each row's maximum in the kernel that makes the row.
    scale = scale_for(tensor.abs().amax(-1).amax(), dtype)
    return Operand(scaled(tensor, scale, dtype), scale.reciprocal())


def to_fp8_rows(tensor: Tensor, dtype: torch.dtype = ACTIVATION) -> Operand:
    """A matrix in fp8 with a power of two for every row, [rows, 1]: scaling by it rounds nothing."""
    scale = scale_for(tensor.abs().amax(-1, keepdim=True), dtype)
    scale = (scale.view(torch.int32) & EXPONENT).view(torch.float32)
    return Operand(scaled(tensor, scale, dtype), scale.reciprocal())


def fp8_linear(hidden: Tensor, weight: Tensor, exact_gradients: bool, scaling: Scaling = "tensor") -> Tensor:
    """The product of hidden states [tokens, inner] and a weight [outer, inner], in 8 bits both ways.

    Sums of the forward pass are kept in the tensor cores' own short format; those of the backward pass in fp32 with
    `exact_gradients`. A weight without gradients costs no third product.
    """
    trained = weight.requires_grad
    out: Tensor = _Fp8Linear.apply(hidden, weight, exact_gradients, scaling, trained)  # type: ignore[no-untyped-call]
    return out


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(hidden: Tensor, weight: Tensor, exact_gradients: bool, scaling: Scaling, trained: bool) -> Tensor:
        return _product(_cast(hidden, scaling), _cast_weight(weight, scaling), hidden.dtype, scaling, False)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        hidden, weight, ctx.exact, ctx.scaling, ctx.trained = inputs
        ctx.save_for_backward(hidden, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        # Written as if cast again; the compiler sees that the casts are those of the forward pass and keeps the
        # cheaper of the two, the fp8 copy or its source.
        hidden, weight = ctx.saved_tensors
        scaling: Scaling = ctx.scaling
        by_rows, by_columns = _cast_gradient(gradient, scaling)
        by_hidden = _product(by_rows, _cast_weight(weight, scaling, True), gradient.dtype, scaling, ctx.exact)
        by_weight = None
        if ctx.trained:
            by_weight = _product(by_columns, _cast(hidden, scaling, True), gradient.dtype, scaling, ctx.exact)
        return by_hidden, by_weight, None, None, None


def _cast(tensor: Tensor, scaling: Scaling, transposed: bool = False) -> Operand:
    """A matrix, or its transpose, in 8 bits; the tensor cores read it along the summed dimension, which comes last."""
    if scaling == "tensor":
        whole = to_fp8(tensor, ACTIVATION)
        return _turned(whole) if transposed else whole
    matrix = tensor.t() if transposed else tensor
    codes, unit = to_fp8_rows(matrix) if scaling == "row" else mxfp8.to_blocks(matrix)
    return Operand(codes.contiguous(), unit)


def _cast_weight(weight: Tensor, scaling: Scaling, transposed: bool = False) -> Operand:
    if not isinstance(weight, Fp8Weight):
        return _cast(weight, scaling, transposed)
    came = Operand(weight.codes, weight.unit)  # it was gathered in fp8
    return _turned(came) if transposed else came


def _cast_gradient(gradient: Tensor, scaling: Scaling) -> tuple[Operand, Operand]:
    """The gradient of the output for the product with the weight, and its transpose for that with the input."""
    if scaling == "tensor":
        whole = to_fp8(gradient, GRADIENT[scaling])
        return whole, _turned(whole)
    return _cast(gradient, scaling), _cast(gradient, scaling, True)


def _turned(operand: Operand) -> Operand:
    return Operand(operand.codes.t().contiguous(), operand.unit)


def _product(left: Operand, right: Operand, dtype: torch.dtype, scaling: Scaling, exact: bool) -> Tensor:
    """left @ right.T."""
    if scaling == "mx":
        return mxfp8.product(left.codes, left.unit, right.codes, right.unit, dtype)
    if scaling == "row" and not on_gpu(left.codes):  # not every torch has it for CPUs
        return mxfp8.in_format((left.codes.float() @ right.codes.float().t()) * left.unit * right.unit.t(), dtype)
    made = torch._scaled_mm(
        left.codes,
        right.codes.t(),
        scale_a=left.unit,
        scale_b=right.unit.t() if scaling == "row" else right.unit,
        out_dtype=torch.bfloat16 if scaling == "row" else dtype,  # the only one that products by rows come in
        use_fast_accum=not exact,
    )
    return mxfp8.in_format(made, dtype)
