"""Files of a checkpoint: written to the disk itself, with a checksum for every block, and checked against it."""

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

BLOCK = 1 << 24  # bytes hashed in one go: blocks of a file are hashed side by side while it is written
HASHERS = min(4, os.cpu_count() or 1)
WAITING = 2 * HASHERS  # blocks that may wait for their hash: bounds the memory they hold


class Block(msgspec.Struct, frozen=True, array_like=True):
    """A run of bytes in a file and its checksum."""

    size: int
    sha256: str


class FileRecord(msgspec.Struct, frozen=True):
    """What a file was when it was written."""

    size: int
    blocks: list[Block]


class Manifest(msgspec.Struct, frozen=True):
    """Every file of a checkpoint; the last one to be written."""

    step: int
    files: dict[str, FileRecord]


class DamagedError(Exception):
    """A file is not what was written: its message names file and reason."""


def write(path: Path, blocks: Iterable[memoryview | bytes]) -> FileRecord:
    """Writes a new file block by block and waits until the disk has it; its record."""
    done: list[Block] = []
    waiting: deque[tuple[int, Future[str]]] = deque()
    with _created(path) as file, ThreadPoolExecutor(HASHERS) as pool:
        for block in blocks:
            for piece in _pieces(memoryview(block)):
                waiting.append((len(piece), pool.submit(_digest, piece)))
                _write_all(file, piece)
                while len(waiting) > WAITING:
                    done.append(_hashed(waiting))
        while waiting:
            done.append(_hashed(waiting))
        os.fsync(file)
    return FileRecord(sum(block.size for block in done), done)


def verify(path: Path, record: FileRecord, from_disk: bool = False) -> None:
    """Reads a file and compares it with its record; `from_disk` first drops what memory still holds of it."""
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size != record.size:
                raise DamagedError(f"{path} is {size} bytes long; {record.size} were written")
            if from_disk and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            _compare(path, file, record)
    except FileNotFoundError:
        raise DamagedError(f"{path} is missing") from None
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror or error}") from None


def write_sealed(path: Path, text: bytes) -> None:
    """Replaces a small file at once by a line of text and its checksum."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    write(temporary, [text + b"\n" + _digest(memoryview(text)).encode() + b"\n"])
    temporary.replace(path)
    sync_folder(path.parent)


def read_sealed(path: Path) -> bytes:
    """The line of text of a small file, when its checksum fits."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise DamagedError(f"{path} is missing") from None
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror or error}") from None
    text, _, seal = content.partition(b"\n")
    if seal != _digest(memoryview(text)).encode() + b"\n":
        raise DamagedError(f"{path} does not have its checksum")
    return text


def total_size(files: Mapping[str, FileRecord]) -> int:
    """Bytes of all files."""
    return sum(record.size for record in files.values())


def _compare(path: Path, file: object, record: FileRecord) -> None:
    waiting: deque[tuple[int, str, Future[str]]] = deque()
    place = 0
    with ThreadPoolExecutor(HASHERS) as pool:
        for block in record.blocks:
            data = file.read(block.size)  # type: ignore[attr-defined]  # a raw file: one read may give less
            while len(data) < block.size and (more := file.read(block.size - len(data))):  # type: ignore[attr-defined]
                data += more
            waiting.append((place, block.sha256, pool.submit(_digest, memoryview(data))))
            place += block.size
            while len(waiting) > WAITING:
                _check(path, *waiting.popleft())
        while waiting:
            _check(path, *waiting.popleft())


def _check(path: Path, place: int, expected: str, found: Future[str]) -> None:
    if found.result() != expected:
        raise DamagedError(f"{path} does not have its checksum in the block at byte {place}")


def _digest(data: memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def _hashed(waiting: deque[tuple[int, Future[str]]]) -> Block:
    size, digest = waiting.popleft()
    return Block(size, digest.result())


def _pieces(block: memoryview) -> Iterator[memoryview]:
    for first in range(0, len(block), BLOCK):
        yield block[first : first + BLOCK]


def _write_all(file: int, data: memoryview) -> None:
    """Writes every byte: a disk that fills up takes a part first and refuses the rest."""
    while data:
        data = data[os.write(file, data) :]


@contextmanager
def _created(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        yield file
    finally:
        os.close(file)
