"""Readers, checks and writers for the configs of other training frameworks."""

from __future__ import annotations

from pathlib import Path

from meshwright import file_access
from meshwright.errors import InputError
from meshwright.frameworks.check import check
from meshwright.frameworks.dropped import DroppedSetting, dropped_settings
from meshwright.frameworks.export import export, exported_engine
from meshwright.frameworks.framework import Content, Framework
from meshwright.frameworks.import_file import ImportedFile, import_file
from meshwright.frameworks.load import SUFFIXES, content_of, open_file
from meshwright.frameworks.native import check as check_native
from meshwright.frameworks.native import is_native, looks_native
from meshwright.frameworks.registry import NAMES, detect_framework, framework, require_framework
from meshwright.frameworks.result import CheckResult, RecipeCheckResult, UnresolvedValue
from meshwright.frameworks.types import ExportedConfig, Program, SourcedValue, UnmappedField

__all__ = [
    "NAMES",
    "NATIVE",
    "SUFFIXES",
    "CheckResult",
    "Content",
    "DroppedSetting",
    "ExportedConfig",
    "Framework",
    "ImportedFile",
    "Program",
    "RecipeCheckResult",
    "SourcedValue",
    "UnmappedField",
    "UnresolvedValue",
    "check",
    "check_native",
    "content_of",
    "detect_framework",
    "dropped_settings",
    "export",
    "exported_engine",
    "framework",
    "framework_of",
    "import_file",
    "is_file",
    "is_native",
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
    if named is not None:
        return require_framework(content, named)
    try:
        return detect_framework(content)
    except InputError:
        if looks_native(content):  # its reader says which key is missing or misspelt
            return None
        raise
