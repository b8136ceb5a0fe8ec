"""TOML parser with line numbers: values from tomllib, lines from a scanner of our own."""

from __future__ import annotations

import re
import tomllib
from datetime import date, datetime, time
from typing import Any

from meshwright.config_io.nodes import (
    MAX_DEPTH,
    MAX_NODES,
    Lines,
    Node,
    check_integer,
    duplicate_key_error,
    join_key,
    nesting_error,
    parse_error,
    size_error,
)
from meshwright.errors import InputError, first_line

_Path = tuple[str | int, ...]  # keys, and the indices of array items

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
_POSITION = re.compile(r" \(at line (\d+), column \d+\)$")


class _NotTomlError(Exception):
    """The text is not TOML; tomllib reports why."""


def parse_toml(text: str, where: str) -> Node:
    """Parse a TOML document."""
    scanner = _Scanner(text, where)
    try:
        scanner.document()
    except _NotTomlError as error:
        _values(text, where)
        raise parse_error(where, scanner.line, "is not valid TOML") from error
    return _node(_values(text, where), (), scanner.lines, where, 1)


def _values(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        reason = first_line(error)
        offset = _POSITION.search(reason)
        line = int(offset[1]) if offset else None
        raise parse_error(where, line, f"is not valid TOML: {_POSITION.sub('', reason)}") from error


def _node(value: Any, path: _Path, lines: dict[_Path, int], where: str, above: int) -> Node:
    line = lines.get(path, above)
    if isinstance(value, dict):
        return Node({key: _node(child, (*path, key), lines, where, line) for key, child in value.items()}, line)
    if isinstance(value, list):
        return Node([_node(child, (*path, offset), lines, where, line) for offset, child in enumerate(value)], line)
    if isinstance(value, date | datetime | time):
        return Node(value.isoformat(), line)
    if isinstance(value, int):
        check_integer(value, where, line)
    return Node(value, line)


class _Scanner:
    """Scans a TOML text once for lines and limits, before tomllib, which is quadratic in some nestings."""

    def __init__(self, text: str, where: str) -> None:
        self.text, self.where, self.offset = text, where, 0
        self.at = Lines(text).at
        self.lines: dict[_Path, int] = {}
        self.defined: dict[_Path, int] = {}  # lines of values and [tables], which may be set only once
        self.arrays: dict[_Path, int] = {}  # items of [[arrays of tables]] so far

    @property
    def line(self) -> int:
        return self.at(self.offset)

    def document(self) -> None:
        table: _Path = ()
        while self.skip(_BLANK) < len(self.text):
            if self.text.startswith("[[", self.offset):
                table = self.array_header()
            elif self.text[self.offset] == "[":
                table = self.header()
            else:
                self.entry(table)
            self.end_of_line()

    def header(self) -> _Path:
        line = self.line
        self.take("[")
        path = self.resolved(self.key())
        self.take("]")
        self.define(path, line)
        self.record_line(path, line)
        return path

    def array_header(self) -> _Path:
        line = self.line
        self.take("[[")
        path = self.resolved(self.key(), of_array=True)
        self.take("]]")
        if path in self.defined:
            raise self.duplicate_error(path, line)
        offset = self.arrays.get(path, 0)
        self.arrays[path] = offset + 1
        self.defined[(*path, offset)] = line
        self.record_line((*path, offset), line)
        return (*path, offset)

    def resolved(self, key: tuple[str, ...], of_array: bool = False) -> _Path:
        """Return the path of a header; inside an array of tables it refers to the last item."""
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
        self.define(path, line)
        self.record_line(path, line)
        self.value(path)

    def key(self) -> tuple[str, ...]:
        parts: list[str] = []
        while True:
            found = _KEY.match(self.text, self.offset)
            if found is None:
                raise _NotTomlError
            self.offset = found.end()
            parts.append(_unquoted(found[1]))
            if len(parts) > MAX_DEPTH:
                raise nesting_error(self.where, self.line)
            if not self.text.startswith(".", self.offset):
                return tuple(parts)
            self.offset += 1

    def value(self, path: _Path) -> None:
        before = self.skip(_SPACE)
        start = self.text[before : before + 1]
        if start == "[":
            self.array(path)
        elif start == "{":
            self.inline_table(path)
        elif self.skip(_VALUE) == before:
            raise _NotTomlError

    def array(self, path: _Path) -> None:
        self.take("[")
        item = 0
        while self.text[self.skip(_BLANK) : self.offset + 1] != "]":
            self.record_line((*path, item), self.line)
            self.value((*path, item))
            item += 1
            if self.text[self.skip(_BLANK) : self.offset + 1] != "]":
                self.take(",")
        self.take("]")

    def inline_table(self, path: _Path) -> None:
        self.take("{")
        while self.text[self.skip(_BLANK) : self.offset + 1] != "}":
            self.entry(path)
            if self.text[self.skip(_BLANK) : self.offset + 1] != "}":
                self.take(",")
        self.take("}")

    def define(self, path: _Path, line: int) -> None:
        if path in self.defined or path in self.arrays:
            raise self.duplicate_error(path, line)
        self.defined[path] = line

    def duplicate_error(self, path: _Path, line: int) -> InputError:
        first = self.defined.get(path) or self.lines.get(path, line)
        return duplicate_key_error(self.where, _dotted(path), first, line)

    def record_line(self, path: _Path, line: int) -> None:
        if len(path) > MAX_DEPTH:
            raise nesting_error(self.where, line)
        while path and path not in self.lines:
            self.lines[path] = line
            path = path[:-1]
        if len(self.lines) > MAX_NODES:
            raise size_error(self.where, line)

    def skip(self, pattern: re.Pattern[str]) -> int:
        found = pattern.match(self.text, self.offset)
        self.offset = found.end() if found else self.offset
        return self.offset

    def take(self, mark: str) -> None:
        self.skip(_SPACE)
        if not self.text.startswith(mark, self.offset):
            raise _NotTomlError
        self.offset += len(mark)

    def end_of_line(self) -> None:
        self.skip(_SPACE)
        if self.text[self.offset : self.offset + 1] not in ("", "\r", "\n", "#"):
            raise _NotTomlError


def _unquoted(part: str) -> str:
    if part[0] not in "\"'":
        return part
    if part[0] == "'" or "\\" not in part:
        return part[1:-1]
    try:
        return str(tomllib.loads(f"key = {part}")["key"])
    except ValueError as error:
        raise _NotTomlError from error


def _dotted(path: _Path) -> str:
    name = ""
    for part in path:
        name = f"{name}[{part}]" if isinstance(part, int) else join_key(name, part)
    return name
