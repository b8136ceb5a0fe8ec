"""Activation offload: saved tensors wait in host memory. Offload of weights and optimizer state is in fsdp.py."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.autograd.graph import save_on_cpu

from meshwright.engine.patching import Patch, apply
from meshwright.recipes.types import Layout


def offload_activations(layers: dict[int, nn.Module], layout: Layout) -> None:
    """Move the tensors that layers save for their backward pass to host memory."""
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
