"""Shell variables while a script is interpreted."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from meshwright.frameworks.shell.values import (
    MAX_TEXT_CHARS,
    MAX_WORDS,
    MAX_WORK,
    Field,
    Piece,
    Unresolved,
    script_error,
)
from meshwright.frameworks.types import SourcedValue


class Value(msgspec.Struct, frozen=True):
    """The value of a variable: one text, or several texts by key."""

    kind: str  # text, array, map
    fields: Mapping[str, Field]  # a scalar is field 0, which is also what $NAME means for an array
    line: int
    file: str

    def to_value(self) -> SourcedValue:
        if self.kind == "text":
            field = self.fields["0"]
            return SourcedValue(field.text, self.line, self.file, field.unresolved)
        reason = "; ".join(dict.fromkeys(field.unresolved for field in self.fields.values() if field.unresolved))
        values = {key: field.text for key, field in self.fields.items()}
        return SourcedValue(values if self.kind == "map" else list(values.values()), self.line, self.file, reason)


def text_value(pieces: tuple[Piece, ...], line: int, file: str) -> Value:
    """Return a scalar variable."""
    return Value("text", {"0": Field(pieces, line, file)}, line, file)


def array_value(fields: list[Field], line: int, file: str) -> Value:
    """Return an indexed array."""
    return Value("array", {str(index): field for index, field in enumerate(fields)}, line, file)


class ShellState:
    """Variables, exports, positional arguments, and the work budget."""

    def __init__(self, file: str, slurm: Mapping[str, SourcedValue], in_job: bool) -> None:
        self.file, self.slurm, self.in_job = file, slurm, in_job
        self.values: dict[str, Value] = {}
        self.exported: set[str] = set()
        self.arguments: list[Field] | None = None  # None: the script's own arguments
        self.unresolved: dict[tuple[str, int, str], Unresolved] = {}
        self.defaulted = 0  # how often a default replaced a variable that the environment might set
        self.exports_all = False  # set -a
        self.loop_depth = 0  # enclosing loops, whose bodies are followed once
        self.set_in_loop: set[str] = set()  # variables that the body of the innermost loop gives a new value
        self.work = 0
        self._environment: dict[str, SourcedValue] | None = None

    def spend(self, work: int, line: int, file: str) -> None:
        self.work += work
        if self.work > MAX_WORK:
            raise script_error(file, line, "the script repeats or copies too much to be interpreted")

    def note(self, what: str, line: int, file: str, reason: str, rejected: tuple[str, str] = ("", "")) -> str:
        """Note something unresolved; return why, which is the first reason: bash -c expands a text once more."""
        noted = self.unresolved.setdefault((what, line, file), Unresolved(what, line, file, reason, rejected))
        return noted.reason

    def look_up(self, name: str) -> Value | None:
        value = self.values.get(name)
        if value is None and name in self.slurm:
            setting = self.slurm[name]
            return text_value(
                (Piece(str(setting.value), setting.line, setting.file, setting.unresolved),), setting.line, setting.file
            )
        return value

    def is_set_by_slurm(self, name: str) -> bool:
        """Return whether SLURM sets this variable to an unknown value (the script has #SBATCH lines)."""
        return self.in_job and name.startswith("SLURM_")

    def store(self, name: str, value: Value, export: bool = False) -> None:
        self.check_size(list(value.fields.values()), value.line, value.file)
        self.values[name] = value
        if export:
            self.exported.add(name)
        if name in self.exported:
            self._environment = None

    def check_size(self, fields: list[Field], line: int, file: str) -> None:
        """Raise if a value grew too large, such as a variable that doubles itself."""
        if len(fields) > MAX_WORDS:
            raise script_error(file, line, f"more than {MAX_WORDS} words in one command or array")
        length = sum(len(piece.text) for field in fields for piece in field.pieces)
        if length > MAX_TEXT_CHARS:
            raise script_error(file, line, f"more than {MAX_TEXT_CHARS} characters in one value or command")
        self.spend(1 + len(fields) + sum(len(field.pieces) for field in fields) + length // 64, line, file)

    def mark_unknown(self, name: str, reason: str, line: int, file: str) -> None:
        """Mark a variable as unknown from here on."""
        self.store(name, text_value((Piece(f"${name}", line, file, reason),), line, file))

    def unset(self, name: str) -> None:
        self.values.pop(name, None)
        self.exported.discard(name)
        self._environment = None

    def export(self, name: str) -> None:
        self.exported.add(name)
        self._environment = None

    def environment(self, line: int, file: str) -> dict[str, SourcedValue]:
        """Return the exported variables; cached until one changes."""
        if self._environment is None:
            self.spend(4 * len(self.exported), line, file)
            self._environment = {
                name: self.values[name].to_value()
                for name in sorted(self.exported)
                if name in self.values and self.values[name].kind == "text"
            }
        return self._environment

    def snapshot(self, line: int, file: str) -> tuple[dict[str, Value], set[str], list[Field] | None]:
        """Return the state that a subshell cannot change."""
        self.spend(1 + len(self.values) // 4, line, file)
        return dict(self.values), set(self.exported), self.arguments

    def restore(self, snapshot: tuple[dict[str, Value], set[str], list[Field] | None]) -> None:
        self.values, self.exported, self.arguments = snapshot
        self._environment = None
