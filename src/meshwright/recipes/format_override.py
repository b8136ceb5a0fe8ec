"""Format overrides as a user would type them."""

from __future__ import annotations

from typing import Any


def format_override(key: str, value: Any) -> str:
    """Return one override, e.g. layout.sp=true."""
    if isinstance(value, bool):
        text = str(value).lower()
    elif isinstance(value, tuple | list):
        text = "[" + ",".join(str(v) for v in value) + "]"
    elif isinstance(value, dict):
        text = ",".join(f"{name}:{weight}" for name, weight in value.items())
    else:
        text = "null" if value is None else str(value)
    return f"{key}={text}"
