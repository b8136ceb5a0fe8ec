"""Compare one training on several engines, several recipes and files, or the runs of several trainings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from meshwright import clusters, frameworks, launch, planner
from meshwright.api import requests, run_comparison
from meshwright.api.argument_names import recipe_key
from meshwright.api.engine_configs import CONFIGS, exported_for
from meshwright.api.export_findings import framework_findings
from meshwright.api.inputs import choice, fields_of
from meshwright.api.plan_responses import ChangePart, Contract, PlanLayout, contract_part
from meshwright.api.planning import estimate
from meshwright.api.prices import price_for
from meshwright.api.questions import job_question, model_question, named_job
from meshwright.api.resolve import assumed_in
from meshwright.api.responses import Estimate, Finding, Part, Response, copied, estimate_part, finding_parts
from meshwright.api.run_comparison import (
    ComparedRun,
    Difference,
    RunComparison,
    RunSide,
    compared_runs,
    differences,
    is_run,
    not_all_runs,
)
from meshwright.api.verb_function import verb
from meshwright.costs.uncertainty import error_bands
from meshwright.display import Readable, Row, plural, titled
from meshwright.errors import InputError, MeshwrightError
from meshwright.frameworks import UnmappedField
from meshwright.notes import note
from meshwright.planner import Plan, Question
from meshwright.recipes.capabilities import CAPABILITIES
from meshwright.recipes.types import ENGINES, Recipe, recipe_fields
from meshwright.rules import Finding as RuleFinding
from meshwright.stages import stage

ONLY_SHARDING = ("accelerate", "deepspeed")  # their configs leave the training program to the user
COMPILED = "kernels.compile=true"
NEVER_RUN = "was never run on several GPUs (only on one, and with several ranks over gloo): this is an estimate"
SHOWN = 4  # fields named in a reason
MOST_ALIKE = 25.0  # per cent of speed beyond which the faster engine is ranked first, however uncertain both are

OF_PIPELINES = ("layout.vp", "layout.pp_schedule")
"""Settings without a meaning on an engine without pipelines, which the limitation of layout.pp covers."""


class Limitation(msgspec.Struct, frozen=True):
    """A setting of the job that an engine does not execute."""

    field: str
    value: Any
    effect: str  # refused or ignored
    instead: Any  # what runs in its place; None if it is refused
    why: str


class Side(Readable, msgspec.Struct, frozen=True):
    """One engine, or one recipe or file, of a comparison."""

    name: str
    plan: Plan | None = None  # None: the error says why there is none
    error: str = ""
    cannot: tuple[Limitation, ...] = ()
    lost: tuple[UnmappedField, ...] = ()
    export_error: str = ""  # why the engine's framework cannot be given this job
    refused: tuple[RuleFinding, ...] = ()  # errors that the framework's own rules find in its config
    sized: bool = False  # whether the layout was chosen for the GPUs: that of a model, not of a recipe or file

    def summary(self) -> Sequence[Row]:
        """Return the plan, or why there is none."""
        why = self.error or self.export_error
        return [
            ("Side", self.name),
            *(() if self.plan is None else self.plan.summary()),
            *titled("Error", [why] * bool(why)),
        ]

    @property
    def shape(self) -> tuple[float, ...]:
        """The sizes of the model: files of other frameworks may name the same one differently."""
        if self.plan is None:
            return ()
        model = self.plan.case.model
        return (model.num_layers, model.hidden, model.vocab, round(model.params.total / 1e6))

    @property
    def model(self) -> str:
        """The model that is trained; empty if there is no plan."""
        return "" if self.plan is None else self.plan.question.model.name

    @property
    def runs(self) -> bool:
        """Whether the training can start there; it may still need too much memory."""
        return self.plan is not None and self.plan.exists and not self.export_error and not self.refused

    @property
    def ok(self) -> bool:
        """Whether the training can run and fits there."""
        return self.runs and self.plan is not None and self.plan.ok

    @property
    def rate(self) -> float:
        """Tokens per second of the whole cluster."""
        return 0.0 if self.plan is None else float(self.plan.estimate.tokens_per_s_per_gpu) * self.plan.case.world

    @property
    def lost_contract(self) -> list[str]:
        """Fields that determine the trained weights and are lost in the framework's config."""
        kinds = {key: info.kind for key, info in recipe_fields().items()}
        made_up = ("data.dataset", "mock")  # random data is nothing to lose
        lost = [one for one in self.lost if (one.field, one.value) != made_up]
        return [one.field for one in lost if kinds.get(one.field) == "contract"]


