"""Megatron's indexed data sets: `PREFIX.bin` with tokens and `PREFIX.idx` that says where sequences lie, version 1.

The index: 9 bytes of magic, the version (uint64), a code for the tokens' format (uint8), the number of sequences and
the length of the document list (uint64 each); then the length of each sequence in tokens (int32), its place in the
tokens' file in bytes (int64), and the document list (int64: the first sequence of each document, and the number of
sequences at its end). All little-endian.
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

from meshwright.engine.data.shards import Part, Stream, map_file
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
PLACES: np.dtype[Any] = np.dtype("<i8")
AT_ONCE = 1 << 20  # sequences checked at a time: an index may be larger than memory


@dataclass(frozen=True)
class MegatronFile:
    """A pair of .bin and .idx files, checked and mapped into memory."""

    prefix: Path
    dtype: np.dtype[Any]
    lengths: NDArray[np.int32]  # of sequences, in tokens
    places: NDArray[np.int64]  # of sequences, in bytes
    document_list: NDArray[np.int64]
    tokens: NDArray[Any]  # the whole .bin file
    contiguous: bool  # sequences lie one after the other without gaps

    def __len__(self) -> int:
        return len(self.lengths)

    def sequence(self, number: int) -> NDArray[Any]:
        """The tokens of one sequence."""
        begin = int(self.places[number]) // self.dtype.itemsize
        return self.tokens[begin : begin + int(self.lengths[number])]

    def documents(self) -> Iterator[list[NDArray[Any]]]:
        """The sequences of each document, in order."""
        for i in range(len(self.document_list) - 1):
            yield [self.sequence(n) for n in range(int(self.document_list[i]), int(self.document_list[i + 1]))]

    def stream(self) -> Stream:
        """All documents as one stream."""
        part = Part(self.tokens, _Ends(self)) if self.contiguous else _gathered(self)
        return Stream([part], str(self.prefix))


def prefix_of(path: Path) -> Path | None:
    """The prefix of a pair of files, when a path is that prefix or one of the two."""
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    both = all(Path(f"{prefix}{ending}").is_file() for ending in (".bin", ".idx"))
    return prefix if both else None


def open_megatron(prefix: Path) -> MegatronFile:
    """Opens and checks a pair of files; an error names the file and what is wrong with it."""
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for path in (index, data):
        if not path.is_file():
            raise _damaged(path, "the file is missing")
    dtype, sequences, listed = _header(index)
    at, parts = HEADER.size, []
    for kind, count in ((LENGTHS, sequences), (PLACES, sequences), (PLACES, listed)):
        parts.append(map_file(index, kind, count, at))
        at += kind.itemsize * count
    lengths, places, document_list = parts
    size = data.stat().st_size
    contiguous = _check_sequences(index, lengths, places, dtype, size)
    _check_documents(index, document_list, sequences)
    tokens = map_file(data, dtype, size // dtype.itemsize, 0)
    return MegatronFile(prefix, dtype, lengths, places, document_list, tokens, contiguous)


class MegatronWriter:
    """Writes a pair of files; they appear under their names when everything is written."""

    def __init__(self, prefix: Path, dtype: Any) -> None:
        kind = np.dtype(dtype).newbyteorder("<")
        if kind not in CODES:
            raise InputError(
                f"tokens of this format cannot be written ({', '.join(str(known) for known in CODES)})",
                field="dtype",
                value=str(dtype),
            )
        self.prefix, self.dtype = prefix, kind
        self._lengths: list[int] = []
        self._documents = [0]
        prefix.parent.mkdir(parents=True, exist_ok=True)
        self._partial = {ending: Path(f"{prefix}{ending}.partial-{os.getpid()}") for ending in (".bin", ".idx")}
        self._file = self._partial[".bin"].open("wb")

    def add(self, tokens: Sequence[int] | NDArray[Any]) -> None:
        """One more sequence of the document."""
        given = np.asarray(tokens, dtype=np.int64) if len(tokens) else np.zeros(0, np.int64)
        limits = np.iinfo(self.dtype)
        if len(given) and not limits.min <= int(given.min()) <= int(given.max()) <= limits.max:
            raise InputError(f"a token does not fit into {self.dtype}", field="tokens", value=int(given.max()))
        self._file.write(given.astype(self.dtype).tobytes())
        self._lengths.append(len(given))

    def end_document(self) -> None:
        """The sequences since the last end are one document."""
        self._documents.append(len(self._lengths))

    def __enter__(self) -> MegatronWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if error is None:
                self._write_index()
                sync_file(self._file)
                for ending in (".bin", ".idx"):  # the index last: it makes the pair whole
                    self._partial[ending].replace(f"{self.prefix}{ending}")
        finally:
            self._file.close()
            for path in self._partial.values():
                path.unlink(missing_ok=True)

    def _write_index(self) -> None:
        lengths = np.array(self._lengths, dtype=LENGTHS)
        ends = np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
        places = np.concatenate([np.zeros(1, np.int64), ends])[: len(lengths)]
        with self._partial[".idx"].open("wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, CODES[self.dtype], len(lengths), len(self._documents)))
            for array, kind in ((lengths, LENGTHS), (places, PLACES), (np.array(self._documents), PLACES)):
                file.write(array.astype(kind).tobytes())
            sync_file(file)


def write_stream(stream: Stream, prefix: Path, dtype: Any) -> None:
    """Writes the documents of a stream as a pair of files, one sequence for each."""
    with MegatronWriter(prefix, dtype) as writer:
        for part in stream.parts:
            begin = 0
            for end in part.ends:
                writer.add(part.tokens[begin : int(end)])
                writer.end_document()
                begin = int(end)


class _Ends(Sequence[int]):
    """Where documents end, looked up in the index when asked for: there may be more than memory holds."""

    def __init__(self, file: MegatronFile) -> None:
        self.file = file

    def __len__(self) -> int:
        return len(self.file.document_list) - 1

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        if not 0 <= at < len(self):
            raise IndexError(at)
        after = int(self.file.document_list[at + 1]) - 1  # the document's last sequence
        if after < 0:
            return 0
        return int(self.file.places[after]) // self.file.dtype.itemsize + int(self.file.lengths[after])


class _Scattered:
    """Sequences that lie anywhere in the file, as one run of tokens."""

    def __init__(self, file: MegatronFile, starts: NDArray[np.int64]) -> None:
        self.file, self.starts = file, starts

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, at: slice) -> NDArray[Any]:
        begin, end, _ = at.indices(len(self))
        found = [np.zeros(0, self.file.dtype)]
        for number in range(max(bisect_right(self.starts, begin) - 1, 0), len(self.file)):
            start = int(self.starts[number])
            if start >= end:
                break
            found.append(self.file.sequence(number)[max(begin - start, 0) : end - start])
        return np.concatenate(found)


def _gathered(file: MegatronFile) -> Part:
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(file.lengths, dtype=np.int64)])
    return Part(_Scattered(file, starts), starts[file.document_list[1:]])  # type: ignore[arg-type]  # bisected


def _header(path: Path) -> tuple[np.dtype[Any], int, int]:
    size = path.stat().st_size
    with path.open("rb") as file:
        raw = file.read(HEADER.size)
    if len(raw) < HEADER.size:
        raise _damaged(path, f"{size} bytes are less than a header")
    magic, version, code, sequences, listed = HEADER.unpack(raw)
    if magic != MAGIC:
        raise _damaged(path, "it does not begin like an index of Megatron")
    if version != VERSION:
        raise _damaged(path, f"its version is {version}, not {VERSION}")
    if code not in DTYPES:
        raise _damaged(path, f"the code {code} stands for no format of tokens ({', '.join(map(str, DTYPES))})")
    expected = HEADER.size + sequences * (LENGTHS.itemsize + PLACES.itemsize) + listed * PLACES.itemsize
    if size == expected + sequences and sequences:
        raise _damaged(path, "it carries modes of images and text, which are not read")
    if size != expected:
        raise _damaged(
            path, f"{sequences:,} sequences and {listed:,} document borders need {expected:,} bytes, not {size:,}"
        )
    return DTYPES[code], sequences, listed


def _check_sequences(
    path: Path, lengths: NDArray[np.int32], places: NDArray[np.int64], dtype: np.dtype[Any], size: int
) -> bool:
    """Refuses sequences outside the tokens' file; whether they lie one after the other and fill it."""
    expected, contiguous = 0, True
    for first in range(0, len(lengths), AT_ONCE):
        length = np.array(lengths[first : first + AT_ONCE], dtype=np.int64) * dtype.itemsize
        place = np.array(places[first : first + AT_ONCE])
        wrong = (length < 0) | (place < 0) | (place > size - length) | (place % dtype.itemsize != 0)
        if wrong.any():
            number = first + int(wrong.argmax())
            raise _damaged(
                path, f"sequence {number} lies outside the {size:,} bytes of {path.with_suffix('.bin').name}"
            )
        ends = expected + np.cumsum(length)
        contiguous &= bool((place == ends - length).all())
        expected = int(ends[-1])
    if size % dtype.itemsize:
        raise _damaged(path.with_suffix(".bin"), f"{size:,} bytes are not a whole number of {dtype} tokens")
    return contiguous and expected == size


def _check_documents(path: Path, document_list: NDArray[np.int64], sequences: int) -> None:
    before = 0
    for first in range(0, len(document_list), AT_ONCE):
        some = np.array(document_list[first : first + AT_ONCE])
        if (np.diff(some, prepend=before) < 0).any():
            raise _damaged(path, "the documents are not in order")
        before = int(some[-1])
    begins = int(document_list[0]) if len(document_list) else -1
    if begins != 0 or before != sequences:
        raise _damaged(path, f"the documents do not begin at 0 and end at the {sequences:,} sequences")


def _damaged(path: Path, reason: str) -> InputError:
    return InputError(
        f"not a data set that can be read: {reason}",
        field="data.dataset",
        value=str(path),
        fix=("copy both files again, .bin and .idx", "or tokenise the text: meshwright tokenize …"),
    )
