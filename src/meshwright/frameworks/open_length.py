"""Files that do not say how long they train: the steps are then the default of a recipe, which nobody chose."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.frameworks.framework import Content
from meshwright.frameworks.to_recipe import ImportedRecipe
from meshwright.planner.plan import OPEN_LENGTH
from meshwright.recipes import overrides as override
from meshwright.recipes.types import Recipe, recipe_fields

LENGTHS = (OPEN_LENGTH, "train.epochs")


def open_length(path: str, imported: ImportedRecipe, recipe: Recipe, overrides: Sequence[str] = ()) -> str:
    """Return that neither another framework's file nor an override says how long it trains; empty if one does."""
    typed, mapped = {**imported.typed, **override.requested(recipe, list(overrides))}, imported.mapped
    stated = {*mapped.source_keys} - {*mapped.unresolved, *imported.unknown_fields}
    is_open = imported.parsed.base is None and not recipe.benchmark and OPEN_LENGTH not in stated | {*typed}
    return _text(path) if is_open and _has_default(recipe) else ""


def open_length_of_recipe(content: Content, recipe: Recipe) -> str:
    """Return that a recipe file of ours does not say how long it trains; empty if it or its base does."""
    is_open = not content.settings.keys() & {"base", *LENGTHS} and not recipe.benchmark
    return _text(content.path) if is_open and _has_default(recipe) else ""


def _has_default(recipe: Recipe) -> bool:
    return recipe.train.steps == recipe_fields()[OPEN_LENGTH].default and not recipe.train.epochs


def _text(path: str) -> str:
    steps = recipe_fields()[OPEN_LENGTH].default
    return (
        f"{path} does not say how long it trains: a recipe then has {steps:,} steps; "
        "write train.epochs=N or train.steps=N"
    )
