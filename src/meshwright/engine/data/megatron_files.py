"""Megatron indexed datasets, version 1: tokens in `PREFIX.bin`, sequence offsets in `PREFIX.idx`.

The index: 9 bytes of magic, the version (uint64), the dtype code of the tokens (uint8), the number of sequences and
the length of the document list (uint64 each); then the length of each sequence in tokens (int32), its byte offset in
the .bin file (int64), and the document list (int64: the first sequence of each document, followed by the number of
sequences). All little-endian.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from meshwright.engine.data.shards import Segment, Stream, map_file
from meshwright.engine.fsync import sync_file
from meshwright.errors import InputError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
LENGTHS: np.dtype[Any] = np.dtype("<i4")
OFFSETS: np.dtype[Any] = np.dtype("<i8")
CHECK_CHUNK = 1 << 20  # sequences checked at a time: an index can be larger than memory


@dataclass(frozen=True)
class MegatronFile:
    """A pair of .bin and .idx files, validated and memory-mapped."""

    prefix: Path
    dtype: np.dtype[Any]
    lengths: NDArray[np.int32]  # tokens per sequence
    offsets: NDArray[np.int64]  # byte offset of each sequence
    document_list: NDArray[np.int64]
    tokens: NDArray[Any]  # the .bin file
    contiguous: bool  # sequences follow each other without gaps

    def __len__(self) -> int:
        return len(self.lengths)

    def sequence(self, number: int) -> NDArray[Any]:
        """Return the tokens of one sequence."""
        begin = int(self.offsets[number]) // self.dtype.itemsize
        return self.tokens[begin : begin + int(self.lengths[number])]

    def documents(self) -> Iterator[list[NDArray[Any]]]:
        """Yield the sequences of each document, in order."""
        for i in range(len(self.document_list) - 1):
            yield [self.sequence(n) for n in range(int(self.document_list[i]), int(self.document_list[i + 1]))]

    def stream(self) -> Stream:
        """Return all documents as one stream."""
        segment = Segment(self.tokens, _Ends(self)) if self.contiguous else _scattered_segment(self)
        return Stream([segment], str(self.prefix))


def megatron_prefix(path: Path) -> Path | None:
    """Return the prefix of a file pair if the path is that prefix or one of the two files."""
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    both = all(Path(f"{prefix}{ending}").is_file() for ending in (".bin", ".idx"))
    return prefix if both else None


def token_count(prefix: Path) -> int:
    """Return the number of tokens of a pair of files, from their header and size."""
    dtype, _, _ = _header(Path(f"{prefix}.idx"))
    return Path(f"{prefix}.bin").stat().st_size // dtype.itemsize


def open_megatron(prefix: Path) -> MegatronFile:
    """Open and validate a pair of files."""
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for path in (index, data):
        if not path.is_file():
            raise _corrupt(path, "the file is missing")
    dtype, sequences, boundaries = _header(index)
    position, arrays = HEADER.size, []
    for item_dtype, count in ((LENGTHS, sequences), (OFFSETS, sequences), (OFFSETS, boundaries)):
        arrays.append(map_file(index, item_dtype, count, position))
        position += item_dtype.itemsize * count
    lengths, offsets, document_list = arrays
    size = data.stat().st_size
    contiguous = _check_sequences(index, lengths, offsets, dtype, size)
    _check_documents(index, document_list, sequences)
    tokens = map_file(data, dtype, size // dtype.itemsize, 0)
    return MegatronFile(prefix, dtype, lengths, offsets, document_list, tokens, contiguous)


class MegatronWriter:
    """Writes a pair of files, renamed to their final names once complete."""

    def __init__(self, prefix: Path, dtype: Any) -> None:
        token_dtype = np.dtype(dtype).newbyteorder("<")
        if token_dtype not in CODES:
            raise InputError(
                f"unsupported token dtype ({', '.join(str(known) for known in CODES)})", field="dtype", value=str(dtype)
            )
        self.prefix, self.dtype = prefix, token_dtype
        self._lengths: list[int] = []
        self._documents = [0]
        prefix.parent.mkdir(parents=True, exist_ok=True)
        self._partial = {ending: Path(f"{prefix}{ending}.partial-{os.getpid()}") for ending in (".bin", ".idx")}
        self._file = self._partial[".bin"].open("wb")

    def add(self, tokens: Sequence[int] | NDArray[Any]) -> None:
        """Append a sequence to the current document."""
        values = np.asarray(tokens, dtype=np.int64) if len(tokens) else np.zeros(0, np.int64)
        limits = np.iinfo(self.dtype)
        if len(values) and not limits.min <= int(values.min()) <= int(values.max()) <= limits.max:
            raise InputError(f"a token does not fit into {self.dtype}", field="tokens", value=int(values.max()))
        self._file.write(values.astype(self.dtype).tobytes())
        self._lengths.append(len(values))

    def end_document(self) -> None:
        """End the current document."""
        self._documents.append(len(self._lengths))

    def __enter__(self) -> MegatronWriter:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        try:
            if error is None:
                self._write_index()
                sync_file(self._file)
                for ending in (".bin", ".idx"):  # the index last: its presence marks the pair complete
                    self._partial[ending].replace(f"{self.prefix}{ending}")
        finally:
            self._file.close()
            for path in self._partial.values():
                path.unlink(missing_ok=True)

    def _write_index(self) -> None:
        lengths = np.array(self._lengths, dtype=LENGTHS)
        ends = np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
        offsets = np.concatenate([np.zeros(1, np.int64), ends])[: len(lengths)]
        with self._partial[".idx"].open("wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, CODES[self.dtype], len(lengths), len(self._documents)))
            for array, item_dtype in ((lengths, LENGTHS), (offsets, OFFSETS), (np.array(self._documents), OFFSETS)):
                file.write(array.astype(item_dtype).tobytes())
            sync_file(file)


def write_stream(stream: Stream, prefix: Path, dtype: Any) -> None:
    """Write the documents of a stream as a pair of files, one sequence per document."""
    with MegatronWriter(prefix, dtype) as writer:
        for segment in stream.segments:
            begin = 0
            for end in segment.ends:
                writer.add(segment.tokens[begin : int(end)])
                writer.end_document()
                begin = int(end)


class _Ends(Sequence[int]):
    """Document ends, looked up lazily in the index: the list can be larger than memory."""

    def __init__(self, file: MegatronFile) -> None:
        self.file = file

    def __len__(self) -> int:
        return len(self.file.document_list) - 1

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        last = int(self.file.document_list[index + 1]) - 1  # the document's last sequence
        if last < 0:
            return 0
        return int(self.file.offsets[last]) // self.file.dtype.itemsize + int(self.file.lengths[last])


class _Scattered:
    """Sequences at arbitrary offsets, presented as one contiguous token array."""

    def __init__(self, file: MegatronFile, starts: NDArray[np.int64]) -> None:
        self.file, self.starts = file, starts

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, index: slice) -> NDArray[Any]:
        begin, end, _ = index.indices(len(self))
        pieces = [np.zeros(0, self.file.dtype)]
        for number in range(max(bisect_right(self.starts, begin) - 1, 0), len(self.file)):
            start = int(self.starts[number])
            if start >= end:
                break
            pieces.append(self.file.sequence(number)[max(begin - start, 0) : end - start])
        return np.concatenate(pieces)


def _scattered_segment(file: MegatronFile) -> Segment:
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(file.lengths, dtype=np.int64)])
    return Segment(_Scattered(file, starts), starts[file.document_list[1:]])  # type: ignore[arg-type]  # bisected


def _header(path: Path) -> tuple[np.dtype[Any], int, int]:
    size = path.stat().st_size
    with path.open("rb") as file:
        raw = file.read(HEADER.size)
    if len(raw) < HEADER.size:
        raise _corrupt(path, f"{size} bytes is shorter than the header")
    magic, version, code, sequences, boundaries = HEADER.unpack(raw)
    if magic != MAGIC:
        raise _corrupt(path, "no Megatron index magic at its start")
    if version != VERSION:
        raise _corrupt(path, f"version {version}, expected {VERSION}")
    if code not in DTYPES:
        raise _corrupt(path, f"unknown token dtype code {code} ({', '.join(map(str, DTYPES))})")
    expected = HEADER.size + sequences * (LENGTHS.itemsize + OFFSETS.itemsize) + boundaries * OFFSETS.itemsize
    if size == expected + sequences and sequences:
        raise _corrupt(path, "multimodal indices (with sequence modes) are not supported")
    if size != expected:
        raise _corrupt(
            path,
            f"{sequences:,} sequences and {boundaries:,} document boundaries need {expected:,} bytes, not {size:,}",
        )
    return DTYPES[code], sequences, boundaries


def _check_sequences(
    path: Path, lengths: NDArray[np.int32], offsets: NDArray[np.int64], dtype: np.dtype[Any], size: int
) -> bool:
    """Raise if a sequence is outside the .bin file; return whether the sequences fill it contiguously."""
    expected, contiguous = 0, True
    for first in range(0, len(lengths), CHECK_CHUNK):
        length = np.array(lengths[first : first + CHECK_CHUNK], dtype=np.int64) * dtype.itemsize
        offset = np.array(offsets[first : first + CHECK_CHUNK])
        invalid = (length < 0) | (offset < 0) | (offset > size - length) | (offset % dtype.itemsize != 0)
        if invalid.any():
            number = first + int(invalid.argmax())
            raise _corrupt(path, f"sequence {number} is outside the {size:,} bytes of {path.with_suffix('.bin').name}")
        ends = expected + np.cumsum(length)
        contiguous &= bool((offset == ends - length).all())
        expected = int(ends[-1])
    if size % dtype.itemsize:
        raise _corrupt(path.with_suffix(".bin"), f"{size:,} bytes is not a multiple of the {dtype} token size")
    return contiguous and expected == size


def _check_documents(path: Path, document_list: NDArray[np.int64], sequences: int) -> None:
    previous = 0
    for first in range(0, len(document_list), CHECK_CHUNK):
        chunk = np.array(document_list[first : first + CHECK_CHUNK])
        if (np.diff(chunk, prepend=previous) < 0).any():
            raise _corrupt(path, "document list is not sorted")
        previous = int(chunk[-1])
    start = int(document_list[0]) if len(document_list) else -1
    if start != 0 or previous != sequences:
        raise _corrupt(path, f"document list does not start at 0 and end at {sequences:,} sequences")


def _corrupt(path: Path, reason: str) -> InputError:
    return InputError(
        f"cannot read the Megatron dataset: {reason}",
        field="data.dataset",
        value=str(path),
        fix=("copy both files again, .bin and .idx", "or tokenize the text: meshwright tokenize …"),
    )
