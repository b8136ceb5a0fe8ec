"""What makes files survive a power cut: their bytes, and their names, are on the disk."""

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
    """Waits until the disk has what was written to an open file."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Waits until the disk knows the names in a folder."""
    opened = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # some network file systems cannot, and need not
            os.fsync(opened)
    finally:
        os.close(opened)
