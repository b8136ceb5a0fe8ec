"""Plan a training: recommend, plan and estimate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from meshwright import costs, models, planner
from meshwright.api import requests
from meshwright.api.file_errors import errors_left
from meshwright.api.own_data_plans import with_own_data
from meshwright.api.prices import price_for
from meshwright.api.questions import job_question, model_question, named_job, question_for
from meshwright.api.resolve import model_and_goal, typed_model
from meshwright.api.run_length import overrides_of, plan_of_length, steps_counter, with_budget
from meshwright.api.targets import GOAL_FIX, not_saved, own_recipe, stated_goal
from meshwright.api.verb_function import verb
from meshwright.errors import InputError
from meshwright.notes import note
from meshwright.parsing import token_budget
from meshwright.planner import Plan, Question
from meshwright.recipes.format_override import format_override
from meshwright.recipes.types import Recipe, field_value, recipe_fields

if TYPE_CHECKING:
    from meshwright.frameworks.file_import import ImportedFile
    from meshwright.planner import Ranking


@verb(requests.Recommend)
def recommend(request: requests.Recommend) -> Plan:
    """Return the plan for a model on a cluster: recipe, layout, memory, speed and findings."""
    job = named_job(request, request.model, request.train_model)
    if job is None:
        for name, value in (("gpus", request.gpus), ("goal", request.goal)):
            if value is None:
                fix = ("--gpus 8xH100",) if name == "gpus" else GOAL_FIX
                raise InputError("required for a model", field=name, fix=fix)
        question = question_for(request, typed_model(request.model), *_given(request), request.benchmark)
    else:
        question = job_question(request, job)
    price_for(request, question), token_budget(request.tokens)  # refused before the search
    recipe = None if job is None else job.on(question.engine)
    found = _with_counted_data(plan_of_length(question, recipe, request), request, recipe)
    if request.save:
        from meshwright.api.catalogues import save_recipe  # 10 ms that other recommendations save

        lost = () if job is None else not_saved(job, question.engine)
        save_recipe(found.repaired or found, request.save, _comments(lost, question))  # what its commands run
        _note_saved(found, request.save)
        if lost:
            note(f"not in {request.save}, as a recipe has no field for them: {', '.join(lost)}; {_keeps(found)}")
    return _without_figures_if_refused(with_budget(found, request))


def _note_saved(plan: Plan, path: str) -> None:
    """Say what was written: the plan, or its repair where the commands run that, with every field that it changes.

    A repair that replaces the user's settings is not made by itself: the saved recipe has their errors and warnings.
    """
    without = f"; the repair is not in it: {' '.join(plan.repair.overrides)}" if plan.repair is not None else ""
    if plan.ok:
        if plan.repaired is None:
            note(f"wrote {path}: the recipe of this plan{without}")
            return
        changed = (
            f"{format_override(key, new)} in place of {format_override(key, old).partition('=')[2]}"
            for key in recipe_fields()
            if (old := field_value(plan.recipe, key)) != (new := field_value(plan.repaired.recipe, key))
        )
        what = "what the commands of this answer run, with the repair"
        note(f"wrote {path}: {what}, which differs from the plan above: {', '.join(changed)}")
        return
    note(f"wrote {path}: it has your settings and the errors of this answer{without}")


def _comments(lost: Sequence[str], question: Question) -> list[str]:
    """Return the lines above a saved recipe: what it does not have of the user's file, and what was assumed."""
    file = " ".join(question.recipe_words[:1])
    assumed = [f"assumed: {one.message}" for one in question.assumed if one.field.startswith("architecture.")]
    return [*(f"not in this recipe, of {file}: {one}" for one in lost), *assumed]


def _keeps(plan: Plan) -> str:
    """Return how the settings of a file are kept that a recipe has no field for."""
    return f"exporting or launching {' '.join(plan.question.recipe_words[:1])} itself keeps them"


def _with_counted_data(plan: Plan, request: requests.Recommend, recipe: Recipe | None) -> Plan:
    """Return the plan with what the user's data adds; a repair that its steps need is planned too."""
    found = with_own_data(plan)
    if found.repair is None or found.repair == plan.repair:
        return found
    steps = steps_counter(plan.question, recipe, request)
    other = planner.replanned(found, plan.question, overrides_of(plan, request), recipe, steps)
    return found if other is None else planner.with_replanned(found, other)


