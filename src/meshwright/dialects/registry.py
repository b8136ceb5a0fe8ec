"""The dialects there are, and whose words a file is written in."""

from __future__ import annotations

from importlib import import_module

from meshwright.dialects.dialect import Content, Dialect
from meshwright.errors import InputError, some, unknown

NAMES = (
    "megatron-lm",
    "megatron-bridge",
    "automodel",
    "torchtitan",
    "kempnerforge",
    "deepspeed",
    "accelerate",
)


def dialect(name: str) -> Dialect:
    """A dialect by name."""
    plain = name.strip().lower().replace("_", "-")
    if plain not in NAMES:
        raise unknown("dialect", name, (*NAMES, "meshwright"))
    found: Dialect = import_module(f"meshwright.dialects.{plain.replace('-', '_')}").DIALECT
    return found


def recognise(content: Content) -> Dialect:
    """The dialect that a file is written in."""
    scores = {name: dialect(name).recognises(content) for name in NAMES}
    best = max(scores.values())
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
