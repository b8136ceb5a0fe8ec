"""Tokens of many documents as one long stream, and the samples it is cut into.

A folder of shards holds `manifest.json` and, for each shard, `NNNNN.tokens` (the tokens of its documents, one after
the other, little-endian) and `NNNNN.ends` (int64: where each document ends, in tokens from the shard's start). A
document lies in one shard.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.engine.data.sampler import Sample
from meshwright.engine.fsync import sync_file
from meshwright.errors import InputError

MANIFEST = "manifest.json"
FORMAT, VERSION = "meshwright-shards", 1
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
ENDS: np.dtype[Any] = np.dtype("<i8")
LARGEST_MANIFEST = 1 << 28  # bytes; of some hundred thousand shards
SHARD_NAME = re.compile(r"[0-9]{5,}")


class SourceFile(msgspec.Struct, frozen=True):
    """A file that documents came from."""

    name: str
    bytes: int
    documents: int
    skipped: int = 0  # lines that could not be read
    empty: int = 0  # documents without text


class Shard(msgspec.Struct, frozen=True):
    """A pair of files with the tokens of some documents and their ends."""

    name: str
    tokens: int
    documents: int
    tokens_sha256: str
    ends_sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a folder of shards holds and where it came from."""

    format: str = FORMAT
    version: int = VERSION
    dtype: str
    tokens: int
    documents: int
    max_token: int  # the highest token that occurs
    eos: int | None  # the token that ends every document
    tokenizer: str  # the folder's name
    tokenizer_sha256: str
    vocab: int
    sources: list[SourceFile]
    shards: list[Shard]


class Tokens(Protocol):
    """Tokens that can be sliced without reading the others."""

    def __len__(self) -> int: ...

    def __getitem__(self, at: slice) -> NDArray[Any]: ...


@dataclass(frozen=True)
class Part:
    """A run of documents: their tokens and where each ends, in order, the last at the end of the tokens."""

    tokens: Tokens
    ends: Sequence[int]


class Stream:
    """The documents of all parts, one after the other."""

    def __init__(self, parts: Sequence[Part], name: str) -> None:
        self.parts, self.name = parts, name
        self.starts = [0]
        for part in parts:
            self.starts.append(self.starts[-1] + len(part.tokens))

    def __len__(self) -> int:
        return self.starts[-1]

    def read(self, begin: int, end: int) -> NDArray[np.int64]:
        """The tokens from one place to another."""
        found = [
            self.parts[i].tokens[max(begin - self.starts[i], 0) : end - self.starts[i]]
            for i in self._parts_between(begin, end)
        ]
        return np.concatenate(found).astype(np.int64) if len(found) != 1 else np.array(found[0], dtype=np.int64)

    def ends(self, begin: int, end: int) -> NDArray[np.int64]:
        """The places behind `begin` and up to `end` where documents end."""
        found = []
        for i in self._parts_between(begin, end):
            ends, start = self.parts[i].ends, self.starts[i]
            first, last = bisect_right(ends, begin - start), bisect_right(ends, end - start)
            found.append(np.array(ends[first:last], dtype=np.int64) + start)
        return np.concatenate(found)

    def document_border(self, place: int) -> int:
        """The last end of a document that is not behind a place; 0 where there is none."""
        for i in range(bisect_right(self.starts, place) - 1, -1, -1):
            if i == len(self.parts):
                return len(self)
            before = bisect_right(self.parts[i].ends, place - self.starts[i])
            if before:
                return self.starts[i] + int(self.parts[i].ends[before - 1])
        return 0

    def _parts_between(self, begin: int, end: int) -> range:
        return range(bisect_right(self.starts, begin) - 1, max(bisect_right(self.starts, end - 1), 1))


