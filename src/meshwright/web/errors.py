"""The error object over HTTP; the same as on the command line and over MCP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.version import SCHEMA

SHOWN = 300  # characters of the value


def to_error(
    message: str, field: str = "", value: object = None, fix: Sequence[str] = (), kind: str = "InputError"
) -> dict[str, Any]:
    """Return an error object."""
    return {
        "schema": SCHEMA,
        "error": {
            "kind": kind,
            "field": _encodable(field),
            "value": None if value is None else _encodable(str(value)[:SHOWN]),
            "message": _encodable(message),
            "fix": [_encodable(one) for one in fix],
        },
    }


def error_of(error: MeshwrightError, fixes: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the object of an error, with these fixes if they are given."""
    value = error.to_dict()["value"]
    return to_error(error.reason, error.field, value, error.fix if fixes is None else fixes, type(error).__name__)


def _encodable(text: str) -> str:
    """Return a text without lone surrogates, which JSON can contain and UTF-8 cannot."""
    return str(text).encode("utf-8", "replace").decode()
