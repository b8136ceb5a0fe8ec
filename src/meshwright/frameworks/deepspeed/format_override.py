"""One setting as it stands in DeepSpeed's JSON."""

from __future__ import annotations

import json
from typing import Any


def spell(key: str, value: Any) -> str:
    """`"zero_optimization": {"stage": 3}`; without the key when there is no value."""
    *path, last = key.split(".")
    if value is None:
        return f"without {key}"
    text = f'"{last}": {json.dumps(list(value) if isinstance(value, tuple) else value)}'
    for part in reversed(path):
        text = f'"{part}": {{{text}}}'
    return text
