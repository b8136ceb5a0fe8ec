"""TOML with lines: tomllib's values, and a scanner that says where each of them is written."""

from __future__ import annotations

import re
import tomllib
from datetime import date, datetime, time
from typing import Any

from meshwright.config_io.nodes import (
    DEEPEST,
    MOST_NODES,
    Lines,
    Node,
    checked_integer,
    given_twice,
    keyed,
    refused,
    too_deep,
    too_many,
)
from meshwright.errors import InputError, first_line

_Path = tuple[str | int, ...]  # keys, and the places of items in arrays

_BLANK = re.compile(r"(?:[ \t\r\n]++|#[^\n]*+)*+")
_SPACE = re.compile(r"[ \t]*+")
_BASIC = r'"[^"\\\n]*+(?:\\.[^"\\\n]*+)*+"'
_LITERAL = r"'[^'\n]*+'"
_KEY = re.compile(rf"[ \t]*+([A-Za-z0-9_-]++|{_BASIC}|{_LITERAL})[ \t]*+")
_VALUE = re.compile(
    r'"""(?:[^"\\]++|\\[\s\S]|"{1,2}(?!"))*+"""(?:"{0,2})'
    r"|'''(?:[^']++|'{1,2}(?!'))*+'''(?:'{0,2})"
    rf"|{_BASIC}|{_LITERAL}"
    r"|[^,\[\]{}\n#\"'=]++"
)
_PLACE = re.compile(r" \(at line (\d+), column \d+\)$")


class _LostError(Exception):
    """What is not TOML: tomllib says why."""


def read_toml(text: str, where: str) -> Node:
    """The document in a TOML text."""
    scanner = _Scanner(text, where)
    try:
        scanner.document()
    except _LostError as lost:
        _values(text, where)
        raise refused(where, scanner.line, "is not TOML that can be read") from lost
    return _node(_values(text, where), (), scanner.lines, where, 1)


def _values(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        reason = first_line(error)
        place = _PLACE.search(reason)
        line = int(place[1]) if place else None
        raise refused(where, line, f"is not TOML: {_PLACE.sub('', reason)}") from error


def _node(value: Any, path: _Path, lines: dict[_Path, int], where: str, above: int) -> Node:
    line = lines.get(path, above)
    if isinstance(value, dict):
        return Node({key: _node(child, (*path, key), lines, where, line) for key, child in value.items()}, line)
    if isinstance(value, list):
        return Node([_node(child, (*path, place), lines, where, line) for place, child in enumerate(value)], line)
    if isinstance(value, date | datetime | time):
        return Node(value.isoformat(), line)
    if isinstance(value, int):
        checked_integer(value, where, line)
    return Node(value, line)


class _Scanner:
    """Walks over a TOML text once, before tomllib, whose time grows with the square of some nestings."""

    def __init__(self, text: str, where: str) -> None:
        self.text, self.where, self.place = text, where, 0
        self.at = Lines(text).at
        self.lines: dict[_Path, int] = {}
        self.said: dict[_Path, int] = {}  # lines of what may be said once only: values and [tables]
        self.arrays: dict[_Path, int] = {}  # items of [[arrays of tables]] so far

    @property
    def line(self) -> int:
        return self.at(self.place)

    def document(self) -> None:
        table: _Path = ()
        while self.skip(_BLANK) < len(self.text):
            if self.text.startswith("[[", self.place):
                table = self.array_header()
            elif self.text[self.place] == "[":
                table = self.header()
            else:
                self.entry(table)
            self.end_of_line()

    def header(self) -> _Path:
        line = self.line
        self.take("[")
        path = self.resolved(self.key())
        self.take("]")
        self.say_once(path, line)
        self.mention(path, line)
        return path

    def array_header(self) -> _Path:
        line = self.line
        self.take("[[")
        path = self.resolved(self.key(), of_array=True)
        self.take("]]")
        if path in self.said:
            raise self.twice(path, line)
        place = self.arrays.get(path, 0)
        self.arrays[path] = place + 1
        self.said[(*path, place)] = line
        self.mention((*path, place), line)
        return (*path, place)

    def resolved(self, key: tuple[str, ...], of_array: bool = False) -> _Path:
        """The path of a header: inside arrays of tables it means their last item."""
        path: _Path = ()
        for index, part in enumerate(key):
            path = (*path, part)
            last = index == len(key) - 1
            if path in self.arrays and not (last and of_array):
                path = (*path, self.arrays[path] - 1)
        return path

    def entry(self, table: _Path) -> None:
        line = self.line
        path = (*table, *self.key())
        self.take("=")
        self.say_once(path, line)
        self.mention(path, line)
        self.value(path)

    def key(self) -> tuple[str, ...]:
        parts: list[str] = []
        while True:
            found = _KEY.match(self.text, self.place)
            if found is None:
                raise _LostError
            self.place = found.end()
            parts.append(_unquoted(found[1]))
            if len(parts) > DEEPEST:
                raise too_deep(self.where, self.line)
            if not self.text.startswith(".", self.place):
                return tuple(parts)
            self.place += 1

    def value(self, path: _Path) -> None:
        before = self.skip(_SPACE)
        start = self.text[before : before + 1]
        if start == "[":
            self.array(path)
        elif start == "{":
            self.inline_table(path)
        elif self.skip(_VALUE) == before:
            raise _LostError

    def array(self, path: _Path) -> None:
        self.take("[")
        item = 0
        while self.text[self.skip(_BLANK) : self.place + 1] != "]":
            self.mention((*path, item), self.line)
            self.value((*path, item))
            item += 1
            if self.text[self.skip(_BLANK) : self.place + 1] != "]":
                self.take(",")
        self.take("]")

    def inline_table(self, path: _Path) -> None:
        self.take("{")
        while self.text[self.skip(_BLANK) : self.place + 1] != "}":
            self.entry(path)
            if self.text[self.skip(_BLANK) : self.place + 1] != "}":
                self.take(",")
        self.take("}")

    def say_once(self, path: _Path, line: int) -> None:
        if path in self.said or path in self.arrays:
            raise self.twice(path, line)
        self.said[path] = line

    def twice(self, path: _Path, line: int) -> InputError:
        first = self.said.get(path) or self.lines.get(path, line)
        return given_twice(self.where, _dotted(path), first, line)

    def mention(self, path: _Path, line: int) -> None:
        if len(path) > DEEPEST:
            raise too_deep(self.where, line)
        while path and path not in self.lines:
            self.lines[path] = line
            path = path[:-1]
        if len(self.lines) > MOST_NODES:
            raise too_many(self.where, line)

    def skip(self, pattern: re.Pattern[str]) -> int:
        found = pattern.match(self.text, self.place)
        self.place = found.end() if found else self.place
        return self.place

    def take(self, mark: str) -> None:
        self.skip(_SPACE)
        if not self.text.startswith(mark, self.place):
            raise _LostError
        self.place += len(mark)

    def end_of_line(self) -> None:
        self.skip(_SPACE)
        if self.text[self.place : self.place + 1] not in ("", "\r", "\n", "#"):
            raise _LostError


def _unquoted(part: str) -> str:
    if part[0] not in "\"'":
        return part
    if part[0] == "'" or "\\" not in part:
        return part[1:-1]
    try:
        return str(tomllib.loads(f"key = {part}")["key"])
    except ValueError as error:
        raise _LostError from error


def _dotted(path: _Path) -> str:
    name = ""
    for part in path:
        name = f"{name}[{part}]" if isinstance(part, int) else keyed(name, part)
    return name
