"""Recipes: types, index, overrides, builders and files."""

from meshwright.recipes.build import benchmark, peft, pretrain, sft
from meshwright.recipes.files import from_file, from_text, to_text
from meshwright.recipes.index import (
    IndexEntry,
    closest,
    entries,
    for_model,
    is_known,
    load,
    names,
    published_recipe,
    resolve,
    search,
)
from meshwright.recipes.overrides import Change, apply, apply_with_log, change
from meshwright.recipes.registry import Published, recipe, set_file_reader
from meshwright.recipes.types import Recipe, RecipeField, recipe_fields

set_file_reader(from_file)

__all__ = [
    "Change",
    "IndexEntry",
    "Published",
    "Recipe",
    "RecipeField",
    "apply",
    "apply_with_log",
    "benchmark",
    "change",
    "closest",
    "entries",
    "for_model",
    "from_file",
    "from_text",
    "is_known",
    "load",
    "names",
    "peft",
    "pretrain",
    "published_recipe",
    "recipe",
    "recipe_fields",
    "resolve",
    "search",
    "sft",
    "to_text",
]
