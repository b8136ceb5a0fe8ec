"""The dialects there are, and whose words a file is written in."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec

from meshwright.dialects.dialect import Content, Dialect, Format
from meshwright.errors import InputError, some, unknown

FORMATS: Mapping[str, tuple[Format, ...]] = {
    "megatron-lm": ("shell",),
    "megatron-bridge": ("shell", "python", "yaml"),
    "automodel": ("yaml", "shell"),
    "torchtitan": ("toml", "shell"),
    "kempnerforge": ("toml", "shell"),
    "deepspeed": ("json", "shell"),
    "accelerate": ("yaml", "shell"),
}
"""What each dialect is written in, so that only those are loaded that a file may be of."""
NAMES = tuple(FORMATS)


def dialect(name: str) -> Dialect:
    """A dialect by name."""
    plain = name.strip().lower().replace("_", "-")
    if plain not in NAMES:
        raise unknown("dialect", name, (*NAMES, "meshwright"))
    found: Dialect = import_module(f"meshwright.dialects.{plain.replace('-', '_')}").DIALECT
    return found


def recognise(content: Content) -> Dialect:
    """The dialect that a file is written in."""
    candidates = [name for name, formats in FORMATS.items() if content.format in formats and _there(name)]
    scores = {name: dialect(name).recognises(content) for name in candidates}
    best = max(scores.values(), default=0)
    found = [name for name, score in scores.items() if score == best]
    if best == 0:
        seen = f"; it says {some(sorted(content.top()), 6)}" if content.settings else ""
        raise InputError(
            f"is of no framework that is known here{seen}",
            field="file",
            value=content.path,
            fix=[f"--dialect {name}" for name in (*NAMES, "meshwright")],
        )
    if len(found) > 1:
        raise InputError(
            f"could be of {' or '.join(found)}",
            field="file",
            value=content.path,
            fix=[f"--dialect {name}" for name in found],
        )
    return dialect(found[0])


def _there(name: str) -> bool:
    return find_spec(f"meshwright.dialects.{name.replace('-', '_')}") is not None