def search_command(plan: Plan) -> str:
    """Return the command that searches layouts for the training of a recipe's or a file's estimate."""
    typed = [one for one in plan.changes if one.why.startswith("requested") and not one.field.startswith("layout.")]
    return planner.command_for_target(plan.question, "plan", [format_override(one.field, one.new) for one in typed])


def _given(request: requests.Recommend) -> tuple[str, str | int]:
    return str(request.goal), request.gpus if request.gpus is not None else ""


@verb(requests.Plan)
def plan(request: requests.Plan) -> Ranking:
    """Return the fastest plans of all legal layouts for a model or recipe, and why others were dropped."""
    job = named_job(request, request.target, request.model)
    if job is None:
        model, goal = model_and_goal(str(request.target), request.goal)
        if request.gpus is None:
            raise InputError("required to plan a model without a recipe", field="gpus", fix=("--gpus 8xH100",))
        question, recipe = question_for(request, model, goal or stated_goal(model), request.gpus), None
    else:
        question = job_question(request, job)
        recipe = job.on(question.engine)
    price_for(request, question), token_budget(request.tokens)  # refused before the search
    found = planner.rank_layouts(question, request.overrides, request.top, request.everything, recipe)
    plans = tuple(with_budget(one, request) for one in found.plans)
    rejected = errors_left(job, next(iter(plans), None))
    return msgspec.structs.replace(found, plans=plans, rejected=rejected)


@verb(requests.Estimate)
def estimate(request: requests.Estimate) -> Plan:
    """Return the estimate of exactly this layout: the recipe's own with overrides, nothing searched."""
    return _without_figures_if_refused(_estimated(request))


def _without_figures_if_refused(found: Plan) -> Plan:
    """Return a plan whose layout cannot be built without the figures that its arithmetic gives."""
    return found if found.exists else msgspec.structs.replace(found, estimate=found.estimate.refused())


def _estimated(request: requests.Estimate) -> Plan:
    job = named_job(request, request.target, request.model)
    if job is not None:
        question = job_question(request, job)
        price_for(request, question), token_budget(request.tokens)
        if job.imported is not None and question.engine == job.engine:
            return _plan_of_file(request, question, job.imported)
        found = planner.plan_fixed(question, job.on(question.engine), request.overrides)
        found = msgspec.structs.replace(found, findings=(*errors_left(job, found), *found.findings))
        return with_budget(with_own_data(found), request)
    question = model_question(request)
    if models.is_path(question.model_ref):  # it has no recipe whose layout could be estimated: as dryrun and check do
        return with_budget(_estimated_as_recommended(question, request), request)
    return with_budget(with_own_data(planner.plan_fixed(question, None, request.overrides)), request)


def _estimated_as_recommended(question: Question, request: requests.Estimate) -> Plan:
    """Return the estimate of the layout that is recommended for a user's model with these overrides."""
    sized = planner.recommend(question, request.overrides)
    found = planner.plan_fixed(question, own_recipe(sized), request.overrides)
    if sized.exists:
        what = "the layout is the recommended one with your overrides"
    else:
        what = f"no layout can have your overrides; this one is that of {sized.base.name} with them"
    note(f"{request.target}: {what}; layout.KEY=VALUE sets another")
    if found.repair is not None and sized.repair is not None:  # typed, it gives another recommended layout
        found = msgspec.structs.replace(found, repair=sized.repair)
    return with_own_data(found)


def _plan_of_file(request: requests.Estimate, question: Question, imported: ImportedFile) -> Plan:
    """Return the estimate of another framework's file as that framework runs it, with the findings of check."""
    case = planner.case_of(imported.checked.recipe, imported.model, imported.cluster, question.engine)
    if question.calibration is not None:
        case = case.replace(calibration=question.calibration)
    if question.mtbf_hours is not None:
        case = case.replace(mtbf_hours=question.mtbf_hours)
    return Plan(
        question=question,
        base=imported.recipe,
        recipe=imported.recipe,
        match="exact",
        case=case,
        estimate=costs.estimate(case),
        changes=(),
        findings=imported.checked.findings,
        repair=imported.checked.repair,
    )
