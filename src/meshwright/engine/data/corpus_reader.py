"""Reads text files in blocks and encodes their documents; worker processes import this module, so no torch here."""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.engine.data import csv_format
from meshwright.engine.data.column_schemas import spelled_column
from meshwright.engine.data.files import COMPRESSED, csv_rows, longest_suffix, require_package
from meshwright.engine.data.missing_column import MissingColumnError, missing_column
from meshwright.engine.data.workers import map_in_order, worker_pool
from meshwright.errors import InputError
from meshwright.file_access import missing_path
from meshwright.recipes.types import Documents

SUFFIXES = (".jsonl", ".ndjson", ".txt", *csv_format.SUFFIXES, ".parquet", *COMPRESSED)
BLOCK_BYTES = 1 << 20  # bytes read and encoded at a time
MAX_LINE_BYTES = 1 << 28  # a longer line is not a document and would fill memory
TABLE_ROWS = 1024  # rows of a table read at a time
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
INPUTS = "inputs"  # field named in errors
BadLines = Literal["refuse", "skip"]
# How a text file is split into documents. auto: at separators if its beginning has any, else at blank lines.
HEAD_BYTES = 1 << 20
SEPARATOR = re.compile(rb"\f|^<\|endoftext\|>[ \t\r]*$", re.MULTILINE)
SPLITS = {"separator": SEPARATOR, "blank_line": re.compile(rb"\n[ \t\r]*\n"), "line": re.compile(rb"\n"), "file": None}


DESCRIPTIONS = {
    "separator": "each ends at a form feed or a line <|endoftext|>",
    "blank_line": "each ends at a blank line",
    "line": "one per line",
    "file": "one per file",
}


def split_in(path: Path, documents: Documents) -> Documents:
    """Return how a text file is split."""
    if documents != "auto":
        return documents
    with path.open("rb") as raw:
        return "separator" if SEPARATOR.search(_decompress(raw, path).read(HEAD_BYTES)) else "blank_line"


@dataclass(frozen=True)
class Block:
    """Lines or rows of a file: JSON lines, table rows, or a chunk of one plain text."""

    format: Literal["json", "rows", "text"]
    file: int  # index into the input files
    first: int  # number of its first line or row, 1-based
    data: bytes | list[Any]
    read: int  # bytes of the file read so far, on disk
    ends: bool = True  # plain text only: whether its last document ends here
    continues: bool = False  # plain text only: whether it begins within a document
    documents: Documents = "file"  # plain text only: how it is split

    @property
    def keeps_empty(self) -> bool:
        """Whether its first document counts without text: as the end of one that began before, or as a file."""
        return self.format == "text" and (self.continues or self.documents == "file")


@dataclass(frozen=True)
class EncodedBlock:
    """The tokens of a block and the document ends within them."""

    tokens: NDArray[np.uint32]
    ends: NDArray[np.int64]
    bad: list[tuple[int, str]] = field(default_factory=list)  # line numbers that could not be parsed, and why
    empty: int = 0  # documents without text


class Encoder:
    """Tokenizes blocks of text."""

    def __init__(self, tokenizer_json: str, eos: int | None, text_column: str) -> None:
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_str(tokenizer_json)
        self.tokenizer.no_truncation()  # tokenizer.json may carry truncation and padding settings from training
        self.tokenizer.no_padding()
        self.eos, self.column = eos, text_column
        self._encode = getattr(self.tokenizer, "encode_batch_fast", self.tokenizer.encode_batch)

    def encode(self, block: Block) -> EncodedBlock:
        """Encode a block's documents; lines that are not documents go to `bad`."""
        bad: list[tuple[int, str]] = []
        texts = list(documents_in(block, self.column, bad))
        found = self._encode(texts, add_special_tokens=False) if texts else []
        ids, ends, empty, length = [], [], 0, 0
        for number, encoding in enumerate(found):
            token_ids = encoding.ids
            if not token_ids and not (block.keeps_empty and number == 0):
                empty += block.format != "text"
                continue
            ids.append(token_ids)
            length += len(token_ids)
            if block.format != "text" or number < len(found) - 1 or block.ends:
                length += self._end(ids)
                ends.append(length)
        tokens = np.fromiter(chain.from_iterable(ids), dtype=np.uint32, count=length)
        return EncodedBlock(tokens, np.array(ends, dtype=np.int64), bad, empty)

    def _end(self, ids: list[list[int]]) -> int:
        if self.eos is None:
            return 0
        ids.append([self.eos])
        return 1


def documents_in(block: Block, column: str, bad: list[tuple[int, str]]) -> Iterator[str]:
    """Yield the documents of a block; lines that are not documents go to `bad`."""
    if block.format == "text":
        for chunk in _decode_text(block, bad):
            yield from _split(chunk, block)
        return
    for number, text in enumerate(_values(block, column), block.first):
        if text is None:
            continue  # a blank line between documents
        if isinstance(text, _BadValue):
            bad.append((number, text.reason))
        elif any("\ud800" <= char <= "\udfff" for char in text) if not text.isascii() else False:
            bad.append((number, "the text contains an unpaired surrogate"))
        else:
            yield text


