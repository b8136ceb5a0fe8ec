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
from meshwright.recipes.key_maps.key import CompositeKey, ConfigKey, MappedFields
from meshwright.recipes.key_maps.removed_keys import RETIRED

__all__ = [
    "FRAMEWORKS",
    "RETIRED",
    "CompositeKey",
    "ConfigKey",
    "Framework",
    "MappedFields",
    "by_foreign_key",
    "foreign_key",
    "joint_of",
    "joints",
    "to_foreign",
    "words",
]

Framework = Literal[
    "megatron_bridge", "megatron_lm", "automodel", "torchtitan", "kempnerforge", "deepspeed", "accelerate"
]
FRAMEWORKS: tuple[Framework, ...] = get_args(Framework)
IN_OVERRIDES = FRAMEWORKS[:5]
"""Frameworks whose keys are accepted as overrides."""

LEGACY = (
    ConfigKey("training.global_batch_size", "train.global_batch_size"),
    ConfigKey("training.micro_batch_size", "layout.micro_batch_size"),
    ConfigKey("training.train_iters", "train.steps"),
    ConfigKey("training.seq_length", "data.seq_length"),
)
"""Keys from older guides: accepted as overrides, never written."""


@cache
def words(framework: str) -> dict[str, ConfigKey]:
    """Return the key map of a framework, by framework key, with the keys that extensions add."""
    known = {word.key: word for word in _module(framework).WORDS}
    for path, tables in extensions.tables("keys.toml"):
        for name in tables:
            if name.replace("-", "_") not in FRAMEWORKS:
                raise extensions.invalid(path, str(unknown("framework", name, FRAMEWORKS)))
        added = tables.get(framework.replace("_", "-"), {})
        if framework == "megatron_lm":  # its key map has argparse names, not flags
            added = {key.lstrip("-").replace("-", "_"): facts for key, facts in added.items()}
        extensions.add_new(known, path, _added(path, added), "key {}".format)
    return known


def _added(path: Path, table: Mapping[str, Any]) -> Iterator[tuple[str, ConfigKey]]:
    """Yield the keys that an extension adds to a framework."""
    for key, facts in table.items():
        try:
            renamed = {"own" if name == "field" else name: value for name, value in facts.items()}
            yield key, msgspec.convert({"key": key, **renamed}, ConfigKey)
        except (msgspec.ValidationError, TypeError) as error:
            raise extensions.invalid(path, f"{key}: {error}") from error


@cache
def joints(framework: str) -> tuple[CompositeKey, ...]:
    """Return the keys of a framework that are read together."""
    found: tuple[CompositeKey, ...] = _module(framework).JOINTS
    return found


def _module(framework: str) -> Any:
    if framework not in FRAMEWORKS:
        raise unknown("framework", framework, FRAMEWORKS)
    return import_module(f"meshwright.recipes.key_maps.{framework}")


@lru_cache(maxsize=1)
def by_foreign_key() -> dict[str, ConfigKey]:
    """Return all keys accepted as overrides; a key shared by several frameworks accepts the values of each."""
    found: dict[str, ConfigKey] = {}
    for table in (*(words(framework).values() for framework in IN_OVERRIDES), LEGACY):
        for word in table:
            if not word.own or word.fate == "gone" or word.key in RETIRED:
                continue
            known = found.setdefault(word.key, word)
            if word.values:
                found[word.key] = msgspec.structs.replace(known, values={**word.values, **known.values})
    return found


@lru_cache(maxsize=1)
def joint_of() -> dict[str, CompositeKey]:
    """Return the composite key that each override key belongs to."""
    found = [composites for framework in reversed(IN_OVERRIDES) for composites in joints(framework)]
    return {key: composites for composites in found for key in composites.keys if key not in RETIRED}


@cache
def _by_own_key(framework: str) -> dict[str, ConfigKey]:
    return {word.own: word for word in reversed(words(framework).values()) if word.own and word.fate == "read"}


def foreign_key(own: str, framework: str) -> str | None:
    """Return a framework's key for a recipe field, or None if there is no single one."""
    word = _by_own_key(framework).get(own)
    return word.key if word else None


def to_foreign(own: str, value: Any, framework: str) -> tuple[str, Any]:
    """Convert a recipe field and value to a framework's key and value."""
    if foreign_key(own, framework) is None:
        raise InputError(f"{framework} has no single key for {own}", field=own, value=value)
    word = _by_own_key(framework)[own]
    return word.key, word.to_foreign(value)
