"""How long a plan trains: the steps of a number of tokens or days, with their days and cost."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from math import ceil

import msgspec
from msgspec import UNSET, UnsetType

from meshwright import planner
from meshwright.api import requests
from meshwright.api.argument_names import recipe_key
from meshwright.api.compile_time import compile_note
from meshwright.api.dataset_length import BATCH, batch_for_updates, epochs_of, sample_width, share_of_data
from meshwright.api.prices import price_for
from meshwright.api.questions import Asked
from meshwright.api.validation_time import validation_note
from meshwright.display import duration, plural
from meshwright.notes import no_notes
from meshwright.parsing import token_budget
from meshwright.planner import Plan, Question
from meshwright.planner.baseline import Baseline
from meshwright.planner.budget import FEW_STEPS, MANY_STEPS
from meshwright.planner.recommend import STEPS, StepsOfPlan, planned
from meshwright.planner.scaling import SCALED
from meshwright.recipes import overrides as override
from meshwright.recipes.case import Case
from meshwright.recipes.types import Recipe, field_value, recipe_fields
from meshwright.rules.learning_rate import is_long_warmup, short_warmup
from meshwright.rules.repeated_data import VALIDATIONS, validation_interval


def plan_of_length(question: Question, recipe: Recipe | None, request: requests.Recommend) -> Plan:
    """Return the plan, of as many steps as the requested tokens or days take; steps and epochs of the user stay."""
    tokens, overrides = token_budget(request.tokens), request.overrides
    if tokens is None and request.days is None:
        return _plan_of_epochs(question, recipe, request)
    baseline = planner.baseline_for(question, overrides, recipe)
    steps_of = _steps_of(baseline, request)
    if steps_of is None:
        return planner.recommend(question, overrides, recipe)
    if tokens is None:
        plan = planner.recommend(question, overrides, recipe, steps_of)
        plan = _with_steps_of_batches(plan, lambda more: _planned_steps(plan, question, recipe, request, more))
        return _explained(plan, STEPS, f"requested: what {request.days:g} days train; a new experiment")
    per_step = planner.step_tokens(baseline.case, sample_width(baseline.requested, baseline.case.engine))
    steps = _steps_of_tokens(tokens, per_step, baseline.requested)
    typed = overrides if steps is None else (*overrides, f"{STEPS}={steps}")
    plan = planner.recommend(question, typed, recipe, steps_of)
    plan = _with_steps_of_batches(_with_one_batch(plan, tokens), lambda more: _counted_steps(plan, tokens, more))
    why = f"requested: {request.tokens} tokens of {per_step:,} per step; a new experiment"
    return _explained(plan, STEPS, why)


def _with_one_batch(plan: Plan, tokens: float) -> Plan:
    """Return the plan without the suggestion of a batch for its GPUs, where the budget names one for the tokens.

    In pretraining, no batch is suggested either that leaves fewer steps than published runs take.
    """
    is_named = ceil(tokens / _tokens_per_step(plan.case)) > MANY_STEPS
    is_pretraining = plan.recipe.goal == "pretrain"

    def fits_budget(one: planner.Suggestion) -> bool:
        if one.title != SCALED:
            return True
        return not is_named and not (is_pretraining and tokens / _step_tokens_with(plan, one.overrides) < FEW_STEPS)

    return msgspec.structs.replace(plan, suggestions=tuple(filter(fits_budget, plan.suggestions)))


def steps_counter(question: Question, recipe: Recipe | None, request: requests.Recommend) -> StepsOfPlan | None:
    """Return the function that counts the steps of a plan; None if no tokens or days set them."""
    if request.tokens is None and request.days is None:
        return None
    return _steps_of(planner.baseline_for(question, request.overrides, recipe), request)


def _steps_of(baseline: Baseline, request: requests.Recommend) -> StepsOfPlan | None:
    """Return the function that counts the steps of a plan; None if the user set steps or epochs."""
    if baseline.requested.train.epochs or STEPS in baseline.reasons:
        return None
    tokens = token_budget(request.tokens)
    if tokens is None:
        return lambda plan: _steps_of_days(plan, request)
    return lambda plan: _steps_of_tokens(tokens, _tokens_per_step(plan.case), plan.recipe)


def _tokens_per_step(case: Case) -> int:
    return planner.step_tokens(case, sample_width(case.recipe, case.engine))


STEP_SIZE = (BATCH, "data.seq_length")
"""Fields whose change takes another number of steps for the same tokens."""
StepsOfChange = Callable[[tuple[str, ...]], int | None]


def _with_steps_of_batches(plan: Plan, steps_of: StepsOfChange) -> Plan:
    """Return the plan whose repair, fixes, suggestions and options set the steps where they set another batch."""

    def followed(overrides: tuple[str, ...]) -> tuple[str, ...]:
        keys = [one.partition("=")[0] for one in overrides]
        steps = steps_of(overrides) if set(keys) & set(STEP_SIZE) and STEPS not in keys else None
        return overrides if steps is None else (*overrides, f"{STEPS}={steps}")

    def option(one: planner.Option) -> planner.Option:
        overrides = followed(one.overrides)
        if overrides == one.overrides:
            return one
        words = [word for word in shlex.split(one.command) if not word.startswith(f"{STEPS}=")]
        return msgspec.structs.replace(one, overrides=overrides, command=shlex.join([*words, overrides[-1]]))

    repair = plan.repair
    if repair is not None:
        planned = plan.repaired
        whole = followed(repair.overrides)
        if planned is not None and whole != repair.overrides:
            whole = (*repair.overrides, f"{STEPS}={planned.recipe.train.steps}")  # what its commands run
        repair = msgspec.structs.replace(repair, overrides=whole)
    replace = msgspec.structs.replace
    return replace(
        plan,
        repair=repair,
        findings=tuple(replace(one, fix=followed(one.fix)) for one in plan.findings),
        suggestions=tuple(replace(one, overrides=followed(one.overrides)) for one in plan.suggestions),
        options=tuple(option(one) for one in plan.options),
    )


def _counted_steps(plan: Plan, tokens: float, overrides: tuple[str, ...]) -> int | None:
    """Return the steps of these tokens with other overrides; None if they stay."""
    return _steps_of_tokens(tokens, _step_tokens_with(plan, overrides), plan.recipe)


def _step_tokens_with(plan: Plan, overrides: tuple[str, ...]) -> int:
    """Return the tokens of a step with other overrides."""
    with no_notes():
        return _tokens_per_step(plan.case.rebuild(override.apply(plan.recipe, overrides)))


def _planned_steps(
    plan: Plan, question: Question, recipe: Recipe | None, request: requests.Recommend, overrides: tuple[str, ...]
) -> int | None:
    """Return the steps that the days train with other overrides, whose layout is planned; None if none runs."""
    if plan.repair is not None and plan.repaired is not None and overrides == plan.repair.overrides:
        return plan.repaired.recipe.train.steps
    with no_notes():
        baseline = planner.baseline_for(question, override.merged(request.overrides, overrides), recipe)
        found = planned(baseline, overrides)
    return None if found is None or not found.ok else _steps_of_days(found, request)


FOLLOWS_DATA = "follows the data: "
WARMUP, EVAL_EVERY = "schedule.warmup_steps", "train.eval_every"
HELD_OUT = {"data.validation": "data", "data.validation_part": "part"}
ABOUT_DATA = ("epoch", "val", "test_s")
"""Parts of the names of epochs and of a held-out part, in any spelling."""


def _plan_of_epochs(question: Question, recipe: Recipe | None, request: requests.Recommend) -> Plan:
    """Return the plan with batch, warm-up and validations that fit the user's data, where nobody asked for others."""
    overrides = request.overrides
    if not any(word in one.partition("=")[0] for one in overrides for word in ABOUT_DATA):
        return planner.recommend(question, overrides, recipe)
    baseline = planner.baseline_for(question, overrides, recipe)
    found = {field: value for field, value in _of_data(baseline, recipe is None) if field not in baseline.reasons}
    plan = planner.recommend(question, (*overrides, *(f"{key}={one[0]}" for key, one in found.items())), recipe)
    for field, (_, why) in found.items():
        changed = "; a new experiment" if recipe_fields()[field].kind == "contract" else ""
        plan = _explained(plan, field, f"{FOLLOWS_DATA}{why}{changed}")
    return plan