@dataclass(frozen=True)
class _BadValue:
    reason: str


def _values(block: Block, column: str) -> Iterator[str | _BadValue | None]:
    """Yield the text of each line or row, a `_BadValue`, or None for a blank line."""
    if block.format == "rows":
        for value in block.data:
            if isinstance(value, str | _BadValue):
                yield value
            else:
                yield _BadValue(f"{column!r} is {_describe_type(value)}, not text")
        return
    assert isinstance(block.data, bytes)
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    for line in block.data.split(b"\n"):
        if not line.strip():
            yield None
            continue
        try:
            row = decode(line)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            yield _BadValue(f"not a JSON object: {error}")
            continue
        column = spelled_column(column, row)
        if column not in row:
            kinds = {name: "" if isinstance(one, str) else _describe_type(one) for name, one in row.items()}
            yield _BadValue(missing_column(column, kinds))
        else:
            value = row[column]
            yield value if isinstance(value, str) else _BadValue(f"{column!r} is {_describe_type(value)}, not text")


def _describe_type(value: object) -> str:
    return "empty" if value is None else f"of type {type(value).__name__}"


def _split(text: str, block: Block) -> list[str]:
    """Return the documents of a text chunk; the last one may go on in the next chunk."""
    pattern = SPLITS[block.documents]
    if pattern is None:
        return [text]
    parts = re.split(pattern.pattern.decode(), text, flags=pattern.flags & re.MULTILINE)
    if block.ends:
        parts[-1] = parts[-1].rstrip("\r\n")
    if len(parts) > 1 or not block.continues:
        parts[-1] = parts[-1].lstrip("\r\n")
    first = [parts[0].rstrip("\r\n") if len(parts) > 1 else parts[0]] if block.continues else []
    inner = [part.strip("\r\n") for part in parts[len(first) : -1] if part.strip()]
    return [*first, *inner, *(parts[-1:] if len(parts) > len(first) and parts[-1].strip() else [])]


def _decode_text(block: Block, bad: list[tuple[int, str]]) -> Iterator[str]:
    """Yield a text chunk as one string; lines that are not UTF-8 are left out and added to `bad`."""
    assert isinstance(block.data, bytes)
    try:
        yield block.data.decode()
    except UnicodeDecodeError:
        kept = []
        for number, line in enumerate(block.data.splitlines(keepends=True), block.first):
            try:
                kept.append(line.decode())
            except UnicodeDecodeError as error:
                bad.append((number, f"not UTF-8: {error.reason} at byte {error.start}"))
        yield "".join(kept)


def find_text_files(inputs: Sequence[str]) -> list[Path]:
    """Return the input files, searching folders recursively; raise on unreadable inputs."""
    found: list[Path] = []
    for name in inputs:
        path = Path(name).expanduser()
        if path.is_dir():
            matches = sorted(
                p for p in path.rglob("*") if p.is_file() and longest_suffix(p, SUFFIXES) and not p.name.startswith(".")
            )
            if not matches:
                raise InputError(f"the folder has no text files ({', '.join(SUFFIXES)})", field=INPUTS, value=name)
            found += matches
        elif not path.is_file():
            if not path.exists():
                raise missing_path(name, INPUTS)
            raise InputError("not a file or folder", field=INPUTS, value=name)
        elif not longest_suffix(path, SUFFIXES):
            raise csv_format.unsupported(path, SUFFIXES, INPUTS, name)
        else:
            found.append(path)
    if not found:
        raise InputError("no input files", field=INPUTS)
    return found


def blocks(files: Sequence[Path], text_column: str, documents: Documents = "auto") -> Iterator[Block]:
    """Yield all blocks of all files, in order."""
    for number, path in enumerate(files):
        kind = longest_suffix(path, SUFFIXES).split(".")[1]
        try:
            yield from _READERS[kind](path, number, documents if kind == "txt" else text_column)
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise InputError(f"the file cannot be read: {error}", field=INPUTS, value=str(path)) from None


def _json_blocks(path: Path, number: int, _: str) -> Iterator[Block]:
    first = 1
    for data, read, _last in _line_chunks(path):
        yield Block("json", number, first, data, read)
        first += data.count(b"\n")


def _text_blocks(path: Path, number: int, documents: Any) -> Iterator[Block]:
    """Yield a text file in blocks that end with a document, or within one that is longer than a block."""
    first, rest, split, continues = 1, b"", split_in(path, documents), False
    for chunk, read, last in _line_chunks(path):
        data = rest + chunk
        end = len(data) if last else _end_of_documents(data, SPLITS[split])
        ends = last or end > 0
        if not ends:  # keep line breaks together: they may be a separator with those of the next chunk
            end = len(data.rstrip()) if split != "file" else len(data)
        if end or last:
            yield Block("text", number, first, data[:end], read, ends, continues, split)
            continues = not ends
        first += data[:end].count(b"\n")
        rest = data[end:]


