"""Key maps: which recipe field each config key of another framework sets, for reading and for writing.

One module per framework: `megatron_lm.py` maps Megatron-LM's flags, `torchtitan.py` torchtitan's TOML keys, and so on.
Each has a table of single keys (`KEYS`) and a list of keys that are read together (`COMPOSITE_KEYS`, in
`<framework>_composite_keys.py` where there are many). Overrides accept the keys of all frameworks at once, so a key
that two frameworks share maps to the same field in both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from meshwright import extensions
from meshwright.errors import InputError, unknown
from meshwright.recipes.key_maps import hugging_face
from meshwright.recipes.key_maps.key import CompositeKey, ConfigKey, MappedFields
from meshwright.recipes.key_maps.removed_keys import REMOVED_KEYS

__all__ = [
    "FRAMEWORKS",
    "OVERRIDE_FRAMEWORKS",
    "REMOVED_KEYS",
    "CompositeKey",
    "ConfigKey",
    "Framework",
    "MappedFields",
    "composite_keys",
    "config_keys",
    "framework_key",
    "override_composite_keys",
    "override_keys",
    "to_framework",
]

Framework = Literal[
    "megatron_bridge", "megatron_lm", "automodel", "torchtitan", "kempnerforge", "deepspeed", "accelerate"
]
FRAMEWORKS: tuple[Framework, ...] = get_args(Framework)
READ_ONLY = ("ms_swift_megatron",)
"""Key maps of front ends, whose files are read and not written."""
OVERRIDE_FRAMEWORKS = FRAMEWORKS[:5]
"""Frameworks whose keys are accepted as overrides."""

LEGACY_KEYS = (
    ConfigKey("training.global_batch_size", "train.global_batch_size"),
    ConfigKey("training.micro_batch_size", "layout.micro_batch_size"),
    ConfigKey("training.train_iters", "train.steps"),
    ConfigKey("training.seq_length", "data.seq_length"),
)
"""Keys from older guides: accepted as overrides, never written."""
INITIALIZATION_KEYS = (ConfigKey("initializer_range", "train.init_std"),)
"""Keys of the initial weights, which files of other frameworks describe as part of the model."""
OTHER_KEYS = (LEGACY_KEYS, hugging_face.KEYS, INITIALIZATION_KEYS)


@cache
def config_keys(framework: str) -> dict[str, ConfigKey]:
    """Return the key map of a framework, by framework key, with the keys that extensions add."""
    known = {config_key.key: config_key for config_key in _module(framework).KEYS}
    for path, tables in extensions.tables("keys.toml"):
        for name in tables:
            if name.replace("-", "_") not in FRAMEWORKS:
                raise extensions.invalid(path, unknown("framework", name, FRAMEWORKS).message)
        added = tables.get(framework.replace("_", "-"), {})
        if framework == "megatron_lm":  # its key map has argparse names, not flags
            added = {key.lstrip("-").replace("-", "_"): facts for key, facts in added.items()}
        extensions.add_new(known, path, _added(path, added), "key {}".format)
    return known


def _added(path: Path, table: Mapping[str, Any]) -> Iterator[tuple[str, ConfigKey]]:
    """Yield the keys that an extension adds to a framework."""
    for key, facts in table.items():
        try:
            yield key, msgspec.convert({"key": key, **facts}, ConfigKey)
        except (msgspec.ValidationError, TypeError) as error:
            raise extensions.invalid(path, f"{key}: {error}") from error


@cache
def composite_keys(framework: str) -> tuple[CompositeKey, ...]:
    """Return the keys of a framework that are read together."""
    found: tuple[CompositeKey, ...] = _module(framework).COMPOSITE_KEYS
    return found


def _module(framework: str) -> Any:
    if framework not in (*FRAMEWORKS, *READ_ONLY):
        raise unknown("framework", framework, FRAMEWORKS)
    return import_module(f"meshwright.recipes.key_maps.{framework}")


@lru_cache(maxsize=1)
def override_keys() -> dict[str, ConfigKey]:
    """Return all keys accepted as overrides; a key shared by several frameworks accepts the values of each."""
    found: dict[str, ConfigKey] = {}
    for table in (*(config_keys(framework).values() for framework in OVERRIDE_FRAMEWORKS), *OTHER_KEYS):
        for config_key in table:
            if not config_key.field or config_key.status == "removed" or config_key.key in REMOVED_KEYS:
                continue
            known = found.setdefault(config_key.key, config_key)
            if config_key.values:
                found[config_key.key] = msgspec.structs.replace(known, values={**config_key.values, **known.values})
    return found


@lru_cache(maxsize=1)
def override_composite_keys() -> dict[str, CompositeKey]:
    """Return the composite key that each override key belongs to."""
    found = [composite for framework in reversed(OVERRIDE_FRAMEWORKS) for composite in composite_keys(framework)]
    return {key: composite for composite in found for key in composite.keys if key not in REMOVED_KEYS}


@cache
def _keys_by_field(framework: str) -> dict[str, ConfigKey]:
    table = reversed(config_keys(framework).values())
    return {row.field: row for row in table if row.field and row.status == "read"}


def framework_key(field: str, framework: str) -> str | None:
    """Return a framework's key for a recipe field, or None if there is no single one."""
    config_key = _keys_by_field(framework).get(field)
    return config_key.key if config_key else None


def to_framework(field: str, value: Any, framework: str) -> tuple[str, Any]:
    """Convert a recipe field and value to a framework's key and value."""
    if framework_key(field, framework) is None:
        raise InputError(f"{framework} has no single key for {field}", field=field, value=value)
    config_key = _keys_by_field(framework)[field]
    return config_key.key, config_key.to_framework_value(value)
