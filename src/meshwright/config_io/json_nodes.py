"""JSON with lines."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

from meshwright.config_io.nodes import (
    DEEPEST,
    MOST_NODES,
    Lines,
    Node,
    checked_integer,
    checked_text,
    given_twice,
    refused,
    too_deep,
    too_long,
    too_many,
)
from meshwright.errors import InputError

_SPACE = re.compile(r"[ \t\r\n]*+")
_TOKEN = re.compile(
    r'(?P<string>"[^"\\\x00-\x1f]*+(?:\\["\\/bfnrtu][^"\\\x00-\x1f]*+)*+")'
    r"|(?P<number>-?(?:0|[1-9][0-9]*+)(?P<part>\.[0-9]++)?(?P<power>[eE][+-]?[0-9]++)?)"
    r"|(?P<word>(?:true|false|null)\b)"
    r"|(?P<mark>[{}\[\],:])"
)
_WORDS = {"true": True, "false": False, "null": None}
_MISTAKES = (  # what people write that is not JSON, and what to do about it
    (re.compile(r"//|/\*|#"), "JSON has no comments", "remove the comment"),
    (re.compile(r"-?(?:NaN|Infinity|inf|nan)\b"), "JSON has no NaN and no Infinity", "write a finite number"),
    (re.compile(r"'"), "JSON has double quotes only", 'write "text"'),
    (re.compile(r"(?:True|False|None)\b"), "JSON has true, false and null", "write true, false or null"),
    (re.compile(r'"'), "a text is not closed on its line, or holds an escape JSON does not know", 'end it with "'),
)


class _Token(NamedTuple):
    kind: str  # string, whole, number, word, mark or end
    text: str
    line: int


def read_json(text: str, where: str) -> Node:
    """The document in a JSON text."""
    return _Reader(text, where).document()


class _Reader:
    def __init__(self, text: str, where: str) -> None:
        self.where, self.nodes = where, 0
        self.tokens = _tokens(text, where)

    def document(self) -> Node:
        token = next(self.tokens)
        if token.kind == "end":
            raise self.wrong(token.line, "it is empty")
        root = self.value(token, token.line, 0)
        self.expect(next(self.tokens), "", "the end")
        return root

    def value(self, token: _Token, line: int, depth: int) -> Node:
        self.nodes += 1
        if depth >= DEEPEST and token.kind == "mark":
            raise too_deep(self.where, token.line)
        if self.nodes > MOST_NODES:
            raise too_many(self.where, token.line)
        if token.text == "{":
            return Node(self.map(depth), line)
        if token.text == "[":
            return Node(self.list(depth), line)
        if token.kind == "word":
            return Node(_WORDS[token.text], line)
        if token.kind == "string":
            return Node(self.string(token), line)
        if token.kind == "whole":
            return Node(self.whole(token), line)
        if token.kind == "number":
            return Node(float(token.text), line)
        raise self.unexpected(token, "a value")

    def map(self, depth: int) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        token = next(self.tokens)
        while token.text != "}":
            if token.kind != "string":
                raise self.unexpected(token, "a key in double quotes" if entries else "a key in double quotes, or }")
            key = self.string(token)
            if key in entries:
                raise given_twice(self.where, key, entries[key].line, token.line)
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
        """The next token of a map or list: what follows a comma, or its end."""
        token = next(self.tokens)
        if token.text == end:
            return token
        self.expect(token, ",", f"a comma or {end}")
        following = next(self.tokens)
        if following.text == end:
            raise self.wrong(token.line, f"there is a comma before {end}", "remove the comma")
        return following

    def string(self, token: _Token) -> str:
        try:
            text = str(json.loads(token.text)) if "\\" in token.text else token.text[1:-1]
        except ValueError as error:
            raise self.wrong(token.line, "a text holds an escape that JSON does not know") from error
        return checked_text(text, self.where, token.line)

    def whole(self, token: _Token) -> int:
        try:
            return checked_integer(int(token.text), self.where, token.line)
        except ValueError as error:
            raise too_long(self.where, token.line) from error

    def expect(self, token: _Token, text: str, wanted: str) -> None:
        if token.text != text:
            raise self.unexpected(token, wanted)

    def unexpected(self, token: _Token, wanted: str) -> InputError:
        found = token.text[:60] if token.kind != "end" else "the end of the file"
        return self.wrong(token.line, f"{wanted} is expected, not {found}")

    def wrong(self, line: int, reason: str, fix: str = "") -> InputError:
        return _not_json(self.where, line, reason, fix)


def _not_json(where: str, line: int, reason: str, fix: str = "") -> InputError:
    return refused(where, line, f"is not JSON: {reason}", fix=(fix,) if fix else ())


def _tokens(text: str, where: str) -> Iterator[_Token]:
    lines, place = Lines(text), _end(_SPACE, text, 0)
    while place < len(text):
        line, found = lines.at(place), _TOKEN.match(text, place)
        if found is None:
            raise _mistake(text, place, where, line)
        kind = found.lastgroup or ""
        if kind in ("number", "part", "power"):
            kind = "whole" if found["part"] is None and found["power"] is None else "number"
        yield _Token(kind, found[0], line)
        place = _end(_SPACE, text, found.end())
    while True:
        yield _Token("end", "", lines.at(place))


def _end(pattern: re.Pattern[str], text: str, place: int) -> int:
    found = pattern.match(text, place)
    return found.end() if found else place


def _mistake(text: str, place: int, where: str, line: int) -> InputError:
    for pattern, reason, fix in _MISTAKES:
        if pattern.match(text, place):
            return _not_json(where, line, reason, fix)
    return _not_json(where, line, f"{text[place : place + 20].split(chr(10))[0]!r} is no value")
