"""The time that validations add to a budget, which counts training steps only."""

from __future__ import annotations

from math import ceil
from typing import Any

import msgspec

from meshwright.api.dataset_length import epochs_of
from meshwright.display import duration, plural
from meshwright.planner import Budget
from meshwright.recipes.case import Case
from meshwright.recipes.types import Recipe

LEAST = 0.02  # of the training time: less is within every band


def validation_note(case: Case, budget: Budget) -> str:
    """Return how long the validations of a budget's steps take; empty if that is little or not known."""
    train = case.recipe.train
    samples = _held_out_samples(case.recipe) if train.eval_every and budget.steps else 0
    if not samples:
        return ""
    from meshwright.engine.data.finite import MAX_BATCHES

    batches = min(ceil(samples / train.global_batch_size), train.eval_steps or MAX_BATCHES)
    times = ceil(budget.steps / train.eval_every)  # one follows the last step
    share = times * batches * _forward_share(case) / budget.steps
    if share < LEAST:
        return ""
    each = "a batch" if batches == 1 else f"{batches:,} batches"
    return (
        f"validation adds about {duration(budget.days * share)} ({share:.0%}), which is not in these figures: "
        f"{plural(times, 'validation')} of {each}; train.eval_every and train.eval_steps set both"
    )


def _held_out_samples(recipe: Recipe) -> int:
    """Return the samples of a validation over a local file, or over the part that is held out; 0 if not known."""
    data, changes = recipe.data, dict[str, Any](validation="", validation_part=0.0)
    if data.validation:
        changes["dataset"] = data.validation
    elif not data.validation_part:
        return 0
    train = msgspec.structs.replace(recipe.train, epochs=1.0)
    whole = msgspec.structs.replace(recipe, train=train, data=msgspec.structs.replace(data, **changes))
    found = epochs_of(whole)
    if found is None:
        return 0
    return found.samples if data.validation else max(round(found.samples * data.validation_part), 1)


def _forward_share(case: Case) -> float:
    """Return the forward pass's part of a step: a backward pass is two of them, one if the weights are frozen."""
    recipe = case.recipe
    passes = (2 if recipe.goal == "peft" else 3) + (recipe.layout.recompute == "full")
    return 1 / passes
