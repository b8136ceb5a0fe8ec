"""What the rules look at."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from meshwright.dialects.dialect import ForeignRule, Look, Problem
from meshwright.dialects.megatron_bridge import upstream
from meshwright.dialects.megatron_bridge.says import value
from meshwright.dialects.parts import is_whole
from meshwright.rules.rule import Severity

Broken = Callable[[Look], Iterable[Problem] | Problem | None]


def shipped(look: Look) -> upstream.Upstream | None:
    """The recipe of theirs that the file starts from."""
    return upstream.find(look.parsed.name)


def command(look: Look) -> bool:
    """Whether the runner starts it, which puts some things right by itself."""
    return look.says("--recipe")


def recipe_key(look: Look) -> str:
    """Where the file names its recipe."""
    return "--recipe" if command(look) else "recipe"


def number(look: Look, key: str) -> int | None:
    """The whole number that the file says for a key."""
    found = value(look.parsed.settings, key)
    return found if is_whole(found) else None


def rule(name: str, severity: Severity, keys: tuple[str, ...], broken: Broken, symptom: str, cause: str) -> ForeignRule:
    """A rule of this dialect."""
    return ForeignRule(f"megatron-bridge.{name}", severity, keys, broken, symptom=symptom, cause=cause)
