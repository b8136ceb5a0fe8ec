"""Which files a question may open: those of this machine, or only the texts that were sent along with it.

A person at a terminal names files. What comes over a connection must not: there, `with only({...})` stands around the
question, and a name that means a file is one of the texts sent along or is refused, without looking whether it exists.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from meshwright.errors import InputError

_sent: ContextVar[Mapping[str, str] | None] = ContextVar("sent", default=None)


@contextmanager
def only(texts: Mapping[str, str]) -> Iterator[None]:
    """Within, the only files are these texts by their names."""
    before = _sent.set({str(Path(name)): text for name, text in texts.items()})
    try:
        yield
    finally:
        _sent.reset(before)


def closed() -> bool:
    """Whether the files of this machine are closed to the question."""
    return _sent.get() is not None


def text_of(path: str | Path, field: str = "file") -> str | None:
    """The text sent along under this name; None where the files of this machine are open; any other is refused."""
    sent = _sent.get()
    if sent is None:
        return None
    found = sent.get(str(Path(path)))
    if found is None:
        raise InputError(
            "names a file, and files are not opened here",
            field=field,
            value=str(path),
            fix=("send its text, or give the name of something known",),
        )
    return found


def exists(path: str | Path) -> bool:
    """Whether there is such a file or folder to open."""
    sent = _sent.get()
    return os.path.exists(path) if sent is None else str(Path(path)) in sent


def is_dir(path: str | Path) -> bool:
    """Whether there is such a folder to look into; texts come without folders."""
    return not closed() and os.path.isdir(path)


def resolved(path: str | Path) -> Path:
    """Where a file is on this machine; a text sent along is nowhere but under its name."""
    return Path(path) if closed() else Path(path).expanduser().resolve()
