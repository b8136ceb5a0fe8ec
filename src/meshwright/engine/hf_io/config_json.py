"""Writes config.json so that transformers 4 and 5 read the same model from it.

transformers 5 has the rotary positions in `rope_parameters`, which version 4 does not know: it takes the default base
(10,000) without an error, and so does vLLM where version 4 is installed. The same holds for the number of Qwen3's
experts, which version 5 has renamed. Both versions read the older keys.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.engine.hf_io.shards import write_text
from meshwright.hub import CONFIG

RULES = "rope_parameters"
OUTSIDE = ("rope_theta", "partial_rotary_factor")  # beside the other settings in version 4, not among them
LONG = ("short_factor", "long_factor")  # version 4 takes no others for longrope
LAYER_TYPES = {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}
"""Kinds of layers with a table each, and the base of each in version 4."""
EXPERTS = ("num_local_experts", "num_experts")  # of versions 5 and 4
RENAMED_EXPERTS = ("qwen3_moe", "qwen3_vl_moe_text")
"""Types of which version 5 writes the number of experts under another key than version 4 reads."""
WITH_LAYER_TYPES = ("gemma3_text", "gemma3n_text")


def write_config(folder: Path, config: Any) -> None:
    """Write a transformers config as config.json of a folder."""
    values = json.loads(config.to_json_string(use_diff=True))
    write_text(folder / CONFIG, json.dumps(with_older_keys(values), indent=2, sort_keys=True) + "\n")


def with_older_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a config.json and its sections, with version 4's keys."""
    sections = {key: with_older_keys(one) for key, one in values.items() if key.endswith("_config") and _is_table(one)}
    return {**_rotary(values), **_experts(values), **values, **sections}


def _experts(values: Mapping[str, Any]) -> dict[str, Any]:
    new, old = EXPERTS
    return {old: values[new]} if values.get("model_type") in RENAMED_EXPERTS and new in values else {}


def _rotary(values: Mapping[str, Any]) -> dict[str, Any]:
    table = values.get(RULES) or {}
    kinds = {kind: table[kind] for kind in LAYER_TYPES if _is_table(table.get(kind))}
    if values.get("model_type") in WITH_LAYER_TYPES and len(kinds) == len(LAYER_TYPES):
        bases = {key: kinds[kind]["rope_theta"] for kind, key in LAYER_TYPES.items() if "rope_theta" in kinds[kind]}
        return {**bases, **_scaling(kinds["full_attention"])}
    if "rope_theta" not in table:
        return {}
    return {**{key: table[key] for key in OUTSIDE if key in table}, **_scaling(table)}


def _scaling(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return version 4's `rope_scaling`, which plain rotary positions do not have."""
    inner = {key: one for key, one in table.items() if key not in OUTSIDE}
    if inner.get("rope_type") == "longrope":
        inner = {"type": "longrope", **{key: inner[key] for key in LONG if key in inner}}
    return {} if inner in ({}, {"rope_type": "default"}) else {"rope_scaling": inner}


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping)
