"""fp8 linear layers: all three GEMMs in fp8, operands scaled by the magnitudes of the current step.

tensor  one scale per operand; gradients in e5m2
row     one power-of-two scale per row of the left operand and per column of the right one; e4m3 throughout
mx      one scale per 32 values along the reduction dimension (kernels/mxfp8.py); e4m3 throughout
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
# With one scale, gradients span more magnitudes than e4m3 can represent.
GRADIENT: dict[Scaling, torch.dtype] = {"tensor": torch.float8_e5m2, "row": ACTIVATION, "mx": ACTIVATION}
MULTIPLE: dict[Scaling, int] = {"tensor": 16, "row": 16, "mx": mxfp8.BLOCK}  # required of every dimension
SMALLEST = 1e-12
EXPONENT = 0x7F800000  # exponent bits of fp32: masking with it rounds down to a power of two


class Operand(NamedTuple):
    """An fp8 matrix [outer, reduction] and its dequantization factors: one, or one per row or block."""

    codes: Tensor
    unit: Tensor


def scale_for(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the factor that maps the largest magnitude to the largest value of the dtype."""
    return torch.finfo(dtype).max / largest.float().clamp(min=SMALLEST)


def cast_scaled(tensor: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor times a scale in fp8, saturating."""
    largest = torch.finfo(dtype).max
    return (tensor.float() * scale).clamp(-largest, largest).to(dtype)


def to_fp8(tensor: Tensor, dtype: torch.dtype) -> Operand:
    """Return the tensor in fp8 with one fp32 dequantization factor."""
    # Rows first: the compiler then fuses each row's maximum into the kernel that computes the row.
    scale = scale_for(tensor.abs().amax(-1).amax(), dtype)
    return Operand(cast_scaled(tensor, scale, dtype), scale.reciprocal())


def to_fp8_rows(tensor: Tensor, dtype: torch.dtype = ACTIVATION) -> Operand:
    """Return a matrix in fp8 with a power-of-two factor per row, [rows, 1]: scaling by it is exact."""
    scale = scale_for(tensor.abs().amax(-1, keepdim=True), dtype)
    scale = (scale.view(torch.int32) & EXPONENT).view(torch.float32)
    return Operand(cast_scaled(tensor, scale, dtype), scale.reciprocal())


def fp8_linear(hidden: Tensor, weight: Tensor, exact_gradients: bool, scaling: Scaling = "tensor") -> Tensor:
    """Return hidden [tokens, inner] @ weight [outer, inner].T, in fp8 in both passes.

    The forward pass uses the tensor cores' fast accumulation; the backward pass accumulates in fp32 with
    `exact_gradients`. A frozen weight has no weight-gradient GEMM.
    """
    trained = weight.requires_grad
    out: Tensor = _Fp8Linear.apply(hidden, weight, exact_gradients, scaling, trained)  # type: ignore[no-untyped-call]
    return out


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(hidden: Tensor, weight: Tensor, exact_gradients: bool, scaling: Scaling, trained: bool) -> Tensor:
        return _matmul(_cast(hidden, scaling), _cast_weight(weight, scaling), hidden.dtype, scaling, False)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        hidden, weight, ctx.exact, ctx.scaling, ctx.trained = inputs
        ctx.save_for_backward(hidden, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        # Casts again in eager mode; the compiler recognizes the casts of the forward pass and saves the cheaper of the
        # fp8 copy and its source.
        hidden, weight = ctx.saved_tensors
        scaling: Scaling = ctx.scaling
        rows, columns = _cast_gradient(gradient, scaling)
        grad_hidden = _matmul(rows, _cast_weight(weight, scaling, True), gradient.dtype, scaling, ctx.exact)
        grad_weight = None
        if ctx.trained:
            grad_weight = _matmul(columns, _cast(hidden, scaling, True), gradient.dtype, scaling, ctx.exact)
        return grad_hidden, grad_weight, None, None, None


def _cast(tensor: Tensor, scaling: Scaling, transposed: bool = False) -> Operand:
    """Return a matrix, or its transpose, in fp8; tensor cores need the reduction dimension last and contiguous."""
    if scaling == "tensor":
        operand = to_fp8(tensor, ACTIVATION)
        return _transposed(operand) if transposed else operand
    matrix = tensor.t() if transposed else tensor
    codes, unit = to_fp8_rows(matrix) if scaling == "row" else mxfp8.to_blocks(matrix)
    return Operand(codes.contiguous(), unit)


def _cast_weight(weight: Tensor, scaling: Scaling, transposed: bool = False) -> Operand:
    if not isinstance(weight, Fp8Weight):
        return _cast(weight, scaling, transposed)
    gathered = Operand(weight.codes, weight.unit)  # FSDP gathered it in fp8
    return _transposed(gathered) if transposed else gathered


def _cast_gradient(gradient: Tensor, scaling: Scaling) -> tuple[Operand, Operand]:
    """Return the output gradient for the GEMM with the weight, and its transpose for the GEMM with the input."""
    if scaling == "tensor":
        operand = to_fp8(gradient, GRADIENT[scaling])
        return operand, _transposed(operand)
    return _cast(gradient, scaling), _cast(gradient, scaling, True)


def _transposed(operand: Operand) -> Operand:
    return Operand(operand.codes.t().contiguous(), operand.unit)


def _matmul(left: Operand, right: Operand, dtype: torch.dtype, scaling: Scaling, exact: bool) -> Tensor:
    """Return left @ right.T."""
    if scaling == "mx":
        return mxfp8.matmul(left.codes, left.unit, right.codes, right.unit, dtype)
    if scaling == "row" and not on_gpu(left.codes):  # not every torch version supports it on CPUs
        return mxfp8.cast_if_needed((left.codes.float() @ right.codes.float().t()) * left.unit * right.unit.t(), dtype)
    result = torch._scaled_mm(
        left.codes,
        right.codes.t(),
        scale_a=left.unit,
        scale_b=right.unit.t() if scaling == "row" else right.unit,
        out_dtype=torch.bfloat16 if scaling == "row" else dtype,  # row-wise scaling supports only this output dtype
        use_fast_accum=not exact,
    )
    return mxfp8.cast_if_needed(result, dtype)
