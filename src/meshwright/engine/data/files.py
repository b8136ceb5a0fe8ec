"""Reads rows of JSONL, JSON, CSV, TSV, Parquet, text lines and saved datasets, with locations for error messages."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import IO, Any

import msgspec

from meshwright import json_text
from meshwright.display import plural
from meshwright.engine.data import csv_format, json_fixes
from meshwright.engine.data.column_schemas import known_columns
from meshwright.errors import InputError, unknown
from meshwright.extras import not_installed

Row = dict[str, Any]
OnBadRow = Callable[[InputError], None]
FIELD = "data.dataset"
FILE = "file"  # field of an error about the file itself, not about one of its rows
SUFFIXES = (".jsonl", ".jsonl.gz", ".ndjson", ".json", *csv_format.SUFFIXES, ".parquet", ".txt")
TEXT = ".txt"  # a row per line, as the text builder of datasets reads it
COMPRESSED = tuple(f"{kind}{end}" for kind in (".jsonl", ".txt") for end in (".gz", ".zst"))
"""File types that tokenize and a pretraining read."""
DESCRIPTION = re.compile(
    r"(about|authors|changelog|citation|copying|description|info|licen[cs]e|metadata|notice|readme|requirements|sources"
    r"|version)\b",
    re.IGNORECASE,
)
"""Names of .txt files that describe the rows beside them."""
SHOWN_NAMES = 3  # of files in a message
SAVED_DATASET_FILES = ("dataset_info.json", "state.json")  # written by Dataset.save_to_disk
SPLITS = ("train", "validation", "valid", "val", "dev", "test", "eval")
# The split is the first word of the file name (train-00000-of-00002.parquet) or of its folder.
ROWS = re.compile(r"(\d*):(\d*)\]")
LEADING_WORD = re.compile(r"[a-z]+", re.IGNORECASE)
ARROW_ROWS = 1024  # rows converted to Python values at a time


@dataclass(frozen=True)
class Rows:
    """The rows of a dataset, in a fixed order."""

    name: str  # as the user wrote it
    files: tuple[Path, ...] = ()
    dataset: Any = field(default=None, compare=False)  # a Dataset or IterableDataset, if not read from files
    part: tuple[int, int | None] = (0, None)  # first row and the row after the last one; None: to the end
    left_out: tuple[Path, ...] = ()  # files of the folder that are not read: they describe the others

    def __iter__(self) -> Iterator[tuple[str, Row]]:
        """Yield each row with its location, such as chats.jsonl:17."""
        return self.read()

    def read(self, start: int = 0, bad: OnBadRow | None = None) -> Iterator[tuple[str, Row]]:
        """Yield the rows from `start` on; earlier rows are skipped without being parsed.

        A row that cannot be parsed is given to `bad`, and the next one follows; without it, it raises.
        """
        first, end = self.part
        found = self._read(first + start, bad or _raise)
        return found if end is None else islice(found, max(end - first - start, 0))

    def _read(self, start: int, bad: OnBadRow) -> Iterator[tuple[str, Row]]:
        if self.dataset is not None:
            for number, row in enumerate(self.dataset.skip(start), start):
                yield f"{self.name}[{number}]", _without_nulls(row)
            return
        for path in self.files:
            skipped = 0
            for where, row in _READERS[longest_suffix(path)](path, start):
                if row is None:
                    skipped += 1
                elif isinstance(row, InputError):
                    bad(row)
                else:
                    yield where, row
            start -= skipped

    def first(self) -> Row:
        """Return the first row that can be parsed, or raise if there is none."""
        bad: list[InputError] = []
        found = next(self.read(bad=bad.append), None)
        if found is None:
            raise bad[0] if bad else no_rows(self.name)
        return found[1]

    @property
    def format_note(self) -> str:
        """What is unusual about how its files are read as samples; empty if nothing is."""
        return self.format_for("sft")

    def format_for(self, goal: str) -> str:
        """Return what is unusual about how a goal reads its files; empty if nothing is.

        Other delimiters, lines as samples, files that are left out. Pretraining joins documents and cuts them.
        """
        texts = [path for path in self.files if path.suffix.lower() == TEXT]
        found = csv_format.other_delimiters(self.files)
        facts = [f"columns are separated by {found}"] if found else []
        if texts and goal != "pretrain":
            of_texts = "" if len(texts) == len(self.files) else f" of {plural(len(texts), '.txt file')}"
            facts.append(f"each line{of_texts} is a sample; --goal continued-pretraining trains on it as one text")
        if self.left_out:
            facts.append(f"{_names(self.left_out)} not read: the name is that of a description")
        return f"{self.name}: {'; '.join(facts)}" if facts else ""

    def state(self) -> list[object]:
        """Return a cache key for the content without reading it: file names, sizes and mtimes."""
        part: list[object] = [] if self.part == (0, None) else [list(self.part)]
        if self.dataset is not None:
            return [self.name, self.dataset._fingerprint, len(self.dataset), *part]
        files = [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in self.files]
        return [*files, *part]

    def count(self) -> int | None:
        """Return the number of rows if it can be had without parsing them."""
        first, end = self.part
        count = self._count()
        return None if count is None else max(min(count, count if end is None else end) - first, 0)

    def _count(self) -> int | None:
        if self.dataset is not None:
            return len(self.dataset)
        counters = [_COUNTERS.get(longest_suffix(path)) for path in self.files]
        counts = [
            None if counter is None else counter(path) for counter, path in zip(counters, self.files, strict=True)
        ]
        return None if None in counts else sum(count for count in counts if count is not None)


def find_rows(path: Path, split: str, name: str = "") -> Rows:
    """Open a split of a file or folder, or some of its rows: train[:100], train[100:]."""
    split, part = split_and_rows(split)
    found = _find_rows(path, split, name or str(path))
    return found if part == (0, None) else replace(found, part=part)


def split_and_rows(split: str) -> tuple[str, tuple[int, int | None]]:
    """Return a split without its slice, and the rows that the slice selects."""
    name, bracket, inner = split.partition("[")
    if not bracket:
        return split, (0, None)
    found = ROWS.fullmatch(inner)
    if found is None:
        reason = "a slice of a split is a range of row numbers"
        raise InputError(reason, field="data.split", value=split, fix=(f"data.split={name}[:100]",))
    first, end = int(found[1] or 0), int(found[2]) if found[2] else None
    if end is not None and end <= first:
        reason = f"rows {first} to {end} are none"
        raise InputError(reason, field="data.split", value=split, fix=(f"data.split={name}[{first}:{first + 100}]",))
    return name, (first, end)


def _find_rows(path: Path, split: str, name: str) -> Rows:
    if path.is_file():
        if not longest_suffix(path):
            raise csv_format.unsupported(path, SUFFIXES, FIELD, name)
        if split != "train":
            raise InputError("a single file has no splits", field="data.split", value=split, fix=("data.split=train",))
        return Rows(name, (path,))
    if (path / "dataset_dict.json").is_file() or all((path / part).is_file() for part in SAVED_DATASET_FILES):
        return Rows(name, dataset=_load_saved(path, split))
    files, left_out = _data_files(path, name)
    return Rows(name, tuple(_split_files(path, files, split)), left_out=left_out)


def _data_files(folder: Path, name: str) -> tuple[list[Path], tuple[Path, ...]]:
    """Return the files of a folder that have samples, and those that describe them.

    Lines of .txt files are samples beside rows that are texts too; beside conversations they are refused.
    """
    files = sorted(
        path for path in folder.rglob("*") if path.is_file() and longest_suffix(path, (*SUFFIXES, *COMPRESSED))
    )
    files = [path for path in files if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    packed = [path for path in files if not longest_suffix(path)]
    if packed:
        reason = f"{_names(packed)} cannot be read in a fine-tuning, which reads {', '.join(SUFFIXES)}"
        raise InputError(reason, field=FIELD, value=name, fix=(f"unpack {packed[0]}",))
    if not files:
        raise InputError(f"the folder has no readable files ({', '.join(SUFFIXES)})", field=FIELD, value=name)
    rows = [path for path in files if path.suffix.lower() != TEXT]
    described = tuple(path for path in files if path not in rows and DESCRIPTION.match(path.name)) if rows else ()
    texts = [path for path in files if path not in rows and path not in described]
    if rows and texts and not _has_texts(Rows(name, tuple(rows))):
        reason = (
            f"{_names(texts)} would be left out: the rows of {_names(rows)} are conversations, and the lines of a "
            ".txt file are texts"
        )
        fix = f"{FIELD}={rows[0]}" if len(rows) == 1 else f"move the .txt files out of {name}"
        raise InputError(reason, field=FIELD, value=name, fix=(fix,))
    return [path for path in files if path not in described], described


def _has_texts(rows: Rows) -> bool:
    """Return whether the rows are texts; those that cannot be parsed are reported when they are read."""
    try:
        found = known_columns(rows.first())
    except InputError:
        return True
    return not found or "text" in found


def _names(files: Sequence[Path]) -> str:
    """Return the first names of some files, and how many there are."""
    shown = ", ".join(path.name for path in files[:SHOWN_NAMES])
    return f"{shown} and {len(files) - SHOWN_NAMES:,} more" if len(files) > SHOWN_NAMES else shown


def _split_files(folder: Path, files: Sequence[Path], split: str) -> list[Path]:
    """Return the files of one split; files without a split name count as train."""
    by_split: dict[str, list[Path]] = {}
    for path in files:
        by_split.setdefault(_split_of(path.relative_to(folder)), []).append(path)
    named = {key: paths for key, paths in by_split.items() if key}
    if split in named:
        return named[split]
    if split == "train" and "" in by_split:
        return by_split[""]
    raise unknown("data.split", split, named or ["train"])


def _split_of(path: Path) -> str:
    for part in reversed(path.parts):
        word = LEADING_WORD.match(part)
        if word and word[0].lower() in SPLITS:
            return word[0].lower()
    return ""


def _load_saved(path: Path, split: str) -> Any:
    datasets = require_package("datasets")
    try:
        found = datasets.load_from_disk(str(path))
    except Exception as error:  # datasets raises many error types for a corrupt folder
        raise InputError(f"the saved dataset cannot be read: {error}", field=FIELD, value=path) from None
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise unknown("data.split", split, found)
        return _check_inside(path, found[split])
    if split != "train":
        raise InputError("the saved dataset has no splits", field="data.split", value=split, fix=("data.split=train",))
    return _check_inside(path, found)


def _check_inside(folder: Path, dataset: Any) -> Any:
    """Return the dataset if all its files are inside its folder: state.json could name any path."""
    for file in dataset.cache_files:
        if not Path(file["filename"]).resolve().is_relative_to(folder.resolve()):
            raise InputError(
                f"the saved dataset references {file['filename']}, which is outside its folder",
                field=FIELD,
                value=folder,
                fix=("do not use this folder: a saved dataset references only its own files",),
            )
    return dataset


def require_package(module: str, field: str = FIELD, package: str = "") -> Any:
    """Import an optional dependency, or raise with the install command."""
    try:
        return import_module(module)
    except ImportError:
        package = package or module.split(".")[0]
        raise not_installed(package, field, package) from None


def no_rows(name: str) -> InputError:
    """Return the error for an empty dataset."""
    return InputError("the dataset has no rows", field=FIELD, value=name)


def row_error(where: str, reason: str, fix: Sequence[str] = ()) -> InputError:
    """Return the error for a row, with its location."""
    return InputError(f"{where}: {reason}", field=FIELD, fix=tuple(fix))


def longest_suffix(path: Path, suffixes: Sequence[str] = SUFFIXES) -> str:
    """Return the longest of `suffixes` that the file name ends with, or an empty string."""
    name = path.name.lower()
    return max((suffix for suffix in suffixes if name.endswith(suffix)), key=len, default="")


def _open(path: Path) -> IO[bytes] | gzip.GzipFile:
    """Open a file of data after the byte order mark, if it has one."""
    try:
        file = gzip.GzipFile(path) if path.name.endswith(".gz") else path.open("rb")
    except OSError as error:
        raise InputError(f"cannot read the file: {error.strerror}", field=FIELD, value=path) from None
    if file.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
        file.seek(0)
    return file


RowIterator = Iterator[tuple[str, Row | InputError | None]]  # None: skipped; an error: the row cannot be parsed


def _raise(error: InputError) -> None:
    raise error


def _jsonl(path: Path, start: int) -> RowIterator:
    decoder = msgspec.json.Decoder()
    seen = 0
    with _open(path) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            seen += 1
            where = f"{path}:{number}"
            if seen <= start:
                yield where, None
                continue
            try:
                row = decoder.decode(line)
            except (RecursionError, msgspec.DecodeError, UnicodeDecodeError) as error:
                reason = str(json_text.NestingError()) if isinstance(error, RecursionError) else f"not JSON: {error}"
                refused = row_error(where, reason, json_fixes.not_json_fix(path, error))
                if seen == 1 and refused.fix:  # the whole file is written so
                    raise refused from None
                yield where, refused
                continue
            yield where, _object(where, row)


def _json(path: Path, start: int) -> RowIterator:
    with _open(path) as file:
        text = file.read()
    try:
        rows = json_text.decode(text)
    except json_text.NestingError as error:
        raise InputError(str(error), field=FILE, value=str(path)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if text.lstrip().startswith(b"{") and b"\n{" in text:  # JSON lines in a .json file
            yield from _jsonl(path, start)
            return
        raise row_error(str(path), f"not JSON: {error}", json_fixes.not_json_fix(path, error)) from None
    if isinstance(rows, dict) and len(lists := [value for value in rows.values() if isinstance(value, list)]) == 1:
        rows = lists[0]
    if not isinstance(rows, list):
        raise row_error(str(path), "the file must contain a list of samples", json_fixes.no_list_fix(path, rows))
    for number, row in enumerate(rows):
        where = f"{path}[{number}]"
        yield where, None if number < start else _object(where, row)


def _text_lines(path: Path, start: int) -> RowIterator:
    seen = 0
    with _open(path) as lines:
        for number, line in enumerate(lines, 1):
            where = f"{path}:{number}"
            try:
                text = line.decode().strip("\r\n")
            except UnicodeDecodeError:
                raise row_error(str(path), "the file is not UTF-8", csv_format.utf8_fix(path)) from None
            if text.strip():
                seen += 1
                yield where, None if seen <= start else {"text": text}


def csv_rows(path: Path, start: int = 0) -> RowIterator:
    """Yield each row of a CSV file from row `start` on; an error for one that does not have the header's columns."""
    with _open(path) as file:
        delimiter = csv_format.find_delimiter(path)
        reader = csv.DictReader(io.TextIOWrapper(file, encoding="utf-8", newline=""), delimiter=delimiter)
        try:
            for number, row in enumerate(reader):
                where = f"{path}:{reader.line_num}"
                if None in row or None in row.values():
                    names = csv_format.DELIMITERS[delimiter]
                    more = f'put cells that contain {names} in double quotes: "a{delimiter} b"'
                    fix = more if None in row else f"add the missing cells to the row in {path}, if only {names}"
                    reason = f"the row does not have the header's {len(reader.fieldnames or ())} columns"
                    yield where, row_error(where, reason, (fix,))
                    continue
                yield where, None if number < start else row
        except UnicodeDecodeError:
            raise row_error(str(path), "the file is not UTF-8", csv_format.utf8_fix(path)) from None
        except csv.Error as error:
            raise row_error(f"{path}:{reader.line_num + 1}", f"not CSV: {error}") from None


