"""What is kept of data between runs: the folder, and who may write to it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.errors import InputError


def cache_folder() -> Path:
    """Where tokenised data is kept between runs."""
    root = os.environ.get("MESHWRIGHT_CACHE", "")
    return Path(root).expanduser() if root else Path.home() / ".cache" / "meshwright"


@contextmanager
def making(folder: Path) -> Iterator[None]:
    """Held by the one process that makes a folder of the cache; the system lets go of it when that one dies."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        file = folder.with_suffix(".lock").open("w")
    except OSError as error:
        raise unwritable(folder, error) from None
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def unwritable(folder: Path, error: OSError) -> InputError:
    """The error for a cache that cannot be written to."""
    return InputError(
        f"tokenised data cannot be kept there: {error.strerror or error}",
        field="MESHWRIGHT_CACHE",
        value=str(folder.parent),
        fix=("export MESHWRIGHT_CACHE=FOLDER with space on a disk that all ranks of a machine see",),
    )
