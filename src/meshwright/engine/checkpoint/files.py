"""Checkpoint files: written with fsync and a checksum per block, and verified against them."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec

from meshwright.engine.fsync import sync_folder

BLOCK = 1 << 24  # bytes per checksum; blocks are hashed in parallel while the file is written
HASHERS = min(4, os.cpu_count() or 1)
PENDING = 2 * HASHERS  # blocks that may wait for their hash; bounds their memory


class Block(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive bytes of a file and their checksum."""

    size: int
    sha256: str


class FileRecord(msgspec.Struct, frozen=True):
    """Size and checksums of a file as it was written."""

    size: int
    blocks: list[Block]


class Manifest(msgspec.Struct, frozen=True):
    """All files of a checkpoint; written last."""

    step: int
    files: dict[str, FileRecord]


class DamagedError(Exception):
    """A file is missing or differs from what was written; the message has file and reason."""


def write(path: Path, blocks: Iterable[memoryview | bytes]) -> FileRecord:
    """Write a new file block by block, fsync it and return its record."""
    done: list[Block] = []
    pending: deque[tuple[int, Future[str]]] = deque()
    with _created(path) as file, ThreadPoolExecutor(HASHERS) as pool:
        for block in blocks:
            for piece in _split(memoryview(block)):
                pending.append((len(piece), pool.submit(_digest, piece)))
                _write_all(file, piece)
                while len(pending) > PENDING:
                    done.append(_hashed(pending))
        while pending:
            done.append(_hashed(pending))
        os.fsync(file)
    return FileRecord(sum(block.size for block in done), done)


def verify(path: Path, record: FileRecord, from_disk: bool = False) -> None:
    """Read a file and compare it with its record; `from_disk` drops it from the page cache first."""
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size != record.size:
                raise DamagedError(f"{path} has {size} bytes; {record.size} were written")
            if from_disk and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            _compare(path, file, record)
    except FileNotFoundError:
        raise DamagedError(f"{path} is missing") from None
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror or error}") from None


def write_checksummed(path: Path, text: bytes) -> None:
    """Atomically replace a small file by a line of text and its checksum."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    write(temporary, [text + b"\n" + _digest(memoryview(text)).encode() + b"\n"])
    temporary.replace(path)
    sync_folder(path.parent)


def read_checksummed(path: Path) -> bytes:
    """Return the line of text of a small file; raise DamagedError if its checksum does not match."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise DamagedError(f"{path} is missing") from None
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror or error}") from None
    text, _, checksum = content.partition(b"\n")
    if checksum != _digest(memoryview(text)).encode() + b"\n":
        raise DamagedError(f"{path}: checksum mismatch")
    return text


def total_size(files: Mapping[str, FileRecord]) -> int:
    """Return the bytes of all files."""
    return sum(record.size for record in files.values())


def _compare(path: Path, file: object, record: FileRecord) -> None:
    pending: deque[tuple[int, str, Future[str]]] = deque()
    offset = 0
    with ThreadPoolExecutor(HASHERS) as pool:
        for block in record.blocks:
            data = file.read(block.size)  # type: ignore[attr-defined]  # a raw file: one read may return less
            while len(data) < block.size and (more := file.read(block.size - len(data))):  # type: ignore[attr-defined]
                data += more
            pending.append((offset, block.sha256, pool.submit(_digest, memoryview(data))))
            offset += block.size
            while len(pending) > PENDING:
                _check(path, *pending.popleft())
        while pending:
            _check(path, *pending.popleft())


def _check(path: Path, offset: int, expected: str, found: Future[str]) -> None:
    if found.result() != expected:
        raise DamagedError(f"{path}: checksum mismatch in the block at byte {offset}")


def _digest(data: memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def _hashed(pending: deque[tuple[int, Future[str]]]) -> Block:
    size, digest = pending.popleft()
    return Block(size, digest.result())


def _split(block: memoryview) -> Iterator[memoryview]:
    for first in range(0, len(block), BLOCK):
        yield block[first : first + BLOCK]


def _write_all(file: int, data: memoryview) -> None:
    """Write all bytes: a disk that fills up accepts a part first and then fails."""
    while data:
        data = data[os.write(file, data) :]


@contextmanager
def _created(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        yield file
    finally:
        os.close(file)
