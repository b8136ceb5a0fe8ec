"""Types of the key maps: one framework key, the recipe field it maps to, and the versions it exists in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from meshwright.errors import InputError
from meshwright.recipes.types import Recipe

Values = Mapping[str, str]
"""Framework value → recipe value. Reading ignores case; the first match is written; unlisted values are equal."""

EXACT_CASE = ("megatron_lm", "torchtitan")
"""Key maps of frameworks whose parser compares values as they are written: argparse choices and Literal fields."""

KeyStatus = Literal["read", "ignored", "removed", "overwritten"]
"""What the framework does with a key: reads it; accepts and ignores it; rejects it; or overwrites its value."""


def to_framework_name(values: Values, value: str, default: str = "") -> str:
    """Return the first framework value that maps to a recipe value."""
    return next((name for name, mapped in values.items() if mapped == value), default)


class ConfigKey(msgspec.Struct, frozen=True):
    """A config key of another framework."""

    key: str  # as the framework writes it: a dotted name or a flag
    field: str = ""  # recipe field it maps to; empty if none, or if it is part of a CompositeKey
    values: Values = {}
    written: Values = {}  # recipe value → framework value, where reading that one gives another recipe value
    default: Any = UNSET  # UNSET if there is no single known default
    choices: tuple[str, ...] = ()  # values the framework's parser accepts
    any_case: bool = False  # whether it accepts them in upper and lower case, in a framework of EXACT_CASE
    type: Literal["", "flag", "int", "float", "str", "bool", "list", "map"] = ""  # "": the type of the recipe field
    since: str = ""  # first version or date, if known
    until: str = ""  # last version or date, if known
    status: KeyStatus = "read"
    replacement: str = ""  # what to write instead, in the framework's syntax; … is the value
    replacement_if_off: str = ""  # instead of false, 0 or none, where `replacement` turns on; empty: leave the key out
    switch: str = ""  # key that must be on for a removed key to have an effect
    note: str = ""  # one sentence for the user

    def to_recipe_value(self, text: str) -> str:
        """Convert a raw framework value to the recipe value."""
        plain = text.strip().lower()
        return next((value for name, value in self.values.items() if name.lower() == plain), text)

    def to_framework_value(self, value: Any) -> Any:
        """Convert a recipe value to the framework value."""
        if isinstance(value, tuple):
            return [self.to_framework_value(part) for part in value]
        text = str(value).lower() if isinstance(value, bool) else str(value)
        name = self.written.get(text) or to_framework_name(self.values, text, text)
        if name == text:
            if {"true", "false"} <= set(self.values) and text not in self.values:
                raise InputError(f"has no equivalent value in {self.key}", field=self.field, value=value)
            return value
        return {"null": None, "true": True, "false": False}.get(name, name)


RawValues = Mapping[str, str]
"""Values as written, by key."""


class MappedFields(msgspec.Struct, frozen=True):
    """Recipe fields set by framework keys. Implied values apply only where a field is not set explicitly."""

    explicit: RawValues
    implied: RawValues = {}


class CompositeKey(msgspec.Struct, frozen=True):
    """Framework keys that are read together, or that map to several recipe fields."""

    keys: tuple[str, ...]
    fields: tuple[str, ...]  # recipe fields they set
    read: Callable[[RawValues, Recipe], MappedFields]
    write: Callable[[Recipe], Mapping[str, Any]] | None = None  # framework keys for a recipe; None: read-only
    read_override: Callable[[RawValues, Recipe], MappedFields] | None = None  # of key=value; None: as `read`


RemovedKey = tuple[str, ...]
"""Why a key is not accepted, and its replacements: the first that the typed command accepts; none: leave it out.

A replacement is an override, an option (`--out {value}`) or a whole command (`meshwright …`).
"""

__all__ = [
    "EXACT_CASE",
    "UNSET",
    "CompositeKey",
    "ConfigKey",
    "KeyStatus",
    "MappedFields",
    "RawValues",
    "RemovedKey",
    "UnsetType",
    "Values",
    "to_framework_name",
]
