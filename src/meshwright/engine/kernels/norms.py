"""Fused RMS norms, which save one value per row for the backward pass instead of several copies of their input."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.engine.patching import Patch, apply, base_class

EPSILON_NAMES = ("variance_epsilon", "eps", "epsilon")
PROBE_WIDTH = 8


def fuse_norms(model: nn.Module) -> int:
    """Replace every plain RMS norm of a model by torch's fused one; return how many."""
    changed = 0
    for module in model.modules():
        original: Any = type(module)
        patch = _patch_for(original) if _is_rms_norm(module) else None
        if patch is not None:
            apply(module, patch)
            changed += 1
    return changed


def _is_rms_norm(module: nn.Module) -> bool:
    parameters = list(module.named_parameters())
    return (
        base_class(module).__name__.endswith("RMSNorm")
        and not isinstance(module, FusedNorm)
        and [name for name, _ in parameters] == ["weight"]
        and parameters[0][1].ndim == 1
        and _epsilon_name(module) is not None
    )


def _epsilon_name(module: nn.Module) -> str | None:
    return next((name for name in EPSILON_NAMES if isinstance(getattr(module, name, None), float)), None)


class FusedNorm(Patch):
    """torch's fused RMS norm."""

    tag = "FusedNorm"

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        weight: Tensor = self.weight
        return functional.rms_norm(hidden_states, (weight.shape[0],), weight, _epsilon(self))


class FusedOffsetNorm(FusedNorm):
    """torch's fused RMS norm where the weight is an offset from one (Gemma, Qwen3-Next)."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        weight = 1.0 + self.weight.float()  # a small offset survives the sum only in fp32
        normed = functional.rms_norm(hidden_states.float(), (weight.shape[0],), weight, _epsilon(self))
        return normed.type_as(hidden_states)


@cache
def _patch_for(original: Any) -> type[Patch] | None:
    """Return the patch that computes what this class of norm computes, or None."""
    return next((patch for patch in (FusedNorm, FusedOffsetNorm) if _agree(original, patch)), None)


def _epsilon(module: Any) -> float:
    epsilon: float = next(getattr(module, name) for name in EPSILON_NAMES if hasattr(module, name))
    return epsilon


def _agree(original: type[nn.Module], patch: type[Patch]) -> bool:
    """Return whether a small norm gives the same numbers with the patch: class names do not distinguish variants."""
    try:
        with torch.device("cpu"), torch.no_grad():  # models may be built under another default device, such as meta
            rows = torch.linspace(-2.0, 3.0, 3 * PROBE_WIDTH, dtype=torch.float32).reshape(3, PROBE_WIDTH)
            expected, fused = _probe(original), _probe(original)
            apply(fused, patch)
            return torch.allclose(expected(rows), fused(rows), rtol=1e-6, atol=1e-6)
    except (TypeError, AttributeError, RuntimeError):  # a norm with another signature, such as a gated one
        return False


def _probe(norm: type[nn.Module]) -> nn.Module:
    module = norm.__new__(norm)
    nn.Module.__init__(module)
    module.weight = nn.Parameter(torch.linspace(0.5, 1.5, PROBE_WIDTH, dtype=torch.float32), requires_grad=False)
    for name in EPSILON_NAMES:
        setattr(module, name, 1e-3)
    return module