class Comparison(Readable, msgspec.Struct, frozen=True):
    """Sides in the order of the request, and ranked."""

    of: str  # engines or targets
    sides: tuple[Side, ...]
    ranked: tuple[Side, ...]
    own: str = ""  # engine that another framework's file is for

    @property
    def answer(self) -> str:
        """Which engine or target to use, and why, in one sentence or two."""
        return _answer(self)

    def summary(self) -> Sequence[Row]:
        """Return the sides by rank, each with the reasons for it, what differs between targets, and the answer."""
        best = self.ranked[0]
        lines = [f"{rank}. {one.name}: {'; '.join(_reasons(one, best))}" for rank, one in enumerate(self.ranked, 1)]
        plans = [one.plan for one in self.sides if one.plan is not None] if self.of == "targets" else []
        differ = differences([one.recipe for one in plans]) if plans else []
        shown = [f"{one.field}: {' | '.join(map(str, one.values))}" for one in differ]
        return [*titled(self.of.capitalize(), lines), *titled("Differ", shown), ("Result", self.answer)]


@verb(requests.Compare)
def compare(request: requests.Compare) -> Comparison | RunComparison:
    """Return one training on several engines, or several recipes, files, models or runs, side by side and ranked."""
    targets = (request.target, *request.more)
    if any(is_run(one) for one in targets):
        return _of_runs(request, targets)
    engines = _engines(request.engines)
    if len(targets) == 1:
        sides, own = _on_engines(request, engines or ENGINES)
        _note_calibration(sides)
        return Comparison("engines", sides, _ranked(sides, own), own)
    if engines is not None and len(engines) > 1:
        reason = "compare one target on several engines, or several targets on one"
        fix = (f"--engines {engines[0]}", f"meshwright compare {request.target} --engines {request.engines}")
        raise InputError(reason, field="engines", value=request.engines, fix=fix)
    sides = tuple(_side(request, target, engines[0] if engines else None) for target in targets)
    _note_calibration(sides)
    return Comparison("targets", sides, _ranked(sides))


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
    return tuple(dict.fromkeys(choice(field, one).value for one in names))


def _on_engines(request: requests.Compare, engines: Sequence[str]) -> tuple[tuple[Side, ...], str]:
    """Return the same contract on each engine, in the layout that is best there, and the engine the target is for."""
    asked = requests.Estimate(**_shared(request), target=request.target)
    job = named_job(asked, request.target, request.model)
    question = model_question(asked) if job is None else job_question(asked, job)
    own = job.engine if job is not None and job.imported is not None else ""
    recipe = None if job is None else job.recipe
    sides = [_on_engine(question, recipe, one, request.overrides, is_own=one == own) for one in engines]
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


def _ranked(sides: Sequence[Side], own: str = "") -> tuple[Side, ...]:
    """Return the sides, best first: those that run, then speed beyond the uncertainty, then what is lost.

    Of engines that are about as fast, the one that the file is for needs no conversion.
    """
    fastest = max((one for one in sides if one.ok), key=lambda one: one.rate, default=sides[0])

    def order(side: Side) -> tuple[Any, ...]:
        if not side.ok:
            return (2, not side.runs, side.plan is None, bool(side.export_error), -side.rate)
        near = _about_as_fast(side, fastest)
        return (0, side.name != own, len(side.lost_contract), -side.rate) if near else (1, -side.rate)

    return tuple(sorted(sides, key=order))


