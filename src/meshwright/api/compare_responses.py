"""The JSON of a comparison."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from meshwright import clusters, planner
from meshwright.api import requests, run_comparison
from meshwright.api.compared_sides import Limitation, Side
from meshwright.api.engine_configs import CONFIGS
from meshwright.api.plan_responses import ChangePart, Contract, PlanLayout, contract_part
from meshwright.api.prices import price_for
from meshwright.api.ranked_sides import Comparison, answer_of, reasons_for
from meshwright.api.resolve import assumed_in
from meshwright.api.responses import Estimate, Finding, Part, Response, copied, estimate_part, finding_parts
from meshwright.api.run_comparison import ComparedRun, Difference, RunComparison, RunSide, differences
from meshwright.display import duration, plural
from meshwright.frameworks import UnmappedField


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
        answer=answer_of(found),
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
        findings=finding_parts(
            [*side.refused, *(f for f in (plan.findings if plan else ()) if f.severity != "advice")]
        ),
        cannot=side.cannot,
        lost=side.lost,
        error=side.error or side.export_error or next((one.message for one in side.refused), ""),
        sized=side.sized,
        reasons=[
            *reasons_for(side, best),
            *(_sizing_reason(side) if found.of == "targets" else ()),
            *_days_and_cost(side, found),
            *(["the file is for it: nothing to convert"] if side.name == found.own else []),
        ],
    )


def _sizing_reason(side: Side) -> list[str]:
    """Return whether a target's layout is its own or was chosen for the GPUs."""
    return ["a model: sized to the GPUs as recommend does"] if side.sized else ["a recipe or file, as it is"]


def _days_and_cost(side: Side, found: Comparison) -> list[str]:
    """Return the days and the cost of a side's own steps, where clusters differ or have a price."""
    plan, clusters_of = side.plan, [one.plan.question.cluster for one in found.sides if one.plan is not None]
    if plan is None or not side.ok or not plan.has_length:
        return []
    here = plan.question.cluster
    if here.price is None and all(one == here for one in clusters_of):
        return []
    price = price_for(requests.Estimate(target=side.name), plan.question)
    spent = planner.budget(plan.case, plan.estimate, None, price)
    if spent is None:
        return []
    others = {planner.step_tokens(one.plan.case) for one in found.sides if one.plan is not None}
    tokens = f" of {planner.step_tokens(plan.case):,} tokens" if len(others) > 1 else ""
    text = f"{plural(spent.steps, 'step')}{tokens} take {duration(spent.days)} on {plan.question.cluster}"
    if spent.cost is not None:
        return [f"{text} and cost {spent.cost:,.0f} {spent.currency}".rstrip()]
    is_priced = any(one.price is not None for one in clusters_of)
    return [f"{text}; its cost is unknown: price = PRICE in its cluster file adds it" if is_priced else text]
