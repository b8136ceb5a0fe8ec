"""JSON parser that keeps line numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

from meshwright.config_io.nodes import (
    MAX_DEPTH,
    MAX_NODES,
    Lines,
    Node,
    check_integer,
    check_text,
    duplicate_key_error,
    integer_error,
    nesting_error,
    parse_error,
    size_error,
)
from meshwright.errors import InputError

_SPACE = re.compile(r"[ \t\r\n]*+")
_TOKEN = re.compile(
    r'(?P<string>"[^"\\\x00-\x1f]*+(?:\\["\\/bfnrtu][^"\\\x00-\x1f]*+)*+")'
    r"|(?P<number>-?(?:0|[1-9][0-9]*+)(?P<part>\.[0-9]++)?(?P<power>[eE][+-]?[0-9]++)?)"
    r"|(?P<constant>(?:true|false|null)\b)"
    r"|(?P<mark>[{}\[\],:])"
)
_CONSTANTS = {"true": True, "false": False, "null": None}
_MISTAKES = (  # common non-JSON syntax, with the reason and the fix
    (re.compile(r"//|/\*|#"), "JSON has no comments", "remove the comment"),
    (re.compile(r"-?(?:NaN|Infinity|inf|nan)\b"), "JSON has no NaN or Infinity", "write a finite number"),
    (re.compile(r"'"), "JSON allows double quotes only", 'write "text"'),
    (re.compile(r"(?:True|False|None)\b"), "JSON constants are true, false and null", "write true, false or null"),
    (re.compile(r'"'), "the string is not closed on its line, or contains an invalid escape", 'close it with "'),
)


class _Token(NamedTuple):
    type: str  # string, integer, number, constant, mark or end
    text: str
    line: int


def parse_json(text: str, where: str) -> Node:
    """Parse a JSON document."""
    return _Parser(text, where).document()


class _Parser:
    def __init__(self, text: str, where: str) -> None:
        self.where, self.nodes = where, 0
        self.tokens = _tokens(text, where)

    def document(self) -> Node:
        token = next(self.tokens)
        if token.type == "end":
            raise self.error(token.line, "the file is empty")
        root = self.value(token, token.line, 0)
        self.expect(next(self.tokens), "", "the end of the file")
        return root

    def value(self, token: _Token, line: int, depth: int) -> Node:
        self.nodes += 1
        if depth >= MAX_DEPTH and token.type == "mark":
            raise nesting_error(self.where, token.line)
        if self.nodes > MAX_NODES:
            raise size_error(self.where, token.line)
        if token.text == "{":
            return Node(self.map(depth), line)
        if token.text == "[":
            return Node(self.list(depth), line)
        if token.type == "constant":
            return Node(_CONSTANTS[token.text], line)
        if token.type == "string":
            return Node(self.string(token), line)
        if token.type == "integer":
            return Node(self.integer(token), line)
        if token.type == "number":
            return Node(float(token.text), line)
        raise self.unexpected(token, "a value")

    def map(self, depth: int) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        token = next(self.tokens)
        while token.text != "}":
            if token.type != "string":
                raise self.unexpected(token, "a key in double quotes" if entries else "a key in double quotes, or }")
            key = self.string(token)
            if key in entries:
                raise duplicate_key_error(self.where, key, entries[key].line, token.line)
            self.expect(next(self.tokens), ":", f"a colon after {token.text[:60]}")
            entries[key] = self.value(next(self.tokens), token.line, depth + 1)
            token = self.after_comma("}")
        return entries

    def list(self, depth: int) -> list[Node]:
        items: list[Node] = []
        token = next(self.tokens)
        while token.text != "]":
            items.append(self.value(token, token.line, depth + 1))
            token = self.after_comma("]")
        return items

    def after_comma(self, end: str) -> _Token:
        """Return the next token of a map or list: the one after a comma, or the closing bracket."""
        token = next(self.tokens)
        if token.text == end:
            return token
        self.expect(token, ",", f"a comma or {end}")
        following = next(self.tokens)
        if following.text == end:
            raise self.error(token.line, f"trailing comma before {end}", "remove the comma")
        return following

    def string(self, token: _Token) -> str:
        try:
            text = str(json.loads(token.text)) if "\\" in token.text else token.text[1:-1]
        except ValueError as error:
            raise self.error(token.line, "the string contains an invalid escape") from error
        return check_text(text, self.where, token.line)

    def integer(self, token: _Token) -> int:
        try:
            return check_integer(int(token.text), self.where, token.line)
        except ValueError as error:
            raise integer_error(self.where, token.line) from error

    def expect(self, token: _Token, text: str, wanted: str) -> None:
        if token.text != text:
            raise self.unexpected(token, wanted)

    def unexpected(self, token: _Token, wanted: str) -> InputError:
        found = token.text[:60] if token.type != "end" else "the end of the file"
        return self.error(token.line, f"expected {wanted}, found {found}")

    def error(self, line: int, reason: str, fix: str = "") -> InputError:
        return _not_json(self.where, line, reason, fix)


def _not_json(where: str, line: int, reason: str, fix: str = "") -> InputError:
    return parse_error(where, line, f"is not JSON: {reason}", fix=(fix,) if fix else ())


def _tokens(text: str, where: str) -> Iterator[_Token]:
    lines, offset = Lines(text), _end(_SPACE, text, 0)
    while offset < len(text):
        line, found = lines.at(offset), _TOKEN.match(text, offset)
        if found is None:
            raise _syntax_error(text, offset, where, line)
        type_name = found.lastgroup or ""
        if type_name in ("number", "part", "power"):
            type_name = "integer" if found["part"] is None and found["power"] is None else "number"
        yield _Token(type_name, found[0], line)
        offset = _end(_SPACE, text, found.end())
    while True:
        yield _Token("end", "", lines.at(offset))


def _end(pattern: re.Pattern[str], text: str, offset: int) -> int:
    found = pattern.match(text, offset)
    return found.end() if found else offset


def _syntax_error(text: str, offset: int, where: str, line: int) -> InputError:
    for pattern, reason, fix in _MISTAKES:
        if pattern.match(text, offset):
            return _not_json(where, line, reason, fix)
    return _not_json(where, line, f"{text[offset : offset + 20].split(chr(10))[0]!r} is not a value")
