"""Helpers of the scan tests: outputs and gradients, saved bytes, and differences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def outcome(scan: Any, tensors: list[Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """Return the output of a scan and the gradients of its inputs, for a loss with random weights."""
    out = scan(*tensors)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad((out * weights).sum(), tensors)
    return dict(zip(names, (out.detach(), *found), strict=True))


def differences(found: dict[str, Tensor], expected: dict[str, Tensor], floor: float) -> dict[str, float]:
    """Return the largest difference of each tensor, relative to its largest expected value (at least `floor`)."""
    return {
        name: float((found[name].double() - one.double()).abs().max() / one.double().abs().max().clamp(min=floor))
        for name, one in expected.items()
    }


def kept_bytes(scan: Any, tensors: list[Tensor]) -> int:
    """Return the bytes of the storages that a forward pass saves."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = scan(*tensors)
    del out
    return sum(kept.values())
