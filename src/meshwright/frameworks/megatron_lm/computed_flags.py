"""Flags that change what a model computes, compared with those of a published model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from meshwright.errors import InputError
from meshwright.frameworks.framework import ComputedDifference, ParsedConfig
from meshwright.frameworks.mapping import same_value
from meshwright.frameworks.megatron_lm.arguments import UNREAD_ARGS
from meshwright.frameworks.megatron_lm.numerics import numeric_flags
from meshwright.frameworks.megatron_lm.sizes import model_flags
from meshwright.models import MLA, ModelSpec
from meshwright.recipes.types import Architecture, Recipe

COMPUTED: Mapping[str, Any] = {
    "position_embedding_type": "learned_absolute",
    "rotary_percent": 1.0,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "normalization": "LayerNorm",
    "swiglu": False,
    "squared_relu": False,
    "disable_bias_linear": False,
    "add_qkv_bias": False,
    "attention_output_gate": False,
    "softmax_type": "vanilla",
    "window_size": None,
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
    "moe_router_topk_scaling_factor": 1.0,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_shared_expert_gate": False,
}
"""Flags of what a model computes, beside its sizes, with Megatron-LM's defaults."""
LATENT: Mapping[str, Any] = {"rope_type": "yarn", "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
"""The same for multi-latent attention, whose RoPE is YaRN by default."""
NEVER: Mapping[str, Any] = {
    "apply_layernorm_1p": False,
    "rotary_interleaved": False,
    "quick_geglu": False,
    "no_rope_freq": None,
    "qk_l2_norm": False,
    "apply_residual_connection_post_layernorm": False,
    "rotary_seq_len_interpolation_factor": None,
}
"""Flags that change the computation and that no model of the PLAIN types has."""
PLAIN = ("llama", "qwen2", "qwen3", "mistral")
SCALING = ("use_rope_scaling", "rope_scaling_factor", *LATENT)
"""Flags that stretch trained positions: a model that starts from random weights has no need for the published ones."""
NOT_STORED = SCALING
"""Flags that --use-checkpoint-args does not read from a checkpoint."""


def computed_differences(parsed: ParsedConfig, model: ModelSpec, recipe: Recipe) -> Iterator[ComputedDifference]:
    """Yield flags with which the file's model computes something else than a published one of its shape."""
    if UNREAD_ARGS in parsed.settings:
        return
    own = msgspec.structs.replace(recipe, model=model.name, architecture=Architecture())
    expected: dict[str, Any] = {}
    with suppress(InputError):  # a model that Megatron-LM's flags cannot build
        expected = {**model_flags(model, own), **numeric_flags(own, model)}
    latent = bool(model.mixers(MLA))
    defaults = {**COMPUTED, **(LATENT if latent else {}), **(NEVER if model.model_type in PLAIN else {})}
    for key, default in defaults.items() if expected else ():
        if key in parsed.possible_keys or ("use_checkpoint_args" in parsed.settings and key not in NOT_STORED):
            continue
        found, wanted = _found(parsed, key, default), expected.get(key)
        wanted = default if wanted is None else wanted
        if found is UNKNOWN or _same(found, wanted) or not _is_read(key, parsed, expected, recipe):
            continue
        also = {"rope_scaling_factor": expected["rope_scaling_factor"]} if key == "use_rope_scaling" and wanted else {}
        yield ComputedDifference(key, found, wanted, also, key in SCALING)


UNKNOWN = object()


def _found(parsed: ParsedConfig, key: str, default: Any) -> Any:
    """Return the value of a flag in the file, or Megatron-LM's default."""
    setting = parsed.settings.get(key)
    if key == "position_embedding_type" and setting is None and "use_rotary_position_embeddings" in parsed.settings:
        return "rope"
    if setting is None:
        return default
    if setting.unresolved:
        return UNKNOWN
    if isinstance(default, bool):
        return True
    with suppress(ValueError, TypeError):
        return float(setting.value) if isinstance(default, float) else setting.value
    return UNKNOWN


def _same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, str) or isinstance(found, str):
        return str(found).strip("()").replace(" ", "") == str(wanted)
    return same_value(found, wanted)


def _is_read(key: str, parsed: ParsedConfig, expected: Mapping[str, Any], recipe: Recipe) -> bool:
    """Return whether Megatron-LM reads a flag here, so that another value changes something."""
    if key == "rope_scaling_factor":  # without scaling, that difference is the finding
        return "use_rope_scaling" in parsed.settings and bool(expected.get("use_rope_scaling"))
    if key == "add_qkv_bias":  # linear layers with biases have them there too
        return "disable_bias_linear" in parsed.settings
    if key == "window_size":  # a window wider than the sequences has no effect
        width = str(expected.get(key) or "0").partition(",")[0]
        return parsed.settings.get(key) is not None or int(width) + 1 < recipe.data.seq_length
    if key == "position_embedding_type":  # some scripts leave it to other flags of theirs
        return expected.get(key) in ("rope", "learned_absolute")
    if key in ("moe_router_group_topk", "moe_router_num_groups"):
        return "moe_router_num_groups" in (*parsed.settings, *expected)
    return True
