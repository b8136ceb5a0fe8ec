"""Which files a request may open: those of this machine, or only the texts sent with it.

A user at a terminal names files, and so does an agent that the user started, over standard input and output. A request
over HTTP must not: it runs inside `with only({...})`, where a path is one of the texts sent with the request or is
rejected, without checking whether the file exists. A call of an agent that sends texts runs there too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from meshwright.errors import InputError, closest

BYTE_ORDER_MARK = "\ufeff"  # Windows programs write it at the start of UTF-8 files
SHOWN_NAMES = 5  # of a folder in an error
MOST_NAMES = 10_000  # of a folder that are compared with a name
ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/{1,2}(?=[^/])")  # s3://bucket, also after a path was made of it
FETCH = "copy its files to a folder where the run starts, or mount it there, and name the folder"

_sent: ContextVar[Mapping[str, str] | None] = ContextVar("sent", default=None)


@contextmanager
def only(texts: Mapping[str, str]) -> Iterator[None]:
    """Allow no files but these texts, by name."""
    before = _sent.set({str(Path(name)): text.removeprefix(BYTE_ORDER_MARK) for name, text in texts.items()})
    try:
        yield
    finally:
        _sent.reset(before)


def closed() -> bool:
    """Return whether the files of this machine are closed to the request."""
    return _sent.get() is not None


def text_of(path: str | Path, field: str = "file") -> str | None:
    """Return the text sent under this name; None if files are open. Raise InputError for any other path."""
    sent = _sent.get()
    if sent is None:
        return None
    found = sent.get(str(Path(path)))
    if found is None:
        raise InputError(
            "file paths are not allowed over HTTP, nor with a file sent as text",
            field=field,
            value=str(path),
            fix=("send the file's contents, or use a catalogue name",),
        )
    return found


def exists(path: str | Path) -> bool:
    """Return whether there is such a file or folder to open."""
    sent = _sent.get()
    return os.path.exists(path) if sent is None else str(Path(path)) in sent


def is_dir(path: str | Path) -> bool:
    """Return whether there is such a folder to open; texts have no folders."""
    return not closed() and os.path.isdir(path)


def resolved(path: str | Path) -> Path:
    """Return the absolute path of a file; a text keeps its name."""
    return Path(path) if closed() else Path(path).expanduser().resolve()


def is_address(path: str | Path) -> bool:
    """Return whether a name is an address, such as s3://bucket/data."""
    return ADDRESS.match(str(path)) is not None


def missing_path(path: str | Path, field: str, reason: str = "no such file or folder") -> InputError:
    """Return the error for a path that does not exist, with the nearest names in the folder it should be in."""
    if is_address(path):
        return InputError(f"is an address, not a file or folder: {FETCH}", field=field, value=str(path))
    wanted = Path(path).expanduser()
    rest = Path()
    while not wanted.parent.is_dir() and wanted.parent != wanted:
        wanted, rest = wanted.parent, wanted.name / rest
    near = [str(Path(found, rest)) if Path(found, rest).exists() else found for found in neighbours(wanted)]
    near = [one if os.sep in one else os.path.join(os.curdir, one) for one in near]
    if near:
        reason += f"; did you mean {' or '.join(near)}?"
    elif wanted != Path(path).expanduser():
        reason += f": there is no {wanted}"
    elif shown := sorted(_names(wanted.parent))[:SHOWN_NAMES]:
        reason += f"; {wanted.parent if str(wanted.parent) != '.' else 'this folder'} has {', '.join(shown)}"
    return InputError(reason, field=field, value=str(path), fix=near)


def neighbours(path: Path) -> list[str]:
    """Return the paths in the same folder whose names are closest to this one."""
    return [str(path.parent / name) for name in closest(path.name, _names(path.parent))]


def _names(folder: Path) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if not name.startswith(".")][:MOST_NAMES]
    except OSError:  # not readable, or not a folder
        return []
