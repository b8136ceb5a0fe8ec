"""What a model computes beyond its shape: RoPE base and scaling, norm epsilon, router scores."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from meshwright.toml_tables import TomlTables

from .catalogue import catalogue_name, config_named


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


def numerics_of(text: str) -> Numerics:
    """Return the published values of a catalogue model, or those of a config.json at a path."""
    name = catalogue_name(text)
    return from_config(config_named(text) if name is None else _published(name))


@cache
def expert_groups(name: str) -> tuple[int, int]:
    """Return into how many groups a catalogue model's router divides its experts, and from how many a token chooses."""
    found = from_config(_published(name))
    return found.n_group or 1, found.topk_group or 1


def from_config(config: dict[str, Any]) -> Numerics:
    """Return the values in a Hugging Face config, in its older keys or in `rope_parameters`."""
    config = {**config, **(config.get("text_config") or {})}
    rope = config.get("rope_parameters") or {}
    rope = {} if any(isinstance(value, dict) for value in rope.values()) else rope  # one table per kind of layer
    scaling = config.get("rope_scaling") or ({**rope} if rope.get("rope_type", "default") != "default" else None)
    theta = config.get("rope_theta", rope.get("rope_theta"))
    part = config.get("partial_rotary_factor", rope.get("partial_rotary_factor"))
    return Numerics(
        rope_theta=None if theta is None else float(theta),
        rope_scaling=scaling,
        partial_rotary_factor=1.0 if part is None else float(part),
        norm_eps=next((float(config[key]) for key in EPSILONS if config.get(key) is not None), None),
        init_std=config.get("initializer_range"),
        **{name: config.get(name) for name in SAME},
    )


@cache
def _tables() -> TomlTables:
    return TomlTables(Path(__file__).with_name("numerics.toml"))


def _published(name: str) -> dict[str, Any]:
    family = _tables()["models"].get(name)
    return _family(family) if family else {}


def _family(name: str) -> dict[str, Any]:
    found = _tables()[f"families.{name}"]
    base = _family(found["like"]) if "like" in found else {}
    return {**base, **{key: value for key, value in found.items() if key != "like"}}
