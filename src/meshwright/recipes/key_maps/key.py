"""What a row of another framework's table is: one of its keys, what that means here, and how long it has existed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from meshwright.errors import InputError
from meshwright.recipes.types import Recipe

Values = Mapping[str, str]
"""Their values with ours, the one to write first. Case does not matter in reading; what is not listed is the same."""

Fate = Literal["read", "ignored", "gone", "replaced"]
"""What becomes of a key there: it does what it says; it is accepted and read by nothing; it is refused today; or its
value is overwritten by another one."""


class ConfigKey(msgspec.Struct, frozen=True):
    """One of their keys."""

    key: str  # as they spell it: a dotted name, or a flag with its dashes
    own: str = ""  # the field of ours that it means; empty when it means none, or only together with others
    values: Values = {}
    default: Any = UNSET  # its value there when nobody says it; UNSET when that is not one known value
    choices: tuple[str, ...] = ()  # what their parser accepts, when that is a list of words
    takes: Literal["", "flag", "int", "float", "text", "truth", "list", "map"] = ""  # "" is as our field
    since: str = ""  # version or date of its first appearance, when known
    until: str = ""  # version or date of its last one
    fate: Fate = "read"
    instead: str = ""  # what to write today, in their spelling
    note: str = ""  # what a user should know, as a sentence

    def to_own(self, text: str) -> str:
        """Their value, as typed, in our words."""
        plain = text.strip().lower()
        return next((our for their, our in self.values.items() if their.lower() == plain), text)

    def to_foreign(self, value: Any) -> Any:
        """Our value in their words."""
        if isinstance(value, tuple):
            return [self.to_foreign(part) for part in value]
        text = str(value).lower() if isinstance(value, bool) else str(value)
        theirs = next((their for their, our in self.values.items() if our == text), text)
        if theirs == text:
            if {"true", "false"} <= set(self.values) and text not in self.values:
                raise InputError(f"there is no word for it in {self.key}", field=self.own, value=value)
            return value
        return {"null": None, "true": True, "false": False}.get(theirs, theirs)


Texts = Mapping[str, str]
"""Values as typed, by key."""


class MappedFields(msgspec.Struct, frozen=True):
    """What foreign keys say of ours; what is only implied gives way to what is said outright."""

    said: Texts
    implied: Texts = {}


class CompositeKey(msgspec.Struct, frozen=True):
    """Keys of theirs that only make sense together, or that stand for several of ours."""

    keys: tuple[str, ...]
    own: tuple[str, ...]  # our fields that they decide
    read: Callable[[Texts, Recipe], MappedFields]
    write: Callable[[Recipe], Mapping[str, Any]] | None = None  # their keys for a recipe; None when only read


Gone = tuple[str, str]
"""Why one of their keys cannot be read, and what to write instead."""

__all__ = ["UNSET", "CompositeKey", "ConfigKey", "Fate", "Gone", "MappedFields", "Texts", "UnsetType", "Values"]
