"""The variables of a script while it is read."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from meshwright.frameworks.shell.values import (
    LONGEST_TEXT,
    MOST_WORDS,
    MOST_WORK,
    Field,
    Piece,
    Unresolved,
    bad,
)
from meshwright.frameworks.types import SourcedValue


class Value(msgspec.Struct, frozen=True):
    """What a variable holds: one text, or several under their keys."""

    kind: str  # text, array, map
    fields: Mapping[str, Field]  # a text is the field 0, which $NAME means for an array too
    line: int
    file: str

    def said(self) -> SourcedValue:
        if self.kind == "text":
            field = self.fields["0"]
            return SourcedValue(field.text, self.line, self.file, field.why)
        why = "; ".join(dict.fromkeys(field.why for field in self.fields.values() if field.why))
        values = {key: field.text for key, field in self.fields.items()}
        return SourcedValue(values if self.kind == "map" else list(values.values()), self.line, self.file, why)


def text_value(pieces: tuple[Piece, ...], line: int, file: str) -> Value:
    """A variable that holds one text."""
    return Value("text", {"0": Field(pieces, line, file)}, line, file)


def array_value(fields: list[Field], line: int, file: str) -> Value:
    """A variable that holds several words in order."""
    return Value("array", {str(index): field for index, field in enumerate(fields)}, line, file)


class Memory:
    """Variables, what is exported, the arguments at hand, and how much more work is allowed."""

    def __init__(self, file: str, slurm: Mapping[str, SourcedValue], in_job: bool) -> None:
        self.file, self.slurm, self.in_job = file, slurm, in_job
        self.values: dict[str, Value] = {}
        self.exported: set[str] = set()
        self.arguments: list[Field] | None = None  # none: those the script is started with
        self.unresolved: dict[tuple[str, int, str], Unresolved] = {}
        self.defaulted = 0  # how often a default stood in for a variable that the environment might set
        self.work = 0
        self._environment: dict[str, SourcedValue] | None = None

    def spend(self, work: int, line: int, file: str) -> None:
        self.work += work
        if self.work > MOST_WORK:
            raise bad(file, line, "reading the script to here takes too much work; it repeats or copies too much")

    def note(self, what: str, line: int, file: str, reason: str) -> None:
        self.unresolved.setdefault((what, line, file), Unresolved(what, line, file, reason))

    def look_up(self, name: str) -> Value | None:
        value = self.values.get(name)
        if value is None and name in self.slurm:
            said = self.slurm[name]
            return text_value((Piece(str(said.value), said.line, said.file, said.unresolved),), said.line, said.file)
        return value

    def is_set_by_slurm(self, name: str) -> bool:
        """Whether a job that has #SBATCH lines finds this variable set, to something that is not known."""
        return self.in_job and name.startswith("SLURM_")

    def store(self, name: str, value: Value, export: bool = False) -> None:
        self.check_size(list(value.fields.values()), value.line, value.file)
        self.values[name] = value
        if export:
            self.exported.add(name)
        if name in self.exported:
            self._environment = None

    def check_size(self, fields: list[Field], line: int, file: str) -> None:
        """Refuse what grew out of any proportion, such as a variable that doubles itself."""
        if len(fields) > MOST_WORDS:
            raise bad(file, line, f"more than {MOST_WORDS} words in one command or array")
        length = sum(len(piece.text) for field in fields for piece in field.pieces)
        if length > LONGEST_TEXT:
            raise bad(file, line, f"more than {LONGEST_TEXT} characters in one value or command")
        self.spend(1 + len(fields) + sum(len(field.pieces) for field in fields) + length // 64, line, file)

    def hide(self, name: str, reason: str, line: int, file: str) -> None:
        """Make a variable unknown from here on."""
        self.store(name, text_value((Piece(f"${name}", line, file, reason),), line, file))

    def forget(self, name: str) -> None:
        self.values.pop(name, None)
        self.exported.discard(name)
        self._environment = None

    def export(self, name: str) -> None:
        self.exported.add(name)
        self._environment = None

    def environment(self, line: int, file: str) -> dict[str, SourcedValue]:
        """What a command started now finds set; shared between commands until something changes."""
        if self._environment is None:
            self.spend(4 * len(self.exported), line, file)
            self._environment = {
                name: self.values[name].said()
                for name in sorted(self.exported)
                if name in self.values and self.values[name].kind == "text"
            }
        return self._environment

    def saved(self, line: int, file: str) -> tuple[dict[str, Value], set[str], list[Field] | None]:
        """Everything a subshell cannot change."""
        self.spend(1 + len(self.values) // 4, line, file)
        return dict(self.values), set(self.exported), self.arguments

    def restore(self, saved: tuple[dict[str, Value], set[str], list[Field] | None]) -> None:
        self.values, self.exported, self.arguments = saved
        self._environment = None