class StreamCorpus:
    """Samples of seq_length tokens and one more to predict, cut from a stream by arithmetic alone.

    Sample i begins at token i × seq_length: its last label is the first token of the next sample. What is left at the
    end is less than a sample. With `packing` the documents in a sample are kept apart; otherwise they follow each
    other as one text, and the end of one predicts the begin of the next, as pretraining usually has it.
    """

    def __init__(
        self, stream: Stream, seq_length: int, *, vocab: int, packing: bool = False, span: tuple[int, int] | None = None
    ) -> None:
        self.stream, self.seq_length, self.vocab, self.packing = stream, seq_length, vocab, packing
        self.begin, self.end = span or (0, len(stream))
        if len(self) < 1:
            raise InputError(
                f"{self.end - self.begin:,} tokens are less than one sample of {seq_length + 1:,}",
                field="data.dataset",
                value=stream.name,
                fix=(f"data.seq_length={max(self.end - self.begin - 1, 1)}", "more data"),
            )

    def __len__(self) -> int:
        return (self.end - self.begin - 1) // self.seq_length

    def sample(self, index: int) -> Sample:
        """The sample with this index."""
        begin = self.begin + index * self.seq_length
        tokens = self.stream.read(begin, begin + self.seq_length + 1)
        if int(tokens.max()) >= self.vocab or int(tokens.min()) < 0:
            raise foreign_tokens(self.stream.name, int(tokens.max()), self.vocab)
        counted = np.ones(self.seq_length, dtype=bool)
        if not self.packing:
            return Sample(tokens, counted)
        ends = self.stream.ends(begin, begin + self.seq_length) - begin
        counted[ends - 1] = False
        borders = np.zeros(self.seq_length, dtype=np.int64)
        borders[ends[ends < self.seq_length]] = 1
        return Sample(tokens, counted, np.cumsum(borders))


def spans(stream: Stream, held_out_part: float) -> tuple[tuple[int, int], tuple[int, int]]:
    """The places of the stream to train on and those held out: its last documents, about this part of the tokens."""
    border = stream.document_border(int(len(stream) * (1 - held_out_part))) if held_out_part else len(stream)
    return (0, border), (border, len(stream))


def foreign_tokens(name: str, highest: int, vocab: int) -> InputError:
    """The error for data with tokens that the model does not have."""
    return InputError(
        f"holds token {highest}, the model knows {vocab} tokens (0 to {vocab - 1})",
        field="data.dataset",
        value=name,
        fix=("tokenise the data with the model's own tokenizer: meshwright tokenize … --tokenizer FOLDER",),
    )


def is_shards(path: Path) -> bool:
    """Whether a path is a folder of shards."""
    return (path / MANIFEST).is_file()


def open_shards(folder: Path) -> tuple[Stream, Manifest]:
    """The stream of a folder of shards; an error names what does not fit together."""
    manifest = read_manifest(folder)
    parts = [_part(folder, shard, DTYPES[manifest.dtype]) for shard in manifest.shards]
    return Stream(parts, str(folder)), manifest


def read_manifest(folder: Path) -> Manifest:
    """What a folder says that it holds."""
    path = folder / MANIFEST
    if path.stat().st_size > LARGEST_MANIFEST:
        raise _damaged(folder, f"{MANIFEST} has {path.stat().st_size:,} bytes")
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(folder, f"{MANIFEST} cannot be read: {error}") from None
    if manifest.format != FORMAT or manifest.version != VERSION:
        raise _damaged(folder, f"its format is {manifest.format} {manifest.version}, not {FORMAT} {VERSION}")
    if manifest.dtype not in DTYPES:
        raise _damaged(folder, f"its dtype is {manifest.dtype}, not {' or '.join(DTYPES)}")
    for shard in manifest.shards:
        if not SHARD_NAME.fullmatch(shard.name):  # a name with a path in it could leave the folder
            raise _damaged(folder, f"a shard is named {shard.name!r}")
        if shard.tokens < 0 or shard.documents < 0:
            raise _damaged(folder, f"shard {shard.name} has a count below 0")
    if manifest.tokens != sum(shard.tokens for shard in manifest.shards):
        raise _damaged(folder, f"its shards do not hold the {manifest.tokens:,} tokens it says")
    return manifest


