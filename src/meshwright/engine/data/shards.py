"""Token shards: documents as one long stream that is split into samples.

A shard folder has `manifest.json` and, for each shard, `NNNNN.tokens` (the concatenated tokens of its documents,
little-endian) and `NNNNN.ends` (int64: the end of each document, in tokens from the shard's start). A document is
never split over shards.
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

from meshwright.engine.data.sample_types import PAD, Sample
from meshwright.engine.fsync import sync_file
from meshwright.errors import InputError

MANIFEST = "manifest.json"
FORMAT, VERSION = "meshwright-shards", 1
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
ENDS: np.dtype[Any] = np.dtype("<i8")
MAX_MANIFEST_BYTES = 1 << 28  # enough for some hundred thousand shards
SHARD_NAME = re.compile(r"[0-9]{5,}")


class SourceFile(msgspec.Struct, frozen=True):
    """A source file of documents."""

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
    """Contents and origin of a shard folder."""

    format: str = FORMAT
    version: int = VERSION
    dtype: str
    tokens: int
    documents: int
    max_token: int  # the highest token id
    eos: int | None  # the token that ends every document
    tokenizer: str  # the folder's name
    tokenizer_sha256: str
    vocab: int
    sources: list[SourceFile]
    shards: list[Shard]


class TokenArray(Protocol):
    """A lazily read token array."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: slice) -> NDArray[Any]: ...


@dataclass(frozen=True)
class Segment:
    """Consecutive documents: their tokens and document ends, sorted; the last end is the number of tokens."""

    tokens: TokenArray
    ends: Sequence[int]


class Stream:
    """The documents of all segments, concatenated."""

    def __init__(self, segments: Sequence[Segment], name: str) -> None:
        self.segments, self.name = segments, name
        self.starts = [0]
        for segment in segments:
            self.starts.append(self.starts[-1] + len(segment.tokens))

    def __len__(self) -> int:
        return self.starts[-1]

    def read(self, start: int, end: int) -> NDArray[np.int64]:
        """Return the tokens in [start, end)."""
        pieces = [
            self.segments[i].tokens[max(start - self.starts[i], 0) : end - self.starts[i]]
            for i in self._segments_between(start, end)
        ]
        return np.concatenate(pieces).astype(np.int64) if len(pieces) != 1 else np.array(pieces[0], dtype=np.int64)

    def ends(self, start: int, end: int) -> NDArray[np.int64]:
        """Return the document ends in (start, end]."""
        pieces = []
        for i in self._segments_between(start, end):
            ends, offset = self.segments[i].ends, self.starts[i]
            first, last = bisect_right(ends, start - offset), bisect_right(ends, end - offset)
            pieces.append(np.array(ends[first:last], dtype=np.int64) + offset)
        return np.concatenate(pieces)

    def document_boundary(self, position: int) -> int:
        """Return the last document end at or before a position; 0 if there is none."""
        for i in range(bisect_right(self.starts, position) - 1, -1, -1):
            if i == len(self.segments):
                return len(self)
            before = bisect_right(self.segments[i].ends, position - self.starts[i])
            if before:
                return self.starts[i] + int(self.segments[i].ends[before - 1])
        return 0

    def _segments_between(self, start: int, end: int) -> range:
        return range(bisect_right(self.starts, start) - 1, max(bisect_right(self.starts, end - 1), 1))


