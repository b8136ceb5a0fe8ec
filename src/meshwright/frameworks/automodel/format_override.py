"""Format a setting as YAML."""

from __future__ import annotations

import json
import re
from typing import Any

UNQUOTED = re.compile(r"(?:\.{0,2}/|[A-Za-z_])[\w./@+-]*(?: [\w./@+-]+)*")
YAML_CONSTANTS = frozenset({"true", "false", "null", "none", "yes", "no", "on", "off", "y", "n", "~"})


def format_setting(key: str, value: Any) -> str:
    """Return a setting with its dotted key."""
    return f"{key}: {scalar(value)}"


def scalar(value: Any) -> str:
    """Return a value as YAML that YAML 1.1 and 1.2 read alike."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(scalar(item) for item in value)}]"
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, str):
        plain = UNQUOTED.fullmatch(value) and (value.lower() not in YAML_CONSTANTS or value == "none")
        return value if plain else json.dumps(value, ensure_ascii=False)
    return str(value)


def _number(value: float) -> str:
    """Return a float with a decimal point, which YAML 1.1 requires before an exponent."""
    text = repr(value)
    mantissa, e, exponent = text.partition("e")
    return f"{mantissa if '.' in mantissa else f'{mantissa}.0'}{e}{exponent}" if e else text
