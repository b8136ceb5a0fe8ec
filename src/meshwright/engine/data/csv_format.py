"""How a CSV file is written: the character between its columns, its encoding, and tables of other formats."""

from __future__ import annotations

import codecs
import csv
import shlex
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from meshwright.engine.data.rewrite import rewritten
from meshwright.errors import InputError

SUFFIXES = (".csv", ".tsv")
DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
HEAD_BYTES = 1 << 16  # of the file's beginning, in which the delimiter is looked for
COMPARED_ROWS = 20
READERS = {
    **dict.fromkeys((".xlsx", ".xls", ".xlsm", ".ods"), "read_excel"),
    ".feather": "read_feather",
    ".orc": "read_orc",
    ".dta": "read_stata",
    ".sav": "read_spss",
}
"""Functions of pandas that read tables of formats that are not read here."""
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # how such a file starts
WINDOWS = "WINDOWS-1252"  # what Excel writes as plain CSV in Western Europe; Latin-1 without control characters


def find_delimiter(path: Path) -> str:
    """Return the character between the columns: the one with which most of the first rows have the header's columns."""
    usual = "\t" if path.suffix.lower() == ".tsv" else ","
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
        complete = not file.read(1)
    lines = head.decode("utf-8-sig", errors="replace").splitlines(keepends=True)
    lines = lines if complete else lines[:-1]
    return max((usual, *DELIMITERS), key=lambda one: _fit(lines, one))


def _fit(lines: list[str], delimiter: str) -> tuple[bool, float, int]:
    """Return how well a delimiter fits: whether it splits the header, the share of rows like it, and its columns."""
    try:
        rows = [row for row in islice(csv.reader(lines, delimiter=delimiter), COMPARED_ROWS + 1) if row]
    except csv.Error:
        return False, 0.0, 0
    if not rows or len(rows[0]) < 2:
        return False, 0.0, 0
    same = sum(len(row) == len(rows[0]) for row in rows[1:])
    return True, same / max(len(rows) - 1, 1), len(rows[0])


def other_delimiters(files: tuple[Path, ...]) -> str:
    """Return what separates the columns of CSV files if it is not a comma; empty if it is."""
    found = {find_delimiter(path) for path in files if path.suffix.lower() in SUFFIXES} - {","}
    return " or ".join(name for one, name in DELIMITERS.items() if one in found)


def utf8_fix(path: Path) -> tuple[str, ...]:
    """Return the command that writes a text file as UTF-8, and the file to use then."""
    with path.open("rb") as file:
        head = file.read(1 << 20)
    encoding = "UTF-16" if head.startswith(UTF_16) else WINDOWS
    if encoding == WINDOWS:
        try:
            head.decode("cp1252")
        except UnicodeDecodeError:
            encoding = "LATIN1"
    written = path.with_name(f"{path.stem}_utf8{path.suffix}")
    return (rewritten(f"iconv -f {encoding} -t UTF-8 {shlex.quote(str(path))}", written),)


def unsupported(path: Path, suffixes: Sequence[str], field: str, name: str) -> InputError:
    """Return the error for a file of another type, with the command that writes a table as CSV."""
    fix: tuple[str, ...] = ()
    if reader := READERS.get(path.suffix.lower()):
        written = str(path.with_name(f"{path.stem}_{path.suffix[1:]}.csv"))  # FILE.csv may be another table
        command = f"import pandas; pandas.{reader}({str(path)!r}).to_csv({written!r}, index=False)"
        fix = (f"python3 -c {shlex.quote(command)}", f"save it as {written}, CSV UTF-8, in the program that wrote it")
    return InputError(f"unsupported file type ({', '.join(suffixes)})", field=field, value=name, fix=fix)
