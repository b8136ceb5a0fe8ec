"""What a user's own data adds to a plan: findings about rows and steps, smaller batches, less padding."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import msgspec
import numpy as np

from meshwright import file_access, rules
from meshwright.api.data_findings import DATA_ROWS, data_findings, without_validation
from meshwright.api.dataset_length import (
    BATCH,
    FEW_UPDATES,
    batch_for_updates,
    epochs_if_usual,
    epochs_of,
    sample_width,
    updates_of,
)
from meshwright.api.dropped_rows import dropped_rows
from meshwright.api.paths import looks_like_path
from meshwright.api.sample_lengths import on_engine, own_lengths, tokenized_with
from meshwright.display import short_number
from meshwright.planner import Plan, Suggestion, examine, held_in_a_search
from meshwright.planner.budget import Epochs
from meshwright.recipes import overrides as override
from meshwright.recipes.case import Case
from meshwright.recipes.replacements import bytes_per_token
from meshwright.recipes.types import ENGINES, Recipe, recipe_fields
from meshwright.rules import Finding
from meshwright.rules.data import few_steps, needs_equal_lengths, streams_unknown_lengths
from meshwright.rules.repeated_data import USUAL_EPOCHS

WORTH_IT = 1.25  # times fewer tokens from which packing is suggested
_short = partial(short_number, digits=".1f", least=1e3)


def with_own_data(plan: Plan) -> Plan:
    """Return the plan with what the user's data adds: findings about its rows and steps, and less padding."""
    plan = _with_data_errors(_with_counted_steps(plan))
    epochs = epochs_of(plan.recipe, plan.case.engine) or epochs_if_usual(plan.recipe, plan.case.engine)
    kept = tuple(one for one in plan.suggestions if epochs is None or not _leaves_few_updates(plan, one, epochs))
    found = (*_more_updates(plan), *list(_less_padding(plan))[:1])
    return plan if found + kept == plan.suggestions else msgspec.structs.replace(plan, suggestions=found + kept)


def _more_updates(plan: Plan) -> Iterable[Suggestion]:
    """Suggest a batch that gives a fine-tuning enough updates: one that the user names is not replaced."""
    world, engine = plan.question.cluster.world, plan.case.engine
    found = batch_for_updates(plan.recipe, world, engine, by_steps=True) if plan.exists else None
    if found is not None and not any(one.rule == "data.few-steps" for one in plan.findings):
        length = () if plan.recipe.train.epochs else (f"train.epochs={USUAL_EPOCHS}",)
        yield Suggestion("more updates of your data", (f"{BATCH}={found[0]}", *length), found[1])


def _leaves_few_updates(plan: Plan, suggestion: Suggestion, epochs: Epochs) -> bool:
    """Return whether a suggested batch leaves a fine-tuning few updates."""
    batch = override.requested(plan.recipe, suggestion.overrides).get(BATCH)
    return batch is not None and plan.recipe.goal != "pretrain" and updates_of(epochs, batch) < FEW_UPDATES


def _with_data_errors(plan: Plan) -> Plan:
    """Return the plan with what train refuses of the user's own data, as check and train report it."""
    found = (*_row_findings(plan), *_without_validation(plan.recipe))
    return msgspec.structs.replace(plan, findings=(*found, *plan.findings)) if found else plan


def _without_validation(recipe: Recipe) -> tuple[Finding, ...]:
    return () if file_access.closed() else tuple(without_validation(recipe))


def has_own_data(plan: Plan) -> bool:
    """Return whether the user named the dataset of a plan."""
    return any(change.field == "data.dataset" for change in plan.changes)


def _is_here(recipe: Recipe) -> bool:
    """Return whether a recipe trains on a file or folder of this machine."""
    return not file_access.closed() and looks_like_path(recipe.data.dataset)


