"""Documents of text files, read in blocks and turned into tokens; workers load this module, so no torch here."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import IO, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.engine.data.workers import in_turn, worker_pool
from meshwright.errors import InputError, closest

ENDINGS = (".jsonl", ".ndjson", ".txt", ".parquet", *(f"{e}{c}" for e in (".jsonl", ".txt") for c in (".gz", ".zst")))
BLOCK = 1 << 20  # bytes that are read and encoded at a time
LONGEST_LINE = 1 << 28  # bytes; a longer one is no document, and would fill memory
ROWS = 1024  # of a Parquet file at a time
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
BadLines = Literal["refuse", "skip"]


@dataclass(frozen=True)
class Block:
    """Some lines or rows of a file: JSON lines, rows of a table, or a piece of one plain text."""

    kind: Literal["json", "rows", "text"]
    file: int  # place among the input files
    first: int  # number of its first line or row, counted from 1
    data: bytes | list[Any]
    read: int  # bytes of the file that were read so far, on disk
    ends: bool = True  # of a plain text: whether the document ends here


@dataclass(frozen=True)
class Encoded:
    """The tokens of a block and where documents end in them."""

    tokens: NDArray[np.uint32]
    ends: NDArray[np.int64]
    bad: list[tuple[int, str]] = field(default_factory=list)  # lines that are no document, and why
    empty: int = 0  # documents without text


class Encoder:
    """Turns blocks of text into tokens."""

    def __init__(self, tokenizer_json: str, eos: int | None, text_column: str) -> None:
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_str(tokenizer_json)
        self.tokenizer.no_truncation()  # a file may carry settings of the training it came from
        self.tokenizer.no_padding()
        self.eos, self.column = eos, text_column
        self._encode = getattr(self.tokenizer, "encode_batch_fast", self.tokenizer.encode_batch)

    def encode(self, block: Block) -> Encoded:
        """The tokens of a block's documents; lines that are none are told, not encoded."""
        bad: list[tuple[int, str]] = []
        texts = list(self._texts(block, bad))
        found = self._encode(texts, add_special_tokens=False) if texts else []
        ids, ends, empty, length = [], [], 0, 0
        for encoding in found:
            own = encoding.ids
            if block.kind != "text" and not own:
                empty += 1
                continue
            ids.append(own)
            length += len(own)
            if block.kind != "text":
                length += self._end(ids)
                ends.append(length)
        if block.kind == "text" and block.ends:
            length += self._end(ids)
            ends.append(length)
        tokens = np.fromiter(chain.from_iterable(ids), dtype=np.uint32, count=length)
        return Encoded(tokens, np.array(ends, dtype=np.int64), bad, empty)

    def _end(self, ids: list[list[int]]) -> int:
        if self.eos is None:
            return 0
        ids.append([self.eos])
        return 1

    def _texts(self, block: Block, bad: list[tuple[int, str]]) -> Iterator[str]:
        if block.kind == "text":
            yield from _decoded(block, bad)
            return
        for number, text in enumerate(_values(block, self.column), block.first):
            if text is None:
                continue  # a blank line between documents
            if isinstance(text, _Wrong):
                bad.append((number, text.reason))
            elif any("\ud800" <= letter <= "\udfff" for letter in text) if not text.isascii() else False:
                bad.append((number, "the text has half of a surrogate pair"))
            else:
                yield text


@dataclass(frozen=True)
class _Wrong:
    reason: str


def _values(block: Block, column: str) -> Iterator[str | _Wrong | None]:
    """The text of each line or row, what is wrong with it, or None for a blank line."""
    if block.kind == "rows":
        for value in block.data:
            yield value if isinstance(value, str) else _Wrong(f"{column!r} is {_kind(value)}, not text")
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
            yield _Wrong(f"not a JSON object: {error}")
            continue
        if column not in row:
            near = closest(column, row)
            yield _Wrong(f"has no {column!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        else:
            value = row[column]
            yield value if isinstance(value, str) else _Wrong(f"{column!r} is {_kind(value)}, not text")


def _kind(value: object) -> str:
    return "empty" if value is None else f"of type {type(value).__name__}"


def _decoded(block: Block, bad: list[tuple[int, str]]) -> Iterator[str]:
    """A piece of text as one string; lines that are no UTF-8 are left out and told."""
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


def found_files(inputs: Sequence[str]) -> list[Path]:
    """The files that are meant, folders searched; an error names what cannot be read."""
    found: list[Path] = []
    for name in inputs:
        path = Path(name).expanduser()
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.is_file() and _ending(p) and not p.name.startswith("."))
            if not inside:
                raise InputError(f"the folder holds no file of text ({', '.join(ENDINGS)})", field="inputs", value=name)
            found += inside
        elif not path.is_file():
            what = "neither a file nor a folder" if path.exists() else "there is no such file or folder"
            raise InputError(what, field="inputs", value=name, fix=_near(path) if not path.exists() else ())
        elif not _ending(path):
            raise InputError(f"not a kind of file that can be read ({', '.join(ENDINGS)})", field="inputs", value=name)
        else:
            found.append(path)
    if not found:
        raise InputError("no file was named", field="inputs")
    return found


