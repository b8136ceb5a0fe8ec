"""Readers, checks and writers for the configs of other training frameworks."""

from __future__ import annotations

from pathlib import Path

from meshwright import file_access
from meshwright.errors import InputError
from meshwright.frameworks.announced import lost_lines, with_comments
from meshwright.frameworks.check import as_in_files, check, stated_gpus
from meshwright.frameworks.dropped import DroppedSetting, dropped_settings, require_model
from meshwright.frameworks.export import export, exported_engine, in_version, lost_numbers, write
from meshwright.frameworks.fixed_text import FixedText, fixed_text
from meshwright.frameworks.framework import Content, Framework
from meshwright.frameworks.import_file import ImportedFile, import_file
from meshwright.frameworks.initial_weights import in_folder, loadable_weights, weights_to_prepare
from meshwright.frameworks.load import SUFFIXES, content_of, format_of, open_file
from meshwright.frameworks.mapping import no_effect
from meshwright.frameworks.model_differences import as_replaced
from meshwright.frameworks.native import check as check_native
from meshwright.frameworks.native import is_native, looks_native, train_command
from meshwright.frameworks.open_length import open_length_of_recipe
from meshwright.frameworks.other_trainers import OtherTrainerError
from meshwright.frameworks.our_fixes import in_our_keys, superseded
from meshwright.frameworks.patch_file import patch, referenced_file
from meshwright.frameworks.registry import NAMES, detect_framework, framework, require_framework
from meshwright.frameworks.result import BaselineEntry, CheckResult, IgnoredFinding, RecipeCheckResult, UnresolvedValue
from meshwright.frameworks.types import ExportedConfig, Program, SourcedValue, UnmappedField

__all__ = [
    "NAMES",
    "NATIVE",
    "SUFFIXES",
    "BaselineEntry",
    "CheckResult",
    "Content",
    "DroppedSetting",
    "ExportedConfig",
    "FixedText",
    "Framework",
    "IgnoredFinding",
    "ImportedFile",
    "OtherTrainerError",
    "Program",
    "RecipeCheckResult",
    "SourcedValue",
    "UnmappedField",
    "UnresolvedValue",
    "as_in_files",
    "as_replaced",
    "check",
    "check_native",
    "content_of",
    "detect_framework",
    "dropped_settings",
    "export",
    "exported_engine",
    "fixed_text",
    "format_of",
    "framework",
    "framework_of",
    "import_file",
    "in_folder",
    "in_our_keys",
    "in_version",
    "is_file",
    "is_native",
    "loadable_weights",
    "lost_lines",
    "lost_numbers",
    "no_effect",
    "open_file",
    "open_length_of_recipe",
    "patch",
    "referenced_file",
    "require_model",
    "stated_gpus",
    "superseded",
    "train_command",
    "weights_to_prepare",
    "with_comments",
    "write",
]

NATIVE = "meshwright"


def is_file(name: str) -> bool:
    """Return whether a name refers to a file rather than a shipped recipe."""
    path = Path(name)
    return path.suffix.lower() in SUFFIXES or file_access.exists(path)


def framework_of(content: Content, named: str | None = None, front_ends: bool = False) -> Framework | None:
    """Return the framework of a file, as named or detected; None for a native recipe or a job that trains one.

    `front_ends`: also one whose files are only checked.
    """
    if content.format == "shell" and (named == NATIVE or train_command(content) is not None):
        _require_own_job(content, named)
        return None
    if named == NATIVE or (named is None and is_native(content)):
        return None
    if named is not None:
        return require_framework(content, named)
    try:
        return detect_framework(content, front_ends)
    except InputError:
        if looks_native(content):  # its reader says which key is missing or misspelt
            return None
        raise


def _require_own_job(content: Content, named: str | None) -> None:
    """Raise InputError for a script whose training is not that of the named framework."""
    if train_command(content) is None:
        reason = "is a script without a meshwright train command"
        try:
            fix: tuple[str, ...] = (f"--framework {detect_framework(content).name}",)
        except InputError:
            fix = ()
        raise InputError(reason, field="file", value=content.path, fix=fix)
    if named not in (None, NATIVE):
        raise InputError(
            f"{content.path} runs meshwright train", field="framework", value=named, fix=(f"--framework {NATIVE}",)
        )
