"""Format a setting as a Megatron-Bridge override."""

from __future__ import annotations

import re
from typing import Any

PLAIN = re.compile(r"[\w./:@+-]*")


def format_override(key: str, value: Any) -> str:
    """Return `model.tensor_model_parallel_size=4` or `--dataset squad`."""
    if key.startswith("-"):
        return key if value is True else f"{key} {text(value)}"
    return f"{key}={text(value)}"


def text(value: Any) -> str:
    """Format a value in Hydra syntax."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return "[" + ",".join(text(one) for one in value) + "]"
    if isinstance(value, str) and not PLAIN.fullmatch(value):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return repr(value) if isinstance(value, float) else str(value)
