"""Parsed values with line numbers, shared by all formats, and their flat and nested forms."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from meshwright.errors import InputError

MAX_NODES = 20_000  # values in one document, after alias expansion
MAX_DEPTH = 40  # nested maps and lists
MAX_KEY_CHARS = 10_000_000  # total length of all dotted keys: long keys over many values blow up a small file
MAX_INTEGER_BITS = 14_000  # Python refuses to print integers of more than 4,300 digits
_PLAIN_KEY = re.compile(r'[^.\[\]"\x00-\x1f]+')


class Leaf(msgspec.Struct, frozen=True):
    """A value in a document and the line of its key."""

    value: Any  # str, number, bool, None, a list of these, or {} for an empty map; TOML dates are ISO strings
    line: int  # from 1
    pyyaml: Any = UNSET  # the value PyYAML (YAML 1.1) reads, where it differs


class Node(msgspec.Struct):
    """A value during parsing; lists and maps contain nodes."""

    value: Any
    line: int
    pyyaml: Any = UNSET


class RepeatedKey(msgspec.Struct, frozen=True):
    """A key that a map has twice."""

    key: str
    first: int  # lines
    last: int


class Lines:
    """Map character offsets to lines."""

    def __init__(self, text: str) -> None:
        self._ends = [found.start() for found in re.finditer("\n", text)]

    def at(self, offset: int) -> int:
        """Return the 1-based line of a character offset."""
        return bisect_right(self._ends, offset - 1) + 1


def parse_error(where: str, line: int | None, reason: str, fix: Sequence[str] = ()) -> InputError:
    """Return the error for an invalid document, with a file:line that editors open."""
    return InputError(reason, field="file", value=where if line is None else f"{where}:{line}", fix=fix)


def duplicate_key_error(where: str, key: str, first: int, second: int) -> InputError:
    """Return the error for a duplicate key; one of the two values would be lost."""
    reason = f"the key {_short(key)} is set twice, on lines {first} and {second}"
    return parse_error(where, second, reason, fix=(f"remove one of lines {first} and {second}",))


def nesting_error(where: str, line: int) -> InputError:
    """Return the error for nesting deeper than any real config."""
    return parse_error(where, line, f"is nested too deeply: more than {MAX_DEPTH} levels of maps and lists")


def size_error(where: str, line: int) -> InputError:
    """Return the error for too many values; aliases can expand a small file to millions."""
    return parse_error(where, line, f"expands to more than {MAX_NODES:,} values")


def check_text(text: str, where: str, line: int | None = None) -> str:
    """Return the text, or raise if it contains a lone surrogate, which cannot be encoded as UTF-8."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise parse_error(where, line, f"contains a lone surrogate: {text[error.start]!a}") from error
    return text


def check_integer(number: int, where: str, line: int) -> int:
    """Return the integer, or raise if it is too long to print."""
    if number.bit_length() > MAX_INTEGER_BITS:
        raise integer_error(where, line)
    return number


def integer_error(where: str, line: int) -> InputError:
    """Return the error for an integer that is too long to print."""
    return parse_error(where, line, "contains an integer with too many digits")


def join_key(name: str, key: str) -> str:
    """Return the dotted key of a map entry; a key that contains a dot itself is quoted."""
    part = key if _PLAIN_KEY.fullmatch(key) else json.dumps(key, ensure_ascii=False)
    return f"{name}.{part}" if name else part


def to_plain(node: Node) -> Any:
    """Return a node as plain values."""
    if isinstance(node.value, dict):
        return {key: to_plain(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [to_plain(child) for child in node.value]
    return node.value


def flatten(root: Node, where: str) -> dict[str, Leaf]:
    """Return the leaves of a document by dotted key."""
    found: dict[str, Leaf] = {}
    key_budget = _KeyBudget(where)

    def walk(node: Node, name: str) -> None:
        value = node.value
        if isinstance(value, dict) and (value or not name):
            for key, child in value.items():
                walk(child, join_key(name, key))
        elif isinstance(value, list) and _holds_maps(value):
            for index, child in enumerate(value):
                walk(child, f"{name}[{index}]")
        else:
            key_budget.add(name, node.line)
            found[name] = Leaf(to_plain(node), node.line, _pyyaml_value(node) if _differs_in_pyyaml(node) else UNSET)

    walk(root, "")
    return found


def line_numbers(root: Node, where: str) -> dict[str, int]:
    """Return the line of every value, map and list by dotted key."""
    found: dict[str, int] = {}
    key_budget = _KeyBudget(where)

    def walk(node: Node, name: str) -> None:
        if name:
            key_budget.add(name, node.line)
            found[name] = node.line
        if isinstance(node.value, dict):
            for key, child in node.value.items():
                walk(child, join_key(name, key))
        elif isinstance(node.value, list):
            for index, child in enumerate(node.value):
                walk(child, f"{name}[{index}]")

    walk(root, "")
    return found


class _KeyBudget:
    """Limits the total length of dotted keys."""

    def __init__(self, where: str) -> None:
        self.where, self.characters = where, 0

    def add(self, name: str, line: int) -> None:
        self.characters += len(name)
        if self.characters > MAX_KEY_CHARS:
            raise parse_error(self.where, line, f"has dotted keys of more than {MAX_KEY_CHARS:,} characters in total")


def _holds_maps(nodes: list[Node]) -> bool:
    return any(
        isinstance(node.value, dict) or (isinstance(node.value, list) and _holds_maps(node.value)) for node in nodes
    )


def _differs_in_pyyaml(node: Node) -> bool:
    if isinstance(node.value, list):
        return any(_differs_in_pyyaml(child) for child in node.value)
    return node.pyyaml is not UNSET


def _pyyaml_value(node: Node) -> Any:
    if isinstance(node.value, list):
        return [_pyyaml_value(child) for child in node.value]
    return node.value if node.pyyaml is UNSET else node.pyyaml


def _short(key: str, longest: int = 60) -> str:
    return key if len(key) <= longest else f"{key[:longest]}…"
