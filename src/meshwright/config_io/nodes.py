"""Values with their lines: what every format is read into, and what is made of it."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import msgspec

from meshwright.errors import InputError

MOST_NODES = 20_000  # values in one document, after its aliases are expanded
DEEPEST = 40  # maps and lists inside each other
MOST_NAMED = 10_000_000  # characters of all dotted keys together: long keys over many values blow a small file up
LONGEST_INTEGER = 14_000  # bits; Python refuses to spell integers of more than 4,300 digits
_PLAIN_KEY = re.compile(r'[^.\[\]"\x00-\x1f]+')


class Leaf(msgspec.Struct, frozen=True):
    """A value that a document says, and the line of its key."""

    value: Any  # text, number, truth, None, a list of these, or {} for a map without keys; TOML's dates are text
    line: int  # from 1
    pyyaml: Any = msgspec.UNSET  # what PyYAML, a reader of YAML 1.1, makes of it where that is something else


class Node(msgspec.Struct):
    """A value while a document is read: lists and maps hold nodes."""

    value: Any
    line: int
    pyyaml: Any = msgspec.UNSET


class Lines:
    """The line of every place in a text."""

    def __init__(self, text: str) -> None:
        self._ends = [found.start() for found in re.finditer("\n", text)]

    def at(self, place: int) -> int:
        """The line, from 1, of a character."""
        return bisect_right(self._ends, place - 1) + 1


def refused(where: str, line: int | None, reason: str, fix: Sequence[str] = ()) -> InputError:
    """The error for a document that is not read, at the place as editors open it."""
    return InputError(reason, field="file", value=where if line is None else f"{where}:{line}", fix=fix)


def given_twice(where: str, key: str, first: int, second: int) -> InputError:
    """The error for a key with two values, of which one would be lost."""
    reason = f"the key {_short(key)} is given twice, on lines {first} and {second}"
    return refused(where, second, reason, fix=(f"remove one of lines {first} and {second}",))


def too_deep(where: str, line: int) -> InputError:
    """The error for maps and lists inside each other beyond what any config has."""
    return refused(where, line, f"has deep nesting: more than {DEEPEST} maps and lists inside each other")


def too_many(where: str, line: int) -> InputError:
    """The error for a document of too many values, as small files with aliases can be."""
    return refused(where, line, f"expands to more than {MOST_NODES:,} values")


def checked_text(text: str, where: str, line: int | None = None) -> str:
    """Text that can be written again: half characters (lone surrogates), which escapes can spell, cannot."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise refused(where, line, f"holds half a character: {text[error.start]!a}") from error
    return text


def checked_integer(number: int, where: str, line: int) -> int:
    """A whole number that can be written again."""
    if number.bit_length() > LONGEST_INTEGER:
        raise too_long(where, line)
    return number


def too_long(where: str, line: int) -> InputError:
    """The error for a whole number that cannot be spelled."""
    return refused(where, line, "holds a whole number of too many digits")


def keyed(name: str, key: str) -> str:
    """The dotted key of an entry in a map; a key that holds a dot itself is quoted."""
    spelled = key if _PLAIN_KEY.fullmatch(key) else json.dumps(key, ensure_ascii=False)
    return f"{name}.{spelled}" if name else spelled


def plain(node: Node) -> Any:
    """A node as plain values."""
    if isinstance(node.value, dict):
        return {key: plain(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [plain(child) for child in node.value]
    return node.value


def flat(root: Node, where: str) -> dict[str, Leaf]:
    """The leaves of a document by dotted key."""
    found: dict[str, Leaf] = {}
    named = _Named(where)

    def walk(node: Node, name: str) -> None:
        value = node.value
        if isinstance(value, dict) and (value or not name):
            for key, child in value.items():
                walk(child, keyed(name, key))
        elif isinstance(value, list) and _holds_maps(value):
            for index, child in enumerate(value):
                walk(child, f"{name}[{index}]")
        else:
            named.add(name, node.line)
            found[name] = Leaf(plain(node), node.line, _as_pyyaml(node) if _differs(node) else msgspec.UNSET)

    walk(root, "")
    return found


def lines_of(root: Node, where: str) -> dict[str, int]:
    """The line of every value, map and list by dotted key."""
    found: dict[str, int] = {}
    named = _Named(where)

    def walk(node: Node, name: str) -> None:
        if name:
            named.add(name, node.line)
            found[name] = node.line
        if isinstance(node.value, dict):
            for key, child in node.value.items():
                walk(child, keyed(name, key))
        elif isinstance(node.value, list):
            for index, child in enumerate(node.value):
                walk(child, f"{name}[{index}]")

    walk(root, "")
    return found


class _Named:
    """Counts the characters of dotted keys."""

    def __init__(self, where: str) -> None:
        self.where, self.characters = where, 0

    def add(self, name: str, line: int) -> None:
        self.characters += len(name)
        if self.characters > MOST_NAMED:
            raise refused(self.where, line, f"has keys of more than {MOST_NAMED:,} characters once they are dotted")


def _holds_maps(nodes: list[Node]) -> bool:
    return any(
        isinstance(node.value, dict) or (isinstance(node.value, list) and _holds_maps(node.value)) for node in nodes
    )


def _differs(node: Node) -> bool:
    if isinstance(node.value, list):
        return any(_differs(child) for child in node.value)
    return node.pyyaml is not msgspec.UNSET


def _as_pyyaml(node: Node) -> Any:
    if isinstance(node.value, list):
        return [_as_pyyaml(child) for child in node.value]
    return node.value if node.pyyaml is msgspec.UNSET else node.pyyaml


def _short(key: str, longest: int = 60) -> str:
    return key if len(key) <= longest else f"{key[:longest]}…"
