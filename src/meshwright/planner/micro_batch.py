"""The micro batch of a fixed layout: the fastest that fits, for micro_batch_size=auto."""

from __future__ import annotations

import msgspec

from meshwright import costs, rules
from meshwright.planner.search import has_headroom
from meshwright.recipes.case import Case
from meshwright.recipes.types import Recipe


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


def _sized(recipe: Recipe, size: int) -> Recipe:
    return msgspec.structs.replace(recipe, layout=msgspec.structs.replace(recipe.layout, micro_batch_size=size))
