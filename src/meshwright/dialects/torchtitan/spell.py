"""One setting as torchtitan's files and commands say it."""

from __future__ import annotations

from typing import Any

from meshwright.recipes.foreign import words


def spell(key: str, value: Any) -> str:
    """A line of the TOML file; a flag for what only today's command has."""
    word = words("torchtitan").get(key)
    if word is not None and word.since:
        return flag(key, value)
    return f"{key} = {toml_value(value)}"


def toml_value(value: Any) -> str:
    """A value as TOML; nothing has no word there."""
    if value is None:
        return '""'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def flag(key: str, value: Any) -> str:
    """A flag of the command."""
    if isinstance(value, bool):
        section, _, last = key.rpartition(".")
        return f"--{key}" if value else f"--{section}.no_{last}" if section else f"--no_{last}"
    if isinstance(value, list | tuple):
        return f"--{key}={','.join(str(item) for item in value)}"
    return f"--{key}={value}"