class StreamCorpus:
    """Samples of seq_length + 1 tokens at fixed strides of a stream.

    Sample i starts at token i × seq_length: its last label is the first token of the next sample. The incomplete sample
    at the end is dropped, or padded with `keep_last`. With `packing`, documents in a sample are isolated from each
    other; otherwise they are one text and the last token of a document predicts the first of the next, as is usual in
    pretraining.
    """

    def __init__(
        self,
        stream: Stream,
        seq_length: int,
        *,
        vocab: int,
        packing: bool = False,
        span: tuple[int, int] | None = None,
        keep_last: bool = False,
        field: str = "data.dataset",
    ) -> None:
        self.stream, self.seq_length, self.vocab, self.packing = stream, seq_length, vocab, packing
        self.start, self.end = span or (0, len(stream))
        self.keep_last = keep_last
        if len(self) < 1:
            needed = 2 if keep_last else seq_length + 1
            raise InputError(
                f"{self.end - self.start:,} tokens are fewer than one sample of {needed:,}",
                field=field,
                value=stream.name,
                fix=(f"data.seq_length={max(self.end - self.start - 1, 1)}", "more data")[keep_last:],
            )

    def __len__(self) -> int:
        targets = self.end - self.start - 1
        return -(-targets // self.seq_length) if self.keep_last else targets // self.seq_length

    def sample(self, index: int) -> Sample:
        """Return the sample with this index."""
        start = self.start + index * self.seq_length
        end = min(start + self.seq_length + 1, self.end)
        tokens = np.pad(self.stream.read(start, end), (0, start + self.seq_length + 1 - end), constant_values=PAD)
        if int(tokens.max()) >= self.vocab or int(tokens.min()) < 0:
            raise token_out_of_vocab(self.stream.name, int(tokens.max()), self.vocab)
        loss_mask = np.arange(self.seq_length) < end - start - 1
        if not self.packing:
            return Sample(tokens, loss_mask)
        ends = self.stream.ends(start, min(start + self.seq_length, end)) - start
        loss_mask[ends - 1] = False
        boundaries = np.zeros(self.seq_length, dtype=np.int64)
        boundaries[ends[ends < self.seq_length]] = 1
        return Sample(tokens, loss_mask, np.cumsum(boundaries))


def split_spans(stream: Stream, held_out_share: float) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the training and held-out spans; the last documents are held out, about this share of the tokens.

    A first document longer than the training share, such as a single text file, is split inside.
    """
    if not held_out_share:
        return (0, len(stream)), (len(stream), len(stream))
    share = int(len(stream) * (1 - held_out_share))
    boundary = stream.document_boundary(share) or share
    return (0, boundary), (boundary, len(stream))


def token_out_of_vocab(name: str, highest: int, vocab: int) -> InputError:
    """Return the error for token ids outside the model's vocabulary."""
    return InputError(
        f"contains token {highest}, but the model's vocabulary has {vocab} tokens (0 to {vocab - 1})",
        field="data.dataset",
        value=name,
        fix=("tokenize the data with the model's tokenizer: meshwright tokenize … --tokenizer FOLDER",),
    )


def is_shard_folder(path: Path) -> bool:
    """Return whether a path is a shard folder."""
    return (path / MANIFEST).is_file()


def open_shards(folder: Path) -> tuple[Stream, Manifest]:
    """Open a shard folder, checking its files against the manifest."""
    manifest = read_manifest(folder)
    segments = [_open_segment(folder, shard, DTYPES[manifest.dtype]) for shard in manifest.shards]
    return Stream(segments, str(folder)), manifest


def read_manifest(folder: Path) -> Manifest:
    """Read and validate the manifest of a shard folder."""
    path = folder / MANIFEST
    if path.stat().st_size > MAX_MANIFEST_BYTES:
        raise _corrupt(folder, f"{MANIFEST} is too large ({path.stat().st_size:,} bytes)")
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _corrupt(folder, f"{MANIFEST} cannot be read: {error}") from None
    if manifest.format != FORMAT or manifest.version != VERSION:
        raise _corrupt(folder, f"format {manifest.format} {manifest.version}, expected {FORMAT} {VERSION}")
    if manifest.dtype not in DTYPES:
        raise _corrupt(folder, f"dtype {manifest.dtype}, expected {' or '.join(DTYPES)}")
    for shard in manifest.shards:
        if not SHARD_NAME.fullmatch(shard.name):  # a name with a path in it could escape the folder
            raise _corrupt(folder, f"invalid shard name {shard.name!r}")
        if shard.tokens < 0 or shard.documents < 0:
            raise _corrupt(folder, f"shard {shard.name} has a negative count")
    if manifest.tokens != sum(shard.tokens for shard in manifest.shards):
        raise _corrupt(folder, f"its shards do not add up to {manifest.tokens:,} tokens")
    return manifest


class ShardWriter:
    """Writes shards; a shard ends at the first document end at or after `shard_tokens`."""

    def __init__(self, folder: Path, dtype: str, shard_tokens: int) -> None:
        self.folder, self.dtype, self.shard_tokens = folder, DTYPES[dtype], shard_tokens
        self.shards: list[Shard] = []
        self.max_token = -1
        self._open: dict[str, _HashedFile] = {}
        self._tokens = self._documents = 0  # of the shard being written

    def add(self, tokens: NDArray[Any], ends: Sequence[int] | NDArray[np.int64]) -> None:
        """Append tokens and their document ends; the document after the last end continues in the next call."""
        self.max_token = max(self.max_token, int(tokens.max()) if len(tokens) else -1)
        start = 0
        while len(ends):
            remaining = max(self.shard_tokens - self._tokens, 0)
            last = int(np.searchsorted(ends, start + remaining))  # the first document that fills the shard
            ends_here = ends[: last + 1]
            self._write(tokens[start : int(ends_here[-1])], np.asarray(ends_here, dtype=np.int64) - start)
            start, ends = int(ends_here[-1]), ends[last + 1 :]
            if self._tokens >= self.shard_tokens:
                self.close()
        if start < len(tokens):
            self._write(tokens[start:], np.zeros(0, np.int64))

    def close(self) -> None:
        """Finish the current shard and fsync it."""
        if not self._open:
            return
        checksums = {ending: file.close() for ending, file in self._open.items()}
        self.shards.append(Shard(self._name, self._tokens, self._documents, checksums["tokens"], checksums["ends"]))
        self._open, self._tokens, self._documents = {}, 0, 0

    def abandon(self) -> None:
        """Close the files of an unfinished shard."""
        for file in self._open.values():
            file.file.close()

    @property
    def _name(self) -> str:
        return f"{len(self.shards):05d}"

    def _write(self, tokens: NDArray[Any], ends: NDArray[np.int64]) -> None:
        if not self._open:
            self._open = {ending: _HashedFile(self.folder / f"{self._name}.{ending}") for ending in ("tokens", "ends")}
        self._open["tokens"].write(tokens.astype(self.dtype).tobytes())
        self._open["ends"].write((ends + self._tokens).astype(ENDS).tobytes())
        self._tokens += len(tokens)
        self._documents += len(ends)


class _HashedFile:
    """A file being written, with a running checksum."""

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
    """Write the manifest; written last, it marks the folder complete."""
    with (folder / MANIFEST).open("xb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(manifest)))
        sync_file(file)


def verify(folder: Path) -> list[str]:
    """Return the shard files whose checksum does not match; reads everything."""
    manifest = read_manifest(folder)
    checksums = [(f"{s.name}.tokens", s.tokens_sha256) for s in manifest.shards]
    checksums += [(f"{s.name}.ends", s.ends_sha256) for s in manifest.shards]
    return [name for name, checksum in checksums if _checksum(folder / name) != checksum]


def _checksum(path: Path) -> str | None:
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _open_segment(folder: Path, shard: Shard, dtype: np.dtype[Any]) -> Segment:
    tokens = map_checked(folder / f"{shard.name}.tokens", dtype, shard.tokens, folder)
    ends = map_checked(folder / f"{shard.name}.ends", ENDS, shard.documents, folder)
    if (int(ends[-1]) if len(ends) else 0) != shard.tokens:
        raise _corrupt(folder, f"the last document end in {shard.name}.ends is not the number of tokens")
    return Segment(tokens, ends)  # type: ignore[arg-type]  # an array works as a sequence for bisect


def map_checked(path: Path, dtype: np.dtype[Any], count: int, folder: Path) -> NDArray[Any]:
    """Memory-map a file after checking its size."""
    size = path.stat().st_size if path.is_file() else -1
    if size < 0:
        raise _corrupt(folder, f"{path.name} is missing")
    if size != count * dtype.itemsize:
        raise _corrupt(folder, f"{path.name} has {size:,} bytes, expected {count * dtype.itemsize:,}")
    return map_file(path, dtype, count)


def map_file(path: Path, dtype: np.dtype[Any], count: int, offset: int = 0) -> NDArray[Any]:
    """Memory-map an array of a file."""
    if not count:
        return np.zeros(0, dtype)
    # As a plain ndarray: slicing a np.memmap costs ten times as much.
    return np.asarray(np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,)))


def _corrupt(folder: Path, reason: str) -> InputError:
    return InputError(
        f"the shards are corrupt or of another format: {reason}",
        field="data.dataset",
        value=str(folder),
        fix=("delete the folder and tokenize again: meshwright tokenize …",),
    )
