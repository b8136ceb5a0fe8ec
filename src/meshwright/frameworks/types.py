"""The values that frameworks are read into and written from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class SourcedValue(msgspec.Struct, frozen=True):
    """A value that a file says, and where it says it."""

    value: Any  # text, number, truth, None, or a list or map of these
    line: int  # from 1
    file: str  # as the user would name it
    unresolved: str = ""  # why the value cannot be known without running something; value is then the text as written
    pyyaml: Any = msgspec.UNSET  # what PyYAML, a reader of YAML 1.1, makes of it where that is something else

    @property
    def location(self) -> str:
        """The place as editors open it."""
        return f"{self.file}:{self.line}"


Settings = Mapping[str, SourcedValue]
"""What a file says by their key: dotted names of nested tables, or flags such as --micro-batch-size."""


class Program(msgspec.Struct, frozen=True):
    """What a job runs on every rank, without whatever starts the ranks."""

    argv: tuple[str, ...]  # what follows torchrun and its options: a script or -m module, and its arguments
    env: Mapping[str, str] = {}  # what the engine needs set


class UnmappedField(msgspec.Struct, frozen=True):
    """A setting of a recipe that a framework has no words for."""

    field: str
    value: Any
    reason: str


class ExportedConfig(msgspec.Struct, frozen=True):
    """A recipe in another framework's words."""

    framework: str
    files: Mapping[str, str]  # text by file name; the program speaks of them by these names
    program: Program
    unmapped: tuple[UnmappedField, ...] = ()
    notes: tuple[str, ...] = ()  # what the user must still do, such as converting a checkpoint
