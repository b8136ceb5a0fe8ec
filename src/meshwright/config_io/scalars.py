"""What a word without quotes means in YAML: as YAML 1.2 reads it, and as readers of YAML 1.1 such as PyYAML do."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any

import msgspec

_MAY_BE_A_NUMBER = frozenset("+-.0123456789")
_LONGEST_NUMBER = 4300  # characters

_NULLS = dict.fromkeys(("", "~", "null", "Null", "NULL"))


def _spelled(words: str, value: bool) -> dict[str, bool]:
    return {spelling: value for word in words.split() for spelling in (word, word.capitalize(), word.upper())}


_WORDS: dict[str, Any] = _NULLS | _spelled("true", True) | _spelled("false", False)
_WORDS_11: dict[str, Any] = _WORDS | _spelled("yes on", True) | _spelled("no off", False)

_INT = re.compile(r"[-+]?(?:0b[01_]+|0o[0-7_]+|0x[0-9a-fA-F_]+|[0-9_]+)")
_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?(?:[eE][-+]?[0-9]+)?|\.[0-9_]+(?:[eE][-+][0-9]+)?)")
# YAML 1.1 wants a dot and a sign: 1e-4, 1.0e5 and -.5 are text there. It counts in sixties, and in eights after a 0.
_INT_11 = re.compile(r"[-+]?(?:0b[01_]+|0[0-7_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)")
_FLOAT_11 = re.compile(r"(?:[-+]?[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+][0-9]+)?")
_SIXTIES_11 = re.compile(r"[-+]?(?:[1-9][0-9_]*(?::[0-5]?[0-9])+|[0-9][0-9_]*(?::[0-5]?[0-9])+\.[0-9_]*)")
_ENDLESS = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_DATE_11 = re.compile(r"([0-9]{4})-([0-9]{2})-([0-9]{2})")
_TIME_11 = re.compile(
    r"([0-9]{4})-([0-9]{1,2})-([0-9]{1,2})(?:[Tt]|[ \t]+)([0-9]{1,2}):([0-9]{2}):([0-9]{2})(?:\.([0-9]*))?"
    r"(?:[ \t]*(?:(Z)|([-+])([0-9]{1,2})(?::([0-9]{2}))?))?"
)


def resolved(text: str) -> Any:
    """The value of a word in YAML 1.2: a truth, a number, None or the text itself."""
    if text in _WORDS:
        return _WORDS[text]
    if text[0] not in _MAY_BE_A_NUMBER:
        return text
    if _INT.fullmatch(text):
        return _integer(text, {"0b": 2, "0o": 8, "0x": 16})
    if _FLOAT.fullmatch(text) or _ENDLESS.fullmatch(text):
        return _float(text)
    return text


def resolved_11(text: str) -> Any:
    """The value of a word in PyYAML, which reads YAML 1.1."""
    if text in _WORDS_11:
        return _WORDS_11[text]
    if text[0] not in _MAY_BE_A_NUMBER or len(text) > _LONGEST_NUMBER:
        return text
    if _INT_11.fullmatch(text):
        return _integer(text, {"0b": 2, "0x": 16, "0": 8})
    if _FLOAT_11.fullmatch(text) or _ENDLESS.fullmatch(text):
        return _float(text)
    if _SIXTIES_11.fullmatch(text):
        return _sixties(text)
    return _moment(text)


def otherwise(text: str, value: Any) -> Any:
    """What PyYAML makes of a word where that is not the value; unset where both read the same."""
    other = resolved_11(text)
    same = type(other) is type(value) and (other == value or other != other)  # not a number is never equal
    return msgspec.UNSET if same else other


def typed(tag: str, text: str) -> Any:
    """The value of a word with a tag such as !!int; a ValueError where it cannot be one."""
    if tag == "str":
        return text
    if tag == "null" and text in _NULLS:
        return None
    if tag == "bool" and isinstance(_WORDS_11.get(text), bool):
        return _WORDS_11[text]
    value = resolved(text)
    if tag == "int" and type(value) is int:
        return value
    if tag == "float" and type(value) in (int, float):
        return float(value)
    raise ValueError(f"{text[:60]!r} is no {tag}")


def _integer(text: str, bases: dict[str, int]) -> Any:
    """A whole number; the text itself where there are no digits between its underscores."""
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


def _sixties(text: str) -> Any:
    """12:30:00 as seconds: digits of a number to the base of sixty."""
    parts = text.lstrip("+-").replace("_", "").split(":")
    total: Any = 0.0 if "." in text else 0
    for part in parts:
        total = total * 60 + (float(part) if "." in text else int(part))
    return -total if text[0] == "-" else total


def _moment(text: str) -> Any:
    """A date or a time of day; the text itself where it is neither."""
    try:
        if day := _DATE_11.fullmatch(text):
            return date(*map(int, day.groups()))
        if time := _TIME_11.fullmatch(text):
            year, month, number, hour, minute, second = map(int, time.groups()[:6])
            return datetime(year, month, number, hour, minute, second, _microseconds(time[7]), _zone(time))
    except (ValueError, OverflowError):  # no day of any calendar: PyYAML fails on it
        return text
    return text


def _microseconds(digits: str | None) -> int:
    return int((digits or "0")[:6].ljust(6, "0"))


def _zone(time: re.Match[str]) -> timezone | None:
    if time[8]:
        return UTC
    if not time[9]:
        return None
    apart = timedelta(hours=int(time[10]), minutes=int(time[11] or 0))
    return timezone(-apart if time[9] == "-" else apart)
