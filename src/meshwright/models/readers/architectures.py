"""All decoder architectures, by model_type."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from . import nemotron
from .computed import ACTIVATION_KEYS, NUMBERS, ROPE_KEYS
from .dense_table import DENSE
from .experts_table import EXPERTS
from .fields import Fields
from .hybrid_table import HYBRID
from .layernorm_table import LAYERNORM
from .own_code_table import OWN_CODE
from .rms_table import RMS
from .sparse_table import SPARSE
from .traits import Traits
from .varied_table import VARIED

# The defaults of these rows are their config class's.
WITHOUT_CLASS = ("mimo", "nemotron-nas", "step3p7", *OWN_CODE)  # transformers has no decoder of this type
BY_CLASS: dict[str, Traits] = LAYERNORM | RMS | EXPERTS | HYBRID
BY_CLASS |= {name: traits for name, traits in VARIED.items() if name not in WITHOUT_CLASS}
TRAITS: dict[str, Traits] = DENSE | SPARSE | BY_CLASS | VARIED | OWN_CODE

# The same architecture under another name.
SAME_AS = {
    "kimi_k2": "deepseek_v3",
    "bailing_moe_v2": "bailing_moe",
    "minimax_m3": "minimax_m3_vl_text",  # the decoder of minimax_m3_vl alone
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}

# Nothing can be built from these types.
TYPES_WITHOUT_CLASS = (
    "mimo",
    "nemotron-nas",
    "kimi_k3",
    "minimax_m3",
    *OWN_CODE,
    *(name for name in SAME_AS if SAME_AS[name] in OWN_CODE),
)

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
         "head_dim", "vocab_size", "max_position_embeddings")  # fmt: skip
_OPTIONAL = {"head_dim": None, "num_key_value_heads": None, "layer_types": None, "sliding_window": None}


@cache
def class_defaults() -> dict[str, dict[str, Any]]:
    """Return the defaults of transformers' config classes, which benchmarks/decoders.py writes."""
    found: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("class_defaults.json").read_text("utf-8"))
    return found


@cache
def config_json_keys() -> frozenset[str]:
    """Return the keys of a config.json that set what a decoder is."""
    found = {*SIZES, *ACTIVATION_KEYS, *NUMBERS, *ROPE_KEYS}
    for traits in TRAITS.values():
        found |= {*traits.defaults, *traits.aliases, *(name for names in traits.aliases.values() for name in names)}
    return frozenset(found)


def fields_of(config: Any, model_type: str) -> Fields:
    """Return the fields of a decoder config with the defaults and aliases of its architecture."""
    traits = TRAITS[model_type]
    return with_fallbacks(Fields(config, traits.defaults, traits.aliases), model_type)


def aliases_of(model_type: str) -> Mapping[str, tuple[str, ...]]:
    """Return the other names of an architecture's keys."""
    if model_type == "nemotron_h":
        return nemotron.ALIASES
    traits = TRAITS.get(SAME_AS.get(model_type, model_type))
    return traits.aliases if traits else {}


def with_fallbacks(fields: Fields, model_type: str) -> Fields:
    """Return the fields with the defaults of the architecture's config class, if its row does not type them."""
    if model_type in BY_CLASS:
        fields.fallbacks = {**_OPTIONAL, **class_defaults().get(model_type, {})}
    return fields
