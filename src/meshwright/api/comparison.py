"""Compare one training on several engines, several recipes and files, or the runs of several trainings."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

import msgspec

from meshwright import frameworks, launch, planner
from meshwright.api import requests
from meshwright.api.argument_names import recipe_key
from meshwright.api.compared_sides import Limitation, Side
from meshwright.api.engine_configs import CONFIGS, exported_for
from meshwright.api.export_findings import framework_findings
from meshwright.api.file_errors import errors_left
from meshwright.api.inputs import choice, command_words, fields_of
from meshwright.api.planning import estimate
from meshwright.api.questions import job_question, model_question, named_job
from meshwright.api.ranked_sides import Comparison, ranked
from meshwright.api.run_comparison import RunComparison, compared_runs, is_run, not_all_runs
from meshwright.api.targets import correction
from meshwright.api.verb_function import verb
from meshwright.clusters import is_cluster_file
from meshwright.errors import InputError, MeshwrightError
from meshwright.frameworks import UnmappedField
from meshwright.notes import note
from meshwright.planner import Plan, Question
from meshwright.recipes.capabilities import CAPABILITIES
from meshwright.recipes.types import ENGINES, Recipe, recipe_fields
from meshwright.rules import Finding as RuleFinding
from meshwright.stages import stage

COMPILED = "kernels.compile=true"
OF_PIPELINES = ("layout.vp", "layout.pp_schedule")
"""Settings without a meaning on an engine without pipelines, which the limitation of layout.pp covers."""


@verb(requests.Compare)
def compare(request: requests.Compare) -> Comparison | RunComparison:
    """Return one training on several engines, or several recipes, files, models or runs, side by side and ranked."""
    targets = (request.target, *request.more)
    if any(is_run(one) for one in targets):
        return _of_runs(request, targets)
    if described := [one for one in map(str, targets[1:]) if is_cluster_file(one)]:
        reason = "describes a cluster: compare plans on one, size compares several"
        given: dict[str, Any] = {
            "model": request.target,
            "goal": request.goal or "pretrain",
            "gpu": ",".join(described),
        }
        given |= {name: getattr(request, name) for name in ("seq", "calibration", "overrides")}
        size = shlex.join(["meshwright", "size", *command_words(requests.Size, given)])
        fixes = (size, f"--gpus {described[0]}")
        raise InputError(reason, field="target", value=described[0], fix=fixes)
    engines = _engines(request.engines)
    if len(targets) == 1:
        sides, own = _on_engines(request, engines or ENGINES)
        _note_calibration(sides)
        return Comparison("engines", sides, ranked(sides, own), own)
    if engines is not None and len(engines) > 1:
        reason = "compare one target on several engines, or several targets on one"
        one = command_words(requests.Compare, msgspec.structs.asdict(request) | {"more": ()})
        fix = (f"--engines {engines[0]}", shlex.join(["meshwright", "compare", *one]))
        raise InputError(reason, field="engines", value=request.engines, fix=fix)
    sides = tuple(_side(request, target, engines[0] if engines else None) for target in targets)
    _note_calibration(sides)
    return Comparison("targets", sides, ranked(sides))


def _note_calibration(sides: Sequence[Side]) -> None:
    """Note whether the user's calibration applies, and to which engines its runs do not belong.

    It is applied to all sides: a comparison of calibrated with other estimates would rank the calibration.
    """
    questions = [one.plan.question for one in sides if one.plan is not None]
    for question in questions[:1] if questions and questions[0].calibration is not None else ():
        machine = question.calibration.machine
        ran = () if machine is None else machine.engines
        others = [one.engine for one in questions if ran and one.engine not in ran]
        known = next((one.engine for one in questions if one.engine not in others), question.engine)
        for text in planner.calibration_notes(question.calibration, question.cluster.gpu, known):
            note(text)
        if others and known not in others:
            names = ", ".join(dict.fromkeys(others))
            note(f"the calibration applies to all sides; its runs are of {', '.join(ran)}: {names} may differ")


def _of_runs(request: requests.Compare, targets: Sequence[str | Recipe]) -> RunComparison:
    """Return runs side by side; options that change an estimate are refused, because nothing is estimated."""
    if not all(is_run(one) for one in targets):
        raise not_all_runs(targets)
    given = {name: getattr(request, name) for name in ("engines", "gpus", "goal", "seq", "calibration", "overrides")}
    for name, value in given.items():
        if value:
            shown = " ".join(value) if name == "overrides" else value
            reason = "has no effect on runs: their logs are compared as they are"
            raise InputError(
                reason, field=name, value=shown, fix=(f"without {shown if name == 'overrides' else f'--{name}'}",)
            )
    return RunComparison(compared_runs([str(one) for one in targets]))


def _engines(text: str | None) -> tuple[str, ...] | None:
    """Return the engines of a comma-separated list, or all of them; None if there is no list."""
    if text is None:
        return None
    names = [one.strip() for one in text.split(",") if one.strip()]
    if not names or "all" in [one.lower() for one in names]:
        return ENGINES
    field = next(one for one in fields_of(requests.Estimate) if one.name == "engine")
    found: dict[str, str] = {}
    for at, one in enumerate(names):
        try:
            found.setdefault(choice(field, one).value, one)
        except InputError as error:
            lists = (",".join((*names[:at], instead, *names[at + 1 :])) for instead in error.fix)
            fix = tuple(f"--engines {listed}" for listed in lists)
            raise InputError(error.reason, field="engines", value=one, fix=fix) from None
    return tuple(found)


def _on_engines(request: requests.Compare, engines: Sequence[str]) -> tuple[tuple[Side, ...], str]:
    """Return the same contract on each engine, in the layout that is best there, and the engine the target is for."""
    asked = requests.Estimate(**_shared(request), target=request.target)
    job = named_job(asked, request.target, request.model)
    question = model_question(asked) if job is None else job_question(asked, job)
    own = job.engine if job is not None and job.imported is not None else ""
    recipe = None if job is None else job.recipe
    sides = [_on_engine(question, recipe, one, request.overrides, is_own=one == own) for one in engines]
    plans = [one.plan for one in sorted(sides, key=lambda one: one.name != own) if one.plan is not None]
    if errors := errors_left(job, next(iter(plans), None)):  # what is ranked would be another training
        return tuple(Side(one.name, error=correction(errors), refused=errors) for one in sides), own
    if job is not None and job.no_model:
        sides = [Side(one.name, error=job.no_model) if one.name == ENGINES[0] else one for one in sides]
    return tuple(sides), own


def _on_engine(question: Question, recipe: Recipe | None, engine: str, overrides: Sequence[str], is_own: bool) -> Side:
    """Return a job on one engine, in the layout that `recommend --engine` gives it there.

    The engine that the file is for has its config, also if none could be written for it, such as for a custom model.
    """
    stage(f"compare: planning on {engine}")
    on: Question = msgspec.structs.replace(question, engine=engine)
    moved = None if recipe is None else planner.moved_to(recipe, engine)
    cannot = () if moved is None else _limitations(moved, on)
    try:
        plan = planner.recommend(on, overrides, moved)
    except MeshwrightError as error:
        return Side(engine, error=error.reason, cannot=cannot)
    if moved is None:
        cannot = _limitations(plan.recipe, on)
    lost, refused, why = _exported(plan, engine)
    side = Side(engine, plan, cannot=cannot, lost=lost, export_error="" if is_own else why, refused=refused)
    return side if moved is not None or engine == ENGINES[0] or not side.ok else _compiled(side, on, overrides)


def _compiled(side: Side, on: Question, overrides: Sequence[str]) -> Side:
    """Return a model on another engine with compiled blocks, as ours has them, if it is faster and its config can."""
    if side.plan is None or "kernels.compile" in map(recipe_key, overrides):
        return side
    faster = next((one.overrides for one in side.plan.suggestions if one.title == planner.FASTER_STEP), ())
    for tried in ((faster,) if COMPILED in faster else ()) + ((COMPILED,),):
        other = _with_overrides(side, on, overrides, tried)
        if other is not None and other.rate > side.rate:
            return other
    return side


def _with_overrides(side: Side, on: Question, overrides: Sequence[str], more: Sequence[str]) -> Side | None:
    """Return a side with more overrides; None if the engine or its config does not take them."""
    try:
        plan = planner.recommend(on, (*overrides, *more))
    except MeshwrightError:
        return None
    keys = {text.partition("=")[0] for text in more}
    lost, refused, why = _exported(plan, side.name)
    ignored = keys & {*(one.field for one in lost), *(one.field for one in _limitations(plan.recipe, on))}
    if not plan.ok or refused or why or ignored:
        return None
    reason = "compiled, as every engine that can is compared"
    changes = tuple(msgspec.structs.replace(c, why=reason) if c.field in keys else c for c in plan.changes)
    return Side(side.name, msgspec.structs.replace(plan, changes=changes), cannot=side.cannot, lost=lost)


def _limitations(base: Recipe, on: Question) -> tuple[Limitation, ...]:
    """Return the settings of a job that an engine refuses or ignores; one that turns something off asks for nothing."""
    case = planner.case_of(base, on.model, on.cluster, on.engine)
    keys = {info.flat: key for key, info in recipe_fields().items()}
    found = []
    for row in CAPABILITIES:
        value = getattr(case, row.field, None)
        if row.harmless or row.field not in keys or value is False or not bool(row.unsupported(case)):
            continue
        ignored = on.engine in row.instead
        instead = row.what_runs(case) if ignored else None
        names = row.runs.get(on.engine, ()) if row.rule.endswith(".supported") else ()  # one of several is chosen
        why = row.why.get(on.engine, f"it runs {', '.join(map(str, names))}" if names else row.cause)
        effect = "ignored" if ignored else "refused"
        found.append(Limitation(keys[row.field], value, effect, instead, why))
    refused = {one.field for one in found if one.effect == "refused"}
    return tuple(one for one in found if one.field not in OF_PIPELINES or "layout.pp" not in refused)


def _exported(plan: Plan, engine: str) -> tuple[tuple[UnmappedField, ...], tuple[RuleFinding, ...], str]:
    """Return what the engine's framework has no key for, the errors of its config, and why it has none at all."""
    if engine not in CONFIGS or not plan.exists:
        return (), (), ""
    try:
        recipe = frameworks.in_folder(plan.recipe, engine)  # weights to download refuse no engine
        written = exported_for(engine, recipe, plan.case.model, plan.question.cluster)
    except InputError as error:
        return (), (), error.reason
    theirs = frameworks.framework(written.framework)
    if number := launch.lost_number(plan, theirs):
        return written.unmapped, (), number
    found = framework_findings(theirs, written, plan.case.model, plan.question.cluster)
    return written.unmapped, tuple(one for one in found if one.severity == "error"), ""


def _side(request: requests.Compare, target: str | Recipe, engine: str | None) -> Side:
    """Return one target: a recipe or file as it is, a model in the layout that `recommend` gives it on the GPUs."""
    name = target if isinstance(target, str) else target.name
    asked = requests.Estimate(**_shared(request), target=target, engine=engine)
    if not isinstance(target, str) or named_job(asked, target, request.model) is not None:
        return Side(name, estimate.handle(asked))
    question = model_question(asked)
    try:
        return Side(name, planner.recommend(question, request.overrides), sized=True)
    except InputError as error:
        if error.field != "gpus":  # only a cluster that this model cannot use is a result
            raise
        return Side(name, error=error.reason, sized=True)


def _shared(request: requests.Compare) -> dict[str, Any]:
    names = ("gpus", "goal", "seq", "framework", "model", "overrides", "calibration")
    return {name: getattr(request, name) for name in names}
