"""Format a setting as DeepSpeed JSON."""

from __future__ import annotations

import json
from typing import Any


def format_setting(key: str, value: Any) -> str:
    """Return e.g. `"zero_optimization": {"stage": 3}`, or `without KEY` for None."""
    *path, last = key.split(".")
    if value is None:
        return f"without {key}"
    text = f'"{last}": {json.dumps(list(value) if isinstance(value, tuple) else value)}'
    for part in reversed(path):
        text = f'"{part}": {{{text}}}'
    return text
