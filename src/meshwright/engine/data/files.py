"""Rows of data files: JSONL, JSON, CSV, Parquet and data sets saved to disk, each with the place it was read from."""

from __future__ import annotations

import csv
import gzip
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec

from meshwright.errors import InputError, unknown

Row = dict[str, Any]
FIELD = "data.dataset"
ENDINGS = (".jsonl", ".jsonl.gz", ".ndjson", ".json", ".csv", ".parquet")
SAVED = ("dataset_info.json", "state.json")  # beside the Arrow files of a data set saved to disk
SPLITS = ("train", "validation", "valid", "val", "dev", "test", "eval")
# A file tells its split by the first word of its name (train-00000-of-00002.parquet) or by its folder.
FIRST_WORD = re.compile(r"[a-z]+", re.IGNORECASE)
ARROW_ROWS = 1024  # rows turned into Python values at a time


@dataclass(frozen=True)
class Rows:
    """Rows in their order; reading them again gives the same ones."""

    name: str  # as the user wrote it
    files: tuple[Path, ...] = ()
    saved: Any = field(default=None, compare=False)  # a Dataset or IterableDataset, where there are no files

    def __iter__(self) -> Iterator[tuple[str, Row]]:
        """Each row and its place, such as talks.jsonl:17."""
        return self.read()

    def read(self, start: int = 0) -> Iterator[tuple[str, Row]]:
        """The rows from a number on; the ones before are passed over without being understood."""
        if self.saved is not None:
            for number, row in enumerate(self.saved.skip(start), start):
                yield f"{self.name}[{number}]", row
            return
        for path in self.files:
            passed = 0
            for where, row in _READERS[_ending(path)](path, start):
                if row is None:
                    passed += 1
                else:
                    yield where, row
            start -= passed

    def state(self) -> list[object]:
        """What tells this content from another without reading it: names, sizes and times of change."""
        if self.saved is not None:
            return [self.name, self.saved._fingerprint, len(self.saved)]
        return [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in self.files]

    def count(self) -> int | None:
        """How many rows there are, where that can be told without understanding them."""
        if self.saved is not None:
            return len(self.saved)
        counts = [_COUNTERS[_ending(path)](path) if _ending(path) in _COUNTERS else None for path in self.files]
        return None if None in counts else sum(count for count in counts if count is not None)


def find_rows(path: Path, split: str, name: str = "") -> Rows:
    """The rows of a split of a file or folder."""
    name = name or str(path)
    if path.is_file():
        if _ending(path) not in ENDINGS:
            raise InputError(f"not a kind of file that can be read ({', '.join(ENDINGS)})", field=FIELD, value=name)
        if split != "train":
            raise InputError("a single file has no splits", field="data.split", value=split, fix=("data.split=train",))
        return Rows(name, (path,))
    if (path / "dataset_dict.json").is_file() or all((path / part).is_file() for part in SAVED):
        return Rows(name, saved=_saved(path, split))
    return Rows(name, tuple(_of_split(path, split, name)))


def _of_split(folder: Path, split: str, name: str) -> list[Path]:
    """The files of one split; a folder whose files name no split is all one."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and _ending(path) in ENDINGS)
    files = [path for path in files if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    if not files:
        raise InputError(f"the folder holds no file that can be read ({', '.join(ENDINGS)})", field=FIELD, value=name)
    by_split: dict[str, list[Path]] = {}
    for path in files:
        by_split.setdefault(_split_of(path.relative_to(folder)), []).append(path)
    named = {key: paths for key, paths in by_split.items() if key}
    if split in named:
        return named[split]
    if split == "train" and "" in by_split:  # files whose names say nothing
        return by_split[""]
    raise unknown("data.split", split, named or ["train"])


def _split_of(path: Path) -> str:
    for part in reversed(path.parts):
        word = FIRST_WORD.match(part)
        if word and word[0].lower() in SPLITS:
            return word[0].lower()
    return ""


def _saved(path: Path, split: str) -> Any:
    datasets = need("datasets")
    try:
        found = datasets.load_from_disk(str(path))
    except Exception as error:  # a torn folder shows itself in many kinds of error
        raise InputError(f"the saved data set cannot be read: {error}", field=FIELD, value=path) from None
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise unknown("data.split", split, found)
        return _inside(path, found[split])
    if split != "train":
        raise InputError("the saved data set has no splits", field="data.split", value=split, fix=("data.split=train",))
    return _inside(path, found)


def _inside(folder: Path, saved: Any) -> Any:
    """A saved data set whose every file lies in its folder: its state names them, and could name any."""
    for file in saved.cache_files:
        if not Path(file["filename"]).resolve().is_relative_to(folder.resolve()):
            raise InputError(
                f"the saved data set names {file['filename']}, which lies outside its folder",
                field=FIELD,
                value=folder,
                fix=("do not use this folder: a saved data set names only files of its own",),
            )
    return saved


def need(module: str) -> Any:
    """An optional package, or what to install."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.split(".")[0]
        raise InputError(
            f"{package} is needed to read this and is not installed", field=FIELD, fix=(f"pip install {package}",)
        ) from None


