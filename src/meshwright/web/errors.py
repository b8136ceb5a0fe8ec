"""The error object over HTTP; the same as on the command line and over MCP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.errors import InputError, MeshwrightError
from meshwright.version import SCHEMA


def to_error(
    message: str, field: str = "", value: object = None, fix: Sequence[str] = (), kind: str = "InputError"
) -> dict[str, Any]:
    """Return an error object."""
    found = error_of(InputError(message, field, value, fix))
    found["error"]["kind"] = kind
    return found


def error_of(error: MeshwrightError, fixes: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the object of an error, with these fixes if they are given."""
    details = error.to_dict()
    if fixes is not None:
        details["fix"] = [*fixes]
    encodable = {name: _encodable(value) if isinstance(value, str) else value for name, value in details.items()}
    return {"schema": SCHEMA, "error": encodable}


def _encodable(text: str) -> str:
    """Return a text without lone surrogates, which JSON can contain and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode()
