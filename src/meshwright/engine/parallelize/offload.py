"""Activations kept in host memory between forward and backward. Weights and optimizer state: see data.py."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.autograd.graph import save_on_cpu

from meshwright.engine.patching import Patch, apply
from meshwright.recipes.types import Layout


def offload_activations(layers: dict[int, nn.Module], layout: Layout) -> None:
    """What layers keep for their backward pass waits in host memory."""
    if layout.offload != "activations":
        return
    layer: Any
    for layer in layers.values():
        layer.pins_memory = any(p.is_cuda for p in layer.parameters())
        apply(layer, OffloadedActivations)


class OffloadedActivations(Patch):
    """A layer whose saved tensors are moved to host memory."""

    tag = "Offload"

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with save_on_cpu(pin_memory=self.pins_memory):
            return super().forward(*args, **kwargs)
