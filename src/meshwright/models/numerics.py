"""What a model computes beyond its shape: RoPE base and scaling, norm epsilon, router scores."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from meshwright.toml_tables import TomlTables

from .catalogue import config_file, config_of, find, names, without_hub_url
from .reader import load_config
from .readers.architectures import class_defaults
from .readers.computed import LOCAL_BASES
from .spec import Mamba2, ModelSpec


class Numerics(msgspec.Struct, frozen=True):
    """Published values; None if they are unknown."""

    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    partial_rotary_factor: float = 1.0
    norm_eps: float | None = None
    init_std: float | None = None
    scoring_func: str | None = None  # of a router
    norm_topk_prob: bool | None = None
    routed_scaling_factor: float | None = None
    n_group: int | None = None
    topk_group: int | None = None

    @property
    def scaling_type(self) -> str:
        """Type of the RoPE scaling; empty if there is none."""
        scaling = self.rope_scaling or {}
        found = str(scaling.get("rope_type", scaling.get("type", "")))
        return "" if found == "default" else found


EPSILONS = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps", "norm_epsilon")
SAME = ("scoring_func", "norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group")
NUMBER_KEYS = (
    *("rope_parameters", "rope_theta", "partial_rotary_factor", "query_pre_attn_scalar", "topk_method"),
    *EPSILONS,
    *SAME,
)
"""Keys of a Hugging Face config, as transformers writes it, that change what a model computes but no shape."""


def numerics_of(text: str) -> Numerics:
    """Return the published values of a catalogue model, or those of the config.json of a path or hub id."""
    own = config_file(text)
    return _shipped(find(without_hub_url(text.strip())).name) if own is None else from_config(load_config(own))


def published_config(text: str) -> dict[str, Any]:
    """Return the Hugging Face config of a model with the published values: what a model is built from.

    A catalogue model has the shape of the catalogue and the values of the table here; a path or another hub id has its
    own config.json.
    """
    own = config_file(text)
    return _shipped_config(find(without_hub_url(text.strip())).name) if own is None else load_config(own)


@cache
def expert_groups(name: str) -> tuple[int, int]:
    """Return into how many groups a catalogue model's router divides its experts, and from how many a token chooses."""
    found = _shipped(name) if name in names() else Numerics()
    return found.n_group or 1, found.topk_group or 1


@cache
def _shipped(name: str) -> Numerics:
    return from_config(_shipped_config(name))


def _shipped_config(name: str) -> dict[str, Any]:
    """Return the config of a catalogue model, with the published values in the language model's part."""
    config, published = config_of(name), _published(name)
    part = next((key for key in LANGUAGE_PARTS if isinstance(config.get(key), dict)), None)
    return {**config, **published} if part is None else {**config, part: {**config[part], **published}}


LANGUAGE_PARTS = ("text_config", "llm_config")
"""Keys of the language model's config in that of a vision-language model."""


GLOBAL_LAYERS = "full_attention"
"""Layers whose RoPE is the model's, where those with a window have another."""


def from_config(config: dict[str, Any]) -> Numerics:
    """Return the values in a Hugging Face config, in its older keys or in `rope_parameters`."""
    for part in LANGUAGE_PARTS:
        config = {**config, **(config.get(part) or {})}
    rope = config.get("rope_parameters") or {}
    if any(isinstance(value, dict) for value in rope.values()):  # one table per kind of layer
        rope = rope.get(GLOBAL_LAYERS) or {}
    scaling = config.get("rope_scaling") or (rope if rope.get("rope_type", "default") != "default" else {})
    stated = {key: value for key, value in scaling.items() if value is not None}  # null is the type's default
    theta = config.get("rope_theta", rope.get("rope_theta"))
    rotary_part = config.get("partial_rotary_factor", rope.get("partial_rotary_factor"))
    return Numerics(
        rope_theta=None if theta is None else float(theta),
        rope_scaling=stated or None,
        partial_rotary_factor=1.0 if rotary_part is None else float(rotary_part),
        norm_eps=next((float(config[key]) for key in EPSILONS if config.get(key) is not None), None),
        init_std=config.get("initializer_range"),
        **{name: config.get(name) for name in SAME} | _router_of(config),
    )


SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
"""Scores of routers; dots.llm1 writes the method that balances its experts, noaux_tc, in their place."""


def _router_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return what a router computes where the config states something else or nothing."""
    stated, normalizes = config.get("scoring_func"), config.get("norm_topk_prob")
    usual = class_defaults().get(str(config.get("model_type")), {}).get("norm_topk_prob")
    return {
        "scoring_func": stated if stated in SCORES else None,
        "norm_topk_prob": usual if normalizes is None else normalizes,
    }


def ropes_of_layers(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the different RoPEs of a model's layers: one, unless layers with a window have their own."""
    for part in LANGUAGE_PARTS:
        config = {**config, **(config.get(part) or {})}
    kinds = set(config.get("layer_types") or ())
    rope = config.get("rope_parameters") or CLASS_ROPES.get(str(config.get("model_type")), {})
    tables = {kind: table for kind, table in rope.items() if isinstance(table, dict)}
    found = [table for kind, table in tables.items() if kind in kinds or not kinds]
    bases = [config[key] for key in LOCAL_BASES if config.get(key) is not None]
    if not tables and bases and config.get("rope_theta") is not None:
        found = [{"rope_theta": base} for base in (config["rope_theta"], *bases)]
    return [table for place, table in enumerate(found) if table not in found[:place]]


CLASS_ROPES = {"mellum": {GLOBAL_LAYERS: {"rope_theta": 500000.0}, "sliding_attention": {"rope_theta": 10000.0}}}
"""RoPE of each kind of layer that a config class of transformers has without one in the config."""


def has_rope(model: ModelSpec) -> bool:
    """Return whether a model rotates its queries and keys."""
    return not model.learned_positions and not model.mixers(Mamba2) and model.kind != "diffusion"


UNKNOWN = {"rope_theta": "the RoPE base", "norm_eps": "the norm epsilon", "scoring_func": "the router's scores"}
"""Values without which a model may compute something else than the published one, in words."""


def unknown_values(found: Numerics, model: ModelSpec) -> tuple[str, ...]:
    """Return which values of UNKNOWN a model has and nobody stated."""
    missing = {
        "rope_theta": has_rope(model) and found.rope_theta is None,
        "norm_eps": found.norm_eps is None and not model.learned_positions and model.kind != "diffusion",
        "scoring_func": _router_is_open(model) and found.scoring_func is None and found.norm_topk_prob is None,
    }
    return tuple(name for name, is_missing in missing.items() if is_missing)


ONE_ROUTER = ("mixtral", "gpt_oss", "llama4", "gemma4")
"""Model types whose router has no settings."""


def _router_is_open(model: ModelSpec) -> bool:
    return model.moe is not None and not model.model_type.startswith(ONE_ROUTER)


@cache
def _tables() -> TomlTables:
    return TomlTables(Path(__file__).with_name("numerics.toml"))


def _published(name: str) -> dict[str, Any]:
    """Return a copy of the table's values of a catalogue model, by key of a Hugging Face config."""
    family = _tables()["models"].get(name)
    return deepcopy({key: value for key, value in _family(family).items() if key != "source"}) if family else {}


def _family(name: str) -> dict[str, Any]:
    found = _tables()[f"families.{name}"]
    base = _family(found["like"]) if "like" in found else {}
    return {**base, **{key: value for key, value in found.items() if key != "like"}}
