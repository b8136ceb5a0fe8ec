"""Errors as the API tells them: what is wrong with which value, and the way out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.api import SCHEMA
from meshwright.errors import MeshwrightError


def told(
    reason: str, field: str = "", value: object = None, fix: Sequence[str] = (), error: str = "InputError"
) -> dict[str, Any]:
    """An error as a JSON object."""
    return {
        "schema": SCHEMA,
        "error": error,
        "field": field,
        "value": None if value is None else str(value)[:300],
        "reason": reason,
        "fix": list(fix),
    }


def told_of(error: MeshwrightError) -> dict[str, Any]:
    """An error of ours as a JSON object."""
    said = error.to_dict()
    return told(error.reason, error.field, said["value"], [str(one) for one in error.fix], type(error).__name__)