def _about_as_fast(side: Side, other: Side) -> bool:
    """Return whether two speeds are ranked as equal: they differ little, and by less than their uncertainty."""
    low, high = sorted((side.rate, other.rate))
    return _within_uncertainty(side, other) and high <= low * (1 + MOST_ALIKE / 100)


def _within_uncertainty(side: Side, other: Side) -> bool:
    """Return whether two speeds differ by less than the uncertainty of their ratio.

    Errors of one engine's estimates are largely the same for both layouts; those of two engines are independent.
    """
    if side.plan is None or other.plan is None:
        return False
    if side.plan.question.engine == other.plan.question.engine:
        margin = float(error_bands().layout_gain_pct)
    else:
        margin = math.hypot(*(float(one.estimate.band.step_pct) for one in (side.plan, other.plan)))
    low, high = sorted((side.rate, other.rate))
    return high <= low * (1 + margin / 100)


class ComparedSide(Part, frozen=True, kw_only=True):
    """One engine, recipe or file: what it costs, what it cannot do, and why it is ranked where it is."""

    name: str
    rank: int
    ok: bool
    engine: str | None
    framework: str | None
    gpus: str | None
    contract: Contract | None
    layout: PlanLayout | None
    estimate: Estimate | None
    relative_speed: float | None
    changes: Sequence[ChangePart]
    findings: Sequence[Finding]
    cannot: Sequence[Limitation]
    lost: Sequence[UnmappedField]
    error: str
    reasons: Sequence[str]
    sized: bool = False


class CompareResponse(Response, frozen=True, kw_only=True):
    """Sides by rank, or runs in the order of the request; for several targets or runs, the fields that differ."""

    of: str
    targets: Sequence[str]
    answer: str
    sides: Sequence[ComparedSide]
    differences: Sequence[Difference] | UnsetType = UNSET
    runs: Sequence[ComparedRun] | UnsetType = UNSET
    assumed: Sequence[clusters.Assumption] = ()

    @property
    def ok(self) -> bool:
        """Return whether one side can run and fits; runs have run."""
        return self.of == "runs" or any(one.ok for one in self.sides)


def compare_response(found: Comparison | RunComparison, request: requests.Compare | None = None) -> CompareResponse:
    """Return the response of compare."""
    if isinstance(found, RunComparison):
        return _runs_response(found.sides)
    best = found.ranked[0]
    plans = [one.plan for one in found.sides if one.plan is not None]
    # A recipe's own cluster is not typed, but what its file leaves open decides which of several clusters is faster.
    of_files = [one for plan in plans if plan.question.cluster_ref for one in assumed_in(plan.question.cluster_ref)]
    stated = [one for plan in plans for one in plan.question.assumed if one.field != "layout.strategy"]
    assumed = dict.fromkeys((*stated, *(of_files if found.of == "targets" else ())))
    names = [one.name for one in found.sides] if found.of == "targets" else []
    return CompareResponse(
        of=found.of,
        targets=names or ([] if request is None else [str(getattr(request.target, "name", request.target))]),
        answer=_answer(found),
        sides=[_part(found, side, place, best) for place, side in enumerate(found.ranked, 1)],
        differences=differences([one.plan.recipe for one in found.sides if one.plan is not None])
        if found.of == "targets"
        else UNSET,
        assumed=list(assumed),
    )


def _runs_response(runs: Sequence[RunSide]) -> CompareResponse:
    recipes = [one.recipe for one in runs if one.recipe is not None]
    return CompareResponse(
        of="runs",
        targets=[one.figures.name for one in runs],
        answer=run_comparison.answer(runs),
        sides=[],
        differences=run_comparison.run_differences(runs) if len(recipes) == len(runs) else UNSET,
        runs=[one.figures for one in runs],
    )


