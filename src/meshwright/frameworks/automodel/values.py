"""Values as AutoModel's loader resolves them, without the settings it drops."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from meshwright.frameworks.automodel.extra_keys import SCHEDULE_REPLACEMENTS, STRATEGIES, TOP_LEVEL_KEYS
from meshwright.frameworks.automodel.targets import read_blocks
from meshwright.frameworks.common import is_int
from meshwright.frameworks.types import Settings, SourcedValue
from meshwright.recipes.key_maps import ConfigKey, composite_keys, config_keys
from meshwright.recipes.key_maps.automodel import PARALLEL_AXES
from meshwright.recipes.key_maps.value_maps import PIPELINE_SCHEDULES

TABLE = "automodel"

CONSTANTS = {"none": None, "None": None, "true": True, "True": True, "false": False, "False": False}

VARIABLE = re.compile(r"\$\{(?:oc\.env:)?([A-Za-z_]\w*)(?:,([^}]*))?\}")

CHECKED_PREFIXES = (
    "distributed.", "step_scheduler.", "optimizer.", "lr_scheduler.", "packed_sequence.", "peft.", "fp8.", "seed",
    "model.", "dataset.seq_len", "dataset.max_length", "clip_grad_norm.", "quantization.",
)  # fmt: skip
"""Keys whose unresolved values are reported."""

MAX_LITERAL_CHARS = 1000  # characters; AutoModel keeps longer text as a string


def normalize(settings: Settings) -> dict[str, SourcedValue]:
    """Resolve values as AutoModel's loader does: YAML 1.1, variables with defaults, literals in strings."""
    resolved = {key: _resolve(setting) for key, setting in settings.items()}
    return {
        key: setting if key.startswith(CHECKED_PREFIXES) else _mark_resolved(setting)
        for key, setting in resolved.items()
    }


def _mark_resolved(setting: SourcedValue) -> SourcedValue:
    """Mark a value as resolved because no check depends on it, such as a path or a token."""
    return msgspec.structs.replace(setting, unresolved="")


def _resolve(setting: SourcedValue) -> SourcedValue:
    value = setting.value if setting.pyyaml is msgspec.UNSET else setting.pyyaml
    if not isinstance(value, str) or setting.unresolved:
        return msgspec.structs.replace(setting, value=value)
    missing: list[str] = []

    def default(found: re.Match[str]) -> str:
        if found[2] is None:
            missing.append(found[1])
            return found[0]
        return found[2]

    text = VARIABLE.sub(default, value)
    if missing:
        return msgspec.structs.replace(setting, unresolved=f"the variable {missing[0]} is set when the job starts")
    return msgspec.structs.replace(setting, value=literal(text))


def literal(value: Any) -> Any:
    """Return the number, bool, list or None that a string contains, or the string itself."""
    if not isinstance(value, str):
        return value
    if value in CONSTANTS:
        return CONSTANTS[value]
    if not value or len(value) > MAX_LITERAL_CHARS or value[0] not in "0123456789.+-[({'\"":
        return value
    try:
        found = ast.literal_eval(value)
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return value
    return list(found) if isinstance(found, tuple) else found if isinstance(found, int | float | list | str) else value


def text_setting(settings: Settings, key: str) -> str:
    setting = settings.get(key)
    return (
        str(setting.value) if setting is not None and isinstance(setting.value, str) and not setting.unresolved else ""
    )


def setting_value(settings: Settings, key: str) -> Any:
    setting = settings.get(key)
    return None if setting is None or setting.unresolved else setting.value


def axis_size(settings: Settings, name: str) -> int:
    """Return the effective size of a parallel axis: unset, null and values below 1 count as 1."""
    setting = settings.get(f"distributed.{name}_size")
    value = None if setting is None or setting.unresolved else setting.value
    return max(1, value) if is_int(value) else 1


def strategy_name(settings: Settings) -> str:
    """Return the canonical strategy name, or an empty string if it is unknown."""
    setting = settings.get("distributed.strategy")
    if setting is None or setting.value is None:
        return "fsdp2"
    return STRATEGIES.get(str(setting.value).lower(), "")


def effective_settings(settings: Settings) -> dict[str, SourcedValue]:
    """Return the settings without those that AutoModel drops, and with its corrections."""
    table = config_keys(TABLE)
    composite = {key for composite_key in composite_keys(TABLE) for key in composite_key.keys}
    dropped_prefixes = tuple(_dropped_prefixes(settings))
    effective: dict[str, SourcedValue] = {}
    for key, setting in settings.items():
        config_key = table.get(key)
        if key.startswith(dropped_prefixes) or _is_unread_block(key):
            continue
        if setting.value is None and config_key and _has_type(config_key) and key not in composite:
            continue  # null counts as unset
        effective[key] = _correct(key, setting)
    return effective


def _has_type(config_key: ConfigKey) -> bool:
    """Return whether a key has a type, so that null is not a value."""
    return bool(config_key.field or config_key.type or config_key.choices) and "null" not in config_key.values


def _dropped_prefixes(settings: Settings) -> Iterator[str]:
    yield "rng"
    yield "compile"
    if axis_size(settings, "pp") == 1:
        yield "distributed.pipeline"
    if axis_size(settings, "ep") == 1:
        yield "distributed.moe"
    if not strategy_name(settings):
        yield "distributed.strategy"
    enabled = settings.get("fp8.enabled")
    if enabled is None or enabled.value is not True:
        yield "fp8."


def _schedule(value: Any) -> str:
    """Return a valid schedule: the given one, or its likely replacement."""
    name = str(value).lower()
    return name if name in {known.lower() for known in PIPELINE_SCHEDULES} else SCHEDULE_REPLACEMENTS.get(name, "1f1b")


def _is_unread_block(key: str) -> bool:
    top = key.split(".")[0].split("[")[0]
    return not (top in TOP_LEVEL_KEYS or top in read_blocks() or top.startswith("validation_dataset"))


def _correct(key: str, setting: SourcedValue) -> SourcedValue:
    value = setting.value
    if key == "distributed.strategy" and isinstance(value, str):
        return msgspec.structs.replace(setting, value=value.lower())
    if key == "distributed.pipeline.pp_schedule" and not setting.unresolved:
        return msgspec.structs.replace(setting, value=_schedule(value))
    below_one = is_int(value) and value < 1
    if below_one and key in {*(f"distributed.{name}_size" for name in PARALLEL_AXES), "distributed.dp_replicate_size"}:
        return msgspec.structs.replace(setting, value=1)
    if below_one and key == "distributed.dp_size":
        return msgspec.structs.replace(setting, value=None)
    return setting
