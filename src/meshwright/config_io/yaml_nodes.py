"""YAML with lines: plain values only, and aliases and merges within a budget."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

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
from meshwright.config_io.scalars import otherwise, resolved, resolved_11, typed
from meshwright.errors import InputError, first_line

LARGEST = 250_000  # characters: ruamel's scanner takes seconds for a megabyte that is made to be slow
_TAG = "tag:yaml.org,2002:"
_SCALAR_TAGS = ("str", "int", "float", "bool", "null")


class _Anchored(NamedTuple):
    """What an alias stands for."""

    node: Node
    size: int  # nodes
    height: int  # maps and lists inside each other


def read_yaml(text: str, where: str) -> Node:
    """The document in a YAML text."""
    if len(text) > LARGEST:
        raise refused(where, None, f"has {len(text):,} characters, and at most {LARGEST:,} of YAML are read")
    return _Reader(text, where).document()


class _Reader:
    def __init__(self, text: str, where: str) -> None:
        self.where, self.lines = where, Lines(text)
        self.events = self._events(text)
        self.nodes = 0
        self.anchors: dict[str, _Anchored | None] = {}  # None while what they stand for is being read
        self.speaks_11 = False

    def _events(self, text: str) -> Iterator[Any]:
        from ruamel.yaml import YAML
        from ruamel.yaml.error import MarkedYAMLError
        from ruamel.yaml.reader import ReaderError

        try:
            yield from YAML(typ="safe", pure=True).parse(text)
        except MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = self.lines.at(mark.index) if mark else None
            raise self.wrong(line, " ".join(str(error.problem or error.context).split())) from error
        except ReaderError as error:
            raise self.wrong(self.lines.at(error.position), f"the character {error.character!a}") from error
        except Exception as error:  # what ruamel's scanner raises on odd escapes and tags has no common kind
            raise self.wrong(None, first_line(error)) from error

    def document(self) -> Node:
        next(self.events)  # the stream's start
        start = next(self.events)
        if _kind(start) == "StreamEnd":
            return Node(None, 1)
        self.speaks_11 = start.version == (1, 1)
        event = next(self.events)
        root = self.node(event, self.line(event), 0)
        next(self.events)  # the document's end
        after = next(self.events)
        if _kind(after) != "StreamEnd":
            raise self.wrong(self.line(after), "there is a second document", "keep one document per file")
        return root

    def node(self, event: Any, line: int, depth: int) -> Node:
        """What an event starts, said on a line that may be that of its key."""
        kind = _kind(event)
        if kind == "Alias":
            return self.alias(event, line, depth)
        self.spend(1, event)
        before = self.nodes
        if event.anchor is not None:
            self.anchors[event.anchor] = None
        if kind == "Scalar":
            node = self.scalar(event, line)
        else:
            self.check_collection(event, depth)
            read = self.map if kind == "MappingStart" else self.list
            node = Node(read(depth + 1), line)
        if event.anchor is not None:
            self.anchors[event.anchor] = _Anchored(node, self.nodes - before + 1, _height(node))
        return node

    def alias(self, event: Any, line: int, depth: int) -> Node:
        found = self.anchored(event)
        self.spend(found.size, event)
        if depth + found.height > DEEPEST:
            raise too_deep(self.where, self.line(event))
        return Node(found.node.value, line, found.node.pyyaml)

    def anchored(self, event: Any) -> _Anchored:
        name = event.anchor
        if name not in self.anchors:
            raise self.wrong(
                self.line(event), f"the alias *{name[:60]} stands for nothing", f"write &{name[:60]} first"
            )
        found = self.anchors[name]
        if found is None:
            raise self.wrong(self.line(event), f"the alias *{name[:60]} is inside what it stands for")
        return found

    def map(self, depth: int) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        merges_at = 0
        while _kind(event := next(self.events)) != "MappingEnd":
            line, key = self.line(event), self.key(event)
            if key == "<<" and _kind(event) == "Scalar" and event.implicit[0]:  # "<<" in quotes is a key
                if merges_at:
                    raise given_twice(self.where, key, merges_at, line)
                merges_at, merged = line, self.merged(line, depth)
                continue
            if key in entries:
                raise given_twice(self.where, key, entries[key].line, line)
            entries[key] = self.node(next(self.events), line, depth)
        return merged | entries if merged else entries

    def merged(self, line: int, depth: int) -> dict[str, Node]:
        """The entries that a merge key brings; of two maps with the same key the first one wins."""
        node = self.node(next(self.events), line, depth)
        sources = node.value if isinstance(node.value, list) else [node]
        entries: dict[str, Node] = {}
        for source in reversed(sources):
            if not isinstance(source.value, dict):
                raise self.wrong(line, "<< merges a map, or a list of maps", "<<: *name")
            entries |= source.value
        return entries

    def list(self, depth: int) -> list[Node]:
        items: list[Node] = []
        while _kind(event := next(self.events)) != "SequenceEnd":
            items.append(self.node(event, self.line(event), depth))
        return items

    def key(self, event: Any) -> str:
        """A key as it is written; PyYAML would turn 1 into a number and on into a truth."""
        kind = _kind(event)
        key = self.anchored(event).node.value if kind == "Alias" else event.value if kind == "Scalar" else None
        if not isinstance(key, str):
            raise self.wrong(self.line(event), "a key is a word, not a list, a map or a number behind an alias")
        if kind == "Scalar":
            value = self.scalar(event, self.line(event))
            if event.anchor is not None:
                self.anchors[event.anchor] = _Anchored(value, 1, 0)
        return key

    def scalar(self, event: Any, line: int) -> Node:
        text, tag = event.value, event.tag
        checked_text(text, self.where, self.line(event))
        try:
            if tag in (None, "!"):  # an exclamation mark alone changes nothing in the readers people use
                return self.word(text, line) if event.implicit[0] else Node(text, line)
            name = tag.removeprefix(_TAG)
            if name not in _SCALAR_TAGS or name == tag:
                raise self.builds(tag, event)
            return self.numbered(Node(typed(name, text), line))
        except (ValueError, OverflowError) as error:
            if tag in (None, "!"):
                raise too_long(self.where, self.line(event)) from error
            raise self.wrong(self.line(event), str(error)) from error

    def word(self, text: str, line: int) -> Node:
        if self.speaks_11:
            return self.numbered(Node(resolved_11(text), line))
        value = resolved(text)
        return self.numbered(Node(value, line, otherwise(text, value)))

    def numbered(self, node: Node) -> Node:
        if isinstance(node.value, int):
            checked_integer(node.value, self.where, node.line)
        return node

    def check_collection(self, event: Any, depth: int) -> None:
        if event.tag not in (None, "!", f"{_TAG}map", f"{_TAG}seq"):
            raise self.builds(event.tag, event)
        if depth >= DEEPEST:
            raise too_deep(self.where, self.line(event))

    def spend(self, nodes: int, event: Any) -> None:
        self.nodes += nodes
        if self.nodes > MOST_NODES:
            raise too_many(self.where, self.line(event))

    def line(self, event: Any) -> int:
        return self.lines.at(event.start_mark.index)

    def builds(self, tag: str, event: Any) -> InputError:
        fix = f"remove {tag.replace(_TAG, '!!')[:60]}"
        return self.wrong(self.line(event), "tags that build objects are not read", fix)

    def wrong(self, line: int | None, reason: str, fix: str = "") -> InputError:
        return refused(self.where, line, f"is not plain YAML: {reason}", fix=(fix,) if fix else ())


def _kind(event: Any) -> str:
    return type(event).__name__.removesuffix("Event")


def _height(node: Node) -> int:
    if isinstance(node.value, dict):
        return 1 + max(map(_height, node.value.values()), default=0)
    if isinstance(node.value, list):
        return 1 + max(map(_height, node.value), default=0)
    return 0
