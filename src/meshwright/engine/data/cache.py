"""The data cache folder and its lock."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshwright.errors import InputError


def cache_folder() -> Path:
    """Return the folder where tokenized data is cached between runs."""
    root = os.environ.get("MESHWRIGHT_CACHE", "")
    return Path(root).expanduser() if root else Path.home() / ".cache" / "meshwright"


@contextmanager
def cache_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of the process that builds a cache folder; the OS releases it if that process dies."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        file = folder.with_suffix(".lock").open("w")
    except OSError as error:
        raise cache_not_writable(folder, error) from None
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def cache_not_writable(folder: Path, error: OSError) -> InputError:
    """Return the error for a cache that is not writable."""
    return InputError(
        f"the cache of tokenized data is not writable: {error.strerror or error}",
        field="MESHWRIGHT_CACHE",
        value=str(folder.parent),
        fix=("export MESHWRIGHT_CACHE=FOLDER with free space on a disk that all ranks of a node can reach",),
    )