def _of_data(baseline: Baseline, any_batch: bool) -> Iterator[tuple[str, tuple[int, str]]]:
    """Yield the values that the user's data asks for, each with why: batch, warm-up, steps between validations."""
    recipe, engine = baseline.requested, baseline.case.engine
    batch = batch_for_updates(recipe, int(baseline.case.world), engine) if any_batch else None
    if batch is not None:
        yield BATCH, batch
    size = batch[0] if batch is not None and BATCH not in baseline.reasons else recipe.train.global_batch_size
    epochs = epochs_of(recipe, engine)
    steps = ceil(epochs.samples / size) if epochs is not None else 0
    warmup = recipe.schedule.warmup_steps
    if steps and bool(is_long_warmup(warmup, steps)):
        part = "half" if 2 * warmup > steps else "a quarter"
        yield WARMUP, (short_warmup(steps), f"{warmup} warm-up steps are more than {part} of {plural(steps, 'step')}")
    steps = steps or recipe.train.steps
    requested = [what for field, what in HELD_OUT.items() if field in baseline.reasons and field_value(recipe, field)]
    if requested and steps and not recipe.train.eval_every:
        every = validation_interval(steps)
        yield EVAL_EVERY, (every, f"about {VALIDATIONS} validations on the {requested[0]} that is held out")


