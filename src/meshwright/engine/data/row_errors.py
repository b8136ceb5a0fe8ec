"""Finds the rows of a dataset that cannot be used, all of them in one pass, without a tokenizer and without torch."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from meshwright.engine.data.conversations import (
    REQUIRED,
    detect_columns,
    parse_conversation,
    untrainable_reason,
    unused_names,
)
from meshwright.engine.data.files import FIELD, Row, Rows
from meshwright.errors import InputError

SHOWN_ERRORS = 5  # rows that an error lists after the first
MAX_ERRORS = 100  # more are not looked for
JSONL_PLACE = re.compile(r"(.+\.jsonl):(\d+): ")
PLACE = re.compile(r"(.+?)(?::|\[| row )(\d+)")

Plain = dict[str, Any]  # an InputError that can be sent between processes


class CheckedRows(msgspec.Struct, frozen=True):
    """Rows that were read, and what is wrong with them."""

    rows: int
    columns: Mapping[str, str]
    complete: bool  # whether all rows of the dataset were read
    unused: tuple[str, ...] = ()  # columns


class RowColumns:
    """The columns of each row: those of the first, or its own if it is of another file with others."""

    def __init__(self, columns: Mapping[str, str], detects: bool) -> None:
        self.columns, self.detects = columns, detects
        self._detected: dict[tuple[str, ...], Mapping[str, str]] = {}

    def of(self, row: Row) -> Mapping[str, str]:
        """Return the columns of a row."""
        if not self.detects or all(name in row for key, name in self.columns.items() if key in REQUIRED):
            return self.columns
        names = tuple(row)
        if names not in self._detected:
            try:
                self._detected[names] = detect_columns(names, {}, "")
            except InputError:  # parsing the row reports what it lacks
                self._detected[names] = self.columns
        return self._detected[names]


def detects_columns(configured: Mapping[str, str]) -> bool:
    """Return whether columns are found by their names: files of a folder may then have different ones."""
    return not set(configured) & set(REQUIRED)


def check_rows(rows: Rows, configured: Mapping[str, str], train_on: str, most: int) -> CheckedRows:
    """Parse the first rows as conversations, `most` of them; raise one InputError with all that cannot be used."""
    bad: list[InputError] = []
    columns = detect_columns(rows.first(), configured, rows.name)
    used, names, read = RowColumns(columns, detects_columns(configured)), set[str](), 0
    untrainable: list[str] = []
    for where, row in islice(rows.read(bad=bad.append), most):
        read += 1
        names |= unused_names(row, used.of(row))
        try:
            reason = untrainable_reason(parse_conversation(row, used.of(row), where), train_on)
        except InputError as error:
            bad.append(error)
            if len(bad) > MAX_ERRORS:
                break
            continue
        untrainable += [f"{where}: {reason}"] if reason else []
    if bad:
        raise joined([plain(error) for error in bad])
    if len(untrainable) == read:
        reason = f"{read} dropped: {read} without target tokens, first {untrainable[0]}"
        raise InputError(f"none of its {read} rows has target tokens; {reason}", field=FIELD, value=rows.name)
    return CheckedRows(read, columns, read < most, tuple(sorted(names)))


def plain(error: InputError) -> Plain:
    """Return an error as values: an exception cannot be pickled between processes."""
    return {**error.to_dict(), "fix": tuple(error.fix)}


def joined(errors: Sequence[Plain]) -> InputError:
    """Return the error of the first row that cannot be used, with the others, so that one pass corrects them all."""
    errors = sorted(errors, key=_place)
    first, others = errors[0], [one["message"] for one in errors[1:]]
    more = "" if len(others) <= SHOWN_ERRORS else f"; {len(others) - SHOWN_ERRORS}{_at_least(errors)} more rows"
    reason = "; ".join([first["message"], *others[:SHOWN_ERRORS]]) + more
    return InputError(reason, field=first["field"], value=first["value"], fix=first["fix"] or _without_rows(errors))


def _place(error: Plain) -> tuple[str, int]:
    """Return the file and the number of a row, in whose order errors are listed."""
    found = PLACE.match(error["message"])
    return (found[1], int(found[2])) if found else ("", 0)


def _at_least(errors: Sequence[Plain]) -> str:
    return " or" if len(errors) > MAX_ERRORS else ""


def _without_rows(errors: Sequence[Plain]) -> tuple[str, ...]:
    """Return the command that writes a JSONL file without these rows, if they are all there are."""
    places = [JSONL_PLACE.match(one["message"]) for one in errors]
    files = {place[1] for place in places if place}
    if len(errors) > MAX_ERRORS or len(files) != 1 or not all(places):
        return ()
    path = Path(files.pop())
    lines = ";".join(f"{place[2]}d" for place in places if place)
    kept = shlex.quote(str(path.with_name(f"{path.stem}_kept.jsonl")))
    return ("correct the rows", f"sed '{lines}' {shlex.quote(str(path))} > {kept}")
