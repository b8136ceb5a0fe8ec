"""Settings of Megatron-DeepSpeed as those of Megatron-LM, whose table describes what they train."""

from __future__ import annotations

from typing import Any

import msgspec

from meshwright.frameworks.megatron_deepspeed.flags import RENAMED
from meshwright.frameworks.megatron_lm.arguments import KEY_MAP
from meshwright.frameworks.types import Settings, SourcedValue, as_int
from meshwright.recipes.key_maps import composite_keys, config_keys

JSON = "deepspeed_config."
"""Before the keys of the DeepSpeed config, in the settings of a script."""
NORMS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}
GIVEN_EXPERTS = "num_experts_as_given"  # --num-experts, which may have a value for each layer
INTERVAL = 2  # of layers with experts
RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers")
FLASH = ("use_flash_attn", "use_flash_attn_v1", "use_flash_attn_v2", "use_flash_attn_triton", "use_flash_attn_builder")
OTHER_STRATEGIES = ("use_distributed_optimizer",)  # without effect where DeepSpeed shards


def translated(given: Settings, config: Settings) -> dict[str, SourcedValue]:
    """Return the flags by Megatron-LM's key where it has one of the same meaning, and the config under its own keys."""
    found = {RENAMED.get(key, key): one for key, one in given.items()}

    def put(key: str, value: Any, at: SourcedValue) -> None:
        found[key] = msgspec.structs.replace(at, value=value)

    if "num_query_groups" in found:
        put("group_query_attention", True, found["num_query_groups"])
    if "normalization" in found and not found["normalization"].unresolved:
        put("normalization", NORMS.get(str(found["normalization"].value), "LayerNorm"), found["normalization"])
    if "glu_activation" in found:  # the width stays 4 × hidden
        put("swiglu", True, found["glu_activation"])
        hidden = as_int(found.get("hidden_size"))
        if hidden and "ffn_hidden_size" not in found:
            put("ffn_hidden_size", str(4 * hidden), found["hidden_size"])
    if "context_parallel_size" in found:
        put("cp_comm_type", ["a2a"], found["context_parallel_size"])
    if "checkpoint_activations" in found:
        put("recompute_granularity", "full", found["checkpoint_activations"])
    whole = found.get("recompute_granularity")
    if whole is not None and whole.value == "full":
        found.setdefault("recompute_method", msgspec.structs.replace(whole, value="uniform"))
        found.setdefault("recompute_num_layers", msgspec.structs.replace(whole, value="1"))
    if "checkpoint_activations" not in found and whole is None:
        found.pop("recompute_num_layers", None)
    _put_attention(found)
    _put_experts(found, given)
    if "deepspeed" in found:
        for key in OTHER_STRATEGIES:
            found.pop(key, None)
    return {**found, **{f"{JSON}{key}": one for key, one in config.items()}}


def stated_with(given: Settings) -> dict[str, str]:
    """Return the keys of recompute that follow from another flag, with that flag: a fix removes it."""
    names = {RENAMED.get(key, key) for key in given}
    if "checkpoint_activations" in names:
        return dict.fromkeys(RECOMPUTE, "checkpoint_activations")
    whole = given.get("recompute_granularity")
    follows = whole is not None and whole.value == "full"
    return {key: "recompute_granularity" for key in RECOMPUTE[1:] if key not in names} if follows else {}


def _put_attention(found: dict[str, SourcedValue]) -> None:
    flash = next((found[key] for key in FLASH if key in found), None)
    sizes = found.get("num_attention_heads")
    if flash is not None:
        found["attention_backend"] = msgspec.structs.replace(flash, value="flash")
    elif sizes is not None and "transformer_impl" not in found:
        found["attention_backend"] = msgspec.structs.replace(sizes, value="unfused")


def _put_experts(found: dict[str, SourcedValue], given: Settings) -> None:
    layers = moe_layers(given)
    given_experts = found.pop("num_experts", None)
    if given_experts is not None:
        found[GIVEN_EXPERTS] = given_experts
    if given_experts is None or not layers or not any(count > 1 for count in layers):
        for key in (
            "moe_router_topk",
            "expert_model_parallel_size",
            "moe_expert_capacity_factor",
            "moe_aux_loss_coeff",
        ):
            found.pop(key, None)  # accepted without experts, and without effect
        return

    def put(key: str, value: Any) -> None:
        found[key] = msgspec.structs.replace(given_experts, value=value)

    put("num_experts", str(max(layers)))
    put("moe_layer_freq", str([int(count > 1) for count in layers]).replace(" ", ""))
    put("moe_token_dispatcher_type", "alltoall")
    if "moe_router_topk" not in found:
        put("moe_router_topk", "1")
    split = "enable_expert_tensor_parallelism" in found
    put("expert_tensor_parallel_size", str((as_int(found.get("tensor_model_parallel_size")) or 1) if split else 1))
    kind = found.get("mlp_type")
    width = as_int(found.get("ffn_hidden_size")) or 4 * (as_int(found.get("hidden_size")) or 0)
    if kind is not None and kind.value == "residual" and width:
        put("moe_shared_expert_intermediate_size", str(width))
    if "disable_moe_token_dropping" in found:
        found.pop("moe_expert_capacity_factor", None)


def moe_layers(given: Settings) -> list[int] | None:
    """Return the experts of each layer, 1 for a dense one; None if they differ; empty if the sizes are unknown."""
    experts, layers = given.get("num_experts"), as_int(given.get("num_layers"))
    if experts is None:
        return [1] * (layers or 1)
    every = max(1, as_int(given.get("expert_interval")) or INTERVAL)
    counts = expert_counts(experts)
    if not layers or not counts:
        return []
    if len({one for one in counts if one > 1}) > 1:
        return None
    return [counts[0] if (layer + 1) % every == 0 else 1 for layer in range(layers)]


def expert_counts(experts: SourcedValue) -> list[int]:
    """Return the values of --num-experts; empty if one is unknown."""
    values = experts.value if isinstance(experts.value, list) else [experts.value]
    known = not experts.unresolved and all(str(one).isdigit() for one in values)
    return [int(one) for one in values] if known else []


def mappable(settings: Settings) -> dict[str, SourcedValue]:
    """Return the settings that Megatron-LM's table maps to the recipe; only the own table describes the others."""
    keys, together = config_keys(KEY_MAP), {key for one in composite_keys(KEY_MAP) for key in one.keys}
    found = {}
    for key, one in settings.items():
        row = keys.get(key)
        if row is None or row.status != "read" or not (row.field or key in together):
            continue
        values = one.value if isinstance(one.value, list) else [one.value]
        if not row.choices or one.unresolved or all(str(each) in row.choices for each in values):
            found[key] = one
    return found
