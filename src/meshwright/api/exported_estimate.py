"""The findings and the estimate of what an export has written: another layout, or without what has no key there."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from meshwright import frameworks
from meshwright.api.checks import check_recipe
from meshwright.frameworks import ExportedConfig, RecipeCheckResult
from meshwright.recipes import overrides as override
from meshwright.recipes.types import Recipe
from meshwright.rules import Finding

MEMORY = "memory."  # first letters of rules
TOLERANCE = 0.01  # share of the memory that is no other figure to a reader


def as_written(
    theirs: frameworks.Framework, written: ExportedConfig, checked: RecipeCheckResult, gpus: str | int | None
) -> RecipeCheckResult:
    """Return the result for the layout that the written file has, and for the memory without the settings it lacks."""
    layout = frameworks.exported_layout(theirs, written, checked.recipe, checked.model, checked.cluster)
    recipe = override.apply(checked.recipe, layout)
    checked = _as_laid_out(checked, recipe, gpus) if layout else checked
    lost = frameworks.exported_kernels(theirs, written, checked.recipe, checked.model, checked.cluster)
    if not lost:
        return checked
    found = check_recipe(recipe, gpus, checked.engine, lost, advice=False, model=checked.model)
    before, after = checked.estimate.memory.total, found.estimate.memory.total
    if abs(after - before) <= TOLERANCE * before:
        return checked
    others = [one for one in checked.findings if not one.rule.startswith(MEMORY)]
    memory = [_as_lost(one, lost) for one in found.findings if one.rule.startswith(MEMORY)]
    figures = f"an estimated {after:.1f} GiB per GPU, {before:.1f} with the recipe's own"
    note = f"the written file has {' '.join(lost)}: {figures}"
    notes = checked.notes if memory else (*checked.notes, note)
    return msgspec.structs.replace(checked, findings=(*others, *memory), estimate=found.estimate, notes=notes)


def _as_lost(finding: Finding, lost: Sequence[str]) -> Finding:
    message = f"the written file has {' '.join(lost)}: {finding.message}"
    return msgspec.structs.replace(finding, message=message)


def _as_laid_out(checked: RecipeCheckResult, recipe: Recipe, gpus: str | int | None) -> RecipeCheckResult:
    """Return the result with the findings and the estimate of a recipe in the layout that the written file has."""
    found = check_recipe(recipe, gpus, checked.engine, (), advice=False, model=checked.model)
    if (
        found.estimate.step_s == checked.estimate.step_s
        and found.estimate.memory.total == checked.estimate.memory.total
    ):
        return checked  # of what runs in its place: a warning says so
    return msgspec.structs.replace(checked, findings=found.findings, estimate=found.estimate)