def _part(found: Comparison, side: Side, rank: int, best: Side) -> ComparedSide:
    plan = side.plan
    shown = plan if side.runs or found.of == "targets" else None  # no times of what cannot run
    return ComparedSide(
        name=side.name,
        rank=rank,
        ok=side.ok,
        engine=side.name if found.of == "engines" else plan.question.engine if plan else None,
        framework=CONFIGS.get(side.name) if found.of == "engines" else None,
        gpus=None if plan is None else str(plan.question.cluster),
        contract=None if plan is None else contract_part(plan),
        layout=None if shown is None else PlanLayout(**shown.layout_dict()),
        estimate=None if shown is None else estimate_part(shown.estimate, shown.exists),
        relative_speed=side.rate / best.rate if shown is not None and shown.exists and best.rate else None,
        changes=[] if plan is None or found.of == "targets" else [copied(ChangePart, one) for one in plan.changes],
        findings=[]
        if plan is None
        else finding_parts([*side.refused, *(f for f in plan.findings if f.severity != "advice")]),
        cannot=side.cannot,
        lost=side.lost,
        error=side.error or side.export_error or next((one.message for one in side.refused), ""),
        sized=side.sized,
        reasons=[
            *_reasons(side, best),
            *(_sizing_reason(side) if found.of == "targets" else ()),
            *_days_and_cost(side, found),
            *(["the file is for it: nothing to convert"] if side.name == found.own else []),
        ],
    )


def _reasons(side: Side, best: Side) -> list[str]:
    """Return why a side is ranked where it is, in sentences."""
    if side.plan is None:
        return [f"cannot run this job: {side.error}"]
    if side.export_error:
        return [f"its config cannot express this job: {side.export_error}"]
    if side.refused:
        return [f"its framework refuses this job: {one.message}" for one in side.refused[:2]]
    errors = [one.message for one in side.plan.findings if one.severity == "error"]
    if errors:
        return [f"cannot run this job: {one}" for one in errors[:2]]
    if not side.plan.estimate.fits:
        memory = side.plan.estimate.memory
        return [f"does not fit: {float(memory.total):.1f} of {float(memory.capacity):.1f} GiB per GPU"]
    found = [_speed_reason(side, best)]
    if best.plan is not None and side.plan.estimate.band.step_pct > best.plan.estimate.band.step_pct:
        found.append(f"its estimate is less certain: ±{float(side.plan.estimate.band.step_pct):.0f} %")
    if _never_run(side):
        found.append(NEVER_RUN)
    if side.lost_contract:
        found.append(f"its config loses {_some(side.lost_contract)}, which the result depends on")
    ignored = [one.field for one in side.cannot]
    if ignored:
        found.append(f"does not execute {_some(ignored)}")
    if side.name in CONFIGS:
        needed = frameworks.weights_to_prepare(side.plan.recipe, side.plan.case.model, side.name)
        found += [needed] if needed else []
    if CONFIGS.get(side.name) in ONLY_SHARDING:
        found.append("its config covers sharding and precision: the training program is yours")
    return found


def _never_run(side: Side) -> bool:
    """Return whether a side of a comparison of engines is ours on several GPUs, which it never had."""
    return side.plan is not None and side.name == ENGINES[0] and int(side.plan.case.world) > 1


def _sizing_reason(side: Side) -> list[str]:
    """Return whether a target's layout is its own or was chosen for the GPUs."""
    return ["a model: sized to the GPUs as recommend does"] if side.sized else ["a recipe or file, as it is"]


def _days_and_cost(side: Side, found: Comparison) -> list[str]:
    """Return the days and the cost of a side's own steps, where clusters differ or engines run on one with a price."""
    plan, clusters_of = side.plan, [one.plan.question.cluster for one in found.sides if one.plan is not None]
    if plan is None or not side.ok or not plan.has_length:
        return []
    here = plan.question.cluster
    if here.price is None if found.of == "engines" else all(one == here for one in clusters_of):
        return []
    price = price_for(requests.Estimate(target=side.name), plan.question)
    spent = planner.budget(plan.case, plan.estimate, None, price)
    if spent is None:
        return []
    text = f"{plural(spent.steps, 'step')} take {spent.days:.3g} days on {plan.question.cluster}"
    if spent.cost is not None:
        return [f"{text} and cost {spent.cost:,.0f} {spent.currency}".rstrip()]
    is_priced = any(one.price is not None for one in clusters_of)
    return [f"{text}; its cost is unknown: price = PRICE in its cluster file adds it" if is_priced else text]


