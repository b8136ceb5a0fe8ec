"""YAML parser with line numbers: plain values only, and a limit on alias and merge expansion."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from meshwright.config_io.nodes import (
    MAX_DEPTH,
    MAX_NODES,
    Lines,
    Node,
    RepeatedKey,
    check_integer,
    check_text,
    duplicate_key_error,
    integer_error,
    nesting_error,
    parse_error,
    size_error,
)
from meshwright.config_io.scalars import apply_tag, pyyaml_value, resolve, resolve_yaml11
from meshwright.errors import InputError, first_line

MAX_CHARS = 250_000  # ruamel's scanner takes seconds for a crafted megabyte
_TAG = "tag:yaml.org,2002:"
_SCALAR_TAGS = ("str", "int", "float", "bool", "null")


class _Anchor(NamedTuple):
    """The node an alias refers to."""

    node: Node
    size: int  # nodes
    height: int  # levels of nested maps and lists


def parse_yaml(text: str, where: str, repeated: list[RepeatedKey] | None = None) -> Node:
    """Parse a YAML document. With a list, keys that are set twice are added to it, and the last value is used."""
    if len(text) > MAX_CHARS:
        raise parse_error(where, None, f"has {len(text):,} characters; YAML files may have at most {MAX_CHARS:,}")
    return _Parser(text, where, repeated).document()


class _Parser:
    def __init__(self, text: str, where: str, repeated: list[RepeatedKey] | None) -> None:
        self.where, self.lines, self.repeated = where, Lines(text), repeated
        self.events = self._events(text)
        self.nodes = 0
        self.anchors: dict[str, _Anchor | None] = {}  # None while the anchored node is being parsed
        self.yaml_11 = False

    def _events(self, text: str) -> Iterator[Any]:
        from ruamel.yaml import YAML
        from ruamel.yaml.error import MarkedYAMLError
        from ruamel.yaml.reader import ReaderError

        try:
            yield from YAML(typ="safe", pure=True).parse(text)
        except MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = self.lines.at(mark.index) if mark else None
            raise self.error(line, " ".join(str(error.problem or error.context).split())) from error
        except ReaderError as error:
            raise self.error(self.lines.at(error.position), f"the character {error.character!a}") from error
        except Exception as error:  # ruamel's scanner raises unrelated types on odd escapes and tags
            raise self.error(None, first_line(error)) from error

    def document(self) -> Node:
        next(self.events)  # stream start
        start = next(self.events)
        if _event_type(start) == "StreamEnd":
            return Node(None, 1)
        self.yaml_11 = start.version == (1, 1)
        event = next(self.events)
        root = self.node(event, self.line(event), 0)
        next(self.events)  # document end
        after = next(self.events)
        if _event_type(after) != "StreamEnd":
            raise self.error(self.line(after), "it contains a second document", "keep one document per file")
        return root

    def node(self, event: Any, line: int, depth: int) -> Node:
        """Return the node that starts with an event; `line` may be the line of its key."""
        type_name = _event_type(event)
        if type_name == "Alias":
            return self.alias(event, line, depth)
        self.count_nodes(1, event)
        before = self.nodes
        if event.anchor is not None:
            self.anchors[event.anchor] = None
        if type_name == "Scalar":
            node = self.scalar(event, line)
        else:
            self.check_collection(event, depth)
            read = self.map if type_name == "MappingStart" else self.list
            node = Node(read(depth + 1), line)
        if event.anchor is not None:
            self.anchors[event.anchor] = _Anchor(node, self.nodes - before + 1, _height(node))
        return node

    def alias(self, event: Any, line: int, depth: int) -> Node:
        found = self.anchor(event)
        self.count_nodes(found.size, event)
        if depth + found.height > MAX_DEPTH:
            raise nesting_error(self.where, self.line(event))
        return Node(found.node.value, line, found.node.pyyaml)

    def anchor(self, event: Any) -> _Anchor:
        name = event.anchor
        if name not in self.anchors:
            raise self.error(self.line(event), f"the alias *{name[:60]} is not defined", f"define &{name[:60]} first")
        found = self.anchors[name]
        if found is None:
            raise self.error(self.line(event), f"the alias *{name[:60]} refers to a node that contains it")
        return found

    def map(self, depth: int) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        merges_at = 0
        while _event_type(event := next(self.events)) != "MappingEnd":
            line, key = self.line(event), self.key(event)
            if key == "<<" and _event_type(event) == "Scalar" and event.implicit[0]:  # a quoted "<<" is an ordinary key
                if merges_at:
                    raise duplicate_key_error(self.where, key, merges_at, line)
                merges_at, merged = line, self.merged(line, depth)
                continue
            if key in entries:
                if self.repeated is None:
                    raise duplicate_key_error(self.where, key, entries[key].line, line)
                self.repeated.append(RepeatedKey(key, entries[key].line, line))
            entries[key] = self.node(next(self.events), line, depth)
        return merged | entries if merged else entries

    def merged(self, line: int, depth: int) -> dict[str, Node]:
        """Return the entries of a merge key; the first of several maps wins."""
        node = self.node(next(self.events), line, depth)
        sources = node.value if isinstance(node.value, list) else [node]
        entries: dict[str, Node] = {}
        for source in reversed(sources):
            if not isinstance(source.value, dict):
                raise self.error(line, "<< merges a map, or a list of maps", "<<: *name")
            entries |= source.value
        return entries

    def list(self, depth: int) -> list[Node]:
        items: list[Node] = []
        while _event_type(event := next(self.events)) != "SequenceEnd":
            items.append(self.node(event, self.line(event), depth))
        return items

    def key(self, event: Any) -> str:
        """Return a key as written; PyYAML would turn 1 into an int and on into a bool."""
        type_name = _event_type(event)
        key = self.anchor(event).node.value if type_name == "Alias" else event.value if type_name == "Scalar" else None
        if not isinstance(key, str):
            raise self.error(self.line(event), "a key must be a string, not a list, a map or an alias of a number")
        if type_name == "Scalar":
            value = self.scalar(event, self.line(event))
            if event.anchor is not None:
                self.anchors[event.anchor] = _Anchor(value, 1, 0)
        return key

    def scalar(self, event: Any, line: int) -> Node:
        text, tag = event.value, event.tag
        check_text(text, self.where, self.line(event))
        try:
            if tag in (None, "!"):  # a bare ! has no effect in common parsers
                return self.plain_scalar(text, line) if event.implicit[0] else Node(text, line)
            name = tag.removeprefix(_TAG)
            if name not in _SCALAR_TAGS or name == tag:
                raise self.tag_error(tag, event)
            return self.check_number(Node(apply_tag(name, text), line))
        except (ValueError, OverflowError) as error:
            if tag in (None, "!"):
                raise integer_error(self.where, self.line(event)) from error
            raise self.error(self.line(event), str(error)) from error

    def plain_scalar(self, text: str, line: int) -> Node:
        if self.yaml_11:
            return self.check_number(Node(resolve_yaml11(text), line))
        value = resolve(text)
        return self.check_number(Node(value, line, pyyaml_value(text, value)))

    def check_number(self, node: Node) -> Node:
        if isinstance(node.value, int):
            check_integer(node.value, self.where, node.line)
        return node

    def check_collection(self, event: Any, depth: int) -> None:
        if event.tag not in (None, "!", f"{_TAG}map", f"{_TAG}seq"):
            raise self.tag_error(event.tag, event)
        if depth >= MAX_DEPTH:
            raise nesting_error(self.where, self.line(event))

    def count_nodes(self, nodes: int, event: Any) -> None:
        self.nodes += nodes
        if self.nodes > MAX_NODES:
            raise size_error(self.where, self.line(event))

    def line(self, event: Any) -> int:
        return self.lines.at(event.start_mark.index)

    def tag_error(self, tag: str, event: Any) -> InputError:
        fix = f"remove {tag.replace(_TAG, '!!')[:60]}"
        return self.error(self.line(event), "tags that construct objects are not allowed", fix)

    def error(self, line: int | None, reason: str, fix: str = "") -> InputError:
        return parse_error(self.where, line, f"is not plain YAML: {reason}", fix=(fix,) if fix else ())


def _event_type(event: Any) -> str:
    return type(event).__name__.removesuffix("Event")


def _height(node: Node) -> int:
    if isinstance(node.value, dict):
        return 1 + max(map(_height, node.value.values()), default=0)
    if isinstance(node.value, list):
        return 1 + max(map(_height, node.value), default=0)
    return 0
