"""What a launch script says, as values."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from meshwright.errors import InputError
from meshwright.frameworks.types import SourcedValue

NESTED = 50  # brackets, quotes, functions and sourced files inside each other
LONGEST_TEXT = 200_000  # characters of one expanded value or command
MOST_WORDS = 20_000  # words of one expanded command or array
LARGEST_FILE = 1_000_000  # bytes
LARGEST_TOTAL = 2_000_000  # bytes of a script and all it sources
MOST_COMMANDS = 20_000  # written in one file
MOST_WORK = 500_000  # words and values moved while reading; a real script needs a few thousand


class Unresolved(msgspec.Struct, frozen=True):
    """Something that cannot be known, or is likely not meant, without running the script."""

    what: str  # as written
    line: int
    file: str
    reason: str


class Command(msgspec.Struct, frozen=True):
    """One simple command with its variables filled in."""

    words: tuple[SourcedValue, ...]
    env: Mapping[str, SourcedValue]  # exported variables and those set in front of the command
    line: int


class Script(msgspec.Struct, frozen=True):
    """A launch script as read, without running any of it."""

    commands: tuple[Command, ...]  # in order; what the reader itself carries out (assignments, tests) is not listed
    variables: Mapping[str, SourcedValue]  # final values; an array is a list, an associative array a map
    sbatch: Mapping[str, SourcedValue]  # by long name without dashes; an option without a value is True
    unresolved: tuple[Unresolved, ...]


class LaunchCommand(msgspec.Struct, frozen=True):
    """A training program that a script starts."""

    launcher: str  # torchrun, python, accelerate, deepspeed, srun, automodel, or empty when nobody is named
    program: SourcedValue
    is_module: bool
    args: tuple[SourcedValue, ...]  # the program's own
    launcher_args: Mapping[str, SourcedValue]  # by long name without dashes; a flag without a value is True
    env: Mapping[str, SourcedValue]
    nodes: SourcedValue | None = None
    gpus_per_node: SourcedValue | None = None
    gpu: str = ""


class Outcome(enum.Enum):
    """How a command ends, as far as that can be known."""

    YES = "yes"
    NO = "no"
    RAN = "ran"  # a program ran, and most likely well
    UNKNOWN = "unknown"

    @classmethod
    def of(cls, verdict: bool | None) -> Outcome:
        return cls.UNKNOWN if verdict is None else cls.YES if verdict else cls.NO

    def negated(self) -> Outcome:
        return {Outcome.YES: Outcome.NO, Outcome.NO: Outcome.YES}.get(self, Outcome.UNKNOWN)


class Piece(NamedTuple):
    """Some text and the one line it was written on."""

    text: str
    line: int
    file: str
    why: str = ""  # not empty: it cannot be known, and the text is as written


class Field(NamedTuple):
    """One expanded word."""

    pieces: tuple[Piece, ...]
    line: int
    file: str

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def why(self) -> str:
        return reasons(self.pieces)

    def to_value(self) -> SourcedValue:
        first = self.pieces[0] if self.pieces else self
        return SourcedValue(self.text, first.line, first.file, self.why)


def reasons(pieces: tuple[Piece, ...]) -> str:
    """Why a text cannot be known; empty when it can."""
    return "; ".join(dict.fromkeys(piece.why for piece in pieces if piece.why))


def bad(file: str, line: int, reason: str, *fix: str) -> InputError:
    """The error for a script that bash itself would refuse, or that is too large to read."""
    return InputError(f"line {line}: {reason}", field="file", value=file, fix=fix)
