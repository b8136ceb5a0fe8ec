"""Change settings in the text of a YAML, TOML or JSON file: comments, order and all other settings stay."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from typing import Any

from msgspec import UNSET

from meshwright.errors import unknown

_PART = re.compile(r'"(?:[^"\\]|\\.)*"|\[\d+\]|[^.\[\]]+')
_DEEPER_LISTS = re.compile(r"(?m)^( *)[^\s#-][^\n]*:[ \t]*\n\1 +- ")


def edit(text: str, format: str, changes: Mapping[str, Any]) -> str:
    """Return the text with these values by dotted key; UNSET removes a key, and a table that is then empty."""
    if not changes:
        return text
    if format == "toml":
        return _edit_toml(text, changes)
    if format == "yaml":
        return _edit_yaml(text, changes)
    if format == "json":
        return _edit_json(text, changes)
    raise unknown("format", format, ("yaml", "toml", "json"))


def _edit_toml(text: str, changes: Mapping[str, Any]) -> str:
    import tomlkit

    document = tomlkit.parse(text)
    _apply(document, changes, tomlkit.table)
    return tomlkit.dumps(document)


def _edit_yaml(text: str, changes: Mapping[str, Any]) -> str:
    from ruamel.yaml import YAML

    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 4096
    if _DEEPER_LISTS.search(text):
        yaml.indent(mapping=2, sequence=4, offset=2)
    document = yaml.load(text)
    values = {key: yaml.load(_float(value)) if isinstance(value, float) else value for key, value in changes.items()}
    _apply(document, values, dict)
    out = io.StringIO()
    yaml.dump(document, out)
    return out.getvalue()


def _float(value: float) -> str:
    """Return a number that YAML 1.1 also reads as one: 1e-05 would be text there."""
    text = repr(value)
    return text.replace("e", ".0e", 1) if "e" in text and "." not in text else text


def _edit_json(text: str, changes: Mapping[str, Any]) -> str:
    document = json.loads(text)
    _apply(document, changes, dict)
    indented = re.search(r'\n( +)"', text)
    return json.dumps(document, indent=len(indented[1]) if indented else 2) + "\n"


def _apply(document: Any, changes: Mapping[str, Any], new_table: Any) -> None:
    for key, value in changes.items():
        path = [_part(text) for text in _PART.findall(key)]
        if value is UNSET:
            _remove(document, path)
            continue
        table = document
        for part in path[:-1]:
            if isinstance(part, str) and not isinstance(table.get(part), dict | list):
                table[part] = new_table()
            table = table[part]
        table[path[-1]] = value


def _part(text: str) -> str | int:
    if text.startswith("["):
        return int(text[1:-1])
    return str(json.loads(text)) if text.startswith('"') else text


def _remove(table: Any, path: list[str | int]) -> None:
    """Remove a value, and the tables that are empty without it; a position in a list stays."""
    first, rest = path[0], path[1:]
    if isinstance(first, int) or first not in table:
        return
    if rest:
        _remove(table[first], rest)
    if not rest or table[first] == {}:
        del table[first]
