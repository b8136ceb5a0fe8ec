"""Recipes: types, index, overrides, builders and files. Names are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.lazy_names import LazyNames

if TYPE_CHECKING:  # the names of the table below, for type checkers
    from meshwright.recipes.build import benchmark as benchmark
    from meshwright.recipes.build import peft as peft
    from meshwright.recipes.build import pretrain as pretrain
    from meshwright.recipes.build import sft as sft
    from meshwright.recipes.files import from_file as from_file
    from meshwright.recipes.files import from_text as from_text
    from meshwright.recipes.files import to_text as to_text
    from meshwright.recipes.index import IndexEntry as IndexEntry
    from meshwright.recipes.index import closest as closest
    from meshwright.recipes.index import entries as entries
    from meshwright.recipes.index import for_model as for_model
    from meshwright.recipes.index import is_known as is_known
    from meshwright.recipes.index import load as load
    from meshwright.recipes.index import names as names
    from meshwright.recipes.index import published_recipe as published_recipe
    from meshwright.recipes.index import resolve as resolve
    from meshwright.recipes.index import search as search
    from meshwright.recipes.overrides import Change as Change
    from meshwright.recipes.overrides import apply as apply
    from meshwright.recipes.overrides import apply_with_log as apply_with_log
    from meshwright.recipes.overrides import change as change
    from meshwright.recipes.registry import Published as Published
    from meshwright.recipes.registry import recipe as recipe
    from meshwright.recipes.types import Recipe as Recipe
    from meshwright.recipes.types import RecipeField as RecipeField
    from meshwright.recipes.types import recipe_fields as recipe_fields

__getattr__ = LazyNames(
    __name__,
    {
        "recipes.build": "benchmark peft pretrain sft",
        "recipes.files": "from_file from_text to_text",
        "recipes.index": "IndexEntry closest entries for_model is_known load names published_recipe resolve search",
        "recipes.overrides": "Change apply apply_with_log change",
        "recipes.registry": "Published recipe",
        "recipes.types": "Recipe RecipeField recipe_fields",
    },
)
