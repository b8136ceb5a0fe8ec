"""The transformers config of a recipe's model: as published, with the recipe's changes, or shrunk to laptop size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from meshwright.engine.model import tiny_any
from meshwright.engine.model.build import runs_own_layers, transformers_config
from meshwright.engine.model.layer_lists import (
    layer_count,
    layer_signatures,
    number_name,
    representative_layers,
    with_layers,
)
from meshwright.engine.vision.vision_modules import VISION_MODULES
from meshwright.errors import InputError
from meshwright.models import ModelSpec, aliases_of, spec_from_config
from meshwright.models.numerics import NUMBER_KEYS, published_config
from meshwright.recipes.types import Recipe


def config_for(recipe: Recipe) -> Any:
    """Return the transformers config of the model that a recipe trains, with the vision config if data has images."""
    full = transformers_config(_supported_config(recipe))
    config = full if recipe.data.images else full.get_text_config()
    config.tie_word_embeddings = full.tie_word_embeddings  # vision-language configs have it only outside
    values = _values(config) if recipe.data.images else _on_text_alone(_values(config))
    text = language_values(values)
    changes = {k: v for k, v in msgspec.structs.asdict(recipe.architecture).items() if v is not None}
    for field, value in changes.items():
        if field == "layers":
            text = with_layers(text, [i % layer_count(text) for i in range(value)])
        elif field == "rope_theta":
            text = _with_rope_base(text, value)
        else:
            text[number_name(text, field)] = value
    text = _with_positions(text, recipe)
    if recipe.train.init_std:
        if "initializer_range" not in text:
            reason = f"the initialization of {text.get('model_type')} has no standard deviation of its own"
            raise InputError(reason, field="train.init_std", value=recipe.train.init_std, fix=("train.init_std=0",))
        text["initializer_range"] = recipe.train.init_std
    return transformers_config(_with_language(values, text))


# Language models with a class only inside their vision-language model -> the values of the class that computes the
# same without images, where the three positions of a token are equal.
SAME_ON_TEXT: Mapping[str, Mapping[str, Any]] = {
    "qwen2_5_vl_text": {"model_type": "qwen2"},
    "qwen3_vl_text": {"model_type": "qwen3"},
    "qwen3_vl_moe_text": {"model_type": "qwen3_moe", "norm_topk_prob": True},
    "glm4v_moe_text": {"model_type": "glm4_moe"},
}
IMAGE_POSITIONS = ("mrope_section", "mrope_interleaved")


def _on_text_alone(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a language model's values as those of a class that transformers can build without the vision encoder."""
    same = SAME_ON_TEXT.get(values["model_type"])
    if same is None:
        return dict(values)
    rope = {key: value for key, value in (values.get("rope_parameters") or {}).items() if key not in IMAGE_POSITIONS}
    return {**values, **same, "rope_parameters": rope}


