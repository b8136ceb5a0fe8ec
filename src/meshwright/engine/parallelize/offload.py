"""Activations kept in host memory between forward and backward. Weights and optimizer state: see data.py."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.autograd.graph import save_on_cpu

from meshwright.recipes.types import Layout


def offload_activations(layers: dict[int, nn.Module], layout: Layout) -> None:
    """What layers keep for their backward pass waits in host memory."""
    if layout.offload != "activations":
        return
    for layer in layers.values():
        _offloaded(layer)


def _offloaded(layer: nn.Module) -> None:
    inner = layer.forward
    pin = any(p.is_cuda for p in layer.parameters())

    def forward(*args: Any, **kwargs: Any) -> Any:
        with save_on_cpu(pin_memory=pin):
            return inner(*args, **kwargs)

    layer.forward = forward
