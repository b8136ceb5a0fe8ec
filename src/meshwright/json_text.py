"""Decode JSON from outside: text that is nested too deeply is an error of the text, not of the interpreter."""

from __future__ import annotations

import json
from typing import Any

import msgspec


class NestingError(msgspec.DecodeError, ValueError):
    """JSON with more nested lists and objects than the decoders' recursion allows."""

    def __init__(self) -> None:
        super().__init__("is nested too deeply")


def decode(text: str | bytes, type: Any = Any) -> Any:
    """Return the value of JSON text, of one type; raise msgspec.DecodeError if it is not valid."""
    try:
        return msgspec.json.decode(text, type=type)
    except RecursionError:
        raise NestingError from None


def loads(text: str | bytes, **options: Any) -> Any:
    """Return the value of JSON text with the NaN and Infinity that Python writes; raise ValueError if not valid."""
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise NestingError from None
