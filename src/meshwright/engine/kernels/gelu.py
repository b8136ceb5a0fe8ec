"""Tanh GELU as one operation: transformers computes it elementwise, which saves four tensors instead of one."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from meshwright.engine.patching import Patch, apply, symbol

ELEMENTWISE = ("NewGELUActivation", "FastGELUActivation")  # GPT-2 uses the first


class FusedGELU(Patch):
    """torch's tanh GELU, which saves only its input."""

    tag = "FusedGELU"

    def forward(self, input: Tensor) -> Tensor:
        return functional.gelu(input, approximate="tanh")


def fuse_gelus(model: nn.Module) -> int:
    """Replace every elementwise tanh GELU of transformers by torch's fused one; return how many."""
    elementwise = {symbol("transformers.activations", name) for name in ELEMENTWISE}
    chosen = [module for module in model.modules() if type(module) in elementwise]
    for module in chosen:
        apply(module, FusedGELU)
    return len(chosen)
