"""Accessors and the rule constructor of this package."""

from __future__ import annotations

from meshwright.frameworks.common import is_int
from meshwright.frameworks.framework import Check, FrameworkRule, RuleContext
from meshwright.frameworks.megatron_bridge import bridge_recipes
from meshwright.frameworks.megatron_bridge.parsed_config import get_value
from meshwright.rules.rule import Severity


def bridge_recipe(ctx: RuleContext) -> bridge_recipes.BridgeRecipe | None:
    """Return the Megatron-Bridge recipe that the file derives from."""
    return bridge_recipes.find(ctx.parsed.name)


def uses_runner(ctx: RuleContext) -> bool:
    """Return whether run_recipe.py starts it; the runner adjusts some settings."""
    return ctx.is_set("--recipe")


def recipe_key(ctx: RuleContext) -> str:
    """Return the key under which the file names its recipe."""
    return "--recipe" if uses_runner(ctx) else "recipe"


def get_int(ctx: RuleContext, key: str) -> int | None:
    """Return the integer that the file sets for a key."""
    found = get_value(ctx.parsed.settings, key)
    return found if is_int(found) else None


def rule(name: str, severity: Severity, keys: tuple[str, ...], check: Check, symptom: str, cause: str) -> FrameworkRule:
    """Return a rule of this framework."""
    return FrameworkRule(f"megatron-bridge.{name}", severity, keys, check, symptom=symptom, cause=cause)
