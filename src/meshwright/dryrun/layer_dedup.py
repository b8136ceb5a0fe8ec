"""Which layers and micro batches to trace: one of each group that runs the same code between the same neighbors.

A layer's share of the step's memory depends on its own structure and on its neighbors (whose weights are prefetched,
whose gradients are still being reduced). Layers that repeat an earlier one between the same neighbors are left out of
the traced step; replay.py adds their entries to the log afterwards.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch import nn

LONGEST_PATTERN = 24  # layers in a repeated pattern
# Attributes that differ between identical layers.
INDEX_ATTRIBUTES = ("layer_idx", "layer_number", "idx", "index", "layer_id", "block_idx")
Context = tuple[Hashable, ...]


def layer_signature(layer: nn.Module) -> Hashable:
    """Return a hash of what determines a layer's memory: module classes, settings and parameter shapes."""
    modules = tuple((type(module), _settings(module)) for module in layer.modules())
    shapes = tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in layer.named_parameters())
    return hash((modules, shapes))


def _settings(module: Any) -> Hashable:
    plain = ((k, v) for k, v in vars(module).items() if isinstance(v, bool | int | float | str))
    return tuple(sorted((k, v) for k, v in plain if k not in INDEX_ATTRIBUTES))


def contexts(signatures: Sequence[Hashable]) -> list[Context]:
    """Return each layer's signature with those of its neighbors; both ends have a marker as neighbor."""
    padded = ["before the first", *signatures, "after the last"]
    return [tuple(padded[i : i + 3]) for i in range(len(signatures))]


def kept_layers(signatures: Sequence[Hashable]) -> list[int]:
    """Return the positions of the fewest layers that still show every layer between its neighbors."""
    required = set(contexts(signatures))
    kept = list(range(len(signatures)))
    for length in range(1, min(LONGEST_PATTERN, len(signatures) // 2) + 1):
        at = 0
        while at + length <= len(kept):
            candidate = kept[:at] + kept[at + length :]
            if set(contexts([signatures[i] for i in candidate])) == required:
                kept = candidate
            else:
                at += 1
    return kept


def representatives(signatures: Sequence[Hashable], kept: Sequence[int]) -> list[int]:
    """Return for every layer the traced one with the same neighbors in the shortened step."""
    traced = dict(zip(kept, contexts([signatures[i] for i in kept]), strict=True))  # neighbors in the shortened step
    first_with: dict[Context, int] = {}
    for place, context in traced.items():
        first_with.setdefault(context, place)
    return [i if traced.get(i) == context else first_with[context] for i, context in enumerate(contexts(signatures))]


def kept_micro_batches(count: int) -> list[int]:
    """Return the micro batches to trace.

    The first finds no gradients yet, the second represents all that follow, and after the last gradients are reduced.
    """
    return sorted({0, min(1, count - 1), count - 1})
