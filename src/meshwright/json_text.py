"""Decode JSON from outside: nesting that is too deep is an error of the text, a byte order mark is skipped."""

from __future__ import annotations

import codecs
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
        return msgspec.json.decode(_without_mark(text), type=type)
    except RecursionError:
        raise NestingError from None


def loads(text: str | bytes, **options: Any) -> Any:
    """Return the value of JSON text with the NaN and Infinity that Python writes; raise ValueError if not valid."""
    try:
        return json.loads(_without_mark(text), **options)
    except RecursionError:
        raise NestingError from None


def _without_mark(text: str | bytes) -> str | bytes:
    """Return the text without the byte order mark that Windows programs write: JSON decoders reject it."""
    return text.removeprefix("\ufeff") if isinstance(text, str) else text.removeprefix(codecs.BOM_UTF8)