def _row_findings(plan: Plan) -> tuple[Finding, ...]:
    """Return what train refuses of the user's rows, and the warnings of rows that it drops, as check reports them."""
    own = plan.case.engine == ENGINES[0] and _is_here(plan.recipe)
    found = data_findings(plan.recipe, thorough=True) if own or has_own_data(plan) else ()
    errors = tuple(one for one in found if one.severity == "error")
    if errors or not own:
        return errors
    return (*(one for one in found if one.rule == DATA_ROWS), *dropped_rows(plan.case))


def _with_counted_steps(plan: Plan) -> Plan:
    """Return the plan with the findings that the steps of its epochs add: a search does not know them."""
    epochs = epochs_of(on_engine(plan.recipe, plan.case.engine))
    if epochs is None:
        return plan
    counted = epochs.counted(plan.case)
    if not any(bool(one.broken(counted)) and not bool(one.broken(plan.case)) for one in rules.applicable(counted)):
        return plan
    typed = {recipe_fields()[change.field].flat for change in plan.changes if change.why.startswith("requested")}
    question = plan.question
    findings, repair = examine(counted, typed, stated=question.stated, options=question.options)
    kept = tuple(one for one in plan.suggestions if not _leaves_few_steps(one, counted))
    held = held_in_a_search(findings, counted)
    return msgspec.structs.replace(plan, findings=held, repair=repair, repaired=None, suggestions=kept)


def _leaves_few_steps(suggestion: Suggestion, counted: Case) -> bool:
    """Return whether a suggested batch makes too few steps of the counted samples."""
    batch = override.requested(counted.recipe, suggestion.overrides).get(BATCH)
    return batch is not None and bool(few_steps(counted.replace(global_batch_size=batch)))


def _less_padding(plan: Plan) -> Iterable[Suggestion]:
    data, lengths = plan.recipe.data, own_lengths(on_engine(plan.recipe, plan.case.engine))
    if lengths is None or data.packing or not plan.exists:
        return
    seq, mean = data.seq_length, float(np.minimum(lengths, data.seq_length).mean())
    engine = plan.case.engine
    padded = sample_width(plan.recipe, engine) or seq
    for title, changes in (
        ("pack the samples", ("data.packing=true", "data.group_by_length=false")),
        ("group samples by length", ("data.group_by_length=true",)),
    ):
        values = {key: value == "true" for key, _, value in (text.partition("=") for text in changes)}
        recipe, log = override.change(plan.recipe, values)
        width = mean if recipe.data.packing else sample_width(recipe, engine) or seq
        case = plan.case.rebuild(recipe)
        refused = bool(needs_equal_lengths(case)) or bool(streams_unknown_lengths(case))
        if padded < WORTH_IT * width or not log or refused or not bool(rules.legal(case)):
            continue
        changed = {change.key for change in log}
        chosen = tuple(text for text in changes if text.partition("=")[0] in changed)
        yield Suggestion(title, chosen, _saving(recipe, lengths, padded, width, mean))


def _saving(recipe: Recipe, lengths: Any, padded: float, width: float, mean: float) -> str:
    """Return what packing or grouping saves in one pass over the data, and what else it changes."""
    before, after = len(lengths) * padded, len(lengths) * width
    times = recipe.data.packing and padded == recipe.data.seq_length  # the same width of a step
    less = f"{before / after:.1f} times less time and cost" if times else "the rest is padding"
    text = (
        f"about {_short(after)} instead of {_short(before)} tokens per epoch, {less}: "
        f"samples have {_mean(recipe, mean)}, padded to {padded:,.0f}"
    )
    if not recipe.data.packing:
        return text
    held, batch = recipe.data.seq_length / mean, recipe.train.global_batch_size
    kept = max(1, round(batch / held))
    return text + (
        f"; a packed sample holds about {held:.0f} of them: train.global_batch_size={kept} keeps the updates per epoch"
        if kept < batch
        else ""
    )


def _mean(recipe: Recipe, tokens: float) -> str:
    """Return the tokens of a sample on average, and how they were counted."""
    name = tokenized_with(recipe)
    how = f"counted with {name}" if name else f"at {bytes_per_token(recipe):g} bytes each"
    return f"about {tokens:,.0f} tokens ({how})"