def overrides_of(plan: Plan, request: requests.Recommend) -> tuple[str, ...]:
    """Return the overrides that a plan was made with: the user's, and those that follow the data."""
    followed = [one for one in plan.changes if one.why.startswith(FOLLOWS_DATA)]
    return (*request.overrides, *(f"{one.field}={one.new}" for one in followed))


def _steps_of_tokens(tokens: float, per_step: int, recipe: Recipe) -> int | None:
    """Return the steps of so many tokens; None for the recipe's, which stay if the tokens are less than a step.

    They stay also if they are these tokens rounded down, as Megatron counts the steps of its samples.
    """
    steps = ceil(tokens / per_step)
    return None if tokens < per_step or recipe.train.steps in (steps, tokens // per_step) else steps


def _steps_of_days(plan: Plan, request: requests.Recommend) -> int | None:
    """Return the steps that a plan trains in the requested days; None for the recipe's, which stay if it cannot."""
    found = budget_for(plan, request)
    steps = found.steps if isinstance(found, planner.Budget) else 0
    return None if steps in (0, plan.recipe.train.steps) else steps


def _explained(plan: Plan, field: str, why: str) -> Plan:
    """Return the plan with why a field changed."""
    changes = (msgspec.structs.replace(c, why=why) if c.field == field else c for c in plan.changes)
    return msgspec.structs.replace(plan, changes=tuple(changes))


def with_budget(plan: Plan, request: Asked) -> Plan:
    """Return the plan with the days and cost that were requested, for Python."""
    found = budget_for(plan, request)
    if not isinstance(found, planner.Budget):
        return plan
    plan = msgspec.structs.replace(plan, budget=found)
    return plan if plan.fewer_nodes is None else _with_figures(plan, plan.fewer_nodes, request)


def _with_figures(plan: Plan, fewer: Plan, request: Asked) -> Plan:
    """Return the plan with the days and cost of the fewer nodes that it suggests."""
    found = budget_for(fewer, request)
    if not isinstance(found, planner.Budget) or plan.budget is None or token_budget(request.tokens) is None:
        return plan

    def written(one: planner.Budget) -> str:
        cost = "" if one.cost is None else f" and {one.cost:,.0f} {one.currency}".rstrip()
        return f"{duration(one.days)}{cost}"

    figures = f"; {written(found)} in place of {written(plan.budget)}"
    suggested = (
        msgspec.structs.replace(one, why=one.why + figures) if one.title in planner.FEWER_NODES else one
        for one in plan.suggestions
    )
    return msgspec.structs.replace(plan, suggestions=tuple(suggested))


def budget_for(plan: Plan, request: Asked | None) -> planner.Budget | UnsetType | None:
    """Return days and cost of the requested tokens or days, else of the recipe's epochs, or of its steps at a price."""
    if request is None:
        return UNSET
    by_epochs = request.tokens is None and plan.recipe.train.epochs > 0
    is_deadline = by_epochs or STEPS in map(recipe_key, request.overrides)  # of the days, for a requested length
    asked = request.tokens is not None or (request.days is not None and not is_deadline)
    wants_figures = asked or request.days is not None or request.price is not None or plan.recipe.train.epochs > 0
    epochs = epochs_of(plan.recipe, plan.case.engine) if by_epochs else None
    if not wants_figures:
        return UNSET
    if by_epochs and epochs is None:
        return None
    if not plan.exists or not plan.estimate.fits or not (asked or plan.has_length):
        return None
    price = price_for(request, plan.question)
    width = sample_width(plan.recipe, plan.case.engine)
    tokens = token_budget(request.tokens)
    advised = any(one.field == "checkpoint.save_every" for one in plan.findings)  # with an interval of its own
    found = planner.budget(
        plan.case, plan.estimate, tokens, price, epochs, width, request.days, not advised, is_deadline
    )
    if found is None:
        return None
    share = "" if asked else share_of_data(plan.recipe, plan.case.engine)
    added = tuple(filter(None, (share, validation_note(plan.case, found), compile_note(plan.case, found))))
    return msgspec.structs.replace(found, notes=(*found.notes, *added)) if added else found  # what was typed is first
