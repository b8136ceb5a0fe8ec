"""A model's shape as a catalogue model, resized where needed: how a recipe can refer to it without a config.json."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.errors import InputError
from meshwright.frameworks.model_match import same_shape
from meshwright.models import Attention, Dense, ModelSpec, all_specs, find, names, reshape
from meshwright.models.numerics import numerics_of
from meshwright.recipes.types import Architecture


def catalogue_reference(spec: ModelSpec, scaling: float | None = None) -> tuple[str, Architecture | None] | None:
    """Return the catalogue model of this shape, and how it is resized; None if no catalogue model can be.

    Of several, the one of which fewest sizes change; `scaling` is the factor of the RoPE scaling of a file that
    describes its model by sizes, 0 for none: a model with another one is the last choice.
    """

    def rank(one: ModelSpec) -> tuple[bool, int, int]:
        other = sum(_sizes(one).get(key) != value for key, value in wanted.items())
        return scaling is not None and _scaling(one.name) != scaling, other, abs(one.num_layers - spec.num_layers)

    wanted = _sizes(spec)
    if spec.name in names() and same_shape(find(spec.name), spec) and not rank(spec)[0]:
        return spec.name, None
    for candidate in sorted(all_specs(), key=rank):
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


def _scaling(name: str) -> float:
    """Return the factor of a catalogue model's RoPE scaling; 0 if there is none."""
    found = numerics_of(name)
    return float((found.rope_scaling or {}).get("factor", 1)) if found.scaling_type else 0.0


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
