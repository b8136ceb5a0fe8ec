"""Recipes: what they are made of, how to find one, change one, build one and keep one in a file."""

from meshwright.recipes.build import benchmark, peft, pretrain, sft
from meshwright.recipes.index import (
    IndexEntry,
    closest,
    entries,
    for_model,
    knows,
    load,
    mission_recipe,
    names,
    resolve,
    search,
)
from meshwright.recipes.registry import Mission, recipe
from meshwright.recipes.types import Recipe, RecipeField, recipe_fields

__all__ = [
    "IndexEntry",
    "Mission",
    "Recipe",
    "RecipeField",
    "benchmark",
    "closest",
    "entries",
    "for_model",
    "knows",
    "load",
    "mission_recipe",
    "names",
    "peft",
    "pretrain",
    "recipe",
    "recipe_fields",
    "resolve",
    "search",
    "sft",
]
