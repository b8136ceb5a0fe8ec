"""The product of a frozen linear layer with its adapter: one pass over inputs and outputs less than written out.

y = x·Wᵀ + s·(x·Aᵀ)·Bᵀ. The low-rank part is made first and handed to the large product, which adds it before it rounds;
the backward pass does the same with dx = dy·W + s·(dy·B)·A. W has no gradient. Kept are x, W, A, B and s·x·Aᵀ; of a
weight in four bits only its codes and scales, and each pass unpacks it for itself.

These are operations of their own rather than autograd functions: inside a compiled layer that is to be recomputed, the
compiler would keep what an autograd function gives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from meshwright.engine.kernels.device_caps import STEPS
from meshwright.engine.kernels.matmul import product_add
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
    """What a frozen weight and its adapter A [rank, in], B [out, rank] make of x [..., in].

    The weight is a matrix [out, in], or [in, out] where inputs come first; with `scales` it is the codes of one.
    `tuned` sends the large products through the kernels that hold their speed on Hopper GPUs.
    """
    out, _ = _adapted(x.flatten(0, -2), matrix, scales, a, b, scale, inputs_first, tuned)
    made: Tensor = out.view(*x.shape[:-1], b.shape[0])
    return made


def packed_linear(x: Tensor, codes: Tensor, scales: Tensor, inputs_first: bool = False) -> Tensor:
    """What a frozen weight in four bits makes of x [..., in]."""
    out: Tensor = _packed(x.flatten(0, -2), codes, scales, inputs_first)
    return out.view(*x.shape[:-1], out.shape[-1])


def _adapted_steps(
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
    return _plus(low @ b.t(), x, _numbers(matrix, scales), not inputs_first, tuned), low


_adapted = torch.library.custom_op(
    "meshwright::adapted", _adapted_steps, mutates_args=(), schema=f"(Tensor x, {WEIGHT}) -> (Tensor, Tensor)"
)


@_adapted.register_fake
def _(x: Tensor, matrix: Tensor, scales: Tensor | None, a: Tensor, b: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], b.shape[0]), x.new_empty(x.shape[0], a.shape[0])


def _adapted_backward_steps(
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
    wanted: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x (nothing where nobody wants it), A and B."""
    gradient = gradient.contiguous()
    by_low = (gradient @ b).mul_(scale)
    by_a, by_b = by_low.t() @ x, gradient.t() @ low
    if not wanted:
        return x.new_empty(0), by_a, by_b
    return _plus(by_low @ a, gradient, _numbers(matrix, scales), inputs_first, tuned), by_a, by_b


_adapted_backward = torch.library.custom_op(
    "meshwright::adapted_backward",
    _adapted_backward_steps,
    mutates_args=(),
    schema=f"(Tensor gradient, Tensor low, Tensor x, {WEIGHT}, bool wanted) -> (Tensor, Tensor, Tensor)",
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
    wanted: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape if wanted else (0,)), torch.empty_like(a), torch.empty_like(b)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, matrix, scales, a, b, *ctx.settings = inputs
    ctx.save_for_backward(output[1], x, matrix, scales, a, b)


def _gradients(ctx: Any, gradient: Tensor, _: Tensor) -> Gradients:
    wanted = ctx.needs_input_grad[0]
    by_x, by_a, by_b = _adapted_backward(gradient, *ctx.saved_tensors, *ctx.settings, wanted)
    return by_x if wanted else None, None, None, by_a, by_b, None, None, None


_adapted.register_autograd(_gradients, setup_context=_remember)


def _packed_steps(x: Tensor, codes: Tensor, scales: Tensor, inputs_first: bool) -> Tensor:
    weight = _numbers(codes, scales)
    return x @ (weight if inputs_first else weight.t())


_packed = torch.library.custom_op("meshwright::packed", _packed_steps, mutates_args=())


@_packed.register_fake
def _(x: Tensor, codes: Tensor, scales: Tensor, inputs_first: bool) -> Tensor:
    return x.new_empty(x.shape[0], 2 * codes.shape[1] if inputs_first else codes.shape[0])


def _remember_packed(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, codes, scales, ctx.inputs_first = inputs
    ctx.save_for_backward(codes, scales)


def _packed_gradients(ctx: Any, gradient: Tensor) -> Gradients:
    return _packed(gradient, *ctx.saved_tensors, not ctx.inputs_first), None, None, None


_packed.register_autograd(_packed_gradients, setup_context=_remember_packed)


# What they make in between takes memory, which a dry run is to see.
STEPS[torch.ops.meshwright.adapted.default] = _adapted_steps
STEPS[torch.ops.meshwright.adapted_backward.default] = _adapted_backward_steps
STEPS[torch.ops.meshwright.packed.default] = _packed_steps


def _numbers(matrix: Tensor, scales: Tensor | None) -> Tensor:
    return matrix if scales is None else unpack(matrix, scales)


def _plus(add: Tensor, left: Tensor, right: Tensor, transposed: bool, tuned: bool) -> Tensor:
    """left @ right (or its transpose) + add."""
    if tuned:
        out: Tensor = product_add(add, left, right, transposed)
        return out
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