class ShardWriter:
    """Writes the shards of a folder: a shard ends at the first end of a document behind `shard_tokens`."""

    def __init__(self, folder: Path, dtype: str, shard_tokens: int) -> None:
        self.folder, self.dtype, self.shard_tokens = folder, DTYPES[dtype], shard_tokens
        self.shards: list[Shard] = []
        self.max_token = -1
        self._open: dict[str, _Checked] = {}
        self._tokens = self._documents = 0  # of the shard being written

    def add(self, tokens: NDArray[Any], ends: Sequence[int] | NDArray[np.int64]) -> None:
        """More tokens, and the places among them where documents end; what is behind the last end goes on later."""
        self.max_token = max(self.max_token, int(tokens.max()) if len(tokens) else -1)
        begin = 0
        while len(ends):
            room = max(self.shard_tokens - self._tokens, 0)
            full = int(np.searchsorted(ends, begin + room))  # the first document that ends behind the room
            here = ends[: full + 1]
            self._write(tokens[begin : int(here[-1])], np.asarray(here, dtype=np.int64) - begin)
            begin, ends = int(here[-1]), ends[full + 1 :]
            if self._tokens >= self.shard_tokens:
                self.close()
        if begin < len(tokens):
            self._write(tokens[begin:], np.zeros(0, np.int64))

    def close(self) -> None:
        """Ends the shard that is being written, durably."""
        if not self._open:
            return
        sums = {ending: file.close() for ending, file in self._open.items()}
        self.shards.append(Shard(self._name, self._tokens, self._documents, sums["tokens"], sums["ends"]))
        self._open, self._tokens, self._documents = {}, 0, 0

    def abandon(self) -> None:
        """Lets go of the files of a shard that will not be finished."""
        for file in self._open.values():
            file.file.close()

    @property
    def _name(self) -> str:
        return f"{len(self.shards):05d}"

    def _write(self, tokens: NDArray[Any], ends: NDArray[np.int64]) -> None:
        if not self._open:
            self._open = {ending: _Checked(self.folder / f"{self._name}.{ending}") for ending in ("tokens", "ends")}
        self._open["tokens"].write(tokens.astype(self.dtype).tobytes())
        self._open["ends"].write((ends + self._tokens).astype(ENDS).tobytes())
        self._tokens += len(tokens)
        self._documents += len(ends)


class _Checked:
    """A file being written, with the checksum of what was written."""

    def __init__(self, path: Path) -> None:
        self.file, self.hash = path.open("xb"), hashlib.sha256()

    def write(self, data: bytes) -> None:
        self.file.write(data)
        self.hash.update(data)

    def close(self) -> str:
        sync_file(self.file)
        self.file.close()
        return self.hash.hexdigest()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Says what a folder holds; written last, it makes the folder whole."""
    with (folder / MANIFEST).open("xb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(manifest)))
        sync_file(file)


def verify(folder: Path) -> list[str]:
    """The files of a folder of shards whose content is not what was written; reads everything."""
    manifest = read_manifest(folder)
    told = [(f"{s.name}.tokens", s.tokens_sha256) for s in manifest.shards]
    told += [(f"{s.name}.ends", s.ends_sha256) for s in manifest.shards]
    return [name for name, checksum in told if _checksum(folder / name) != checksum]


def _checksum(path: Path) -> str | None:
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _part(folder: Path, shard: Shard, dtype: np.dtype[Any]) -> Part:
    tokens = mapped(folder / f"{shard.name}.tokens", dtype, shard.tokens, folder)
    ends = mapped(folder / f"{shard.name}.ends", ENDS, shard.documents, folder)
    if (int(ends[-1]) if len(ends) else 0) != shard.tokens:
        raise _damaged(folder, f"the last document of {shard.name}.ends does not end where the tokens do")
    return Part(tokens, ends)  # type: ignore[arg-type]  # an array is a sequence of numbers to bisect


def mapped(path: Path, dtype: np.dtype[Any], count: int, folder: Path) -> NDArray[Any]:
    """A file's numbers, read when they are looked at; refused where the file has not as many."""
    size = path.stat().st_size if path.is_file() else -1
    if size < 0:
        raise _damaged(folder, f"{path.name} is missing")
    if size != count * dtype.itemsize:
        raise _damaged(folder, f"{path.name} has {size:,} bytes, not {count * dtype.itemsize:,}")
    return map_file(path, dtype, count)


def map_file(path: Path, dtype: np.dtype[Any], count: int, offset: int = 0) -> NDArray[Any]:
    """Numbers of a file that are read when they are looked at; the file must have them."""
    if not count:
        return np.zeros(0, dtype)
    # As a plain array: slices of numpy's own class for it cost ten times as much.
    return np.asarray(np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,)))


def _damaged(folder: Path, reason: str) -> InputError:
    return InputError(
        f"the shards are damaged or not ours: {reason}",
        field="data.dataset",
        value=str(folder),
        fix=("delete the folder and tokenise again: meshwright tokenize …",),
    )
