"""Read a user-named text file, or raise an error that says why it cannot be read."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from meshwright import file_access
from meshwright.errors import InputError, closest

_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_MAX_NAMES = 1000  # directory entries searched for a similar name


def read_text(path: str | Path, max_bytes: int = 1_000_000) -> str:
    """Return the text of a file; raise if it is not UTF-8 text of at most `max_bytes`."""
    text = file_access.text_of(path)
    raw = _read(path, max_bytes) if text is None else _encode(text, path, max_bytes)
    if raw.startswith(_UTF16):
        raise _read_error(path, "is UTF-16 text, not UTF-8", ("save it as UTF-8",))
    if b"\0" in raw:
        raise _read_error(path, f"is binary, not text: byte {raw.index(0)} is NUL", ("pass a text file",))
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise _read_error(path, f"is not UTF-8 text (line {line})", ("save it as UTF-8",)) from error


def _encode(text: str, path: str | Path, max_bytes: int) -> bytes:
    raw = text.encode(errors="surrogatepass")  # a lone surrogate is reported later, with its line
    if len(raw) > max_bytes:
        raise _read_error(path, f"has {len(raw):,} bytes; at most {max_bytes:,} are allowed")
    return raw


def _read(path: str | Path, max_bytes: int) -> bytes:
    try:
        # Without O_NONBLOCK, opening a named pipe blocks until there is a writer.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError as error:
        similar = _similar_names(Path(path))
        hint = f"; did you mean {similar[0]}?" if similar else ""
        raise _read_error(path, f"cannot be read: there is no such file{hint}", similar) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise _read_error(path, f"cannot be read: {reason}") from error
    try:
        return _read_open(path, descriptor, max_bytes)
    except OSError as error:
        raise _read_error(path, f"cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)


def _read_open(path: str | Path, descriptor: int, max_bytes: int) -> bytes:
    status = os.fstat(descriptor)
    if stat.S_ISDIR(status.st_mode):
        raise _read_error(path, "cannot be read: it is a directory", ("pass a file in it",))
    if not stat.S_ISREG(status.st_mode):
        raise _read_error(path, "cannot be read: it is a device or a pipe, not a file", ("pass a regular file",))
    if status.st_size > max_bytes:
        raise _read_error(path, f"has {status.st_size:,} bytes; at most {max_bytes:,} are allowed")
    with os.fdopen(descriptor, "rb", closefd=False) as file:
        raw = file.read(max_bytes + 1)
    if len(raw) > max_bytes:  # files under /proc report size 0
        raise _read_error(path, f"has more than {max_bytes:,} bytes; at most {max_bytes:,} are allowed")
    return raw


def _similar_names(path: Path) -> list[str]:
    """Return files in the same directory with similar names."""
    try:
        names = [entry.name for entry in islice(os.scandir(path.parent), _MAX_NAMES) if entry.is_file()]
    except OSError:
        return []
    return [str(path.parent / name) for name in closest(path.name, names, limit=2)]


def _read_error(path: str | Path, reason: str, fix: Sequence[str] = ()) -> InputError:
    return InputError(reason, field="file", value=str(path), fix=fix)
