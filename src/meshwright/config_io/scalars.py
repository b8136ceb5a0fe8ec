"""Types of unquoted YAML scalars, under YAML 1.2 and under YAML 1.1 as PyYAML implements it."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any

import msgspec

_MAY_BE_A_NUMBER = frozenset("+-.0123456789")
_MAX_NUMBER_CHARS = 4300

_NULLS = dict.fromkeys(("", "~", "null", "Null", "NULL"))


def _case_variants(names: str, value: bool) -> dict[str, bool]:
    return {text: value for name in names.split() for text in (name, name.capitalize(), name.upper())}


_CONSTANTS: dict[str, Any] = _NULLS | _case_variants("true", True) | _case_variants("false", False)
_CONSTANTS_11: dict[str, Any] = _CONSTANTS | _case_variants("yes on", True) | _case_variants("no off", False)

_INT = re.compile(r"[-+]?(?:0b[01_]+|0o[0-7_]+|0x[0-9a-fA-F_]+|[0-9_]+)")
_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?(?:[eE][-+]?[0-9]+)?|\.[0-9_]+(?:[eE][-+][0-9]+)?)")
# YAML 1.1 floats need a dot and a signed exponent: 1e-4, 1.0e5 and -.5 are strings there.
# It also has sexagesimal numbers (12:30:00), and a leading 0 means octal.
_INT_11 = re.compile(r"[-+]?(?:0b[01_]+|0[0-7_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)")
_FLOAT_11 = re.compile(r"(?:[-+]?[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+][0-9]+)?")
_SEXAGESIMAL_11 = re.compile(r"[-+]?(?:[1-9][0-9_]*(?::[0-5]?[0-9])+|[0-9][0-9_]*(?::[0-5]?[0-9])+\.[0-9_]*)")
_INF_OR_NAN = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_DATE_11 = re.compile(r"([0-9]{4})-([0-9]{2})-([0-9]{2})")
_TIME_11 = re.compile(
    r"([0-9]{4})-([0-9]{1,2})-([0-9]{1,2})(?:[Tt]|[ \t]+)([0-9]{1,2}):([0-9]{2}):([0-9]{2})(?:\.([0-9]*))?"
    r"(?:[ \t]*(?:(Z)|([-+])([0-9]{1,2})(?::([0-9]{2}))?))?"
)


def resolve(text: str) -> Any:
    """Return the YAML 1.2 value of a scalar: bool, number, None or the text itself."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if text[0] not in _MAY_BE_A_NUMBER:
        return text
    if _INT.fullmatch(text):
        return _integer(text, {"0b": 2, "0o": 8, "0x": 16})
    if _FLOAT.fullmatch(text) or _INF_OR_NAN.fullmatch(text):
        return _float(text)
    return text


def resolve_yaml11(text: str) -> Any:
    """Return the value PyYAML (YAML 1.1) gives a scalar."""
    if text in _CONSTANTS_11:
        return _CONSTANTS_11[text]
    if text[0] not in _MAY_BE_A_NUMBER or len(text) > _MAX_NUMBER_CHARS:
        return text
    if _INT_11.fullmatch(text):
        return _integer(text, {"0b": 2, "0x": 16, "0": 8})
    if _FLOAT_11.fullmatch(text) or _INF_OR_NAN.fullmatch(text):
        return _float(text)
    if _SEXAGESIMAL_11.fullmatch(text):
        return _sexagesimal(text)
    return _timestamp(text)


def pyyaml_value(text: str, value: Any) -> Any:
    """Return the PyYAML value of a scalar if it differs from `value`, else UNSET."""
    other = resolve_yaml11(text)
    same = type(other) is type(value) and (other == value or other != other)  # NaN is never equal
    return msgspec.UNSET if same else other


def apply_tag(tag: str, text: str) -> Any:
    """Return the value of a scalar with a tag such as !!int; raise ValueError if it does not fit."""
    if tag == "str":
        return text
    if tag == "null" and text in _NULLS:
        return None
    if tag == "bool" and isinstance(_CONSTANTS_11.get(text), bool):
        return _CONSTANTS_11[text]
    value = resolve(text)
    if tag == "int" and type(value) is int:
        return value
    if tag == "float" and type(value) in (int, float):
        return float(value)
    raise ValueError(f"{text[:60]!r} is not a valid {tag}")


def _integer(text: str, bases: dict[str, int]) -> Any:
    """Return the integer, or the text itself if there are only underscores and no digits."""
    digits = text.lstrip("+-").replace("_", "")
    start = next((start for start in bases if digits.startswith(start) and digits != "0"), "")
    digits = digits.removeprefix(start)
    if not digits:
        return text
    number = int(digits, bases.get(start, 10))
    return -number if text[0] == "-" else number


def _float(text: str) -> Any:
    if text[-1] in "fFnN":  # .inf and .nan
        return float(text.replace(".", ""))
    try:
        return float(text.replace("_", ""))
    except ValueError:  # a dot among underscores
        return text


def _sexagesimal(text: str) -> Any:
    """Return 12:30:00 as seconds (base 60)."""
    parts = text.lstrip("+-").replace("_", "").split(":")
    total: Any = 0.0 if "." in text else 0
    for part in parts:
        total = total * 60 + (float(part) if "." in text else int(part))
    return -total if text[0] == "-" else total


def _timestamp(text: str) -> Any:
    """Return a date or datetime, or the text itself if it is neither."""
    try:
        if day := _DATE_11.fullmatch(text):
            return date(*map(int, day.groups()))
        if time := _TIME_11.fullmatch(text):
            year, month, number, hour, minute, second = map(int, time.groups()[:6])
            return datetime(year, month, number, hour, minute, second, _microseconds(time[7]), _zone(time))
    except (ValueError, OverflowError):  # not a calendar date: PyYAML fails on it
        return text
    return text


def _microseconds(digits: str | None) -> int:
    return int((digits or "0")[:6].ljust(6, "0"))


def _zone(time: re.Match[str]) -> timezone | None:
    if time[8]:
        return UTC
    if not time[9]:
        return None
    offset = timedelta(hours=int(time[10]), minutes=int(time[11] or 0))
    return timezone(-offset if time[9] == "-" else offset)
