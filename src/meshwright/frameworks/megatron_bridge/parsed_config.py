"""What a file says before it is put together with the recipe that it starts from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from meshwright.frameworks.common import is_int
from meshwright.frameworks.framework import GpuRequest
from meshwright.frameworks.types import Settings, SourcedValue
from meshwright.recipes.types import Goal

Form = Literal["command", "python", "saved"]


class ParsedRun(msgspec.Struct, frozen=True):
    """Their settings by key, and the head of the file."""

    form: Form
    settings: Mapping[str, SourcedValue]
    recipe: SourcedValue | None = None  # its name; unresolved when only running would tell
    goal: Goal | None = None
    model: str = ""  # Hugging Face id, where the file builds the model itself
    asked: GpuRequest = GpuRequest()
    env: Mapping[str, SourcedValue] = {}
    notes: tuple[str, ...] = ()


def goal_of(name: str) -> Goal | None:
    """The goal that a recipe's name speaks of, as the runner infers it."""
    lowered = name.lower()
    if "pretrain" in lowered:
        return "pretrain"
    if "peft" in lowered or "lora" in lowered:
        return "peft"
    return "sft" if "sft" in lowered or "finetune" in lowered else None


def plain(text: str) -> Any:
    """A value as typed in an override: a number, a truth, nothing, a list, or words."""
    stripped = text.strip()
    named = {"true": True, "false": False, "null": None}  # none is a word there
    if stripped.lower() in named:
        return named[stripped.lower()]
    if stripped[:1] in "\"'" and stripped[-1:] == stripped[:1] and len(stripped) > 1:
        return stripped[1:-1]
    if stripped.startswith("[") and stripped.endswith("]"):
        return [plain(part) for part in _parts(stripped[1:-1])]
    return number(stripped)


def number(text: str) -> Any:
    """The number that a text spells, or the text."""
    if len(text) > 40 or not text.isascii():
        return text
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            continue
        return value if value == value and abs(value) != float("inf") else text
    return text


def _parts(text: str) -> list[str]:
    """The items of a list, those inside brackets left whole."""
    parts, depth, start = [], 0, 0
    for at, sign in enumerate(text):
        depth += (sign in "[({") - (sign in "])}")
        if sign == "," and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    rest = text[start:]
    return [*parts, rest] if rest.strip() else parts


def value(settings: Settings, key: str, otherwise: Any = None) -> Any:
    """What is said for a key, or something else."""
    setting = settings.get(key)
    return otherwise if setting is None or setting.unresolved else setting.value


def as_int(settings: Settings, key: str, otherwise: int) -> int:
    """The whole number above 0 that is said for a key, or another."""
    found = value(settings, key, otherwise)
    return found if is_int(found) and found > 0 else otherwise
