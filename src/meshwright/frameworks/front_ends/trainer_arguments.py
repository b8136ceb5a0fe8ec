"""A front end's settings as arguments of the Trainer, TRL and peft, and its own keys of those."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from meshwright.errors import InputError
from meshwright.frameworks.framework import ParsedConfig
from meshwright.frameworks.front_ends.describe import FUSED_LOSS, QUANTIZED_LORA, FrontEnd
from meshwright.frameworks.front_ends.half_precision import HALVES, passed_halves
from meshwright.frameworks.front_ends.keys import SHORT_KERNELS, plugin_line, plugins_of
from meshwright.frameworks.front_ends.synonyms import key_for
from meshwright.frameworks.key_table import KeyTable
from meshwright.frameworks.start_checks.axolotl import ATTENTION_FLAGS
from meshwright.frameworks.trainer_args import BITS
from meshwright.frameworks.trainer_fields import DATASETS, LISTS, SCHEDULE, SHARE, WARMUPS, WEIGHT_DTYPES
from meshwright.frameworks.types import Settings, SourcedValue
from meshwright.frameworks.unused_adapters import is_of_adapters
from meshwright.models import quantized_bits
from meshwright.recipes.adapter_targets import groups_of, require_targets
from meshwright.recipes.key_maps import hugging_face
from meshwright.recipes.replacements import WarmupShare

FIRST_ITEM = re.compile(r"(\w+)\[0\]\.(\w+)")  # of a list of sections
DEFAULT_KERNEL = "auto"  # of LLaMA-Factory and Unsloth's files
MODEL = "model_name_or_path"
LOADED = {"qlora": "load_in_4bit", "lora8bit": "load_in_8bit"}
"""Argument that loads the frozen weights, by adapters."""
QUANTIZER = "quant_method"  # of ms-swift, without which it refuses a number of bits


def warmup_of(one: FrontEnd, parsed: ParsedConfig, arguments: Settings) -> WarmupShare:
    """Return the warmup as a share of the steps: that of the file, or the front end's own if the file has none."""
    stated = parsed.program.warmup_share
    if stated:
        return msgspec.structs.replace(stated, rounds_down=one.warmup.rounds_down)
    is_set = any(name in arguments for name in (*WARMUPS, SHARE))
    is_constant = str(getattr(arguments.get(SCHEDULE), "value", "")) == "constant"  # has none
    return stated if is_set or is_constant else one.warmup


def is_true(value: Any) -> bool:
    return str(value).lower() == "true"


def own_keys(
    one: FrontEnd, known: KeyTable, settings: Settings, arguments: Mapping[str, SourcedValue], is_command: bool
) -> dict[str, Any]:
    """Return the front end's key of each argument of the Trainer, and the lines that a key needs, for fixes."""
    written = {argument: key for key, argument in one.names.items() if argument in arguments and key in settings}
    keys = {
        name: written.get(name) or key_for(one, known, name)
        for name in {
            *one.names.values(),
            *(row.key for row in hugging_face.KEYS),
            *LOADED.values(),
            *BITS,
            *WEIGHT_DTYPES,
        }
    }
    former, today = (keys[name] for name in reversed(WEIGHT_DTYPES))
    keys[WEIGHT_DTYPES[0]] = today or former
    listed = plugins_of(settings)
    needed = {
        key: plugin_line(plugin, settings)
        for key in keys.values()
        for start, plugin in one.plugins.items()
        if key.startswith(start) and plugin not in listed
    }
    if str(getattr(settings.get("adapter"), "value", "")) == "lora":  # which Axolotl loads in 16 bits or 8
        needed[LOADED["qlora"]] = "adapter: qlora"
    if known.find("", QUANTIZER) and QUANTIZER not in settings:
        needed["quant_bits"] = f"--{QUANTIZER} bnb" if is_command else f"{QUANTIZER}: bnb"
    if older := next((key for key in ATTENTION_FLAGS if key in settings and is_true(settings[key].value)), ""):
        needed["attn_implementation"] = f"without {older}"  # the schema refuses both
    return {"written_keys": {name: key for name, key in keys.items() if key}, "needed_lines": needed,
        "written_values": SHORT_KERNELS, "is_command": is_command, "is_front_end": True}  # fmt: skip


