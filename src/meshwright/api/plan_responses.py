"""The responses of recommend, plan and estimate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, UnsetType

from meshwright import clusters, costs, launch, planner
from meshwright.api import requests
from meshwright.api.dataset_length import dataset_notes
from meshwright.api.own_data_plans import has_own_data
from meshwright.api.responses import (
    Estimate,
    FieldKind,
    Finding,
    MemoryGib,
    Part,
    Response,
    copied,
    estimate_part,
    finding_parts,
)
from meshwright.api.run_length import budget_for
from meshwright.planner import Plan

if TYPE_CHECKING:
    from meshwright.planner import Ranking
    from meshwright.rules import Finding as RuleFinding


class QuestionPart(Part, frozen=True, kw_only=True):
    """What was requested."""

    model: str
    gpus: str
    goal: str
    seq_length: int
    engine: str
    assumed: Sequence[clusters.Assumption] = ()


class BaseRecipe(Part, frozen=True, kw_only=True):
    """The shipped recipe that a plan starts from."""

    name: str
    match: str | UnsetType = UNSET
    goal: str
    benchmark: bool
    made_for: str
    approach: str | UnsetType = UNSET


class PeftPart(Part, frozen=True, kw_only=True):
    """The adapter of a fine-tuning."""

    method: str
    rank: int
    alpha: float


class Contract(Part, frozen=True, kw_only=True):
    """The fields that determine the trained weights."""

    seq_length: int
    global_batch_size: int
    precision: str
    optimizer: str
    lr: float
    min_lr: float
    schedule: str
    warmup_steps: int
    steps: int | None  # None for a run by epochs
    epochs: float | None
    dataset: str
    packing: bool
    peft: PeftPart | None


class PlanLayout(Part, frozen=True, kw_only=True):
    """How the training is distributed over the GPUs."""

    strategy: str
    tp: int
    pp: int
    vp: int
    cp: int
    ep: int
    etp: int
    dp_shard: int
    dp_replicate: int
    sp: bool
    micro_batch_size: int
    gradient_accumulation: int
    pp_micro_batches: int  # of one pass through the pipeline
    recompute: str
    pp_schedule: str
    stage_layers: Sequence[int]
    cp_comm: str
    offload: str
    reshard_after_forward: bool


class ChangePart(Part, frozen=True, kw_only=True):
    """A field that differs from the base recipe."""

    field: str
    old: Any = msgspec.field(name="from")
    new: Any = msgspec.field(name="to")
    kind: FieldKind
    why: str


class PlanResponse(Response, frozen=True, kw_only=True):
    """One plan."""

    question: QuestionPart
    recipe: BaseRecipe
    contract: Contract
    layout: PlanLayout
    estimate: Estimate
    changes: Sequence[ChangePart]
    findings: Sequence[Finding]
    suggestions: Sequence[planner.Suggestion] | UnsetType = UNSET
    options: Sequence[planner.Option] | UnsetType = UNSET
    repair: planner.Repair | UnsetType = UNSET
    contradiction: planner.Contradiction | UnsetType = UNSET
    published: planner.PublishedLayout | UnsetType = UNSET
    commands: Mapping[str, str]
    no_command: Mapping[str, str]
    budget: planner.Budget | UnsetType | None = UNSET
    smallest_that_fits: int | UnsetType | None = UNSET
    smallest_cluster: str | UnsetType | None = UNSET
    smallest_without_offload: str | UnsetType | None = UNSET
    reasons: Sequence[planner.Reason] | UnsetType = UNSET
    memory_by_stage_gib: Mapping[str, MemoryGib] | UnsetType = UNSET
    dry_run: Mapping[str, Any] | UnsetType | None = UNSET
    notes: Sequence[str] | UnsetType = UNSET

    @property
    def ok(self) -> bool:
        """Return whether it can start and fits."""
        # check downgrades a peak within the estimate's error in another framework's file to a warning.
        uncertain = any(f.rule == "memory.peak" and f.severity == "warning" for f in self.findings)
        fits = (self.estimate.fits or uncertain) and not any(f.severity == "error" for f in self.findings)
        return fits and (self.dry_run is UNSET or bool(self.dry_run and self.dry_run["fits"]))


class LayoutScore(Part, frozen=True, kw_only=True):
    """A layout with its memory and step time."""

    layout: Mapping[str, Any]
    step_s: float
    total_gib: float


class PlansResponse(Response, frozen=True, kw_only=True):
    """Ranked plans, layouts that trade memory for speed, and what was dropped."""

    plans: Sequence[PlanResponse]
    pareto: Sequence[LayoutScore]
    dropped: Sequence[planner.Dropped]
    searched: int
    findings: Sequence[Finding] | UnsetType = UNSET
    repair: planner.Repair | UnsetType = UNSET
    contradiction: planner.Contradiction | UnsetType = UNSET
    fitting: Sequence[LayoutScore] | UnsetType = UNSET
    notes: Sequence[str] | UnsetType = UNSET

    @property
    def ok(self) -> bool:
        """Return whether a plan can start and fits; none does of a file with errors in settings, which it needs."""
        found = () if self.findings is UNSET else self.findings
        return any(one.ok for one in self.plans) and not any(one.severity == "error" for one in found)


def plan_response(plan: Plan, request: requests.Recommend | requests.Plan | None = None) -> PlanResponse:
    """Return the response of recommend, with reasons if they were requested."""
    response = _plan_response(plan)
    more: dict[str, Any] = {"budget": budget_for(plan, request)}
    if not plan.estimate.fits or _offloads_to_fit(plan) or any(f.rule == "memory.host" for f in plan.findings):
        fitting, plain = planner.smallest_fit(plan, () if request is None else request.overrides)
        # Where none fits and the layout is illegal too, the number of GPUs is not what is wrong: see the findings.
        if fitting is not None or not _has_error_beside_memory(plan):
            more["smallest_that_fits"] = None if fitting is None else fitting.world
            more["smallest_cluster"] = None if fitting is None else str(fitting)
            more["smallest_without_offload"] = None if plain is None else str(plain)
    if isinstance(request, requests.Recommend) and request.explain:
        more["reasons"] = planner.reasons(plan)
        more["memory_by_stage_gib"] = _memory_by_stage(plan)
    return msgspec.structs.replace(response, **more)


def _has_error_beside_memory(plan: Plan) -> bool:
    return any(f.severity == "error" and f.rule.split(".")[0] != "memory" for f in plan.findings)


def _offloads_to_fit(plan: Plan) -> bool:
    """Return whether the plan uses host memory because nothing else fits, not because the user or the recipe does."""
    return bool(plan.options) and any(change.field == "layout.offload" for change in plan.changes)


def _uses_host(plan: Plan) -> bool:
    """Return whether the plan keeps state or activations in host memory."""
    return float(plan.estimate.memory.host) > 0


def _made_for(text: str) -> str:
    """Return the GPUs of a recipe, of a cluster file those that it describes."""
    if clusters.is_missing_file(text):
        return f"{text}, which is not on this machine"
    found = clusters.cluster(text)
    return str(found) if found.file else text


def _plan_response(plan: Plan) -> PlanResponse:
    question, no_command = plan.question, launch.left_out(plan)
    commands = launch.commands_of(plan, no_command)
    return PlanResponse(
        question=QuestionPart(
            model=question.model_ref,
            gpus=str(question.cluster),
            goal=question.goal,
            seq_length=plan.recipe.data.seq_length,
            engine=question.engine,
            assumed=(*question.assumed, *(clusters.host_assumed(plan.case.cluster) if _uses_host(plan) else ())),
        ),
        recipe=BaseRecipe(
            name=plan.base.name,
            match=plan.match,
            goal=plan.recipe.goal,
            benchmark=plan.recipe.benchmark,
            made_for=_made_for(plan.base.cluster),
            approach=plan.approach,
        ),
        contract=contract_part(plan),
        layout=PlanLayout(**plan.layout_dict()),
        estimate=estimate_part(plan.estimate, plan.exists),
        changes=[copied(ChangePart, c) for c in plan.changes],
        findings=finding_parts(plan.findings),
        suggestions=plan.suggestions,
        options=plan.options or UNSET,
        repair=plan.repair or UNSET,
        contradiction=plan.contradiction or UNSET,
        published=plan.published or UNSET,
        commands=commands,
        no_command=no_command,
        notes=(*_notes(plan), *launch.unavailable_engine(plan, no_command), *launch.other_speeds(plan, commands))
        or UNSET,
    )


def contract_part(plan: Plan) -> Contract:
    """Return the fields of a plan that determine the trained weights."""
    contract = plan.contract_dict()
    contract["peft"] = None if contract["peft"] is None else PeftPart(**contract["peft"])
    return Contract(**contract)


def _notes(plan: Plan) -> tuple[str, ...]:
    """Return a plan's notes, and how many samples a dataset of the user's own has."""
    return (*plan.notes, *(dataset_notes(plan.recipe, int(plan.case.dp)) if has_own_data(plan) else ()))


def estimate_response(plan: Plan, request: requests.Estimate | None = None) -> PlanResponse:
    """Return the response of estimate: a plan without what only a search gives."""
    response = _plan_response(plan)
    base = msgspec.structs.replace(response.recipe, match=UNSET, approach=UNSET)
    by_stage = _memory_by_stage(plan)
    return msgspec.structs.replace(
        response,
        recipe=base,
        suggestions=UNSET,
        published=UNSET,
        memory_by_stage_gib=by_stage,
        budget=budget_for(plan, request),
    )


def _memory_by_stage(plan: Plan) -> dict[str, MemoryGib]:
    stages = enumerate(costs.memory_by_stage(plan.case))
    parts = (*costs.PARTS, "total")
    return {str(i): MemoryGib(**{part: round(float(getattr(m, part)), 4) for part in parts}) for i, m in stages}


def plans_response(ranking: Ranking, request: requests.Plan | None = None) -> PlansResponse:
    """Return the response of plan."""
    return PlansResponse(
        plans=[plan_response(plan, request) for plan in ranking.plans],
        pareto=_scores(ranking.pareto),
        dropped=ranking.dropped,
        searched=ranking.searched,
        findings=finding_parts(found) if (found := _findings(ranking)) or ranking.blocked else UNSET,
        repair=(ranking.blocked.repair if ranking.blocked else None) or UNSET,
        contradiction=(ranking.blocked.contradiction if ranking.blocked else None) or UNSET,
        fitting=_scores(ranking.fitting) or UNSET,
        notes=(_notes(ranking.plans[0]) or UNSET) if ranking.plans else UNSET,
    )


def _findings(ranking: Ranking) -> Sequence[RuleFinding]:
    """Return what is wrong in the file that was planned, and why no layout is legal."""
    return (*ranking.rejected, *(ranking.blocked.findings if ranking.blocked else ()))


def _scores(candidates: Sequence[planner.Candidate]) -> list[LayoutScore]:
    return [copied(LayoutScore, c) for c in candidates]
