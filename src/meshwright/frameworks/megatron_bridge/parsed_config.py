"""A file's settings before they are combined with its base recipe, and value parsing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from meshwright.frameworks.common import is_int
from meshwright.frameworks.framework import GpuRequest
from meshwright.frameworks.types import Settings, SourcedValue
from meshwright.recipes.types import Goal
from meshwright.rules.rule import Finding

Form = Literal["command", "python", "saved"]


class ParsedRun(msgspec.Struct, frozen=True):
    """Settings by key, and what the file says about recipe, goal and model."""

    form: Form
    settings: Mapping[str, SourcedValue]
    recipe: SourcedValue | None = None  # its name; may be unresolved
    goal: Goal | None = None
    model: str = ""  # Hugging Face id, if the file builds the model itself
    gpu_request: GpuRequest = GpuRequest()
    env: Mapping[str, SourcedValue] = {}
    notes: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()


def infer_goal(name: str) -> Goal | None:
    """Infer the goal from a recipe name, as the runner does."""
    lowered = name.lower()
    if "pretrain" in lowered:
        return "pretrain"
    if "peft" in lowered or "lora" in lowered:
        return "peft"
    return "sft" if "sft" in lowered or "finetune" in lowered else None


def parse_value(text: str) -> Any:
    """Parse an override value: number, boolean, null, list or string."""
    stripped = text.strip()
    named = {"true": True, "false": False, "null": None}  # "none" is a string in Hydra
    if stripped.lower() in named:
        return named[stripped.lower()]
    if stripped[:1] in "\"'" and stripped[-1:] == stripped[:1] and len(stripped) > 1:
        return stripped[1:-1]
    if stripped.startswith("[") and stripped.endswith("]"):
        return [parse_value(part) for part in _parts(stripped[1:-1])]
    return parse_number(stripped)


def parse_number(text: str) -> Any:
    """Return the number a text represents, or the text."""
    if len(text) > 40 or not text.isascii():
        return text
    for number_type in (int, float):
        try:
            value = number_type(text)
        except ValueError:
            continue
        return value if value == value and abs(value) != float("inf") else text
    return text


def _parts(text: str) -> list[str]:
    """Split a list at top-level commas."""
    parts, depth, start = [], 0, 0
    for at, char in enumerate(text):
        depth += (char in "[({") - (char in "])}")
        if char == "," and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    rest = text[start:]
    return [*parts, rest] if rest.strip() else parts


def get_value(settings: Settings, key: str, default: Any = None) -> Any:
    """Return the resolved value of a key, or the default."""
    setting = settings.get(key)
    return default if setting is None or setting.unresolved else setting.value


def positive_int(settings: Settings, key: str, default: int) -> int:
    """Return the value of a key if it is a positive integer, or the default."""
    found = get_value(settings, key, default)
    return found if is_int(found) and found > 0 else default
