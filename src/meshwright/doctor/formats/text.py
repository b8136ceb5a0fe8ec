"""Log lines: removes colors and rank prefixes, parses numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

COLOR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
RANK = re.compile(r"^\s*(?:\[(?:rank|default)?(\d+)\]:\s?|(\d+):(?:\s|$))")  # 12:34:56 is a time, not rank 12
CONTENT = re.compile(r"[^\r\n]+")
MAX_LENGTH = 20_000  # characters of a line that are parsed
LONG_LINE, MAX_RUN = 2_000, 200
LONG_RUN = re.compile(rf"(?<![\w.,/+-])[\w.,/+-]{{{MAX_RUN},}}+|(?<!\s)\s{{{MAX_RUN},}}+|(.)\1{{{MAX_RUN},}}+")
"""No word, number or gap of a log is that long; patterns that start with a repetition take quadratic time on them."""
NUMBER = r"(?>[-+]?(?:nan|inf(?:inity)?|\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?))"  # atomic: linear in a long row of digits

AT = re.compile(r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:[.,](\d+))?")


class Line(NamedTuple):
    """One line of a log."""

    number: int
    rank: str  # from its prefix; empty if it has none
    text: str
    prefix: str = ""  # as written, e.g. [rank3]:


def lines_of(text: str) -> Iterator[Line]:
    """Yield the lines of a log without colors and empty ones; updates of a progress bar share a number.

    Empty lines are skipped by the search itself: a small compressed file may hold hundreds of millions of them.
    """
    number, counted = 1, 0
    for found in CONTENT.finditer(text):
        number += text.count("\n", counted, found.start())
        counted = found.start()
        line = text[found.start() : min(found.end(), found.start() + MAX_LENGTH)]
        if "\x1b" in line:
            line = COLOR.sub("", line)
        if len(line) > LONG_LINE:
            line = LONG_RUN.sub(lambda run: run[0][:MAX_RUN], line)
        prefix = RANK.match(line) if ":" in line[:12] else None
        if prefix is None:
            yield Line(number, "", line)
        else:
            yield Line(number, prefix[1] or prefix[2], line[prefix.end() :], prefix[0].strip())


def has_any(text: str, words: Sequence[str]) -> bool:
    """Return whether a text contains one of some words: much faster than a regular expression or any()."""
    for word in words:  # noqa: SIM110  # called several times for every line of a log
        if word in text:
            return True
    return False


def number(text: str | None) -> float | None:
    """Parse a number as logs write it, such as 1,234.5 or nan; None for anything else."""
    if text is None:
        return None
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def positive(text: str | None) -> float | None:
    """Parse a positive number; None for anything else."""
    found = number(text)
    return found if found is not None and math.isfinite(found) and found > 0 else None


def time_of(text: str, whole: bool = False) -> float | None:
    """Return the first time of a line in seconds; None without one, or if it has no fraction and is not to be whole."""
    found = AT.search(text)
    if found is None or not (found[7] or whole):
        return None
    hour, minute, second = int(found[4]), int(found[5]), int(found[6])
    midnight = _midnight(found[1], found[2], found[3])
    if midnight is None or hour > 23 or minute > 59 or second > 59:  # no time of day
        return None
    return midnight + 3600 * hour + 60 * minute + second + float(f"0.{found[7] or 0}")


@lru_cache(maxsize=64)
def _midnight(year: str, month: str, day: str) -> float | None:
    """Return the seconds at the start of a day; None if there is no such day."""
    with suppress(ValueError):
        return datetime(int(year), int(month), int(day), tzinfo=UTC).timestamp()
    return None


def figures_of(fields: Mapping[str, re.Pattern[str]], text: str, above_zero: Sequence[str]) -> dict[str, Any]:
    """Return the figures of a line by name; zeros of some are placeholders and left out."""
    found: dict[str, Any] = {}
    for name, regex in fields.items():
        match = regex.search(text)
        value = None if match is None else number(match[1])
        if value is not None and (name not in above_zero or (math.isfinite(value) and value > 0)):
            found[name] = value
    return found


def merge_header(header: dict[str, Any], fields: dict[str, Any]) -> None:
    """Add the header fields of a line; overrides of several lines are merged."""
    if not fields:
        return
    overrides = {**header.get("overrides", {}), **fields.pop("overrides", {})}
    header |= fields
    if overrides:
        header["overrides"] = overrides


def of_one_rank(
    lines: Iterable[Line], is_step: re.Pattern[str], hints: Sequence[str]
) -> Iterator[tuple[Line, re.Match[str] | None]]:
    """Yield every line with its match if it is a step line; duplicate lines from other ranks are dropped."""
    reporting_rank: str | None = None
    for line in lines:
        found = is_step.search(line.text) if has_any(line.text, hints) else None
        if found is not None:
            if reporting_rank is None:
                reporting_rank = line.rank
            if line.rank != reporting_rank:
                continue
        yield line, found


def tokens_between(totals: Sequence[tuple[int, float]]) -> int | None:
    """Return the tokens of a step that totals since the start imply, by their steps; None if there are no two."""
    rises = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(totals) if b[0] > a[0] and b[1] > a[1]]
    return (round(median(rises)) or None) if rises else None
