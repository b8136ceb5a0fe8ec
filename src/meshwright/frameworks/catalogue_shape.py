"""A model's shape as a catalogue model, resized where needed: how a recipe can refer to it without a config.json."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.errors import InputError
from meshwright.frameworks.mapping import same_value
from meshwright.frameworks.model_match import same_shape
from meshwright.models import Attention, Dense, ModelSpec, all_specs, find, names, reshape
from meshwright.models.numerics import numerics_of
from meshwright.recipes.model_changes import published_numerics
from meshwright.recipes.types import Architecture

PLAIN = "llama"  # the model type of a decoder with RMSNorm, SwiGLU and RoPE that has nothing else


def catalogue_reference(
    spec: ModelSpec, scaling: float | None = None, rope_theta: float | None = None
) -> tuple[str, Architecture | None] | None:
    """Return the catalogue model of this shape, and how it is resized; None if no catalogue model can be.

    `scaling` is the factor of the RoPE scaling of a file that describes its model by sizes, 0 for none: a model with
    another one is the last choice. `rope_theta` is its RoPE base. A model in other sizes, or with another base, is one
    of the file's own kind, or a plain Llama if the file names none; of those, the one of which fewest sizes change.
    """
    kind = spec.model_type or PLAIN

    def rank(one: ModelSpec) -> tuple[bool, bool, bool, int, int]:
        other = sum(_sizes(one).get(key) != value for key, value in wanted.items())
        published = published_numerics(one.name).rope_theta
        other_base = None not in (rope_theta, published) and not same_value(rope_theta, published)
        return (
            scaling is not None and _scaling(one.name) != scaling,
            one.model_type != kind and bool(other or other_base),
            bool(other) and one.max_seq_length < spec.max_seq_length,
            other,
            abs(one.num_layers - spec.num_layers),
        )

    wanted = _sizes(spec)
    if spec.name in names() and same_shape(find(spec.name), spec) and not any(rank(find(spec.name))[:2]):
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
