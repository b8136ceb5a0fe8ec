"""Flags for what a model computes beyond its shape, and what the flags cannot express."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright.errors import InputError
from meshwright.models import MLA, ModelSpec
from meshwright.models.numerics import UNKNOWN, Numerics, has_rope, unknown_values
from meshwright.recipes.model_changes import numerics_for
from meshwright.recipes.types import Recipe

DEFAULT_STD = 0.02
PADDING = 128  # Megatron pads the vocabulary to a multiple of this times tp
ZERO_CENTERED_NORMS = (  # their norms multiply by 1 + weight
    "gemma", "gemma2", "gemma3", "gemma3_text", "vaultgemma", "nemotron", "qwen3_next", "qwen3_5", "qwen3_5_text",
    "qwen3_5_moe", "qwen3_5_moe_text",
)  # fmt: skip
YARN_BETAS = (32, 1)  # of multi-latent attention; there are no flags for others
ARRAY = dict.fromkeys(
    (
        "moe_router_score_function", "moe_router_topk_scaling_factor", "moe_router_num_groups",
        "moe_router_group_topk", "moe_router_pre_softmax",
    ),
    "MOE_ARGS",
)  # fmt: skip


def numeric_flags(recipe: Recipe, model: ModelSpec) -> dict[str, Any]:
    """Return the flags that make the model the published one, with the recipe's changes."""
    found = numerics_for(recipe)
    return {
        **_positions(found, model),
        **_norms(found, recipe, model),
        **_router(found, model),
        **_padding(model, recipe.layout.tp),
    }


def _positions(found: Numerics, model: ModelSpec) -> dict[str, Any]:
    if not has_rope(model) or found.rope_theta is None:
        return {}
    flags: dict[str, Any] = {"rotary_base": _base(found.rope_theta)}
    if found.partial_rotary_factor != 1.0:
        flags["rotary_percent"] = found.partial_rotary_factor
    scaling = found.rope_scaling or {}
    if found.scaling_type == "llama3":
        flags |= {"use_rope_scaling": True, "rope_scaling_factor": float(scaling["factor"])}
    if model.mixers(MLA):  # it takes YaRN by default
        if found.scaling_type != "yarn":
            return {**flags, "rope_type": "rope", "no_rope_fusion": True}
        flags |= {
            "rotary_scaling_factor": float(scaling["factor"]),
            "mscale": float(scaling.get("mscale", 1.0)),
            "mscale_all_dim": float(scaling.get("mscale_all_dim", 0.0)),
        }
    return flags


def _base(value: float) -> int:
    """Return the RoPE base as --rotary-base takes it: an integer."""
    if value != int(value):
        raise InputError("--rotary-base is an integer", "architecture.rope_theta", value, [f"{round(value)}"])
    return int(value)


def _norms(found: Numerics, recipe: Recipe, model: ModelSpec) -> dict[str, Any]:
    flags: dict[str, Any] = {} if found.norm_eps is None else {"norm_epsilon": found.norm_eps}
    if model.model_type in ZERO_CENTERED_NORMS:
        flags["apply_layernorm_1p"] = True
    if recipe.train.init_std or found.init_std not in (None, DEFAULT_STD):
        flags["init_method_std"] = found.init_std
    return flags


def _router(found: Numerics, model: ModelSpec) -> dict[str, Any]:
    if model.moe is None:
        return {}
    flags: dict[str, Any] = {}
    sigmoid = found.scoring_func == "sigmoid" or (found.scoring_func is None and model.moe.balance_bias)
    if sigmoid and found.norm_topk_prob is False and model.moe.topk > 1:
        reason = "Megatron-LM divides the sigmoid scores of a token's experts by their sum: another model"
        raise InputError(reason, field="norm_topk_prob", value=False)
    if found.scoring_func not in (None, "softmax"):
        flags["moe_router_score_function"] = found.scoring_func
    elif found.norm_topk_prob is False:  # probabilities over all experts, not over the selected ones
        flags["moe_router_pre_softmax"] = True
    if found.routed_scaling_factor not in (None, 1.0):
        flags["moe_router_topk_scaling_factor"] = found.routed_scaling_factor
    if (found.n_group or 1) > 1:
        flags |= {"moe_router_num_groups": found.n_group, "moe_router_group_topk": found.topk_group}
    return flags


def _padding(model: ModelSpec, tp: int) -> dict[str, Any]:
    """Return the padding of the vocabulary: none where tp divides it, so that the model has its published size."""
    size = PADDING
    while size > 1 and model.vocab % (size * tp):
        size //= 2
    return {} if size == PADDING else {"make_vocab_size_divisible_by": size}


UNKNOWN_FLAGS = {
    "rope_theta": "--rotary-base", "norm_eps": "--norm-epsilon", "scoring_func": "--moe-router-score-function",
}  # fmt: skip
SCALINGS = ("", "llama3", "yarn")
"""Types of RoPE scaling that have flags, or a note of their own."""


def numeric_notes(recipe: Recipe, model: ModelSpec, with_padding: bool = True) -> Iterator[str]:
    """Yield what the file lacks and has to be added, and what Megatron-LM has no flag for."""
    found = numerics_for(recipe)
    missing = [f"{UNKNOWN[name]} ({UNKNOWN_FLAGS[name]})" for name in unknown_values(found, model)]
    if missing:
        what = " and ".join(missing)
        yield f"add {what} of {model.name}: not in the catalogue, so Megatron-LM's defaults apply"
    scaling = found.rope_scaling or {}
    if found.scaling_type == "yarn" and not model.mixers(MLA):
        factor = f"{scaling.get('factor', 1):g}"
        yield f"the published RoPE is scaled by YaRN (factor {factor}); Megatron-LM has no flag for it: set it in code"
    if found.scaling_type not in SCALINGS:
        scaled = f"{found.scaling_type} scaling" + (f" (factor {scaling['factor']:g})" if "factor" in scaling else "")
        yield f"the published RoPE has {scaled}; Megatron-LM has no flag for it: set it in code"
    betas = (scaling.get("beta_fast", YARN_BETAS[0]), scaling.get("beta_slow", YARN_BETAS[1]))
    if found.scaling_type == "yarn" and model.mixers(MLA) and betas != YARN_BETAS:
        yield f"YaRN's beta_fast {betas[0]:g} and beta_slow {betas[1]:g} have no flags: Megatron-LM uses {YARN_BETAS}"
    tp = recipe.layout.tp
    if with_padding and model.vocab % tp:
        multiple = _padding(model, tp)["make_vocab_size_divisible_by"] * tp
        padded = -(-model.vocab // multiple) * multiple
        flag = f"--make-vocab-size-divisible-by {multiple // tp}"
        yield f"{flag} pads the vocabulary of {model.vocab:,} to {padded:,}: tp={tp} does not divide it"
