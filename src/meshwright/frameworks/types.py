"""Values that configs are parsed into and exported from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from meshwright.errors import InputError
from meshwright.recipes.replacements import WarmupShare


class SourcedValue(msgspec.Struct, frozen=True):
    """A value from a file, with its location."""

    value: Any  # string, number, boolean, None, or a list or map of these
    line: int  # from 1
    file: str  # as the user named it
    unresolved: str = ""  # why the value is unknown without executing code; `value` is then the text as written
    pyyaml: Any = msgspec.UNSET  # the value under YAML 1.1 (PyYAML) where it differs
    default_of: str = ""  # the options of the program whose defaults make the value

    @property
    def location(self) -> str:
        """File and line in the form editors accept."""
        return f"{self.file}:{self.line}"


Settings = Mapping[str, SourcedValue]
"""A file's values by the framework's key: dotted names of nested tables, or flags such as micro_batch_size."""


class ProgramArguments(msgspec.Struct, frozen=True):
    """The arguments of a program, and the recipe fields that they set."""

    given: Settings = {}
    values: Mapping[str, Any] = {}
    sources: Mapping[str, str] = {}  # recipe field → the argument that sets it
    lost: Mapping[str, str] = {}  # argument that no field carries → why
    open_fields: tuple[str, ...] = ()  # whose argument is known only when it runs
    warmup_share: WarmupShare = WarmupShare()  # given, or the default of the program
    per_epoch: Mapping[str, str] = {}  # recipe field in steps → the argument that does it at the end of every epoch
    argv: tuple[SourcedValue, ...] = ()  # the command of a script: the program and its arguments as written
    fills: Mapping[str, str] = {}  # key that the config leaves open → the argument that fills it in
    written_keys: Mapping[str, str] = {}  # argument → the key that a front end's file has for it
    written_values: Mapping[str, Mapping[str, str]] = {}  # key of a front end → its own names of values
    needed_lines: Mapping[str, str] = {}  # key of a front end's file → the line without which it is ignored
    sharding: Mapping[str, Mapping[str, Any]] = {}  # settings of a front end's file that shard the training
    is_front_end: bool = False  # whether only the arguments in written_keys can be given
    is_command: bool = False  # whether a front end's keys are flags of its command
    repeats: Mapping[str, str] = {}  # key of the config → the argument that must have the same value
    fixed_in: str = ""  # the program, if its own code sets arguments: it parses none, or only options of its own
    takes: Mapping[str, str] = {}  # argument → the option of such a program that sets it
    switches: tuple[str, ...] = ()  # options of such a program without a value

    def formatted(self, name: str, value: Any) -> tuple[str, ...]:
        """Return an argument as the program is given it: a flag of a command, a keyword in Python, or lines of a file.

        A keyword of a program that a script starts has the name of its file before it.

        Raise InputError if a front end has no key for it.
        """
        if self.is_front_end:
            return self._in_front_end(name, value)
        if place := self.place_in_code(name):
            return (f"{place}: " + (f"without {name}" if value is None else f"{name}={value!r}"),)
        name = self.takes.get(name, name)
        if name in self.switches:
            return (f"--{name}" if value else f"without --{name}",)
        name = f"--{name}" if self.argv else name
        if value is None:
            return (f"without {name}",)
        return (f"{name} {value}" if self.argv else f"{name}={value!r}",)

    def place_in_code(self, name: str) -> str:
        """Return the program whose code sets an argument, so that a flag of the command cannot; empty if one can."""
        if name in self.takes:
            return ""
        stated = self.given.get(name)
        in_code = bool(self.argv) and stated is not None and stated.file.endswith(".py") and not stated.default_of
        return self.fixed_in or (stated.file if in_code and stated is not None else "")

    def _in_front_end(self, name: str, value: Any) -> tuple[str, ...]:
        key = self.written_keys.get(name)
        if key is None:
            raise InputError("the front end has no key for it", field=name)
        shown = f"--{key}" if self.is_command else key
        if value is None:
            return (f"without {shown}",)
        text = str(value).lower() if isinstance(value, bool) else str(value)
        text = self.written_values.get(key, {}).get(text, text)
        needed = (self.needed_lines[key],) if key in self.needed_lines else ()
        return (*needed, f"{shown} {text}" if self.is_command else f"{shown}: {text}")


def as_int(setting: SourcedValue | None, digits: int = 11) -> int | None:
    """Return a resolved non-negative integer of at most `digits` digits, or None."""
    if setting is None or setting.unresolved or isinstance(setting.value, bool):
        return None
    text = str(setting.value)
    return int(text) if text.isascii() and text.isdigit() and len(text) <= digits else None


class Program(msgspec.Struct, frozen=True):
    """The program that a job runs on every rank, without the launcher."""

    argv: tuple[str, ...]  # what follows torchrun and its options: a script or -m module, then its arguments
    env: Mapping[str, str] = {}  # environment variables that the engine needs
    variables: Mapping[
        str, str
    ] = {}  # variables that argv refers to as ${NAME}, set by whoever starts it: what each is
    modules: tuple[str, ...] = ()  # files of the export that it imports, so that their folder must be importable
    expanded: tuple[str, ...] = ()  # words of argv that the shell of the job expands, such as $(nproc)
    env_places: Mapping[str, str] = {}  # variables of env that the user's file sets → where
    checkout: str = ""  # folder of the framework's code that it runs from; empty if it is installed


class UnmappedField(msgspec.Struct, frozen=True):
    """A recipe field that a framework has no key for."""

    field: str
    value: Any
    reason: str


class OtherVersion(msgspec.Struct, frozen=True):
    """The program of another version of a framework, and the exported script that has the same settings."""

    script: str
    program: Program


class ExportedConfig(msgspec.Struct, frozen=True):
    """A recipe exported to another framework."""

    framework: str
    files: Mapping[str, str]  # contents by file name; the program refers to these names
    program: Program
    unmapped: tuple[UnmappedField, ...] = ()
    notes: tuple[str, ...] = ()  # remaining manual steps, such as converting a checkpoint
    paths: tuple[str, ...] = ()  # where the files were written
    in_other_files: tuple[str, ...] = ()  # recipe fields that files other than the first set
    first_file_lacks: tuple[str, ...] = ()  # fields that only the scripts for other versions set
    versions: Mapping[str, OtherVersion] = {}  # programs of other versions of the framework, by version
