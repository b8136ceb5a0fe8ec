"""FSDP by the Trainer's own arguments: fsdp, which turns it on, and fsdp_config, in the keys of Accelerate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright import json_text
from meshwright.frameworks.types import SourcedValue
from meshwright.recipes.key_maps.accelerate import FSDP, SHARDING_STRATEGIES

ON, OFF = ("true", "1"), ("", "none", "no", "false", "0")
CARRIED = {
    "cpu_offload": "offload_params",
    "offload_params": "offload_params",
    "activation_checkpointing": "activation_checkpointing",
    "auto_wrap_policy": "auto_wrap_policy",
    "transformer_layer_cls_to_wrap": "transformer_layer_cls_to_wrap",
    "min_num_params": "min_num_params",
}
"""Entries of fsdp_config with the ends of their keys in Accelerate's config."""
WRAPS = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}  # without a policy of its own
LAYER_CLASSES = "transformer_layer_cls_to_wrap"
ARGUMENTS = ("fsdp", "fsdp_config")


def sharding_settings(arguments: Mapping[str, SourcedValue]) -> dict[str, Any]:
    """Return Accelerate's settings of FSDP that the arguments make; empty if they leave it off.

    fsdp=True is FSDP2 (transformers 5); words such as "full_shard auto_wrap" are FSDP1 unless fsdp_config has a
    version, as they were before.
    """
    setting = arguments.get("fsdp")
    if setting is None or setting.unresolved:
        return {}
    options = _options(arguments)
    words = _words(setting.value)
    kind = next((one.upper() for one in words if one.upper() in SHARDING_STRATEGIES), "")
    is_on = words[:1] in ([one] for one in ON)
    if not (kind or is_on):
        return {}
    is_second = str(options.get("version", 2 if is_on else 1)) == "2"
    found: dict[str, Any] = {**WRAPS} if is_on or is_second or "auto_wrap" in words else {}
    found |= {"offload_params": True} if "offload" in words else {}
    found |= {key: options[name] for name, key in CARRIED.items() if options.get(name)}
    reshards = options.get("reshard_after_forward")
    if is_second:
        found |= {"version": 2, "reshard_after_forward": kind != "SHARD_GRAD_OP" if reshards is None else reshards}
    else:
        named = str(reshards).upper()
        found |= {"version": 1, "sharding_strategy": named if named in SHARDING_STRATEGIES else kind or "FULL_SHARD"}
    return {f"{FSDP}fsdp_{name}": value for name, value in found.items()}


def carried_arguments(arguments: Mapping[str, SourcedValue]) -> tuple[str, ...]:
    """Return the arguments that sharding_settings carries completely: not a fsdp_config in a file of its own."""
    return tuple(name for name in ARGUMENTS if name == "fsdp" or _options(arguments))


def _words(value: Any) -> list[str]:
    words = [str(one) for one in value] if isinstance(value, list | tuple) else str(value).split()
    lower = [one.lower() for one in words]
    return [] if len(lower) == 1 and lower[0] in OFF else lower


def _options(arguments: Mapping[str, SourcedValue]) -> dict[str, Any]:
    """Return fsdp_config, a dictionary or its JSON, without the prefix of its keys, and a class named by itself."""
    setting = arguments.get("fsdp_config")
    value = None if setting is None or setting.unresolved else setting.value
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json_text.loads(value)
        except ValueError:
            value = None
    found = {str(key).removeprefix("fsdp_"): one for key, one in value.items()} if isinstance(value, dict) else {}
    alone = arguments.get(f"fsdp_{LAYER_CLASSES}")
    if LAYER_CLASSES not in found and alone is not None and not alone.unresolved:
        found[LAYER_CLASSES] = alone.value
    return found
