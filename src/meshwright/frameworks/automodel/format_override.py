"""One setting as it stands in a YAML file."""

from __future__ import annotations

import json
import re
from typing import Any

PLAIN = re.compile(r"(?:\.{0,2}/|[A-Za-z_])[\w./@+-]*(?: [\w./@+-]+)*")
WORDS_OF_YAML = frozenset({"true", "false", "null", "none", "yes", "no", "on", "off", "y", "n", "~"})


def spell(key: str, value: Any) -> str:
    """A setting with its dotted key."""
    return f"{key}: {scalar(value)}"


def scalar(value: Any) -> str:
    """A value as YAML of any version reads it back."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(scalar(item) for item in value)}]"
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, str):
        plain = PLAIN.fullmatch(value) and (value.lower() not in WORDS_OF_YAML or value == "none")
        return value if plain else json.dumps(value, ensure_ascii=False)
    return str(value)


def _number(value: float) -> str:
    """A float with a point, which YAML 1.1 wants before an exponent."""
    text = repr(value)
    mantissa, e, exponent = text.partition("e")
    return f"{mantissa if '.' in mantissa else f'{mantissa}.0'}{e}{exponent}" if e else text