def _of_all_items(values: Mapping[str, Any], section: str, key: str) -> Iterator[str]:
    """Yield the values of a key in all items of a list of sections: datasets[0].path, datasets[1].path, …"""
    at = 0
    while (value := values.get(f"{section}[{at}].{key}")) is not None:
        yield str(value)
        at += 1


def trainer_arguments(
    one: FrontEnd, settings: Settings, values: Mapping[str, Any]
) -> Iterator[tuple[str, SourcedValue]]:
    """Yield the settings as arguments of the Trainer, TRL and peft."""
    adapters, halves = adapters_of(one, values), passed_halves(one, values)
    for key, setting in settings.items():
        name = one.names.get(key)
        if name is None or setting.value is None or (not adapters and is_of_adapters(name)):
            continue
        value = setting.value
        if isinstance(value, list):
            value = ",".join(map(str, value)) if name in (*LISTS, *DATASETS) else value[0] if value else ""
        if items := FIRST_ITEM.fullmatch(key):
            value = ",".join(_of_all_items(values, *items.groups()))
        if name == "gradient_checkpointing":
            value = str(value).lower() not in ("false", "no")
        if name in HALVES:
            value = halves.get(name, False)
        if name == "attn_implementation":
            value = hugging_face.OTHER_KERNEL_NAMES.get(str(value).lower(), value)
            is_read = setting.unresolved or hugging_face.is_attention_kernel(str(value))
            if setting.value == DEFAULT_KERNEL or not is_read:
                continue  # transformers' own choice, or a kernel of the front end
        if name in LISTS and (value == "all-linear" or not _is_known(str(value).split(","))):
            name, value = "lora_target_linear", True
        if name in ("max_steps", "eval_steps", "save_steps") and isinstance(value, float) and value < 1:
            continue  # a share of the training
        yield name, msgspec.structs.replace(setting, value=value)
    flag = next((key for key in ATTENTION_FLAGS if is_true(values.get(key))), "")
    if flag in settings and not values.get("attn_implementation"):
        yield "attn_implementation", msgspec.structs.replace(settings[flag], value=ATTENTION_FLAGS[flag])
    if fused := _fused_loss(one, settings, values):
        yield FUSED_LOSS, msgspec.structs.replace(fused, value=True)
    first = next(iter(settings.values()), SourcedValue(True, 1, ""))
    if not any(one.names.get(key) == "gradient_checkpointing" for key in settings):
        yield "gradient_checkpointing", msgspec.structs.replace(first, value=one.recomputes(values), unresolved="")
    if (truncation := one.truncation(values)) != "end":
        yield "truncation_mode", msgspec.structs.replace(first, value=truncation, unresolved="")
    if adapters:
        yield "use_peft", msgspec.structs.replace(first, value=True, unresolved="")
    if adapters in LOADED:
        yield LOADED[adapters], msgspec.structs.replace(first, value=True, unresolved="")


def _fused_loss(one: FrontEnd, settings: Settings, values: Mapping[str, Any]) -> SourcedValue | None:
    """Return the setting that fuses the loss: a key that is on, or a plugin that turns an unset key on."""
    keys = [key for key, name in one.names.items() if name == FUSED_LOSS]
    on = next((key for key in (*keys, *one.fused_losses) if key in settings and is_true(values.get(key))), "")
    if on:
        return settings[on]
    listed = plugins_of(settings)
    found = (plugin for key, plugin in one.fused_losses.items() if plugin in listed and values.get(key) is None)
    return next((listed[plugin] for plugin in found), None)


def adapters_of(one: FrontEnd, values: Mapping[str, Any]) -> str:
    """Return the adapters of a file; LoRA on a model that is published in fewer bits is named by those."""
    found = one.adapters(values)
    named = next((str(values[key]) for key, name in one.names.items() if name == MODEL and values.get(key)), "")
    bits = quantized_bits(named) if found == "lora" else 0
    return QUANTIZED_LORA.get(bits, found)


def _is_known(targets: list[str]) -> bool:
    """Return whether recipes have names for these adapter targets; the memory of others is that of all layers."""
    try:
        require_targets(tuple(targets))
    except InputError:
        return False
    return bool(groups_of(tuple(targets)))
