"""Parsed launch scripts: commands, variables, sbatch options, and the launch commands found in them."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from meshwright.errors import InputError
from meshwright.frameworks.types import SourcedValue

MAX_NESTING = 50  # nested brackets, quotes, functions and sourced files
MAX_TEXT_CHARS = 200_000  # characters of one expanded value or command
MAX_WORDS = 20_000  # words of one expanded command or array
MAX_FILE_BYTES = 1_000_000  # bytes
MAX_TOTAL_BYTES = 2_000_000  # bytes of a script and all sourced files
MAX_COMMANDS = 20_000  # in one file
MAX_WORK = 500_000  # words and values processed; a real script needs a few thousand


class Unresolved(msgspec.Struct, frozen=True):
    """Something that cannot be resolved without running the script, or that is likely a mistake."""

    what: str  # as written
    line: int
    file: str
    reason: str
    rejected: tuple[str, str] = ("", "")  # a number at which bash ends the script, and the variable that has it before


class Command(msgspec.Struct, frozen=True):
    """One simple command with its variables expanded."""

    words: tuple[SourcedValue, ...]
    env: Mapping[str, SourcedValue]  # exported variables and assignments before the command
    line: int


class WrittenFile(msgspec.Struct, frozen=True):
    """The text of a file that a script writes; a value with a dollar sign is known only when the script runs."""

    text: str  # starts with empty lines, so that its lines are those of `file`
    file: str  # the script whose here-document it is, or the template


class CutCommand(msgspec.Struct, frozen=True):
    """The rest of a command that ended before: bash takes its first flag as the name of a program."""

    line: int
    file: str
    flags: tuple[str, ...]
    before: int  # line of the command that ended; 0 if there is none
    in_text: bool = False  # the text of bash -c or eval, whose line breaks end a command as those of a script do


class Script(msgspec.Struct, frozen=True):
    """A launch script, parsed without executing it."""

    commands: tuple[Command, ...]  # in order; commands the interpreter evaluates (assignments, tests) are not listed
    variables: Mapping[str, SourcedValue]  # final values; an array is a list, an associative array a map
    sbatch: Mapping[str, SourcedValue]  # by long name without dashes; an option without a value is True
    unresolved: tuple[Unresolved, ...]
    possible: tuple[Command, ...] = ()  # commands under conditions that are known only at run time, of all branches
    possible_flags: frozenset[str] = frozenset()  # in values that variables get under such conditions
    written: Mapping[str, WrittenFile] = {}  # config files that it writes, by name
    called: tuple[str, ...] = ()  # scripts that it starts in a shell of their own
    texts: tuple[str, ...] = ()  # of the files that it sources or starts
    cut: tuple[CutCommand, ...] = ()  # in the order of their lines, also under conditions and in functions
    choices: tuple[str, ...] = ()  # files of which it sources one, as its caller says


class LaunchCommand(msgspec.Struct, frozen=True):
    """A training program that a script starts."""

    launcher: str  # torchrun, python, accelerate, deepspeed, srun, automodel; empty if unknown
    program: SourcedValue
    is_module: bool
    args: tuple[SourcedValue, ...]  # the program's own
    launcher_args: Mapping[str, SourcedValue]  # by long name without dashes; a flag without a value is True
    env: Mapping[str, SourcedValue]
    nodes: SourcedValue | None = None
    gpus_per_node: SourcedValue | None = None
    gpu: str = ""
    job: Mapping[str, SourcedValue] = {}  # sbatch options, with srun's in place of those it also sets
    under_srun: bool = False  # srun starts the launcher once per task

    @property
    def argv(self) -> tuple[SourcedValue, ...]:
        """The program and its arguments, without the launcher."""
        module = (msgspec.structs.replace(self.program, value="-m", unresolved=""),) if self.is_module else ()
        return (*module, self.program, *self.args)


class ExitStatus(enum.Enum):
    """Exit status of a command, as far as it can be determined."""

    SUCCESS = "success"
    FAILURE = "failure"
    RAN = "ran"  # a program ran; assumed to succeed
    UNKNOWN = "unknown"

    @classmethod
    def of(cls, result: bool | None) -> ExitStatus:
        return cls.UNKNOWN if result is None else cls.SUCCESS if result else cls.FAILURE

    def negated(self) -> ExitStatus:
        return {ExitStatus.SUCCESS: ExitStatus.FAILURE, ExitStatus.FAILURE: ExitStatus.SUCCESS}.get(
            self, ExitStatus.UNKNOWN
        )


class Piece(NamedTuple):
    """Text from a single source line."""

    text: str
    line: int
    file: str
    unresolved: str = ""  # why the value is unknown; the text is then as written


class Field(NamedTuple):
    """One expanded word."""

    pieces: tuple[Piece, ...]
    line: int
    file: str

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def unresolved(self) -> str:
        return reasons(self.pieces)

    def to_value(self) -> SourcedValue:
        first = self.pieces[0] if self.pieces else self
        return SourcedValue(self.text, first.line, first.file, self.unresolved)


def reasons(pieces: tuple[Piece, ...]) -> str:
    """Return why a text is unresolved, or an empty string."""
    return "; ".join(dict.fromkeys(piece.unresolved for piece in pieces if piece.unresolved))


def script_error(file: str, line: int, reason: str, *fix: str) -> InputError:
    """Return the error for a script that bash would reject or that exceeds a size limit."""
    return InputError(f"line {line}: {reason}", field="file", value=file, fix=fix)