def _parquet(path: Path, start: int) -> RowIterator:
    parquet = require_package("pyarrow.parquet")
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(ARROW_ROWS):
                if number + len(batch) <= start:
                    rows: list[Row | None] = [None] * len(batch)
                else:
                    rows = batch.to_pylist()
                for row in rows:
                    yield f"{path} row {number}", None if number < start or row is None else _without_nulls(row)
                    number += 1
    except (OSError, ValueError) as error:  # pyarrow's errors derive from these
        raise row_error(f"{path} row {number}", f"not Parquet: {error}") from None


def _without_nulls(row: Row) -> Row:
    """Return a row of a typed table without the nulls in its objects, which mark keys that other rows have."""
    return {column: _pruned(value) if isinstance(value, list | dict) else value for column, value in row.items()}


def _pruned(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _pruned(one) for key, one in value.items() if one is not None}
    return [_pruned(one) for one in value] if isinstance(value, list) else value


def _object(where: str, row: object) -> Row | InputError:
    if not isinstance(row, dict):
        return row_error(where, f"a sample must be a JSON object, not {type(row).__name__}")
    return row


_READERS = {
    ".jsonl": _jsonl,
    ".jsonl.gz": _jsonl,
    ".ndjson": _jsonl,
    ".json": _json,
    **dict.fromkeys(csv_format.SUFFIXES, csv_rows),
    ".parquet": _parquet,
    TEXT: _text_lines,
}


def _lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 24), b""))


def _parquet_rows(path: Path) -> int | None:
    try:
        rows: int = require_package("pyarrow.parquet").read_metadata(path).num_rows
    except (OSError, ValueError):  # reading the file reports the error
        return None
    return rows


_COUNTERS = {".jsonl": _lines, ".ndjson": _lines, ".parquet": _parquet_rows}
