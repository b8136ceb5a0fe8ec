"""Readers, checks and writers for the configs of other training frameworks."""

from __future__ import annotations

from pathlib import Path

from meshwright import file_access
from meshwright.frameworks.check import check
from meshwright.frameworks.export import export
from meshwright.frameworks.framework import Content, Framework
from meshwright.frameworks.load import SUFFIXES, content_of, open_file
from meshwright.frameworks.native import check as check_native
from meshwright.frameworks.native import is_native
from meshwright.frameworks.registry import NAMES, detect_framework, framework
from meshwright.frameworks.result import CheckResult, RecipeCheckResult, UnresolvedValue
from meshwright.frameworks.types import ExportedConfig, Program, SourcedValue, UnmappedField

__all__ = [
    "NAMES",
    "NATIVE",
    "CheckResult",
    "Content",
    "ExportedConfig",
    "Framework",
    "Program",
    "RecipeCheckResult",
    "SourcedValue",
    "UnmappedField",
    "UnresolvedValue",
    "check",
    "check_native",
    "content_of",
    "detect_framework",
    "export",
    "framework",
    "framework_of",
    "is_file",
    "open_file",
]

NATIVE = "meshwright"


def is_file(name: str) -> bool:
    """Return whether a name refers to a file rather than a shipped recipe."""
    path = Path(name)
    return path.suffix.lower() in SUFFIXES or file_access.exists(path)


def framework_of(content: Content, named: str | None = None) -> Framework | None:
    """Return the framework of a file, as named or detected; None for a native recipe."""
    if named == NATIVE or (named is None and is_native(content)):
        return None
    return detect_framework(content) if named is None else framework(named)