def _near(path: Path) -> tuple[str, ...]:
    beside = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
    return tuple(str(path.parent / name) for name in closest(path.name, beside))


def _ending(path: Path) -> str:
    name = path.name.lower()
    return max((ending for ending in ENDINGS if name.endswith(ending)), key=len, default="")


def blocks(files: Sequence[Path], text_column: str) -> Iterator[Block]:
    """All blocks of all files, in order."""
    for number, path in enumerate(files):
        try:
            yield from _READERS[_ending(path).split(".")[1]](path, number, text_column)
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise InputError(f"the file cannot be read: {error}", field="inputs", value=str(path)) from None


def _json_blocks(path: Path, number: int, _: str) -> Iterator[Block]:
    first = 1
    for data, read, _last in _whole_lines(path):
        yield Block("json", number, first, data, read)
        first += data.count(b"\n")


def _text_blocks(path: Path, number: int, _: str) -> Iterator[Block]:
    first = 1
    for data, read, last in _whole_lines(path):
        yield Block("text", number, first, data, read, last)
        first += data.count(b"\n")


def _whole_lines(path: Path) -> Iterator[tuple[bytes, int, bool]]:
    """Pieces of a file that end with a line, bytes read so far, and whether the piece is the last."""
    with path.open("rb") as raw:
        file = _unpacked(raw, path)
        left, started = file.read(len(BYTE_ORDER_MARK)).removeprefix(BYTE_ORDER_MARK), False
        while True:
            more = file.read(BLOCK)
            left += more
            if not more:
                if left or started:
                    yield left, raw.tell(), True
                return
            cut = left.rfind(b"\n") + 1
            if cut:
                yield left[:cut], raw.tell(), False
                left, started = left[cut:], True
            elif len(left) > LONGEST_LINE:
                raise InputError(
                    f"a line is longer than {LONGEST_LINE >> 20} MiB", field="inputs", value=str(path), fix=("cut it",)
                )


def _unpacked(raw: IO[bytes], path: Path) -> Any:
    if path.name.lower().endswith(".gz"):
        return gzip.GzipFile(fileobj=raw, mode="rb")
    if path.name.lower().endswith(".zst"):
        return _arrow("zst").CompressedInputStream(raw, "zstd")
    return raw


def _table_blocks(path: Path, number: int, column: str) -> Iterator[Block]:
    arrow = _arrow("parquet")
    from pyarrow import parquet  # type: ignore[import-untyped]  # it has no stubs

    try:
        with parquet.ParquetFile(path) as table:
            names = table.schema_arrow.names
            if column not in names:
                near = closest(column, names)
                raise InputError(
                    f"{path} has no such column; it has {', '.join(names)}", field="text_column", value=column, fix=near
                )
            first, size = 1, path.stat().st_size
            for rows in table.iter_batches(batch_size=ROWS, columns=[column]):
                read = size * (first - 1 + len(rows)) // max(table.metadata.num_rows, 1)
                yield Block("rows", number, first, rows.column(0).to_pylist(), read)
                first += len(rows)
    except arrow.ArrowException as error:
        raise InputError(f"the file cannot be read: {error}", field="inputs", value=str(path)) from None


_READERS = {
    "jsonl": _json_blocks,
    "ndjson": _json_blocks,
    "txt": _text_blocks,
    "parquet": _table_blocks,
}


def _arrow(kind: str) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise InputError(
            f".{kind} files are read with pyarrow, which is not installed", field="inputs", fix=("pip install pyarrow",)
        ) from None
    return pyarrow


def encoded(
    given: Iterable[Block], arguments: tuple[str, int | None, str], workers: int
) -> Iterator[tuple[Block, Encoded]]:
    """The blocks with their tokens, in order; `arguments` are the encoder's. Several workers are processes."""
    if workers <= 1:
        encoder = Encoder(*arguments)
        for block in given:
            yield block, encoder.encode(block)
        return
    pool = worker_pool(workers, initializer=_start_worker, initargs=arguments)
    try:
        yield from in_turn(pool, _work, given, 3 * workers)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_ENCODER: list[Encoder] = []  # of a worker process, made once when it starts


def _start_worker(tokenizer_json: str, eos: int | None, text_column: str) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _ENCODER.append(Encoder(tokenizer_json, eos, text_column))


def _work(block: Block) -> Encoded:
    return _ENCODER[0].encode(block)
