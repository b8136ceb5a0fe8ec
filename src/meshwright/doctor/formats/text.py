"""Log lines: removes colors and rank prefixes, parses numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

COLOR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
RANK = re.compile(r"^\s*(?:\[(?:rank|default)?(\d+)\]:\s?|(\d+):(?:\s|$))")  # 12:34:56 is a time, not rank 12
MAX_LENGTH = 20_000  # characters of a line that are parsed
NUMBER = r"[-+]?(?:nan|inf(?:inity)?|\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?)"


class Line(NamedTuple):
    """One line of a log."""

    number: int
    rank: str  # from its prefix; empty if it has none
    text: str
    prefix: str = ""  # as written, e.g. [rank3]:


def lines_of(text: str) -> Iterator[Line]:
    """Yield the lines of a log without colors; updates of a progress bar are several lines with one number."""
    for number, full_line in enumerate(text.split("\n"), start=1):
        for raw in full_line.rstrip("\r").split("\r"):
            line = raw[:MAX_LENGTH]
            if "\x1b" in line:
                line = COLOR.sub("", line)
            found = RANK.match(line) if ":" in line[:12] else None
            rank = (found[1] or found[2]) if found else ""
            yield Line(number, rank, line[found.end() :] if found else line, found[0].strip() if found else "")


def has_any(text: str, words: Sequence[str]) -> bool:
    """Return whether a text contains one of some words: much faster than a regular expression."""
    return any(word in text for word in words)


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


def figures_of(fields: Mapping[str, re.Pattern[str]], text: str, above_zero: Sequence[str]) -> dict[str, Any]:
    """Return the figures of a line by name; zeros of some are placeholders and left out."""
    found = {name: number(match[1]) for name, regex in fields.items() if (match := regex.search(text))}
    return {
        name: value
        for name, value in found.items()
        if value is not None and (name not in above_zero or positive(str(value)))
    }


def merge_header(header: dict[str, Any], fields: dict[str, Any]) -> None:
    """Add the header fields of a line; overrides of several lines are merged."""
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
