"""The transformers config of a recipe's model: as published, with the recipe's changes, or shrunk to laptop size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from meshwright.engine.model.build import transformers_config
from meshwright.errors import InputError
from meshwright.models import ModelSpec, config_of, find, load_config, names, spec_from_config
from meshwright.recipes.types import Recipe

# A recipe's architecture field -> the names transformers has for it.
NAMES = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd"),
    "ffn": ("intermediate_size", "n_inner"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "vocab": ("vocab_size",),
    "experts": ("num_experts", "n_routed_experts", "num_local_experts"),
    "topk": ("num_experts_per_tok",),
}


def config_for(recipe: Recipe) -> Any:
    """The transformers config of the language model that a recipe trains."""
    config = transformers_config(_published(recipe.model)).get_text_config()
    values = _values(config)
    changes = {k: v for k, v in msgspec.structs.asdict(recipe.architecture).items() if v is not None}
    for field, value in changes.items():
        if field == "layers":
            values = with_layers(values, [i % layer_count(values) for i in range(value)])
        else:
            values[_named(values, field)] = value
    return transformers_config(values)


def spec_of(recipe: Recipe, config: Any) -> ModelSpec:
    """The facts of the model that a transformers config builds, for the rules and the estimate."""
    published = _published(recipe.model)
    text = published.get("text_config")
    # transformers gives every key a value, also those of blocks that a model of the family does not have.
    known = {*published, *(text if isinstance(text, Mapping) else {}), "model_type", *LISTS}
    known |= {stored for name, stored in config.attribute_map.items() if name in known}
    return spec_from_config({k: v for k, v in config.to_dict().items() if k in known}, recipe.model)


LISTS = ("layer_types", "layers_block_type")


def _published(model: str) -> Mapping[str, Any]:
    """The config.json of a catalogue name in any spelling, or at a path."""
    name = find(model).name
    return config_of(name) if name in names() else load_config(model)


def _values(config: Any) -> dict[str, Any]:
    """A config as plain values; what transformers adds or derives by itself left out. None says something too."""
    dropped = ("architectures", "transformers_version", "dtype", "torch_dtype", "problem_type", "qk_head_dim")
    return {k: v for k, v in config.to_dict().items() if k not in dropped and not k.startswith("_")}


def _named(values: Mapping[str, Any], field: str) -> str:
    found = next((name for name in NAMES[field] if name in values), None)
    if found is None:
        raise InputError(f"this model has no {field} to change", field=f"architecture.{field}")
    return found


def layer_count(values: Mapping[str, Any]) -> int:
    """Layers of a config, where it gives their number or lists them."""
    if "layers_block_type" in values:
        return len(values["layers_block_type"])
    return int(values[_named(values, "layers")])


def with_layers(values: Mapping[str, Any], chosen: list[int]) -> dict[str, Any]:
    """The config with these layers of it, in this order: every list that has an entry for each layer follows."""
    count, changed = layer_count(values), dict(values)
    for name, value in values.items():
        if isinstance(value, list) and len(value) == count:
            changed[name] = [value[i] for i in chosen]
    if "first_k_dense_replace" in values:
        changed["first_k_dense_replace"] = sum(i < values["first_k_dense_replace"] for i in chosen)
    for name in NAMES["layers"]:
        if name in values:
            changed[name] = len(chosen)
    return changed


def layer_kinds(values: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """What each layer is: layers of one kind are alike."""
    count = layer_count(values)
    lists = [v for v in values.values() if isinstance(v, list) and len(v) == count]
    dense = values.get("first_k_dense_replace", 0)
    return [(*(v[i] for v in lists), i < dense) for i in range(count)]


HEADS, HEAD = 8, 8


def _kv_heads(values: Mapping[str, Any]) -> int:
    heads, kv = values["num_attention_heads"], values["num_key_value_heads"]
    return HEADS if kv == heads else 1 if kv == 1 else HEADS // 2


# What --tiny makes of each value it finds. Structure stays: grouped heads stay grouped, one shared head stays one.
TINY: dict[str, int | Callable[[Mapping[str, Any]], int]] = {
    "hidden_size": HEADS * HEAD,
    "n_embd": HEADS * HEAD,
    "intermediate_size": 2 * HEADS * HEAD,
    "n_inner": 2 * HEADS * HEAD,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "moe_latent_size": 32,
    "num_attention_heads": HEADS,
    "n_head": HEADS,
    "num_key_value_heads": _kv_heads,
    "head_dim": HEAD,
    "query_pre_attn_scalar": HEAD,
    "vocab_size": 256,
    "num_experts": lambda v: min(v["num_experts"], 8),
    "n_routed_experts": lambda v: min(v["n_routed_experts"], 8),
    "num_local_experts": lambda v: min(v["num_local_experts"], 8),
    "num_experts_per_tok": lambda v: min(v["num_experts_per_tok"], 2),
    "n_shared_experts": 1,
    "n_group": lambda v: min(v["n_group"], 2),
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": HEAD,
    "qk_nope_head_dim": HEAD,
    "v_head_dim": HEAD,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "n_groups": lambda v: min(v["n_groups"], 8),
    "chunk_size": 16,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": lambda v: 8 * min(2, v["linear_num_value_heads"] // v["linear_num_key_heads"]),
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "sliding_window": 16,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def tiny(config: Any, layers: int) -> Any:
    """A config of the same structure with a few thousand weights: every kind of layer is there, widths are small."""
    values = _values(config)
    changed: dict[str, Any] = {
        name: (to(values) if callable(to) else to) for name, to in TINY.items() if isinstance(values.get(name), int)
    }
    if "partial_rotary_factor" in (values.get("rope_parameters") or {}):
        changed["rope_parameters"] = {**values["rope_parameters"], "partial_rotary_factor": 0.5}
        changed["partial_rotary_factor"] = 0.5
    return transformers_config({**with_layers(values, _telling_layers(values, layers)), **changed})


def _telling_layers(values: Mapping[str, Any], count: int) -> list[int]:
    """Layers in which every kind occurs, as evenly as the count allows, in the model's own order."""
    kinds = layer_kinds(values)
    firsts = {kind: kinds.index(kind) for kind in dict.fromkeys(kinds)}
    chosen = sorted(firsts.values())
    others = [i for i in range(len(kinds)) if i not in chosen]
    chosen += others[: max(0, count - len(chosen))]
    while len(chosen) < count:  # a model with fewer layers than stages: its last kind once more
        chosen.append(chosen[-1])
    return sorted(chosen)


def kinds_of_layers(config: Any) -> int:
    """How many kinds of layers a model has: a tiny one cannot have fewer layers."""
    return len(set(layer_kinds(_values(config))))
