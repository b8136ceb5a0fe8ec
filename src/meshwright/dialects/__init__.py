"""Other frameworks' config languages: read, to check them, and written, to run there."""

from __future__ import annotations

from pathlib import Path

from meshwright import handed
from meshwright.dialects.check import check
from meshwright.dialects.checked import Checked, CheckedRecipe, Open
from meshwright.dialects.contents import SUFFIXES, content_of, open_file
from meshwright.dialects.dialect import Content, Dialect
from meshwright.dialects.export import export
from meshwright.dialects.own import check as check_own
from meshwright.dialects.own import is_ours
from meshwright.dialects.registry import NAMES, dialect, recognise
from meshwright.dialects.types import Program, Said, Unsaid, Written

__all__ = [
    "NAMES",
    "OURS",
    "Checked",
    "CheckedRecipe",
    "Content",
    "Dialect",
    "Open",
    "Program",
    "Said",
    "Unsaid",
    "Written",
    "check",
    "check_own",
    "content_of",
    "dialect",
    "export",
    "is_file",
    "of",
    "open_file",
    "recognise",
]

OURS = "meshwright"


def is_file(name: str) -> bool:
    """Whether a name means a file rather than a shipped recipe."""
    path = Path(name)
    return path.suffix.lower() in SUFFIXES or handed.exists(path)


def of(content: Content, named: str | None = None) -> Dialect | None:
    """The dialect of a file: as named, or as it shows; None for our own."""
    if named == OURS or (named is None and is_ours(content)):
        return None
    return recognise(content) if named is None else dialect(named)
