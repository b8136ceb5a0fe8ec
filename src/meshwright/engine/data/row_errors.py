"""Finds the rows of a dataset that cannot be used, all of them in one pass, without a tokenizer and without torch."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from meshwright.display import plural
from meshwright.engine.data.conversations import (
    REQUIRED,
    Conversation,
    detect_columns,
    parse_conversation,
    untrainable_reason,
    unused_names,
)
from meshwright.engine.data.csv_format import find_delimiter
from meshwright.engine.data.files import FIELD, Row, Rows
from meshwright.engine.data.role_fixes import UNKNOWN, renamed_roles
from meshwright.errors import InputError

SHOWN_ERRORS = 5  # rows that an error lists after the first
MAX_ERRORS = 10_000  # more are not counted
COMMAND_ROWS = 500  # rows that a command can list
LINE_PLACE = re.compile(r"(.+\.(?:jsonl|ndjson|json)):(\d+): ")
TABLE_PLACE = re.compile(r"(.+\.(?:csv|tsv)):(\d+): (?!not CSV)")
ITEM_PLACE = re.compile(r"(.+\.json)\[(\d+)\]: ")
KEPT = re.compile(r"(.+_kept)(\d*)")
PLACE = re.compile(r"(.+?)(?::|\[| row )(\d+)")
TEMPLATE_FIXES = {
    "the chat template rejects": "data.chat_template=FILE of a template that accepts them",
    "the chat template does not render": "data.chat_template=FILE of a template that renders tools",
}
"""Fixes of rows whose errors are the template's as much as theirs, by the text of the error."""

Plain = dict[str, Any]  # an InputError that can be sent between processes


class CheckedRows(msgspec.Struct, frozen=True):
    """Rows that were read, and what is wrong with them."""

    rows: int
    columns: Mapping[str, str]
    complete: bool  # whether all rows of the dataset were read
    unused: tuple[str, ...] = ()  # columns
    numeric: tuple[str, ...] = ()  # those of them that contain numbers
    untrainable: tuple[str, ...] = ()  # locations and reasons of rows that are dropped
    duplicates: tuple[str, ...] = ()  # locations of rows with the conversation of an earlier one


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


def check_rows(
    rows: Rows,
    configured: Mapping[str, str],
    train_on: str,
    most: int,
    render: Callable[[Conversation, str], object] | None = None,
) -> CheckedRows:
    """Parse the first rows as conversations, `most` of them; raise one InputError with all that cannot be used.

    `render` is called for conversations that are trained on, with their location.
    """
    bad: list[InputError] = []
    unread: list[InputError] = []
    columns = detect_columns(rows.first(), configured, rows.name)
    used, names, numeric, read = RowColumns(columns, detects_columns(configured)), set[str](), set[str](), 0
    untrainable: list[str] = []
    seen: dict[bytes, str] = {}
    duplicates: list[str] = []
    for where, row in islice(rows.read(bad=unread.append), most):
        read += 1
        unused = unused_names(row, used.of(row))
        names |= unused
        numeric |= {name for name in unused if isinstance(row.get(name), int | float)}
        try:
            conversation = parse_conversation(row, used.of(row), where)
            reason = untrainable_reason(conversation, train_on)
            if render is not None and not reason:
                render(conversation, where)
            content = hashlib.blake2b(msgspec.json.encode(conversation), digest_size=8).digest()
            if (first := seen.setdefault(content, where)) != where:
                duplicates.append(f"{where} (the same as {first})")
        except InputError as error:
            bad.append(error)
            if len(bad) + len(unread) > MAX_ERRORS or changes_settings(error.fix):
                break
            continue
        untrainable += [f"{where}: {reason}"] if reason else []
    if bad or unread:
        raise _joined_with_dropped([plain(error) for error in (*bad, *unread)], untrainable, read + len(unread))
    if len(untrainable) == read:
        reason = f"{read} dropped: {read} without target tokens, first {untrainable[0]}"
        raise InputError(f"none of its {read} rows has target tokens; {reason}", field=FIELD, value=rows.name)
    return CheckedRows(
        read, columns, read < most, tuple(sorted(names)), tuple(sorted(numeric)), tuple(untrainable), tuple(duplicates)
    )


def check_readable(rows: Rows, most: int) -> None:
    """Raise one InputError with the rows among the first `most` that no reader of their format can read."""
    unread: list[InputError] = []
    read = sum(1 for _ in islice(rows.read(bad=unread.append), most))
    if unread:
        raise joined([plain(error) for error in unread], read + len(unread))


def changes_settings(fix: Sequence[object]) -> bool:
    """Return whether the fix of a row's error is a setting, not another row: more rows would have the error."""
    texts = [str(one) for one in fix]
    return any(one.startswith("data.") for one in texts) and "(ignores the column)" not in " ".join(texts)


def plain(error: InputError) -> Plain:
    """Return an error as values: an exception cannot be pickled between processes."""
    return {**error.to_dict(), "fix": tuple(error.fix)}


