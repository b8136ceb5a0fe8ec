"""Where a script's files are: beside it, in a folder that it is started from, or in another copy of its repository."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

MAX_PARENTS = 3  # folders above a script in which the files that it names are looked for


def started_from(folder: Path, name: str) -> tuple[Path, ...]:
    """Return the folders that a script may be started from: its own, and those above it.

    A name without a folder is looked for in the next one only: others may have a train.py of their own.
    """
    above = list(folder.resolve().parents)[: MAX_PARENTS if "/" in name else 1]
    here = Path.cwd()
    return folder, *(one.relative_to(here) if one.is_relative_to(here) else one for one in above)


def is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # for example, the name is too long
        return False


def find_file(folder: Path, name: str) -> Path:
    """Return the file that a script names, which need not exist.

    It is beside the script, or relative to a folder above it. A path of the machine that the job runs on, such as
    /home/me/repo/jobs/train.sh, is the file here whose last folders are the same.
    """
    return next((path for path in _places(folder, name) if is_file(path)), folder / name)


def find_fitting(folder: Path, parts: list[str]) -> list[Path]:
    """Return the files whose path fits patterns of its folders and its name, in the place where some are found."""
    for start in range(len(parts) - 1):
        for one in started_from(folder, "/".join(parts[start:])):
            if found := sorted(path for path in one.glob("/".join(parts[start:])) if is_file(path)):
                return found
    return []


def _places(folder: Path, name: str) -> Iterator[Path]:
    yield folder / name
    parts = Path(name).parts
    if len(parts) < 2:
        return
    folders = started_from(folder, name)
    first = 1 if Path(name).is_absolute() else 0
    for start in range(first, len(parts) - 1):  # the longest end of the path comes first, and has a folder
        yield from (one.joinpath(*parts[start:]) for one in folders)
