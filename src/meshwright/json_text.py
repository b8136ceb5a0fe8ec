"""JSON that keeps every value: infinities and NaN are written as transformers does, a byte order mark is skipped.

JSON has no such numbers: `json` writes words that other parsers refuse, and `msgspec` writes null.
"""

from __future__ import annotations

import codecs
import json
import math
from typing import Any

import msgspec

TAG = "__float__"
FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}  # one NaN: equal in lists


class NestingError(msgspec.DecodeError, ValueError):
    """JSON with more nested lists and objects than the decoders' recursion allows."""

    def __init__(self) -> None:
        super().__init__("is nested too deeply")


def decode(text: str | bytes, type: Any = Any) -> Any:
    """Return the value of JSON text, of one type; raise msgspec.DecodeError if it is not valid."""
    try:
        return msgspec.json.decode(_without_mark(text), type=type)
    except RecursionError:
        raise NestingError from None


def loads(text: str | bytes, **options: Any) -> Any:
    """Return the value of JSON text with the NaN and Infinity that Python writes; raise ValueError if not valid."""
    try:
        return json.loads(_without_mark(text), **options)
    except RecursionError:
        raise NestingError from None


def encode(value: Any) -> bytes:
    """Return a value as JSON from which `decode_exact` returns it: no float is lost."""
    return msgspec.json.encode(_with_tags(msgspec.to_builtins(value, enc_hook=str)))


def decode_exact(text: str | bytes, type: Any = Any) -> Any:
    """Return the value of JSON text that `encode` wrote; raise msgspec.MsgspecError if it is not valid."""
    return msgspec.convert(_without_tags(decode(text)), type)


def decode_float(values: dict[str, Any]) -> Any:
    """Return the float that transformers writes as {"__float__": "Infinity"}; any other JSON object unchanged."""
    encoded = values.get(TAG)
    return FLOATS[encoded] if len(values) == 1 and isinstance(encoded, str) and encoded in FLOATS else values


def _with_tags(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {TAG: "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    if isinstance(value, dict):
        return {key: _with_tags(one) for key, one in value.items()}
    return [_with_tags(one) for one in value] if isinstance(value, list | tuple) else value


def _without_tags(value: Any) -> Any:
    if isinstance(value, dict):
        return decode_float({key: _without_tags(one) for key, one in value.items()})
    return [_without_tags(one) for one in value] if isinstance(value, list) else value


def _without_mark(text: str | bytes) -> str | bytes:
    """Return the text without the byte order mark that Windows programs write: JSON decoders reject it."""
    return text.removeprefix("\ufeff") if isinstance(text, str) else text.removeprefix(codecs.BOM_UTF8)
