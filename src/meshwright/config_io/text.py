"""The text of a file that a user named, or why there is none."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from meshwright import file_access
from meshwright.errors import InputError, closest

_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_LISTED = 1000  # names in a folder among which a misspelled one is looked for


def read_text(path: str | Path, largest: int = 1_000_000) -> str:
    """The text of a file; whatever is not a text file of a fair size is refused."""
    sent = file_access.text_of(path)
    raw = _read(path, largest) if sent is None else _in_bytes(sent, path, largest)
    if raw.startswith(_UTF16):
        raise _refused(path, "is UTF-16 text, not UTF-8", ("save it as UTF-8",))
    if b"\0" in raw:
        raise _refused(path, f"is binary, not text: byte {raw.index(0)} is NUL", ("name a text file",))
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise _refused(path, f"is not UTF-8 text (line {line})", ("save it as UTF-8",)) from error


def _in_bytes(sent: str, path: str | Path, largest: int) -> bytes:
    raw = sent.encode(errors="surrogatepass")  # half a character is told with its line
    if len(raw) > largest:
        raise _refused(path, f"has {len(raw):,} bytes, and at most {largest:,} are read")
    return raw


def _read(path: str | Path, largest: int) -> bytes:
    try:
        # Without O_NONBLOCK, opening a named pipe waits for somebody to write to it.
        place = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError as error:
        near = _near(Path(path))
        hint = f"; did you mean {near[0]}?" if near else ""
        raise _refused(path, f"cannot be read: there is no such file{hint}", near) from error
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise _refused(path, f"cannot be read: {why}") from error
    try:
        return _read_open(path, place, largest)
    except OSError as error:
        raise _refused(path, f"cannot be read: {error.strerror}") from error
    finally:
        os.close(place)


def _read_open(path: str | Path, place: int, largest: int) -> bytes:
    state = os.fstat(place)
    if stat.S_ISDIR(state.st_mode):
        raise _refused(path, "cannot be read: it is a folder", ("name a file in it",))
    if not stat.S_ISREG(state.st_mode):
        raise _refused(path, "cannot be read: it is a device or a pipe, not a file", ("name a file",))
    if state.st_size > largest:
        raise _refused(path, f"has {state.st_size:,} bytes, and at most {largest:,} are read")
    with os.fdopen(place, "rb", closefd=False) as file:
        raw = file.read(largest + 1)
    if len(raw) > largest:  # files that say no size, such as those under /proc
        raise _refused(path, f"has more bytes than the {largest:,} that are read")
    return raw


def _near(path: Path) -> list[str]:
    """Files in the same folder whose names are near."""
    try:
        names = [entry.name for entry in islice(os.scandir(path.parent), _LISTED) if entry.is_file()]
    except OSError:
        return []
    return [str(path.parent / name) for name in closest(path.name, names, limit=2)]


def _refused(path: str | Path, reason: str, fix: Sequence[str] = ()) -> InputError:
    return InputError(reason, field="file", value=str(path), fix=fix)
