"""What makes files survive a power cut: their bytes, and their names, are on the disk."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import IO, Any


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