def _with_positions(text: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Return the config with the positions of a longer pretraining: what reads the trained model accepts its length.

    Scaled rotary positions depend on this number, so it stays unless the recipe has another base.
    """
    published, rope = text.get("max_position_embeddings"), text.get("rope_parameters")
    plain = isinstance(rope, Mapping) and rope.get("rope_type", "default") == "default" and "rope_theta" in rope
    longer = recipe.goal == "pretrain" and plain
    if not isinstance(published, int) or not (longer or recipe.architecture.rope_theta):
        return dict(text)
    return {**text, "max_position_embeddings": max(published, recipe.data.seq_length)}


def _with_rope_base(text: Mapping[str, Any], base: float) -> dict[str, Any]:
    """Return the config with another base of its rotary positions."""
    rope = text.get("rope_parameters")
    if not isinstance(rope, Mapping) or "rope_theta" not in rope:  # none, or one table per kind of layer
        key = "architecture.rope_theta"
        reason = f"{text.get('model_type')} has no single base of rotary positions to change"
        raise InputError(reason, field=key, value=base, fix=(f"{key}=null",))
    return {**text, "rope_parameters": {**rope, "rope_theta": base}}


def _supported_config(recipe: Recipe) -> Mapping[str, Any]:
    """Return the published config, or the language model's part of it if transformers has no class for the model."""
    published = published_config(recipe.model)
    language = published.get("llm_config")
    if not isinstance(language, Mapping):
        return published
    if recipe.data.images:
        raise InputError(
            f"transformers has no class for {published.get('model_type')}, and remote code is never run; "
            "its language model can be trained without the vision encoder",
            field="model",
            value=recipe.model,
            fix=("data.images=false",),
        )
    return language


def language_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the language model's values: the text config of a vision-language model, else all values."""
    return dict(values["text_config"] if _has_vision(values) else values)


def _has_vision(values: Mapping[str, Any]) -> bool:
    return isinstance(values.get("vision_config"), Mapping) and isinstance(values.get("text_config"), Mapping)


def _with_language(values: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    if not _has_vision(values):
        return dict(text)
    vision = dict(values["vision_config"])
    if "out_hidden_size" in vision:
        vision["out_hidden_size"] = text["hidden_size"]
    return {**values, "text_config": dict(text), "vision_config": vision}


def with_saved_numbers(config: Any, saved: Mapping[str, Any]) -> tuple[Any, dict[str, tuple[Any, Any]]]:
    """Return the config with the numbers of a saved config of the same model, and those that differ: both values.

    A run goes on with what it computed so far, even if a later version builds the model with other numbers.
    """
    values = _values(config)
    text, before = language_values(values), language_values({**saved})
    differing = {
        name: (before[name], text[name])
        for name in NUMBER_KEYS
        if name in before and name in text and not _same_number(before[name], text[name])
    }
    if not differing:
        return config, {}
    text |= {name: old for name, (old, _) in differing.items()}
    return transformers_config(_with_language(values, text)), differing


def _same_number(one: Any, other: Any) -> bool:
    """Return whether two values of a config are equal; a RoPE table also has keys that transformers derives."""
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return bool(one == other)
    return all(_same_number(one[key], other[key]) for key in one.keys() & other.keys()) and bool(
        one.get("rope_type") == other.get("rope_type")
    )


def spec_of(recipe: Recipe, config: Any) -> ModelSpec:
    """Return the ModelSpec of a transformers config, for the rules and the estimate."""
    published = published_config(recipe.model)
    values = config.to_dict()
    keys = _published_keys(published, config)
    if not _has_vision(values):
        return spec_from_config({k: v for k, v in values.items() if k in keys}, recipe.model)
    text = {k: v for k, v in values["text_config"].items() if k in keys}
    towers = {*published.get("vision_config", {}), "in_channels", "in_chans"}
    vision = {k: v for k, v in values["vision_config"].items() if k in towers}
    outer = ({*published} - {*text}) | {"model_type", "tie_word_embeddings"}
    outside = {k: v for k, v in values.items() if k in outer}
    return spec_from_config({**outside, "text_config": text, "vision_config": vision}, recipe.model)


def _published_keys(published: Mapping[str, Any], config: Any) -> set[str]:
    """Return the keys of the config.json: transformers fills in every key, also those of absent blocks."""
    text = published.get("text_config", published.get("llm_config"))
    keys = {*published, *(text if isinstance(text, Mapping) else {}), "model_type", *LISTS}
    return keys | {stored for name, stored in config.get_text_config().attribute_map.items() if name in keys}


LISTS = ("layer_types", "layers_block_type")


def _values(config: Any) -> dict[str, Any]:
    """Return a config as plain values without the keys that transformers adds or derives. None values stay."""
    return _plain(config.to_dict())


DROPPED = ("architectures", "transformers_version", "dtype", "torch_dtype", "problem_type", "qk_head_dim")


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    plain = {k: v for k, v in values.items() if k not in DROPPED and not k.startswith("_")}
    inner = {k: _plain(v) for k, v in plain.items() if k in ("text_config", "vision_config") and isinstance(v, Mapping)}
    return plain | inner | {k: _without_defaults(v) for k, v in plain.items() if k not in inner and _is_config(v)}


def _is_config(value: Any) -> bool:
    """Return whether a value is a config inside the config, as transformers writes it."""
    return isinstance(value, Mapping) and "_name_or_path" in value


def _without_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return an inner config without the values of every config, which some classes refuse."""
    from transformers import PreTrainedConfig

    usual = PreTrainedConfig().to_dict()
    return {k: v for k, v in values.items() if k not in usual or v != usual[k]}


HEADS, HEAD = 8, 8


def _kv_heads(values: Mapping[str, Any]) -> int:
    heads, kv = values["num_attention_heads"], values["num_key_value_heads"]
    return HEADS if kv == heads else 1 if kv == 1 else HEADS // 2


# Values of --tiny models. The structure stays: grouped heads stay grouped, a single kv head stays single.
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
    """Return a config of the same structure with a few thousand weights: every type of layer, small widths."""
    values = _values(config)
    text = language_values(values)
    has_vision = _has_vision(values)
    if not runs_own_layers(config):
        return tiny_any.tiny_config(text, layers, transformers_config)
    shrunk = _shrunk(text, TINY)
    small = {**with_layers(text, representative_layers(text, layers)), **shrunk, **_by_other_names(text, shrunk)}
    if "partial_rotary_factor" in (text.get("rope_parameters") or {}):
        # Three position axes need three frequencies: six rotated channels of a head.
        part = 0.75 if has_vision else 0.5
        small["rope_parameters"] = {**text["rope_parameters"], "partial_rotary_factor": part}
        small["partial_rotary_factor"] = part
    if not has_vision:
        return transformers_config(small)
    return transformers_config(_with_language(_tiny_vision(values, small), small))


def _by_other_names(values: Mapping[str, Any], shrunk: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shrunk sizes under the other names that a config gives them too."""
    groups = [(key, *names) for key, names in aliases_of(values["model_type"]).items()]
    return {
        name: shrunk[size] for group in groups for size in group if size in shrunk for name in group if name in values
    }


def _shrunk(values: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: (to(values) if callable(to) else to) for name, to in table.items() if isinstance(values.get(name), int)
    }


# Vision encoder: 2 blocks, images of 4 by 4 patches, 4 patches per token.
PATCH, SIDE = 4, 4
TINY_VISION: dict[str, int] = {
    "depth": 2,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 4,
    "num_attention_heads": 4,
    "patch_size": PATCH,
    "image_size": SIDE * PATCH,
    "num_position_embeddings": SIDE * SIDE,
    "window_size": SIDE * PATCH,
}
TINY_BLOCK_INDICES = {"deepstack_visual_indexes": [0], "fullatt_block_indexes": [1]}
TOKEN_SUFFIXES = ("_token_id", "_token_index")


def _tiny_vision(values: Mapping[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    """Return the outer and vision config for a tiny language model, whose mrope sections are adjusted."""
    vision = {**values["vision_config"], **_shrunk(values["vision_config"], TINY_VISION)}
    vision |= {name: indices for name, indices in TINY_BLOCK_INDICES.items() if vision.get(name)}
    token_keys = sorted(
        name for name, value in values.items() if name.endswith(TOKEN_SUFFIXES) and isinstance(value, int)
    )
    tokens = {name: text["vocab_size"] - 1 - i for i, name in enumerate(token_keys)}
    if values["model_type"] in VISION_MODULES and not VISION_MODULES[values["model_type"]].whole_images:
        rope = text.get("rope_parameters") or {}
        width = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
        pairs = int(width * rope.get("partial_rotary_factor", 1.0)) // 2
        text["rope_parameters"] = {**rope, "mrope_section": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]}
    return {**values, **tokens, **_shrunk(values, {"mm_tokens_per_image": SIDE}), "vision_config": vision}


def distinct_layer_types(config: Any) -> int:
    """Return the number of distinct layer types: a tiny model cannot have fewer layers."""
    return len(set(layer_signatures(language_values(_values(config)))))
