"""What commands of bash are, once they are read."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from meshwright.frameworks.shell.words import Word


class Place(NamedTuple):
    """Where something begins."""

    line: int
    file: str


class Element(msgspec.Struct, frozen=True):
    """One entry between the parentheses of an array."""

    word: Word
    key: Word | None = None


class Assignment(msgspec.Struct, frozen=True):
    """NAME=value, NAME+=value, NAME[key]=value or NAME=( … )."""

    name: str
    place: Place
    append: bool = False
    key: Word | None = None
    value: Word | None = ()  # none: an array
    elements: tuple[Element, ...] = ()


class Simple(msgspec.Struct, frozen=True):
    """Assignments, then a command and its words."""

    assignments: tuple[Assignment, ...]
    words: tuple[Word, ...]
    declared: tuple[Assignment, ...]  # the assignments behind export, declare, local, readonly
    place: Place
    here_document: bool = False


class Condition(msgspec.Struct, frozen=True):
    """[[ … ]]; signs are plain text, operands are words."""

    tokens: tuple[str | Word, ...]
    place: Place
    text: str


class Arithmetic(msgspec.Struct, frozen=True):
    """(( … ))."""

    inner: Word
    place: Place
    text: str


class If(msgspec.Struct, frozen=True):
    """Branches in order; the last condition is none for else."""

    branches: tuple[tuple[Block | None, Block], ...]
    place: Place


class Loop(msgspec.Struct, frozen=True):
    """for, select, while or until."""

    kind: str
    body: Block
    place: Place
    name: str = ""
    words: tuple[Word, ...] = ()
    condition: Block = ()


class Arm(msgspec.Struct, frozen=True):
    """One pattern list of case … esac."""

    patterns: tuple[Word, ...]
    body: Block
    falls_through: bool


class Case(msgspec.Struct, frozen=True):
    """case … esac."""

    word: Word
    arms: tuple[Arm, ...]
    place: Place


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
    """Pipelines joined by && and ||; each with the sign in front of it."""

    links: tuple[tuple[str, Pipeline], ...]
    place: Place
    text: str


Block = tuple[Chain, ...]
