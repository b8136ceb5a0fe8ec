"""Command-line options that a Python file defines, and the names of the parsed ones."""

from __future__ import annotations

import ast
from typing import Any

PARSED = ("parse_args", "parse_known_args")


def option_defaults(tree: ast.Module) -> dict[str, Any]:
    """Return the defaults of the command-line options that a file defines, by the name of their value."""
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if not (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument"
        ):
            continue
        options = {one.arg: one.value for one in node.keywords}
        names = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        given, default, action = (options.get(key) for key in ("dest", "default", "action"))
        name = given.value if isinstance(given, ast.Constant) else next((one for one in names if one[:2] == "--"), "")
        value = default.value if isinstance(default, ast.Constant) else None
        if isinstance(action, ast.Constant) and action.value in ("store_true", "store_false") and value is None:
            value = action.value == "store_false"
        found[str(name).lstrip("-").replace("-", "_")] = value
    return found


def parsed_names(tree: ast.Module) -> frozenset[str]:
    """Return the names of parsed command lines: args = parser.parse_args(), args, rest = parse_cli_args()."""
    found = {"args"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            called = getattr(node.value.func, "attr", getattr(node.value.func, "id", ""))
            first = node.targets[0].elts[0] if isinstance(node.targets[0], ast.Tuple) else node.targets[0]
            if called in PARSED and isinstance(first, ast.Name):
                found.add(first.id)
    return frozenset(found)
