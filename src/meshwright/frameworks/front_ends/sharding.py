"""Sharding in a front end's own keys: the configs that it ships, and the settings of a fix that choose one of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.errors import InputError
from meshwright.frameworks.types import ProgramArguments
from meshwright.recipes.key_maps.accelerate import AXIS, FSDP, ZERO, uses_deepspeed
from meshwright.recipes.key_maps.deepspeed import zero_stage
from meshwright.recipes.types import Recipe

Configs = Mapping[str, Mapping[str, Any]]
"""Settings by what they shard: fsdp2, zero1 to zero3, each also with _offload."""
_FSDP2 = {
    "fsdp_version": 2,
    "fsdp_config.auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_config.reshard_after_forward": True,
}
_FACTORY_FILES = {
    "zero2": "ds_z2_config.json",
    "zero2_offload": "ds_z2_offload_config.json",
    "zero3": "ds_z3_config.json",
    "zero3_offload": "ds_z3_offload_config.json",
}
AXOLOTL: Configs = {
    "fsdp2": _FSDP2,
    "fsdp2_offload": {**_FSDP2, "fsdp_config.offload_params": True},
    **{f"zero{stage}": {"deepspeed": f"deepspeed_configs/zero{stage}.json"} for stage in (1, 2, 3)},
    "zero3_offload": {"deepspeed": "deepspeed_configs/zero3_bf16_cpuoffload_all.json"},
    "tp": {"tensor_parallel_size": None},
    "cp": {"context_parallel_size": None},
    "dp_replicate": {"dp_replicate_size": None},
}
LLAMA_FACTORY: Configs = {
    name: {"deepspeed": f"examples/deepspeed/{file}"} for name, file in _FACTORY_FILES.items()
}  # files of its repository
LLAMA_FACTORY_V1: Configs = {
    "fsdp2": {"dist_config.name": "fsdp2"},
    **{
        name: {"dist_config.name": "deepspeed", "dist_config.config_file": f"examples/deepspeed/{file}"}
        for name, file in _FACTORY_FILES.items()
    },
}
MS_SWIFT: Configs = {
    name: {"deepspeed": name} for name in ("zero1", "zero2", "zero2_offload", "zero3", "zero3_offload")
}
TRL: Configs = {name: {"accelerate_config": name} for name in ("fsdp2", "zero1", "zero2", "zero3")}
AXES = {f"{AXIS}{name}_size": name for name in ("tp", "cp", "dp_replicate")}


def own_settings(program: ProgramArguments, settings: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Return settings of Accelerate's config as those of the front end; `recipe` is what they make.

    Raise InputError if it has no key for one of them.
    """
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if key == "distributed_type" or key.startswith((FSDP, ZERO)):
            found |= _sharded(program.sharding, recipe)
        elif key in AXES and AXES[key] in program.sharding:
            found |= dict.fromkeys(program.sharding[AXES[key]], value)
        elif key == "mixed_precision" and value in ("bf16", "fp16"):
            others = {name: False for name in ("bf16", "fp16") if name != value and name in program.given}
            found |= {program.written_keys.get(name, name): on for name, on in {value: True, **others}.items()}
        elif key in program.written_keys:
            found[program.written_keys[key]] = value
        else:
            raise InputError("the front end has no key for it", field=key)
    return found


def _sharded(configs: Configs, recipe: Recipe) -> Mapping[str, Any]:
    """Return the settings that shard as a recipe does; ZeRO-3 where there are none for FSDP2."""
    layout = recipe.layout
    end = "" if layout.offload == "none" else "_offload"
    is_fsdp = layout.strategy == "fsdp2" and not uses_deepspeed(recipe)
    stage = 3 if layout.offload == "params" else zero_stage(recipe)  # only stage 3 shards parameters
    wanted = [f"fsdp2{end}", f"zero3{end}"] if is_fsdp else [f"zero{stage}{end}"]
    found = next((configs[name] for name in wanted if name in configs), None)
    if found is None or layout.strategy == "ddp":
        raise InputError("the front end has no config that shards like this", field="layout.strategy")
    key = "fsdp_config.reshard_after_forward"
    return {**found, key: layout.reshard_after_forward} if key in found else found
