"""Other frameworks' config languages: read, to check them, and written, to run there."""

from __future__ import annotations

from pathlib import Path

from meshwright import file_access
from meshwright.frameworks.check import check
from meshwright.frameworks.export import export
from meshwright.frameworks.framework import Content, Framework
from meshwright.frameworks.load import SUFFIXES, content_of, open_file
from meshwright.frameworks.native import check as check_own
from meshwright.frameworks.native import is_ours
from meshwright.frameworks.registry import NAMES, framework, recognise
from meshwright.frameworks.result import Checked, CheckedRecipe, Open
from meshwright.frameworks.types import Program, SourcedValue, UnmappedField, Written

__all__ = [
    "NAMES",
    "OURS",
    "Checked",
    "CheckedRecipe",
    "Content",
    "Framework",
    "Open",
    "Program",
    "SourcedValue",
    "UnmappedField",
    "Written",
    "check",
    "check_own",
    "content_of",
    "export",
    "framework",
    "is_file",
    "of",
    "open_file",
    "recognise",
]

OURS = "meshwright"


def is_file(name: str) -> bool:
    """Whether a name means a file rather than a shipped recipe."""
    path = Path(name)
    return path.suffix.lower() in SUFFIXES or file_access.exists(path)


def of(content: Content, named: str | None = None) -> Framework | None:
    """The framework of a file: as named, or as it shows; None for our own."""
    if named == OURS or (named is None and is_ours(content)):
        return None
    return recognise(content) if named is None else framework(named)
