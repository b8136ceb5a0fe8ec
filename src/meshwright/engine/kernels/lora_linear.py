"""A frozen linear layer with its LoRA adapter: one pass over inputs and outputs less than separate operations.

y = x·Wᵀ + s·(x·Aᵀ)·Bᵀ. The low-rank part is computed first and added inside the large GEMM, before it rounds; the
backward pass does the same with dx = dy·W + s·(dy·B)·A. W has no gradient. Saved are x, W, A, B and s·x·Aᵀ; of a
four-bit weight only its codes and scales, which each pass unpacks.

These are custom ops rather than autograd functions: inside a compiled layer that is recomputed, the compiler would save
the outputs of an autograd function.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from meshwright.engine.kernels.device_caps import DECOMPOSITIONS
from meshwright.engine.kernels.matmul import added_product
from meshwright.engine.kernels.nf4 import unpack

Gradients = tuple[Tensor | None, ...]
WEIGHT = "Tensor matrix, Tensor? scales, Tensor a, Tensor b, float scale, bool inputs_first, bool tuned"


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
    """Apply a frozen weight and its adapter A [rank, in], B [out, rank] to x [..., in].

    The weight is [out, in], or [in, out] with `inputs_first`; with `scales` it is four-bit codes. `tuned` uses the GEMM
    kernels that keep their speed at a Hopper GPU's power limit.
    """
    out, _ = _adapted(x.flatten(0, -2), matrix, scales, a, b, scale, inputs_first, tuned)
    result: Tensor = out.view(*x.shape[:-1], b.shape[0])
    return result


def packed_linear(x: Tensor, codes: Tensor, scales: Tensor, inputs_first: bool = False) -> Tensor:
    """Apply a frozen four-bit weight to x [..., in]."""
    out: Tensor = _packed(x.flatten(0, -2), codes, scales, inputs_first)
    return out.view(*x.shape[:-1], out.shape[-1])


def _adapted_forward(
    x: Tensor,
    matrix: Tensor,
    scales: Tensor | None,
    a: Tensor,
    b: Tensor,
    scale: float,
    inputs_first: bool,
    tuned: bool,
) -> tuple[Tensor, Tensor]:
    low = (x @ a.t()).mul_(scale)
    return _addmm(low @ b.t(), x, _unpacked(matrix, scales), not inputs_first, tuned), low


_adapted = torch.library.custom_op(
    "meshwright::adapted", _adapted_forward, mutates_args=(), schema=f"(Tensor x, {WEIGHT}) -> (Tensor, Tensor)"
)


@_adapted.register_fake
def _(x: Tensor, matrix: Tensor, scales: Tensor | None, a: Tensor, b: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], b.shape[0]), x.new_empty(x.shape[0], a.shape[0])


def _adapted_backward_impl(
    gradient: Tensor,
    low: Tensor,
    x: Tensor,
    matrix: Tensor,
    scales: Tensor | None,
    a: Tensor,
    b: Tensor,
    scale: float,
    inputs_first: bool,
    tuned: bool,
    needs_x: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x (empty unless `needs_x`), A and B."""
    gradient = gradient.contiguous()
    grad_low = (gradient @ b).mul_(scale)
    grad_a, grad_b = grad_low.t() @ x, gradient.t() @ low
    if not needs_x:
        return x.new_empty(0), grad_a, grad_b
    return _addmm(grad_low @ a, gradient, _unpacked(matrix, scales), inputs_first, tuned), grad_a, grad_b


_adapted_backward = torch.library.custom_op(
    "meshwright::adapted_backward",
    _adapted_backward_impl,
    mutates_args=(),
    schema=f"(Tensor gradient, Tensor low, Tensor x, {WEIGHT}, bool needs_x) -> (Tensor, Tensor, Tensor)",
)


@_adapted_backward.register_fake
def _(
    gradient: Tensor,
    low: Tensor,
    x: Tensor,
    matrix: Tensor,
    scales: Tensor | None,
    a: Tensor,
    b: Tensor,
    scale: float,
    inputs_first: bool,
    tuned: bool,
    needs_x: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape if needs_x else (0,)), torch.empty_like(a), torch.empty_like(b)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, matrix, scales, a, b, *ctx.settings = inputs
    ctx.save_for_backward(output[1], x, matrix, scales, a, b)


def _gradients(ctx: Any, gradient: Tensor, _: Tensor) -> Gradients:
    needs_x = ctx.needs_input_grad[0]
    grad_x, grad_a, grad_b = _adapted_backward(gradient, *ctx.saved_tensors, *ctx.settings, needs_x)
    return grad_x if needs_x else None, None, None, grad_a, grad_b, None, None, None


_adapted.register_autograd(_gradients, setup_context=_save_inputs)


def _packed_forward(x: Tensor, codes: Tensor, scales: Tensor, inputs_first: bool) -> Tensor:
    weight = _unpacked(codes, scales)
    return x @ (weight if inputs_first else weight.t())


_packed = torch.library.custom_op("meshwright::packed", _packed_forward, mutates_args=())


@_packed.register_fake
def _(x: Tensor, codes: Tensor, scales: Tensor, inputs_first: bool) -> Tensor:
    return x.new_empty(x.shape[0], 2 * codes.shape[1] if inputs_first else codes.shape[0])


def _save_packed_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, codes, scales, ctx.inputs_first = inputs
    ctx.save_for_backward(codes, scales)


def _packed_gradients(ctx: Any, gradient: Tensor) -> Gradients:
    return _packed(gradient, *ctx.saved_tensors, not ctx.inputs_first), None, None, None


_packed.register_autograd(_packed_gradients, setup_context=_save_packed_inputs)


# A dry run runs these decompositions to see the memory of intermediate tensors.
DECOMPOSITIONS[torch.ops.meshwright.adapted.default] = _adapted_forward
DECOMPOSITIONS[torch.ops.meshwright.adapted_backward.default] = _adapted_backward_impl
DECOMPOSITIONS[torch.ops.meshwright.packed.default] = _packed_forward


def _unpacked(matrix: Tensor, scales: Tensor | None) -> Tensor:
    return matrix if scales is None else unpack(matrix, scales)


def _addmm(add: Tensor, left: Tensor, right: Tensor, transposed: bool, tuned: bool) -> Tensor:
    """Return left @ right (or its transpose) + add."""
    if tuned:
        return added_product(add, left, right, transposed)
    return torch.addmm(add, left, right.t() if transposed else right)


@register_flop_formula(torch.ops.meshwright.adapted)
def _adapted_flop(x: Any, matrix: Any, scales: Any, a: Any, b: Any, *_: Any, **__: Any) -> int:
    flop: int = 2 * x[0] * (x[1] * b[0] + a[0] * (x[1] + b[0]))
    return flop


@register_flop_formula(torch.ops.meshwright.adapted_backward)
def _adapted_backward_flop(
    gradient: Any, low: Any, x: Any, matrix: Any, scales: Any, a: Any, b: Any, *_: Any, **__: Any
) -> int:
    flop: int = 2 * x[0] * (x[1] * b[0] + 2 * a[0] * (x[1] + b[0]))
    return flop


@register_flop_formula(torch.ops.meshwright.packed)
def _packed_flop(x: Any, codes: Any, *_: Any, **__: Any) -> int:
    flop: int = 4 * x[0] * codes[0] * codes[1]
    return flop
