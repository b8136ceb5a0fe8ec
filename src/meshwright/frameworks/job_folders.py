"""The folders in which a job looks up the relative names that its file has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from meshwright.frameworks.framework import Content
from meshwright.frameworks.script_folders import started_from
from meshwright.frameworks.types import SourcedValue


def changed_folder(content: Content) -> SourcedValue | None:
    """Return the folder to which a script changes last; None if it stays where it is started."""
    commands = () if content.script is None else content.script.commands
    moves = [one.words for one in commands if one.words and one.words[0].value in ("cd", "pushd")]
    return moves[-1][1] if moves and len(moves[-1]) == 2 else None


def job_folders(content: Content, name: str) -> Iterator[Path]:
    """Yield the folders in which a job may look up a relative name: the one that its script changes to comes first.

    Then comes the current folder, from which it is submitted, and those that the file may be started from.
    """
    last = changed_folder(content)
    submitted = (Path(), *(started_from(content.folder, name) if content.folder is not None else ()))
    if last is not None and not last.unresolved:
        yield from (one / str(last.value) for one in submitted)
    yield from submitted
