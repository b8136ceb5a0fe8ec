"""What the rules look at."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from meshwright.frameworks.common import is_int
from meshwright.frameworks.framework import FrameworkRule, Problem, RuleContext
from meshwright.frameworks.megatron_bridge import bridge_recipes
from meshwright.frameworks.megatron_bridge.parsed_config import value
from meshwright.rules.rule import Severity

Broken = Callable[[RuleContext], Iterable[Problem] | Problem | None]


def shipped(ctx: RuleContext) -> bridge_recipes.Upstream | None:
    """The recipe of theirs that the file starts from."""
    return bridge_recipes.find(ctx.parsed.name)


def command(ctx: RuleContext) -> bool:
    """Whether the runner starts it, which puts some things right by itself."""
    return ctx.is_set("--recipe")


def recipe_key(ctx: RuleContext) -> str:
    """Where the file names its recipe."""
    return "--recipe" if command(ctx) else "recipe"


def number(ctx: RuleContext, key: str) -> int | None:
    """The whole number that the file says for a key."""
    found = value(ctx.parsed.settings, key)
    return found if is_int(found) else None


def rule(
    name: str, severity: Severity, keys: tuple[str, ...], broken: Broken, symptom: str, cause: str
) -> FrameworkRule:
    """A rule of this framework."""
    return FrameworkRule(f"megatron-bridge.{name}", severity, keys, broken, symptom=symptom, cause=cause)
