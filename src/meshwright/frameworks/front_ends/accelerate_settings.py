"""How a front end's file shards its training, as keys of Accelerate's config."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from meshwright.errors import InputError
from meshwright.frameworks import accelerate_options
from meshwright.frameworks.accelerate.trl_commands import TRL_CONFIGS
from meshwright.frameworks.framework import Content
from meshwright.frameworks.front_ends.deepspeed_file import named_config
from meshwright.frameworks.front_ends.describe import FrontEnd
from meshwright.frameworks.front_ends.half_precision import passed_halves
from meshwright.frameworks.front_ends.trainer_arguments import is_true
from meshwright.frameworks.trainer import open_deepspeed_config
from meshwright.frameworks.types import Settings, SourcedValue, as_int
from meshwright.recipes.key_maps.accelerate import AXIS, FSDP, ZERO

STAGE = re.compile(r"z(?:ero)?[-_]?([0-3])", re.IGNORECASE)


def zero_settings(content: Content, settings: Settings) -> Mapping[str, Any]:
    """Return the stage and offloading of DeepSpeed's config, by the file or by its name; empty if neither has them."""
    setting = named_config(settings)
    if setting is None or setting.unresolved:
        return {}
    with suppress(InputError):
        config = open_deepspeed_config(content, setting).settings
        stage = as_int(config.get("zero_optimization.stage"))
        if stage is not None:
            found: dict[str, Any] = {f"{ZERO}zero_stage": stage}
            for part in ("optimizer", "param"):
                device = config.get(f"zero_optimization.offload_{part}.device")
                found |= {f"{ZERO}offload_{part}_device": device.value} if device is not None and stage else {}
            return found
    name = str(setting.value)
    named = STAGE.search(name)
    if named is None:
        return {}
    found = {f"{ZERO}zero_stage": int(named[1])}
    offload = "cpu" if "offload" in name else "none"
    found |= {f"{ZERO}offload_optimizer_device": offload} if named[1] != "0" else {}
    return found | ({f"{ZERO}offload_param_device": offload} if named[1] == "3" else {})


def _has_fsdp(settings: Settings) -> bool:
    if (named := settings.get("dist_config.name")) is not None and str(named.value) in ("fsdp2", "fsdpturbo"):
        return True
    return any(key == "fsdp" or key.startswith("fsdp_config") for key in settings) or "dp_shard_size" in settings


def _of_fsdp(values: Mapping[str, Any], name: str) -> Any:
    """Return a value of fsdp_config, whose keys are read with and without the prefix fsdp_; None without one."""
    return values.get(f"fsdp_config.{name}", values.get(f"fsdp_config.fsdp_{name}"))


def fsdp_version(one: FrontEnd, values: Mapping[str, Any]) -> int:
    """Return the version of FSDP that a file names, else the front end's own."""
    stated = values.get("fsdp_version") or _of_fsdp(values, "version") or one.fsdp_version
    return 1 if str(stated) == "1" else 2


def _shipped_config(one: FrontEnd, settings: Settings) -> Mapping[str, Any]:
    """Return the config of Accelerate that TRL ships under the name that a file has for it; empty if it has none."""
    setting = settings.get(accelerate_options.CONFIG) if one.is_of_command(accelerate_options.CONFIG) else None
    return {} if setting is None or setting.unresolved else TRL_CONFIGS.get(str(setting.value), {})


def leaves_sharding_open(settings: Settings, zero: Mapping[str, Any], is_stated: bool) -> bool:
    """Return whether a config of DeepSpeed that is not here shards, or one of Accelerate may, which a file is for."""
    if named_config(settings) is not None:
        return not zero
    if (setting := settings.get(accelerate_options.CONFIG)) is not None:
        return str(setting.value) not in TRL_CONFIGS
    return not is_stated and not _has_fsdp(settings)


def _mixed_precision(one: FrontEnd, values: Mapping[str, Any]) -> str:
    """Return the format of the computation; bf16 where a file states none."""
    named = str(values.get("torch_dtype")).removeprefix("torch.")
    halves = passed_halves(one, values)
    if halves.get("bf16") or named == "bfloat16":
        return "bf16"
    if halves.get("fp16"):
        return "fp16"
    if one.scales_other_dtypes and not {"bf16", "fp16"} & values.keys() and named in ("float16", "float32"):
        return "fp16"
    is_off = "bf16" in values and not one.upcasts_trained  # else the checkpoint's dtype computes
    return "no" if "fp16" in values or is_off else "bf16"


def sharding_settings(
    one: FrontEnd, settings: Settings, values: Mapping[str, Any], zero: Mapping[str, Any]
) -> Iterator[tuple[str, SourcedValue]]:
    """Yield how the training is sharded, as keys of Accelerate's config."""
    first = next(iter(settings.values()), SourcedValue("", 1, ""))
    found: dict[str, Any] = {"distributed_type": "MULTI_GPU"}
    if zero:
        found = {"distributed_type": "DEEPSPEED", **zero}
    elif shipped := _shipped_config(one, settings):
        found = dict(shipped)
    elif _has_fsdp(settings):
        found = {"distributed_type": "FSDP", f"{FSDP}fsdp_version": fsdp_version(one, values)}
        found |= {f"{FSDP}fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
        switches = ("offload_params", "activation_checkpointing")
        found |= {f"{FSDP}fsdp_{name}": True for name in switches if is_true(_of_fsdp(values, name))}
        axes = {"tp": "tensor_parallel_size", "cp": "context_parallel_size", "dp_replicate": "dp_replicate_size"}
        found |= {f"{AXIS}{axis}_size": values[key] for axis, key in axes.items() if isinstance(values.get(key), int)}
    half = found["mixed_precision"] = _mixed_precision(one, values)
    for key, value in found.items():
        place = settings.get(half, first) if key == "mixed_precision" else first
        yield key, msgspec.structs.replace(place, value=value, unresolved="", pyyaml=msgspec.UNSET)
