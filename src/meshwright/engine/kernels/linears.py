"""Linear layers of a model that compute through other products: tuned bf16 ones, or 8 bits."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from meshwright.engine.kernels.fp8 import MULTIPLE, Scaling, fp8_linear
from meshwright.engine.kernels.matmul import product, product_add
from meshwright.engine.patching import Patch, apply


def tune_linears(block: nn.Module) -> int:
    """Sends the plain linear layers of a block through the products tuned for long load; says how many.

    Worth it for bf16 on Hopper GPUs; elsewhere the products are torch's own.
    """
    return _patch(block, TunedLinear, lambda _: True)


def use_fp8(block: nn.Module, exact_gradients: bool = True, scaling: Scaling = "tensor") -> int:
    """Makes the plain linear layers of a block compute in 8 bits where their widths allow it; says how many.

    Give it decoder layers: the head and the embedding stay as they are. Compile the block, or the casts cost more than
    the products save.
    """
    patch = FP8_PATCHES[scaling] if exact_gradients else FastFp8Linear
    return _patch(block, patch, lambda linear: divides(linear.weight.shape, scaling))


def divides(shape: tuple[int, ...], scaling: Scaling) -> bool:
    """Whether products in 8 bits can work on a weight of this shape."""
    return all(width % MULTIPLE[scaling] == 0 for width in shape)


def _patch(block: nn.Module, patch: type[Patch], suits: Any) -> int:
    chosen = [one for one in block.modules() if type(one) is nn.Linear and suits(one)]
    for linear in chosen:
        apply(linear, patch)
    return len(chosen)


class TunedLinear(Patch):
    """A linear layer through the tuned products."""

    tag = "TunedGEMM"

    def forward(self: Any, input: Tensor) -> Tensor:
        """The same numbers as torch's linear layer, but for the order of sums."""
        out: Tensor = product(input.flatten(0, -2), self.weight, False, True)
        # The width of the weight: that of the layer counts what all tensor-parallel ranks hold.
        out = out.view(*input.shape[:-1], self.weight.shape[0])
        return out if self.bias is None else out + self.bias


class Fp8Linear(Patch):
    """A linear layer in 8 bits with one scale for each operand, and fp32 sums in the backward pass."""

    tag = "FP8"
    exact_gradients = True
    scaling: Scaling = "tensor"

    def forward(self: Any, input: Tensor) -> Tensor:
        """Torch's linear layer to 8 bits' precision; torch's own where the number of tokens is not a multiple of 16."""
        rows = input.flatten(0, -2)
        if rows.shape[0] % MULTIPLE[self.scaling]:
            return functional.linear(input, self.weight, self.bias)
        out = fp8_linear(rows, self.weight, self.exact_gradients, self.scaling)
        # The width of the weight: that of the layer counts what all tensor-parallel ranks hold.
        out = out.view(*input.shape[:-1], self.weight.shape[0])
        return out if self.bias is None else out + self.bias


class FastFp8Linear(Fp8Linear):
    """A linear layer in fp8, with the tensor cores' short sums both ways."""

    tag = "FP8Fast"
    exact_gradients = False


class RowFp8Linear(Fp8Linear):
    """A linear layer in fp8 with a scale for every row and column."""

    tag = "FP8Row"
    scaling: Scaling = "row"


class Mxfp8Linear(Fp8Linear):
    """A linear layer in MXFP8; untested on GPUs that have it."""

    tag = "MXFP8"
    scaling: Scaling = "mx"


FP8_PATCHES: dict[Scaling, type[Fp8Linear]] = {"tensor": Fp8Linear, "row": RowFp8Linear, "mx": Mxfp8Linear}


def linear_add(add: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden @ weight.T + add, with the sum made inside the product."""
    out: Tensor = product_add(add.flatten(0, -2), hidden.flatten(0, -2), weight, True)
    return out.view(add.shape)
