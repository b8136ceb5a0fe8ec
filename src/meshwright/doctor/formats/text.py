"""Lines of logs: colours and rank numbers taken off, numbers read."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
RANK = re.compile(r"^\s*(?:\[(?:rank|default)?(\d+)\]:\s?|(\d+):(?:\s|$))")  # 12:34:56 is a time, not rank 12
LONGEST = 20_000  # characters of a line that are looked at
NUMBER = r"[-+]?(?:nan|inf(?:inity)?|\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?)"


class Line(NamedTuple):
    """One line of a log."""

    number: int
    rank: str  # that it says it is from; empty where it does not
    text: str


def lines_of(text: str) -> Iterator[Line]:
    """The lines of a log, without colours; what a progress bar writes over itself is several, of one number."""
    for number, whole in enumerate(text.split("\n"), start=1):
        for raw in whole.rstrip("\r").split("\r"):
            line = raw[:LONGEST]
            if "\x1b" in line:
                line = COLOUR.sub("", line)
            found = RANK.match(line) if ":" in line[:12] else None
            rank = (found[1] or found[2]) if found else ""
            yield Line(number, rank, line[found.end() :] if found else line)


def has_any(text: str, words: Sequence[str]) -> bool:
    """Whether one of some words stands in a text: many times faster than looking for a pattern."""
    return any(word in text for word in words)


def number(text: str | None) -> float | None:
    """A number as logs write it, 1,234.5 or nan; None for anything else."""
    if text is None:
        return None
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def positive(text: str | None) -> float | None:
    """A number above zero; None for anything else."""
    found = number(text)
    return found if found is not None and math.isfinite(found) and found > 0 else None


def of_one_rank(
    lines: Iterable[Line], is_step: re.Pattern[str], hints: Sequence[str]
) -> Iterator[tuple[Line, re.Match[str] | None]]:
    """Every line, with its match where it tells a step; of several ranks that tell the same, one is heard."""
    speaker: str | None = None
    for line in lines:
        found = is_step.search(line.text) if has_any(line.text, hints) else None
        if found is not None:
            if speaker is None:
                speaker = line.rank
            if line.rank != speaker:
                continue
        yield line, found
