"""The grouped GEMM of experts in fp8, with a scale per token and per output column of each expert.

Forward pass and the gradient of the tokens are in fp8. The gradient of the weights sums over an expert's tokens; it
stays in bf16, because fp8 would need groups of multiples of 16 tokens and scales per group.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.engine.kernels.device_caps import on_gpu
from meshwright.engine.kernels.fp8 import MULTIPLE, Operand, to_fp8_rows

# 1: use it. On an H200 it had 0.6 to 1.1 times the speed of bf16 (benchmarks/results/fp8_experts_h200_2026-11-16.json):
# only experts as wide as Mixtral's gain, so that it is off.
SWITCH = "MESHWRIGHT_FP8_EXPERTS"


def is_enabled() -> bool:
    """Return whether experts of precision.matmul=fp8_row compute in fp8."""
    return os.environ.get(SWITCH, "") == "1"


def fits(columns: Tensor) -> bool:
    """Return whether the fp8 kernel supports matrices [experts, in, out] of this shape and dtype."""
    return columns.dtype == torch.bfloat16 and all(width % MULTIPLE["row"] == 0 for width in columns.shape[1:])


def fp8_grouped_mm(rows: Tensor, columns: Tensor, ends: Tensor) -> Tensor:
    """Multiply each expert's rows of [N, in] by its matrix of [E, in, out], in fp8."""
    out: Tensor = _Fp8Grouped.apply(rows, columns, ends, columns.requires_grad)  # type: ignore[no-untyped-call]
    return out


class _Fp8Grouped(torch.autograd.Function):
    @staticmethod
    def forward(rows: Tensor, columns: Tensor, ends: Tensor, trained: bool) -> Tensor:
        return _product(to_fp8_rows(rows), to_fp8_rows(columns.transpose(-2, -1)), ends)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        rows, columns, ends, ctx.trained = inputs
        ctx.save_for_backward(rows, columns, ends)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        rows, columns, ends = ctx.saved_tensors
        gradient = gradient.contiguous()
        grad_rows = _product(to_fp8_rows(gradient), to_fp8_rows(columns), ends)
        grad_columns = functional.grouped_mm(rows.t(), gradient, offs=ends) if ctx.trained else None
        return grad_rows, grad_columns, None, None


def _product(left: Operand, right: Operand, ends: Tensor) -> Tensor:
    """Return left [N, reduction] @ right [E, outer, reduction].T by expert, in bf16."""
    codes = right.codes.contiguous().transpose(-2, -1)  # the kernel wants the reduction dimension contiguous
    if on_gpu(left.codes):
        return torch._scaled_grouped_mm(
            left.codes.contiguous(),
            codes,
            left.unit.squeeze(-1),
            right.unit.squeeze(-1).contiguous(),
            offs=ends,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
    out = left.codes.new_empty((left.codes.shape[0], codes.shape[2]), dtype=torch.bfloat16)
    start = 0
    for number, end in enumerate(ends.tolist()):
        values = left.codes[start:end].float() @ codes[number].float()
        out[start:end] = values * left.unit[start:end] * right.unit[number].t()
        start = end
    return out
