"""The micro batch of a fixed layout: the fastest that fits, for micro_batch_size=auto."""

from __future__ import annotations

from collections.abc import Collection
from itertools import product
from typing import Any

import msgspec

from meshwright import costs, rules
from meshwright.planner.search import has_headroom
from meshwright.recipes.case import Case
from meshwright.recipes.types import Recipe

FASTER = 0.97  # of the step time, from which another micro batch is worth it


def with_fastest_micro_batch(case: Case) -> Recipe:
    """Return the recipe of a case with its fastest legal micro batch that fits; with one sample if none does."""
    layout = case.recipe.layout
    ranks = max(1, case.cluster.world // (layout.tp * layout.pp * layout.cp))
    samples = max(1, case.recipe.train.global_batch_size // ranks)
    found: list[tuple[bool, float, Recipe]] = []
    for size in (size for size in range(1, samples + 1) if samples % size == 0):
        recipe = _sized(case.recipe, size)
        candidate = case.rebuild(recipe)
        estimate = costs.estimate(candidate)
        if bool(rules.legal(candidate)) and bool(estimate.fits):
            tight = not bool(has_headroom(float(estimate.memory.total), candidate))
            found.append((tight, float(estimate.step_s), recipe))
    return min(found, key=lambda one: one[:2])[2] if found else _sized(case.recipe, 1)


def with_freed_memory(case: Case, typed: Collection[str]) -> dict[str, Any]:
    """Return the micro batch and recompute with which a layout that has memory left is clearly faster; else nothing.

    The global batch stays, and so does what the user typed.
    """
    layout = case.recipe.layout
    samples = max(1, int(case.global_batch_size) // max(1, case.cluster.world // (layout.tp * layout.pp * layout.cp)))
    sizes = [size for size in range(1, samples + 1) if samples % size == 0]
    sizes = [layout.micro_batch_size] if "micro_batch_size" in typed else sizes
    kinds = dict.fromkeys((layout.recompute, *(() if "recompute" in typed else ("none",))))
    best_s, found = FASTER * float(costs.step_time(case).step_s), dict[str, Any]()
    for size, recompute in product(sizes, kinds):
        whole = {"recompute_layers": 0, "recompute_modules": ()} if recompute == "none" else {}
        values = {"micro_batch_size": size, "recompute": recompute, **whole}
        tried = case.replace(**values)
        if not bool(rules.legal(tried)) or not bool(has_headroom(float(costs.memory(tried).total), tried)):
            continue
        step_s = float(costs.step_time(tried).step_s)
        if step_s < best_s:
            best_s, found = step_s, values
    return found


def _sized(recipe: Recipe, size: int) -> Recipe:
    return msgspec.structs.replace(recipe, layout=msgspec.structs.replace(recipe.layout, micro_batch_size=size))
