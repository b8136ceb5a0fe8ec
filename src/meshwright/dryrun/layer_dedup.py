"""Which layers and micro batches are traced: of those that do the same between the same neighbours, one of each.

A layer's part in the memory of a step depends on what it is and on the layers beside it (whose weights are gathered
ahead, whose gradients are still being summed). Layers whose like stands elsewhere between the same neighbours are left
out of the traced step, and the book is filled up with their like afterwards (replay.py).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch import nn

LONGEST = 24  # layers in a repeated pattern
NUMBERS = ("layer_idx", "layer_number", "idx", "index", "layer_id", "block_idx")  # attributes that count layers
Context = tuple[Hashable, ...]


def kind_of_layer(layer: nn.Module) -> Hashable:
    """What makes two layers do the same: their modules' classes and settings, and their parameters' shapes."""
    modules = tuple((type(module), _settings(module)) for module in layer.modules())
    shapes = tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in layer.named_parameters())
    return hash((modules, shapes))


def _settings(module: Any) -> Hashable:
    plain = {k: v for k, v in vars(module).items() if isinstance(v, bool | int | float | str) and k not in NUMBERS}
    return tuple(sorted(plain.items()))


def contexts(kinds: Sequence[Hashable]) -> list[Context]:
    """Every layer's kind between its neighbours'; the ends are neighbours of their own."""
    lined = ["before the first", *kinds, "after the last"]
    return [tuple(lined[i : i + 3]) for i in range(len(kinds))]


def kept_layers(kinds: Sequence[Hashable]) -> list[int]:
    """The places of the layers to trace: as few as still show every layer between its neighbours."""
    wanted = set(contexts(kinds))
    kept = list(range(len(kinds)))
    for length in range(1, min(LONGEST, len(kinds) // 2) + 1):
        at = 0
        while at + length <= len(kept):
            tried = kept[:at] + kept[at + length :]
            if set(contexts([kinds[i] for i in tried])) == wanted:
                kept = tried
            else:
                at += 1
    return kept


def likes(kinds: Sequence[Hashable], kept: Sequence[int]) -> list[int]:
    """For every layer the traced one that stands for it: the one that has its neighbours in the shortened step."""
    now = dict(zip(kept, contexts([kinds[i] for i in kept]), strict=True))  # of the traced layers, when traced
    shown: dict[Context, int] = {}
    for place, context in now.items():
        shown.setdefault(context, place)
    return [i if now.get(i) == context else shown[context] for i, context in enumerate(contexts(kinds))]


def kept_micro_batches(count: int) -> list[int]:
    """The first, which finds no gradients; the second, for all that follow; the last, after which they are summed."""
    return sorted({0, min(1, count - 1), count - 1})