def _differ(sides: Sequence[Side]) -> bool:
    """Return whether targets train different models; a framework's file may name the same model differently."""
    return len({one.model for one in sides}) > 1 and len({one.shape for one in sides}) > 1


def _speed_reason(side: Side, best: Side) -> str:
    longer = best.rate / side.rate - 1
    if side is best:
        return "runs and fits, and none is faster beyond the uncertainty"
    if side.plan is not None and best.plan is not None and _differ([side, best]):
        return f"trains {side.model}, another model than {best.name}: not comparable"
    near = _within_uncertainty(side, best)
    if round(abs(longer) * 100) == 0:
        return f"is as fast as {best.name}"
    text = f"takes {abs(longer) * 100:.0f} % {'longer' if longer > 0 else 'less time'} than {best.name}"
    return f"{text}, within the uncertainty" if near else text


def _some(names: Sequence[str]) -> str:
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _rate(side: Side) -> str:
    speed = 0.0 if side.plan is None else float(side.plan.estimate.tokens_per_s_per_gpu)
    return f"{speed:,.0f} tokens/s/GPU"


def _decides(found: Comparison, best: Side, near: Sequence[Side]) -> str:
    """Return what prefers the first of several sides that are about as fast; empty if nothing does."""
    if best.name == found.own:
        return "the file is for it, so nothing has to be converted"
    loses_less = all(len(best.lost_contract) < len(one.lost_contract) for one in near)
    return f"{best.name}'s config loses less of what the result depends on" if near and loses_less else ""


def _other_criteria(found: Comparison, sides: Sequence[Side]) -> list[str]:
    """Return what a choice between equally fast sides depends on."""
    if found.of == "targets":
        plans = [one.plan.recipe for one in sides if one.plan is not None]
        fields = [one.field for one in differences(plans)]
        return [f"the fields that differ ({_some(fields)})" if fields else "nothing, no field differs"]
    lost = [f"{one.name}'s config loses {_some(one.lost_contract)}" for one in sides if one.lost_contract]
    unproven = [f"{one.name} {NEVER_RUN}" for one in sides if _never_run(one)]
    return [*lost, *unproven, "the engine that you already run needs no new setup"]


def _answer(found: Comparison) -> str:
    """Return which engine or target to use, and why, in one sentence or two."""
    best, *others = found.ranked
    if not best.ok or best.plan is None:
        return f"None of the {found.of} can run this: {_reasons(best, best)[0]} ({best.name})."
    able = [one for one in found.ranked if one.ok]
    if _differ(able):
        named = ", ".join(f"{one.name} trains {one.model}" for one in able)
        return f"None is chosen, as they train different models: {named}; compare targets of one model."
    near = [one for one in others if one.ok and _about_as_fast(one, best)]
    slower = [one for one in others if one.ok and one not in near]
    decides = _decides(found, best, near)
    text = f"Use {best.name}: {_rate(best)}"
    if slower and not near:
        text += f", {best.rate / slower[0].rate - 1:.0%} faster than {slower[0].name}"
        text += " by the estimates, within their uncertainty" if _within_uncertainty(best, slower[0]) else ""
    text += f", and its config loses {_some(best.lost_contract)}." if best.lost_contract else "."
    if near and decides:
        text += f" About as fast, within the uncertainty: {', '.join(one.name for one in near)}; {decides}."
    elif near:
        text = f"Equal within the uncertainty: {', '.join(f'{one.name} ({_rate(one)})' for one in (best, *near))}. "
        text += f"What else decides: {'; '.join(_other_criteria(found, (best, *near)))}."
    if _never_run(best) and (decides or not near):
        text += f" {best.name} {NEVER_RUN}."
    no = [one.name for one in others if not one.ok]
    return text + (f" Cannot run it: {', '.join(no)}." if no else "")
