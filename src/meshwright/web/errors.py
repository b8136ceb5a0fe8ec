"""Errors as the API tells them: what is wrong with which value, and the way out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.api import SCHEMA
from meshwright.errors import MeshwrightError

REASONS = {
    "missing": "is needed",
    "extra_forbidden": "is no field of this question",
    "string_too_long": "has more than {max_length:,} characters",
    "string_pattern_mismatch": "is not a plain file name",
    "too_long": "has more than {max_length} entries",
    "value_error": "{error}",
}
"""What is wrong with a field, by what the typed question says of it."""
HINTS = {
    "model": "a name such as llama3-8b, or drop a config.json",
    "target": "a model or recipe, such as llama3-70b",
    "gpus": "a cluster such as 8xH100 or 4x8xH200",
    "gpu": "a GPU type such as H100, at most 6 of them",
    "goal": "pretrain, sft or peft",
    "seq": "tokens such as 8192 or 8k",
    "tokens": "a token budget such as 300B or 15T",
    "price": "the price of a GPU hour, such as 2.50",
    "overrides": "at most 60 of the form layout.tp=4",
    "name": "letters, digits, blanks and _ . - such as run.sh",
    "to": "a framework such as torchtitan",
}


def to_error(
    reason: str, field: str = "", value: object = None, fix: Sequence[str] = (), error: str = "InputError"
) -> dict[str, Any]:
    """An error as a JSON object."""
    return {
        "schema": SCHEMA,
        "error": error,
        "field": _sendable(field),
        "value": None if value is None else _sendable(str(value)[:300]),
        "reason": _sendable(reason),
        "fix": list(fix),
    }


def _sendable(text: str) -> str:
    """A text without halves of characters, which JSON may name and nobody can send."""
    return text.encode("utf-8", "replace").decode()


def not_typed(found: Mapping[str, Any], skipped: int = 0, fix: Sequence[str] = ()) -> dict[str, Any]:
    """What does not have the form of a question, as a JSON object; the first parts of its place may be skipped."""
    place = [str(part) for part in found["loc"]]
    field = ".".join(place[skipped:]) or ".".join(place)
    said = REASONS.get(found["type"]) or str(found["msg"]).replace("Input should", "should").replace("{", "{{")
    value = found.get("input")
    shown = None if found["type"] == "missing" or isinstance(value, dict | list) else value
    hint = HINTS.get(place[skipped] if len(place) > skipped else "")
    return to_error(said.format(**found.get("ctx", {})), field, shown, (hint, *fix) if hint else fix)


def told_of(error: MeshwrightError) -> dict[str, Any]:
    """An error of ours as a JSON object."""
    said = error.to_dict()
    return to_error(error.reason, error.field, said["value"], [str(one) for one in error.fix], type(error).__name__)
