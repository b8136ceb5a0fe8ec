"""fsync for files and folders, so that both survive a power failure."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from meshwright.errors import InputError


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `folder` on success and removed on failure."""
    partial = folder.parent / f".{folder.name}.partial-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)  # left by an earlier process with this PID
    partial.mkdir(parents=True)
    try:
        yield partial
        sync_folder(partial)
        os.replace(partial, folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def require_empty(folder: Path) -> None:
    """Raise if an output folder exists and is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(
            "already exists and is not empty", field="out", value=str(folder), fix=("choose another output folder",)
        )


def sync_file(file: IO[Any]) -> None:
    """Flush an open file to the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush the directory entries of a folder to the disk."""
    opened = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # some network file systems do not support it, and do not need it
            os.fsync(opened)
    finally:
        os.close(opened)
