"""Parse YAML, TOML and JSON configs into plain values with line numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Literal, get_args

from meshwright.config_io.edit import edit
from meshwright.config_io.nodes import (
    Leaf,
    Node,
    RepeatedKey,
    check_text,
    flatten,
    join_key,
    line_numbers,
    parse_error,
    to_plain,
)
from meshwright.config_io.text import read_text
from meshwright.errors import unknown

__all__ = ["FORMATS", "Format", "Leaf", "RepeatedKey", "edit", "join_key", "parse_leaves", "parse_tree", "read_text"]

Format = Literal["yaml", "toml", "json"]
FORMATS: tuple[Format, ...] = get_args(Format)
KEPT = 32  # parsed documents
_TYPE_NAMES = {list: "a list", str: "text", bool: "a boolean", type(None): "nothing"}


def parse_leaves(text: str, format: str, where: str, repeated: list[RepeatedKey] | None = None) -> dict[str, Leaf]:
    """Return the leaves of a document by dotted key, in file order, each with its line.

    With a list, a YAML file may set a key twice, as PyYAML's: the key is added to the list, and the last value is used.
    """
    root, found = _parse(text, format, where, format == "yaml" and repeated is not None)
    if repeated is not None:
        repeated += found
    return flatten(root, where)


def parse_tree(text: str, format: str, where: str) -> tuple[dict[str, Any], dict[str, int]]:
    """Return a document as nested plain values, plus the line of every value, map and list by dotted key."""
    root, _ = _parse(text, format, where)
    return to_plain(root), line_numbers(root, where)


@lru_cache(maxsize=KEPT)
def _parse(text: str, format: str, where: str, repeats: bool = False) -> tuple[Node, tuple[RepeatedKey, ...]]:
    """Return the root of a document, and the keys that are set twice where a file may do that.

    Trying fixes parses the same text many times. Nodes are not changed after parsing.
    """
    repeated: list[RepeatedKey] = []
    parse = _parser_for(format, repeated if repeats else None)
    text = text.removeprefix("\ufeff")
    check_text(text, where)
    root = parse(text, where)
    if not isinstance(root.value, dict):
        type_name = _TYPE_NAMES.get(type(root.value), "a number")
        raise parse_error(
            where, root.line, f"must be a table of keys at the top level, not {type_name}", fix=("key: value",)
        )
    return root, tuple(repeated)


def _parser_for(format: str, repeated: list[RepeatedKey] | None) -> Callable[[str, str], Node]:
    """Return the parser of a format. Imported on first use: planning without a file does not pay for ruamel."""
    if format == "yaml":
        from meshwright.config_io.yaml_nodes import parse_yaml

        return partial(parse_yaml, repeated=repeated)
    if format == "toml":
        from meshwright.config_io.toml_nodes import parse_toml

        return parse_toml
    if format == "json":
        from meshwright.config_io.json_nodes import parse_json

        return parse_json
    raise unknown("format", format, FORMATS)
