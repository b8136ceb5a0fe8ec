"""Notes of an export: overrides without effect, and what changes for the framework."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright import frameworks
from meshwright.api.targets import Job
from meshwright.frameworks import RecipeCheckResult
from meshwright.launch import other_frameworks
from meshwright.recipes import overrides as override
from meshwright.recipes.types import Recipe, field_value, recipe_fields

OF_A_RUN = ("data.dataset", "data.blend", "train.steps", "train.epochs")  # what each run sets, also with options


def without_effect(checked: RecipeCheckResult, overrides: Sequence[str]) -> list[str]:
    """Return the typed fields that this training does not read: an export has no key for them."""
    typed = override.requested(checked.recipe, override.split_auto(overrides)[0])
    reasons = {key: frameworks.no_effect(key, checked.recipe, checked.model) for key in typed}
    return [f"{key}={typed[key]} has no effect: {reason}" for key, reason in reasons.items() if reason]


def without_deepspeed(job: Job, checked: RecipeCheckResult, theirs: frameworks.Framework) -> list[str]:
    """Return what the sharding of a DeepSpeed job becomes in a framework that does not use DeepSpeed."""
    if job.imported is None or job.engine != "deepspeed" or checked.engine == "deepspeed":
        return []
    strategy = checked.recipe.layout.strategy
    return [f"ZeRO of {job.imported.content.path} becomes layout.strategy={strategy}: {theirs.title} has no DeepSpeed"]


def contract_notes(job: Job, recipe: Recipe) -> list[str]:
    """Return the overrides that change what is trained: each is a new experiment."""
    if job.plan is not None or job.imported is not None:
        return []
    fields = [key for key, info in recipe_fields().items() if info.kind == "contract" and key not in OF_A_RUN]
    named = other_frameworks.with_full_paths(job.recipe)  # the same file by its full path is no change
    keys = [key for key in fields if field_value(named, key) != field_value(recipe, key)]
    pairs = [(key, field_value(job.recipe, key), field_value(recipe, key)) for key in keys]
    return [f"changed: {key} {old} → {new} (contract): a new experiment" for key, old, new in pairs if old != new]
