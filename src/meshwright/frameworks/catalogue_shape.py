"""A model's shape as a catalogue model, resized where needed: how a recipe can refer to it without a config.json."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.errors import InputError
from meshwright.frameworks.model_match import same_shape
from meshwright.models import Attention, Dense, ModelSpec, all_specs, find, names, reshape
from meshwright.recipes.types import Architecture


def catalogue_reference(spec: ModelSpec) -> tuple[str, Architecture | None] | None:
    """Return the catalogue model of this shape, and how it is resized; None if no catalogue model can be."""
    if spec.name in names() and same_shape(find(spec.name), spec):
        return spec.name, None
    wanted = _sizes(spec)
    for candidate in sorted(all_specs(), key=lambda one: abs(one.num_layers - spec.num_layers)):
        if candidate.kind != spec.kind or (candidate.moe is None) != (spec.moe is None):
            continue
        for sizes in _fewer(candidate, wanted):
            try:
                found = reshape(candidate, **sizes)
            except (InputError, ZeroDivisionError):
                continue
            if same_shape(found, spec):
                return candidate.name, Architecture(**sizes) if sizes else None
    return None


def _sizes(spec: ModelSpec) -> dict[str, int]:
    """Return the sizes of a model that a recipe's architecture section can set."""
    attention = [group.layer.mixer for group in spec.groups if isinstance(group.layer.mixer, Attention)]
    dense = [group.layer.ffn.width for group in spec.groups if isinstance(group.layer.ffn, Dense)]
    moe = spec.moe
    found: dict[str, Any] = {"layers": spec.num_layers, "hidden": spec.hidden, "vocab": spec.vocab}
    found["ffn"] = dense[0] if dense else moe.width if moe else None
    if attention:
        first = attention[0]
        found |= {"heads": first.heads, "kv_heads": first.kv_heads, "head_dim": first.head_dim}
    if moe:
        found |= {"experts": moe.experts, "topk": moe.topk}
    return {key: value for key, value in found.items() if value}


def _fewer(candidate: ModelSpec, wanted: dict[str, int]) -> Iterator[dict[str, int]]:
    """Yield the sizes that differ from the candidate's, and all of them: a size may follow another that changes."""
    own = _sizes(candidate)
    yield {key: value for key, value in wanted.items() if own.get(key) != value}
    without = "head_dim" if candidate.learned_positions else ""
    yield {key: value for key, value in wanted.items() if key != without}