def _end_of_documents(data: bytes, pattern: re.Pattern[bytes] | None) -> int:
    """Return where the last complete document of a chunk ends, with its separator; 0 if none does."""
    return 0 if pattern is None else max((found.end() for found in pattern.finditer(data)), default=0)


def _line_chunks(path: Path) -> Iterator[tuple[bytes, int, bool]]:
    """Yield chunks that end at a line break, the bytes read so far, and whether the chunk is the last."""
    with path.open("rb") as raw:
        file = _decompress(raw, path)
        buffer, started = file.read(len(BYTE_ORDER_MARK)).removeprefix(BYTE_ORDER_MARK), False
        while True:
            chunk = file.read(BLOCK_BYTES)
            buffer += chunk
            if not chunk:
                if buffer or started:
                    yield buffer, raw.tell(), True
                return
            line_end = buffer.rfind(b"\n") + 1
            if line_end:
                yield buffer[:line_end], raw.tell(), False
                buffer, started = buffer[line_end:], True
            elif len(buffer) > MAX_LINE_BYTES:
                raise InputError(
                    f"a line is longer than {MAX_LINE_BYTES >> 20} MiB",
                    field=INPUTS,
                    value=str(path),
                    fix=("split the line",),
                )


def _decompress(raw: IO[bytes], path: Path) -> Any:
    if path.name.lower().endswith(".gz"):
        return gzip.GzipFile(fileobj=raw, mode="rb")
    if path.name.lower().endswith(".zst"):
        return require_package("pyarrow", INPUTS).CompressedInputStream(raw, "zstd")
    return raw


def _table_blocks(path: Path, number: int, column: str) -> Iterator[Block]:
    arrow = require_package("pyarrow", INPUTS)
    parquet = require_package("pyarrow.parquet", INPUTS)
    try:
        with parquet.ParquetFile(path) as table:
            column = _require_column(path, column, _kinds(table.schema_arrow))
            first, size = 1, path.stat().st_size
            for rows in table.iter_batches(batch_size=TABLE_ROWS, columns=[column]):
                read = size * (first - 1 + len(rows)) // max(table.metadata.num_rows, 1)
                yield Block("rows", number, first, rows.column(0).to_pylist(), read)
                first += len(rows)
    except arrow.ArrowException as error:
        raise InputError(f"the file cannot be read: {error}", field=INPUTS, value=str(path)) from None


def _csv_blocks(path: Path, number: int, column: str) -> Iterator[Block]:
    """Yield the text column of a CSV file; a row without the header's columns is a bad line."""
    first, read, size, rows = 2, 0, path.stat().st_size, csv_rows(path)  # the header is line 1
    while some_rows := [row for _, row in islice(rows, TABLE_ROWS)]:
        values: list[Any] = []
        for line, row in enumerate(some_rows, first):
            if isinstance(row, dict):
                values.append(row[_require_column(path, column, dict.fromkeys(row, ""))])
            else:  # its location is another line if cells have line breaks
                values.append(_BadValue("empty" if row is None else row.reason.removeprefix(f"{path}:{line}: ")))
        read = min(read + sum(len(one) for one in values if isinstance(one, str)), size)
        yield Block("rows", number, first, values, read)
        first += len(some_rows)


def _kinds(schema: Any) -> dict[str, str]:
    """Return the columns of an Arrow schema, with the types of those that are not text."""
    return {one.name: "" if "string" in str(one.type) else f"of type {one.type}" for one in schema}


def _require_column(path: Path, column: str, kinds: Mapping[str, str]) -> str:
    """Return the column of the file that is meant; raise MissingColumnError if there is none."""
    column = spelled_column(column, kinds)
    if column not in kinds:
        raise MissingColumnError(path, column, kinds)
    return column


_READERS = {
    "jsonl": _json_blocks,
    "ndjson": _json_blocks,
    "txt": _text_blocks,
    "parquet": _table_blocks,
    **{suffix.removeprefix("."): _csv_blocks for suffix in csv_format.SUFFIXES},
}


def encode_blocks(
    block_iter: Iterable[Block], arguments: tuple[str, int | None, str], workers: int
) -> Iterator[tuple[Block, EncodedBlock]]:
    """Yield blocks with their tokens, in order; `arguments` go to `Encoder`. More than one worker means processes."""
    if workers <= 1:
        encoder = Encoder(*arguments)
        for block in block_iter:
            yield block, encoder.encode(block)
        return
    with worker_pool(workers, initializer=_start_worker, initargs=arguments) as pool:
        yield from map_in_order(pool, _encode_in_worker, block_iter, 3 * workers)


_ENCODER: list[Encoder] = []  # one per worker process, created when it starts


def _start_worker(tokenizer_json: str, eos: int | None, text_column: str) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _ENCODER.append(Encoder(tokenizer_json, eos, text_column))


def _encode_in_worker(block: Block) -> EncodedBlock:
    return _ENCODER[0].encode(block)
