"""Comments in written files that list what they do not have: whoever opens a file later did not see the report."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from meshwright.frameworks.dropped import DroppedSetting
from meshwright.frameworks.types import UnmappedField

MARK = "# not in this file: "
COMMENTED = (".sh", ".py", ".yaml", ".yml", ".toml")
"""Files that have comments; JSON has none."""
LONGEST = 400  # characters of a comment: a blend of many corpora is in the report


def lost_lines(unmapped: Iterable[UnmappedField], dropped: Iterable[DroppedSetting]) -> list[str]:
    """Return one comment for each field without a key, and for each setting of the user's file without a field."""
    fields = [f"{one.field}={one.value}: {one.reason}" for one in unmapped]
    settings = [f"{one.file}:{one.line} {one.key}={one.value}: {one.reason}" for one in dropped]
    return [comment(text) for text in (*fields, *settings)]


def comment(text: str) -> str:
    """Return a text as one comment line."""
    plain = re.sub(r"\s+", " ", text)
    return MARK + (plain if len(plain) <= LONGEST else f"{plain[:LONGEST]} …")


def with_comments(
    files: Mapping[str, str], lines: Collection[str], modules: Collection[str] = (), first_only: Collection[str] = ()
) -> dict[str, str]:
    """Return files with the comments below their own first ones; those of an earlier export are removed.

    `modules` are imported by a program, and get comments only if no other file has any. Comments in `first_only` are
    about the first file: the others have these settings.
    """
    scripts = [name for name in files if name.endswith(COMMENTED)]
    chosen = [name for name in scripts if name not in modules] or scripts
    others = [line for line in lines if line not in first_only]
    listed = {name: lines if name == next(iter(files)) else others for name in chosen}
    return {name: _with_comments(text, listed[name]) if name in listed else text for name, text in files.items()}


def _with_comments(text: str, lines: Collection[str]) -> str:
    rest = [line for line in text.splitlines(keepends=True) if not line.startswith(MARK)]
    if len(rest) == text.count("\n") and not lines:
        return text
    above = next((number for number, line in enumerate(rest) if not line.startswith("#")), len(rest))
    return "".join((*rest[:above], *(f"{line}\n" for line in lines), *rest[above:]))
