"""The Python files of the repository that a file is in: they may define names that no framework has."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path

from meshwright import file_access
from meshwright.frameworks.script_folders import MAX_PARENTS

ROOT_MARKS = (".git", "README.md", "setup.py", "pyproject.toml", "requirements.txt")
"""Files of a repository's root: folders above one without any are another's."""
MOST_FILES, MOST_BYTES = 400, 400_000
SKIPPED = ("node_modules", "site-packages", "__pycache__")
_FIELD = re.compile(r"(?m)^[ \t]+(\w+)[ \t]*:[ \t]*[A-Za-z_]")
_DATACLASS = "@dataclass"
STARTS_DEEPSPEED = "deepspeed.initialize("
_FILLS_AUTO = re.compile(r"Trainer\(|Accelerator\(|HfDeepSpeedConfig\(")


def declares(folder: Path | None, name: str) -> bool:
    """Return whether a dataclass of the repository has a field of this name."""
    return folder is not None and name in _fields(str(_root(folder)))


def is_in_repository(folder: Path | None, name: str) -> bool:
    """Return whether a program of the repository has a name anywhere in its text; also if there is no repository."""
    return folder is None or any(name in text for text in _texts(str(_root(folder))))


def starts_deepspeed_itself(folder: Path | None) -> bool:
    """Return whether programs of the repository call DeepSpeed, and none has what fills in auto in its config."""
    texts = () if folder is None else _texts(str(_root(folder)))
    return any(STARTS_DEEPSPEED in text for text in texts) and not any(_FILLS_AUTO.search(text) for text in texts)


def _root(folder: Path) -> Path:
    """Return the root of the repository that a folder is in; the folder itself if none shows."""
    places = (folder.resolve(), *list(folder.resolve().parents)[:MAX_PARENTS])
    return next((one for one in places if any((one / mark).exists() for mark in ROOT_MARKS)), folder)


@lru_cache(maxsize=16)
def _fields(root: str) -> frozenset[str]:
    return frozenset(name for text in _texts(root) if _DATACLASS in text for name in _FIELD.findall(text))


@lru_cache(maxsize=2)
def _texts(root: str) -> tuple[str, ...]:
    if file_access.closed():
        return ()
    found: list[str] = []
    for path in islice(_programs(root), MOST_FILES):
        try:
            found += [path.read_text(errors="replace")] if path.stat().st_size <= MOST_BYTES else []
        except OSError:
            continue
    return tuple(found)


def _programs(root: str) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(one for one in folders if one not in SKIPPED and not one.startswith("."))
        yield from (Path(folder, one) for one in sorted(files) if one.endswith(".py"))
