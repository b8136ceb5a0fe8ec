"""Settings of one fix as they are pasted: those of one section, or of one program, together."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from typing import Any

from meshwright import json_text

_IN_PROGRAM = re.compile(r"(\S+\.py): (.+)")
_KEYWORD = re.compile(r"\w+=")
_IN_SECTION = re.compile(r"(\w+): \{(.+)\}")
REMOVED = "without "
LAUNCH = "accelerate launch "
"""Before options of the launcher, which the program would take for its own."""


def merged(texts: Sequence[str]) -> tuple[str, ...]:
    """Return settings with one entry per section of a YAML or JSON file, and one per program.

    A file that has a section twice is refused, or only the last one counts.
    """
    found: dict[str, list[str]] = {}
    for text in texts:
        program, section = _IN_PROGRAM.fullmatch(text), _IN_SECTION.fullmatch(text)
        in_json = _json(text)
        if text.startswith(LAUNCH):
            found.setdefault(LAUNCH, []).append(text.removeprefix(LAUNCH))
        elif program is not None and _KEYWORD.match(program[2]):
            found.setdefault(f"{program[1]}: ", []).append(program[2])
        elif section is not None:
            found.setdefault(f"{section[1]}: {{", []).append(section[2])
        elif in_json is not None:
            found.setdefault(f'"{next(iter(in_json))}"', []).append(text)
        else:
            found.setdefault(text, [])
    return tuple(_written(start, parts) for start, parts in found.items())


def program_arguments(text: str) -> dict[str, str | None]:
    """Return the arguments that a fix sets in a program's code, None for one to remove; empty for another fix."""
    program = _IN_PROGRAM.fullmatch(text)
    if program is None:
        return {}
    if program[2].startswith(REMOVED):
        return {program[2].removeprefix(REMOVED): None}
    try:
        call = ast.parse(f"f({program[2]})", mode="eval").body
    except SyntaxError:
        return {}
    keywords = call.keywords if isinstance(call, ast.Call) and not call.args else []
    return {one.arg: ast.unparse(one.value) for one in keywords if one.arg is not None}


def _written(start: str, parts: Sequence[str]) -> str:
    if not parts:
        return start
    if start.startswith('"'):
        tree: dict[str, Any] = {}
        for part in parts:
            _join(tree, _json(part) or {})
        return parts[0] if len(parts) == 1 else json.dumps(tree)[1:-1]
    if start == LAUNCH:
        return LAUNCH + " ".join(dict.fromkeys(parts))
    return f"{start}{', '.join(dict.fromkeys(parts))}" + "}" * start.endswith("{")


def _json(text: str) -> dict[str, Any] | None:
    """Return a setting of a JSON file with its section; None for other texts."""
    if not text.startswith('"'):
        return None
    try:
        found = json_text.loads(f"{{{text}}}")
    except ValueError:
        return None
    return found if isinstance(found, dict) and len(found) == 1 else None


def _join(tree: dict[str, Any], other: dict[str, Any]) -> None:
    """Add the settings of another tree; a later value of a setting counts."""
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            _join(tree[key], value)
        else:
            tree[key] = value
