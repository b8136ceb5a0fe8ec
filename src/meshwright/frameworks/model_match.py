"""Models that a config describes by their sizes: as one of the catalogue where the sizes are the same."""

from __future__ import annotations

from typing import Any

import msgspec

from meshwright.errors import InputError
from meshwright.models import ModelSpec, find, find_by_shape, spec_from_config


def named(text: str) -> ModelSpec | None:
    """The model of the catalogue that a name or Hugging Face id means, or None; never a file."""
    if not text or text.startswith((".", "/", "~")) or text.endswith((".json", ".yaml", ".toml")):
        return None
    try:
        return find(text)
    except InputError:
        return None


def from_sizes(model_type: str, name: str = "config", **sizes: Any) -> ModelSpec:
    """The model of these sizes, by the keys of a Hugging Face config; a catalogue model where one is the same."""
    made = spec_from_config({"model_type": model_type, **{k: v for k, v in sizes.items() if v is not None}}, name)
    return next((known for known in find_by_shape(made.hidden, made.num_layers) if same_shape(known, made)), made)


def same_shape(one: ModelSpec, other: ModelSpec) -> bool:
    """Whether two models differ in nothing but their names."""
    return _shape(one) == _shape(other)


def _shape(spec: ModelSpec) -> bytes:
    parts = (spec.kind, spec.hidden, spec.groups, spec.vocab, spec.tied, spec.learned_positions, spec.mtp_layers)
    return msgspec.json.encode(parts)