def joined(errors: Sequence[Plain], rows: int) -> InputError:
    """Return the error of the first row that cannot be used, with the others, so that one pass corrects them all.

    `rows` are all rows that were read.
    """
    errors = sorted(errors, key=_place)
    first, messages = errors[0], [one["message"] for one in errors]
    others = _with_shorter_repeats(messages)[1:]
    more = "" if len(others) <= SHOWN_ERRORS else f"; {len(others) - SHOWN_ERRORS:,}{_at_least(errors)} more rows"
    reason = "; ".join([first["message"], *others[:SHOWN_ERRORS]]) + more
    settings = next((one["fix"] for one in errors if changes_settings(one["fix"])), ())
    fix = first["fix"] or settings or renamed_roles(messages, _unusable_lines(messages))
    fix = fix or without_rows(messages if len(messages) < rows else ())
    if not first["fix"] and not settings:
        fix = (*fix, *(other for text, other in TEMPLATE_FIXES.items() if any(text in one for one in messages)))
    return InputError(reason, field=first["field"], value=first["value"], fix=fix)


def _joined_with_dropped(errors: Sequence[Plain], dropped: Sequence[str], rows: int) -> InputError:
    """Return the error of rows that cannot be used; its command also leaves out the rows that would be dropped."""
    refused = joined(errors, rows)
    if not dropped:
        return refused
    all_rows = sorted((*errors, *({"message": one} for one in dropped)), key=_place)
    alone = without_rows([one["message"] for one in sorted(errors, key=_place)])[1:]
    both = without_rows([one["message"] for one in all_rows])[1:] or alone
    fix = tuple(both[0] if one in alone else one for one in refused.fix)
    more = f"{plural(len(dropped), 'row')} more would be dropped, first {dropped[0]}"
    return InputError(f"{refused.reason}; {more}", refused.field, refused.value, fix)


def _with_shorter_repeats(messages: Sequence[str]) -> list[str]:
    """Return messages of rows; of a reason that an earlier row has, only where it is."""
    seen = set[str]()
    found = []
    for one in messages:
        where, _, reason = one.partition(": ")
        found.append(f"{where}: the same" if reason in seen else one)
        seen.add(reason)
    return found


def _place(error: Plain) -> tuple[str, int]:
    """Return the file and the number of a row, in whose order errors are listed."""
    found = PLACE.match(error["message"])
    return (found[1], int(found[2])) if found else ("", 0)


def _at_least(errors: Sequence[Plain]) -> str:
    return " or" if len(errors) > MAX_ERRORS else ""


def _unusable_lines(messages: Sequence[str]) -> list[int]:
    """Return the lines of a JSONL file whose errors are not those of roles; empty for another file, or too many."""
    found = [LINE_PLACE.match(one) for one in messages]
    if not all(found) or len(messages) > COMMAND_ROWS:
        return []
    return [int(place[2]) for one, place in zip(messages, found, strict=True) if place and UNKNOWN not in one]


def without_rows(messages: Sequence[str]) -> tuple[str, ...]:
    """Return the command that writes a JSON or CSV file without the rows that these messages name, if it can."""
    for place, command in ((LINE_PLACE, _without_lines), (TABLE_PLACE, _without_records), (ITEM_PLACE, _without_items)):
        found = [place.match(one) for one in messages]
        files = {one[1] for one in found if one}
        if len(files) == 1 and all(found) and len(messages) <= COMMAND_ROWS:
            path = Path(files.pop())
            kept = path.with_name(f"{_kept_stem(path.stem)}{path.suffix}")
            return ("correct the rows", command(path, kept, [int(one[2]) for one in found if one]))
    return ()


def _kept_stem(stem: str) -> str:
    """Return the name of a file without some rows: rows_kept, and rows_kept2 for the rows that are left of that one."""
    found = KEPT.fullmatch(stem)
    return f"{found[1]}{int(found[2] or 1) + 1}" if found else f"{stem}_kept"


def _without_lines(path: Path, kept: Path, lines: Sequence[int]) -> str:
    listed = ";".join(f"{line}d" for line in lines)
    return f"sed '{listed}' {shlex.quote(str(path))} > {shlex.quote(str(kept))}"


def _without_records(path: Path, kept: Path, lines: Sequence[int]) -> str:
    """Return the command for a table, whose records may have several lines; `lines` are their last ones."""
    delimiter = f"delimiter={find_delimiter(path)!r}"
    program = (
        f'import csv; rows = csv.reader(open(0, newline="", encoding="utf-8"), {delimiter}); '
        f'kept = open(1, "w", newline="", encoding="utf-8"); '
        f"csv.writer(kept, {delimiter}).writerows(row for row in rows if rows.line_num not in "
        f"{{{', '.join(map(str, lines))}}})"
    )
    return f"python3 -c {shlex.quote(program)} < {shlex.quote(str(path))} > {shlex.quote(str(kept))}"


def _without_items(path: Path, kept: Path, items: Sequence[int]) -> str:
    """Return the command for a JSON list, or an object with one list."""
    program = (
        f"import json, sys; rows = json.load(sys.stdin); "
        f"rows = rows if isinstance(rows, list) else next(one for one in rows.values() if isinstance(one, list)); "
        f"json.dump([one for i, one in enumerate(rows) if i not in {{{', '.join(map(str, items))}}}], sys.stdout)"
    )
    return f"python3 -c {shlex.quote(program)} < {shlex.quote(str(path))} > {shlex.quote(str(kept))}"
