"""JSON lines that survive a full disk and a run that was killed in the middle of a line."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from meshwright.errors import InputError

CHUNK = 1 << 16  # bytes looked at in one go when searching for the end of the last whole line


def warn(text: str) -> None:
    """A warning on stderr, where somebody may read it."""
    log(f"warning: {text}")


def log(text: str) -> None:
    """A line on stderr, beside the answer on stdout."""
    with suppress(OSError, ValueError):  # a closed or full stderr must not end a training
        print(text, file=sys.stderr, flush=True)


class Lines:
    """A file of JSON lines, appended to one whole line at a time.

    A line that cannot be written (disk full, quota, broken mount) is dropped without leaving half of itself, and said
    once; writing is tried again with the next line. Values that are not finite are written as null.
    """

    def __init__(self, path: Path, warn: Callable[[str], None] = warn) -> None:
        self.path, self.lost = path, 0
        self._warn = warn
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            repair(path)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise InputError(f"cannot be written: {error.strerror}", field="folder", value=path) from None

    def write(self, line: Mapping[str, Any]) -> bool:
        """Appends one line; whether it is in the file now."""
        data = msgspec.json.encode(line) + b"\n"
        before = _size(self._file)
        try:
            _write_all(self._file, data)
        except OSError as error:
            _cut(self._file, before)
            self._note_lost(error)
            return False
        self._note_written()
        return True

    def close(self) -> None:
        """Closes the file and says how many lines are missing."""
        if self._file < 0:
            return
        with suppress(OSError):
            os.close(self._file)
        self._file = -1
        if self.lost:
            self._warn(f"{self.path} lacks {self.lost} line{'s' * (self.lost > 1)} that could not be written")

    def _note_lost(self, error: OSError) -> None:
        if not self.lost:
            why = error.strerror or str(error)
            self._warn(f"{self.path} cannot be written ({why}); training goes on without these lines")
        self.lost += 1

    def _note_written(self) -> None:
        if self.lost:
            self._warn(f"{self.path} is written again; {self.lost} line{'s' * (self.lost > 1)} are missing")
            self.lost = 0


def repair(path: Path) -> int:
    """Cuts off a last line that was not written to its end; how many bytes went."""
    if not path.is_file():
        return 0
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        whole = _end_of_last_line(file, size)
        if whole < size:
            file.truncate(whole)
    return size - whole


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file, without a torn last one."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield msgspec.json.decode(line)


def spelled(value: float) -> float | str:
    """A number for JSON where it matters which of nan and inf it was."""
    return value if math.isfinite(value) else str(value)


def _end_of_last_line(file: Any, size: int) -> int:
    end = size
    while end > 0:
        start = max(0, end - CHUNK)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return int(start + found + 1)
        end = start
    return 0


def _write_all(file: int, data: bytes) -> None:
    """Writes the whole line: a disk that fills up takes a part of it first and refuses the rest."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


def _size(file: int) -> int:
    with suppress(OSError):
        return os.fstat(file).st_size
    return -1


def _cut(file: int, size: int) -> None:
    if size >= 0:
        with suppress(OSError):  # a device such as /dev/full has no size to go back to
            os.ftruncate(file, size)
