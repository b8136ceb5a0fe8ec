"""JSON-lines files that survive a full disk and a process killed in the middle of a line."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from meshwright import json_text
from meshwright.errors import InputError

CHUNK = 1 << 16  # bytes read at once when searching for the end of the last complete line


def warn(text: str) -> None:
    """Print a warning to stderr."""
    log(f"warning: {text}")


def log(text: str) -> None:
    """Print a line to stderr; stdout is kept for results."""
    with suppress(OSError, ValueError):  # a closed or full stderr must not end the training
        print(text, file=sys.stderr, flush=True)


class Lines:
    """A JSON-lines file to which complete lines are appended.

    A line that cannot be written (disk full, quota, broken mount) is dropped completely, with one warning; the next
    line is tried again. Values that are not finite are written as null.
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
        """Append one line; return whether it was written."""
        data = msgspec.json.encode(line) + b"\n"
        before = _size(self._file)
        try:
            _write_all(self._file, data)
        except OSError as error:
            _truncate(self._file, before)
            self._on_lost(error)
            return False
        self._on_written()
        return True

    def close(self) -> None:
        """Close the file and report how many lines are missing."""
        if self._file < 0:
            return
        with suppress(OSError):
            os.close(self._file)
        self._file = -1
        if self.lost:
            self._warn(f"{self.path} lacks {self.lost} line{'s' * (self.lost > 1)} that could not be written")

    def _on_lost(self, error: OSError) -> None:
        if not self.lost:
            why = error.strerror or str(error)
            self._warn(f"{self.path} cannot be written ({why}); training continues without these lines")
        self.lost += 1

    def _on_written(self) -> None:
        if self.lost:
            self._warn(f"{self.path} is writable again; {self.lost} line{'s' * (self.lost > 1)} are missing")
            self.lost = 0


def repair(path: Path) -> int:
    """Truncate an incomplete last line; return the number of bytes removed."""
    if not path.is_file():
        return 0
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        end = _end_of_last_line(file, size)
        if end < size:
            file.truncate(end)
    return size - end


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file, without an incomplete last one."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json_text.decode(line)


def json_float(value: float) -> float | str:
    """Return a number for JSON, with nan and inf as text which JSON cannot represent."""
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
    """Write all bytes: a disk that fills up accepts a part of the line first and then fails."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


def _size(file: int) -> int:
    with suppress(OSError):
        return os.fstat(file).st_size
    return -1


def _truncate(file: int, size: int) -> None:
    if size >= 0:
        with suppress(OSError):  # devices such as /dev/full cannot be truncated
            os.ftruncate(file, size)