def bad(where: str, reason: str, fix: Sequence[str] = ()) -> InputError:
    """The error for a row, with its place."""
    return InputError(f"{where}: {reason}", field=FIELD, fix=tuple(fix))


def _ending(path: Path) -> str:
    name = path.name.lower()
    return next((ending for ending in sorted(ENDINGS, key=len, reverse=True) if name.endswith(ending)), path.suffix)


def _open(path: Path) -> IO[bytes] | gzip.GzipFile:
    try:
        return gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb")
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", field=FIELD, value=path) from None


Read = Iterator[tuple[str, Row | None]]  # None: passed over


def _jsonl(path: Path, start: int) -> Read:
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
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise bad(where, f"not JSON: {error}") from None
            yield where, _object(where, row)


def _json(path: Path, start: int) -> Read:
    with _open(path) as file:
        text = file.read()
    try:
        rows = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if text.lstrip().startswith(b"{") and b"\n{" in text:  # one object a line under the other ending
            yield from _jsonl(path, start)
            return
        raise bad(str(path), f"not JSON: {error}") from None
    if isinstance(rows, dict) and len(lists := [value for value in rows.values() if isinstance(value, list)]) == 1:
        rows = lists[0]
    if not isinstance(rows, list):
        raise bad(str(path), "the file must hold a list of samples")
    for number, row in enumerate(rows):
        where = f"{path}[{number}]"
        yield where, None if number < start else _object(where, row)


def _csv(path: Path, start: int) -> Read:
    with _open(path) as file:
        reader = csv.DictReader(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""))
        try:
            for number, row in enumerate(reader):
                where = f"{path}:{reader.line_num}"
                if None in row or None in row.values():
                    raise bad(where, f"the row has not the {len(reader.fieldnames or ())} columns of the first line")
                yield where, None if number < start else row
        except (UnicodeDecodeError, csv.Error) as error:
            raise bad(f"{path}:{reader.line_num + 1}", f"not CSV: {error}") from None


def _parquet(path: Path, start: int) -> Read:
    parquet = need("pyarrow.parquet")
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(ARROW_ROWS):
                if number + len(batch) <= start:
                    rows: list[Row | None] = [None] * len(batch)
                else:
                    rows = batch.to_pylist()
                for row in rows:
                    yield f"{path} row {number}", None if number < start else row
                    number += 1
    except (OSError, ValueError) as error:  # pyarrow's errors are kinds of these
        raise bad(f"{path} row {number}", f"not Parquet: {error}") from None


def _object(where: str, row: object) -> Row:
    if not isinstance(row, dict):
        raise bad(where, f"a sample must be an object with named parts, not {type(row).__name__}")
    return row


_READERS = {
    ".jsonl": _jsonl,
    ".jsonl.gz": _jsonl,
    ".ndjson": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}


def _lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 24), b""))


def _parquet_rows(path: Path) -> int | None:
    try:
        rows: int = need("pyarrow.parquet").read_metadata(path).num_rows
    except (OSError, ValueError):  # reading it will say what is wrong
        return None
    return rows


_COUNTERS = {".jsonl": _lines, ".ndjson": _lines, ".parquet": _parquet_rows}
