"""Text in another column than the requested one: what is wrong, and which columns may be meant."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from meshwright.engine.data.conversations import text_columns
from meshwright.errors import InputError, closest, some

NO_COLUMN = "has no "  # start of the reason of a line without the column of texts
MEANT = re.compile(r"; did you mean '(.+)'\?$")
PRESENT = re.compile(r"; it has (.+?)(?: and \d+ more)?$")
SHOWN_FIXES = 2


def missing_column(column: str, kinds: Mapping[str, str]) -> str:
    """Return the reason for a row without the column of texts; `kinds` are its columns, and what is not text."""
    near = closest(column, kinds)
    listed = [f"{name} ({kind})" if kind else name for name, kind in kinds.items()]
    return f"{NO_COLUMN}{column!r}" + (f"; did you mean {near[0]!r}?" if near else f"; it has {some(listed)}")


def is_missing_column(reason: str) -> bool:
    """Return whether a line was refused because it does not have the column of texts."""
    return f": {NO_COLUMN}" in f": {reason}"


def columns_meant(reason: str) -> tuple[str, ...]:
    """Return the columns that a reason suggests or lists, without those that are no text."""
    if meant := MEANT.search(reason):
        return (meant[1],)
    present = PRESENT.search(reason)
    names = [one for one in present[1].split(", ") if not one.endswith(")")] if present else []
    return tuple(text_columns(names)[:SHOWN_FIXES])


class MissingColumnError(InputError):
    """A table without the column of texts; the fixes are options of `tokenize`."""

    def __init__(self, path: Path, column: str, kinds: Mapping[str, str]) -> None:
        reason = f"{path}: {missing_column(column, kinds)}"
        fix = [f"--column {one}" for one in columns_meant(reason)]
        super().__init__(reason, field="--column", value=column, fix=fix or ("--column NAME",))
