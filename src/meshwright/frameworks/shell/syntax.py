"""Syntax tree of a bash script."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from meshwright.frameworks.shell.words import Word


class Location(NamedTuple):
    """Line and file."""

    line: int
    file: str


class Element(msgspec.Struct, frozen=True):
    """One element of an array literal."""

    word: Word
    key: Word | None = None


class Assignment(msgspec.Struct, frozen=True):
    """NAME=value, NAME+=value, NAME[key]=value or NAME=( … )."""

    name: str
    location: Location
    append: bool = False
    key: Word | None = None
    value: Word | None = ()  # None: an array
    elements: tuple[Element, ...] = ()


class HereDocument(msgspec.Struct):
    """The text of a here-document, which the parser fills in when it reaches the next line."""

    quoted: bool  # whether the delimiter is quoted, so that nothing in the text is expanded
    lines: list[tuple[str, int, str]] = msgspec.field(default_factory=list)  # text, line, file


class Simple(msgspec.Struct, frozen=True):
    """A simple command: assignments, then the command's words."""

    assignments: tuple[Assignment, ...]
    words: tuple[Word, ...]
    declared: tuple[Assignment, ...]  # assignments after export, declare, local, readonly
    location: Location
    here_document: HereDocument | None = None
    output: Word | None = None  # the file that > or >> writes
    appends: bool = False


class Condition(msgspec.Struct, frozen=True):
    """[[ … ]]; operators are strings, operands are words."""

    tokens: tuple[str | Word, ...]
    location: Location
    text: str


class Arithmetic(msgspec.Struct, frozen=True):
    """(( … ))."""

    inner: Word
    location: Location
    text: str


class If(msgspec.Struct, frozen=True):
    """if … fi: branches in order; the condition of else is None."""

    branches: tuple[tuple[Block | None, Block], ...]
    location: Location


class Loop(msgspec.Struct, frozen=True):
    """for, select, while or until."""

    kind: str
    body: Block
    location: Location
    name: str = ""
    words: tuple[Word, ...] = ()
    condition: Block = ()


class Arm(msgspec.Struct, frozen=True):
    """One clause of case … esac."""

    patterns: tuple[Word, ...]
    body: Block
    falls_through: bool


class Case(msgspec.Struct, frozen=True):
    """case … esac."""

    word: Word
    arms: tuple[Arm, ...]
    location: Location


class Group(msgspec.Struct, frozen=True):
    """{ … } or ( … )."""

    body: Block
    subshell: bool


class Function(msgspec.Struct, frozen=True):
    """name() { … }."""

    name: str
    body: Statement


Statement = Simple | Condition | Arithmetic | If | Loop | Case | Group | Function


class Pipeline(msgspec.Struct, frozen=True):
    """Commands joined by |."""

    statements: tuple[Statement, ...]
    negated: bool = False


class Chain(msgspec.Struct, frozen=True):
    """Pipelines joined by && and ||, each with the operator before it."""

    links: tuple[tuple[str, Pipeline], ...]
    location: Location
    text: str
    span: tuple[int, int] = (0, 0)  # its first character in the source, and the one after its last


Block = tuple[Chain, ...]
