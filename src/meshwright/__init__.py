"""Meshwright: tell it your model, your GPUs and your goal; it picks the recipe, sizes it, checks it and says why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshwright.version import VERSION

if TYPE_CHECKING:
    from meshwright.api import check, find_recipes, recipe, recommend
    from meshwright.errors import InputError, MeshwrightError
    from meshwright.planner import Plan
    from meshwright.recipes.types import Recipe

__version__ = VERSION
__all__ = ["InputError", "MeshwrightError", "Plan", "Recipe", "check", "find_recipes", "recipe", "recommend"]

_HOMES = {
    "InputError": "meshwright.errors",
    "MeshwrightError": "meshwright.errors",
    "Plan": "meshwright.planner",
    "Recipe": "meshwright.recipes.types",
}


def __getattr__(name: str) -> Any:
    """Names are loaded on first use, so that importing the package costs nothing."""
    if name not in __all__:
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES.get(name, "meshwright.api")), name)
