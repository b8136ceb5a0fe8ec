"""Cells of a user's table of runs: choices, counts, measured values and names, each with the fix of a wrong one."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from meshwright.errors import MeshwrightError, closest

Found = TypeVar("Found")


class CellError(ValueError):
    """A wrong cell: its column, its value, the reason and what to write instead."""

    def __init__(self, column: str, value: str, reason: str, fix: Sequence[str] = ()) -> None:
        super().__init__(reason)
        self.column, self.value, self.fix = column, value, fix


def choice(cells: Mapping[str, str], column: str, known: Sequence[str] | Mapping[str, Any], blank: str) -> str:
    """Return the known value that a cell names in any spelling; `blank` if it is blank."""
    text = cells.get(column, "")
    if not text:
        return blank
    plain = text.lower().replace(" ", "-")
    for name in (plain, plain.replace("-", "_"), plain.replace("_", "-")):
        if name in known:
            return name
    near = closest(plain, known) or list(known)
    raise CellError(column, text, f"unknown {column}; known: {', '.join(known)}", near[:3])


def lookup(column: str, text: str, example: str, read: Callable[[str], Found]) -> Found:
    """Return what a cell names; a blank or unknown name is an error of that cell."""
    if not text:
        raise CellError(column, text, "is blank", (example,))
    try:
        return read(text)
    except MeshwrightError as error:
        raise CellError(column, text, error.reason, tuple(error.fix)) from None


def count(cells: Mapping[str, str], column: str, blank: int | None = 1) -> int:
    """Return the positive integer of a cell; `blank` if it is blank and may be."""
    text = cells.get(column, "")
    if not text and blank is not None:
        return blank
    return int(_number(column, text, lambda value: value >= 1 and value == int(value), "an integer from 1", "8"))


def measure(cells: Mapping[str, str], column: str) -> float:
    """Return the positive number of a cell; 0 if it is blank."""
    text = cells.get(column, "")
    return _number(column, text, lambda value: value > 0, "a number above 0", "1.25") if text else 0.0


def _number(column: str, text: str, valid: Callable[[float], bool], what: str, example: str) -> float:
    if not text:
        raise CellError(column, text, "is blank", (example,))
    try:
        value = float(text.replace("_", ""))
    except ValueError:
        value = math.nan
    if math.isfinite(value) and valid(value):
        return value
    in_seconds = _seconds(text) if column == "step_time_s" else None
    if in_seconds is not None and valid(in_seconds):
        raise CellError(column, text, f"must be {what} in seconds, without unit", (f"{in_seconds:g}",))
    if thousands := re.fullmatch(r"([0-9]+) ?[kK]", text):  # tokens: 8k is 8192
        raise CellError(column, text, f"must be {what}, without unit", (str(1024 * int(thousands[1])),))
    shorter = text.replace(",", ".") if text.count(",") == 1 and "." not in text else "".join(_digits(text))
    fix = (shorter,) if shorter and shorter != text else (example,)
    raise CellError(column, text, f"must be {what}, without unit and thousands separator", fix)


SECONDS = {
    "s": 1.0, "sec": 1.0, "secs": 1.0, "second": 1.0, "seconds": 1.0,
    "ms": 1e-3, "msec": 1e-3, "milliseconds": 1e-3, "us": 1e-6, "µs": 1e-6,
    "m": 60.0, "min": 60.0, "mins": 60.0, "minute": 60.0, "minutes": 60.0,
    "h": 3600.0, "hr": 3600.0, "hour": 3600.0, "hours": 3600.0,
}  # fmt: skip


def _seconds(text: str) -> float | None:
    """Return a time with its unit in seconds, such as 1450ms or 2min 5s; None if it is not one."""
    plain = text.strip().lower().replace("_", "")
    parts = re.findall(r"(\d+(?:[.,]\d+)?)\s*([a-zµ]+)", plain)
    if not parts or "".join(f"{number}{unit}" for number, unit in parts) != re.sub(r"\s+", "", plain):
        return None
    if any(unit not in SECONDS for _, unit in parts):
        return None
    return sum(float(number.replace(",", ".")) * SECONDS[unit] for number, unit in parts)


def _digits(text: str) -> str:
    return "".join(one for one in text if one.isdigit() or one == ".")
