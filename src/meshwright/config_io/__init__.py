"""Documents that people write: YAML, TOML and JSON as plain values, each with the line that says it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

from meshwright.config_io.nodes import Leaf, Node, checked_text, flat, keyed, lines_of, plain, refused
from meshwright.config_io.text import read_text
from meshwright.errors import unknown

__all__ = ["FORMATS", "Format", "Leaf", "keyed", "leaves", "read_text", "tree"]

Format = Literal["yaml", "toml", "json"]
FORMATS: tuple[Format, ...] = get_args(Format)
_KINDS = {list: "a list", str: "text", bool: "true or false", type(None): "nothing"}


def leaves(text: str, format: str, where: str) -> dict[str, Leaf]:
    """Everything a document says, by dotted key and in its order, with its line."""
    return flat(_read(text, format, where), where)


def tree(text: str, format: str, where: str) -> tuple[dict[str, Any], dict[str, int]]:
    """A document as nested plain values, and the line of every value, map and list by dotted key."""
    root = _read(text, format, where)
    return plain(root), lines_of(root, where)


def _read(text: str, format: str, where: str) -> Node:
    read = _reader(format)
    text = text.removeprefix("\ufeff")
    checked_text(text, where)
    root = read(text, where)
    if not isinstance(root.value, dict):
        kind = _KINDS.get(type(root.value), "a number")
        raise refused(where, root.line, f"is no table of keys at its top, but {kind}", fix=("key: value",))
    return root


def _reader(format: str) -> Callable[[str, str], Node]:
    """The reader of a format; each is imported when it is first needed, so that asking without a file is quick."""
    if format == "yaml":
        from meshwright.config_io.yaml_nodes import read_yaml

        return read_yaml
    if format == "toml":
        from meshwright.config_io.toml_nodes import read_toml

        return read_toml
    if format == "json":
        from meshwright.config_io.json_nodes import read_json

        return read_json
    raise unknown("format", format, FORMATS)
