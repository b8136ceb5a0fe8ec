"""Patches of linear layers: tuned bf16 GEMMs, or fp8."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.engine.kernels.fp8 import MULTIPLE, Scaling, fp8_linear
from meshwright.engine.kernels.matmul import product, product_add
from meshwright.engine.patching import Patch, apply

SMALL = 10**11  # FLOPs of a GEMM that takes about as long on an H200 as its start from Python


def is_small(hidden: Tensor, weight: Tensor) -> bool:
    """Return whether a GEMM is so short that starting a kernel of our own takes longer than it can save.

    On an H200 machine, starting `product` took 66 µs of the host and torch's own GEMM 15: steps of a 0.6B model, whose
    GEMMs take 40 µs, waited for the host.
    """
    return 2 * hidden.numel() * weight.shape[0] < SMALL


def tune_linears(block: nn.Module) -> int:
    """Use the GEMM kernels tuned for sustained load in the plain linear layers of a block; return how many.

    Helps bf16 on Hopper GPUs; elsewhere the GEMMs are torch's own.
    """
    return _patch(block, TunedLinear, lambda _: True)


def use_fp8(block: nn.Module, exact_gradients: bool = True, scaling: Scaling = "tensor") -> int:
    """Use fp8 in the plain linear layers of a block whose widths allow it; return how many.

    Call it for decoder layers, not for the head and the embedding. Compile the block: uncompiled, the casts cost more
    than the GEMMs save.
    """
    patch = FP8_PATCHES[scaling] if exact_gradients else FastFp8Linear
    return _patch(block, patch, lambda linear: is_divisible(linear.weight.shape, scaling))


def is_divisible(shape: tuple[int, ...], scaling: Scaling) -> bool:
    """Return whether fp8 GEMMs support a weight of this shape."""
    return all(width % MULTIPLE[scaling] == 0 for width in shape)


def _patch(block: nn.Module, patch: type[Patch], suits: Any) -> int:
    chosen = [one for one in block.modules() if type(one) is nn.Linear and suits(one)]
    for linear in chosen:
        apply(linear, patch)
    return len(chosen)


class TunedLinear(Patch):
    """A linear layer with tuned GEMM kernels."""

    tag = "TunedGEMM"

    def forward(self: Any, input: Tensor) -> Tensor:
        """Return the result of nn.Linear, up to the order of summation."""
        if is_small(input, self.weight):
            return functional.linear(input, self.weight, self.bias)
        out: Tensor = product(input.flatten(0, -2), self.weight, False, True)
        # The weight's width, not out_features: that is the sum over the tensor-parallel ranks.
        out = out.view(*input.shape[:-1], self.weight.shape[0])
        return out if self.bias is None else out + self.bias


class Fp8Linear(Patch):
    """An fp8 linear layer with one scale per operand and fp32 accumulation in the backward pass."""

    tag = "FP8"
    exact_gradients = True
    scaling: Scaling = "tensor"

    def forward(self: Any, input: Tensor) -> Tensor:
        """Compute in fp8; in the weight's dtype if the number of tokens is not a multiple of 16."""
        rows = input.flatten(0, -2)
        if rows.shape[0] % MULTIPLE[self.scaling]:
            return functional.linear(input, self.weight, self.bias)
        out = fp8_linear(rows, self.weight, self.exact_gradients, self.scaling)
        # The weight's width, not out_features: that is the sum over the tensor-parallel ranks.
        out = out.view(*input.shape[:-1], self.weight.shape[0])
        return out if self.bias is None else out + self.bias


class FastFp8Linear(Fp8Linear):
    """An fp8 linear layer with fast accumulation in both passes."""

    tag = "FP8Fast"
    exact_gradients = False


class RowFp8Linear(Fp8Linear):
    """An fp8 linear layer with a scale per row and column."""

    tag = "FP8Row"
    scaling: Scaling = "row"


class Mxfp8Linear(Fp8Linear):
    """An MXFP8 linear layer; untested on GPUs with hardware support."""

    tag = "MXFP8"
    scaling: Scaling = "mx"


FP8_PATCHES: dict[Scaling, type[Fp8Linear]] = {"tensor": Fp8Linear, "row": RowFp8Linear, "mx": Mxfp8Linear}


def linear_add(add: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
    """Return hidden @ weight.T + add, with the addition inside the GEMM."""
    if is_small(hidden, weight):
        return torch.addmm(add.flatten(0, -2), hidden.flatten(0, -2), weight.t()).view(add.shape)
    out: Tensor = product_add(add.flatten(0, -2), hidden.flatten(0, -2), weight, True)
    return out.view(add.shape)
