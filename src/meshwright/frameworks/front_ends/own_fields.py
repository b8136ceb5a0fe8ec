"""Fields that the programs of a repository add to the arguments of a trainer: its YAML files may set them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path

from meshwright import file_access
from meshwright.frameworks.front_ends.describe import FrontEnd
from meshwright.frameworks.script_folders import MAX_PARENTS
from meshwright.rules.rule import Finding

ROOT_MARKS = (".git", "README.md", "setup.py", "pyproject.toml", "requirements.txt")
"""Files of a repository's root: folders above one without any are another's."""
MOST_FILES, MOST_BYTES = 400, 400_000
SKIPPED = ("node_modules", "site-packages", "__pycache__")
_FIELD = re.compile(r"(?m)^[ \t]+(\w+)[ \t]*:[ \t]*[A-Za-z_]")
_DATACLASS = "@dataclass"


def without_own_fields(one: FrontEnd, folder: Path | None, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield the findings but those on unknown keys that a dataclass of the repository declares."""
    for finding in findings:
        is_unknown = one.has_other_programs and finding.rule == "key.unknown" and folder is not None
        if not (is_unknown and folder is not None and finding.field in _declared(str(_root(folder)))):
            yield finding


def _root(folder: Path) -> Path:
    """Return the root of the repository that a folder is in; the folder itself if none shows."""
    places = (folder.resolve(), *list(folder.resolve().parents)[:MAX_PARENTS])
    return next((one for one in places if any((one / mark).exists() for mark in ROOT_MARKS)), folder)


@lru_cache(maxsize=16)
def _declared(root: str) -> frozenset[str]:
    if file_access.closed():
        return frozenset()
    names: set[str] = set()
    for path in islice(_programs(root), MOST_FILES):
        try:
            text = path.read_text(errors="replace") if path.stat().st_size <= MOST_BYTES else ""
        except OSError:
            continue
        if _DATACLASS in text:
            names.update(_FIELD.findall(text))
    return frozenset(names)


def _programs(root: str) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(one for one in folders if one not in SKIPPED and not one.startswith("."))
        yield from (Path(folder, one) for one in sorted(files) if one.endswith(".py"))
