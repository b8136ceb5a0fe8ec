"""The dry run: the engine's step at full size on fake tensors. Imports torch only when it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from meshwright import clusters, costs, extras, rules
from meshwright.api import run_requests as requests
from meshwright.api.recipe_cluster import cluster_for
from meshwright.api.resolve import assumed_in
from meshwright.api.responses import MemoryGib, Part, Response
from meshwright.api.targets import Job, job_for
from meshwright.api.verb_function import verb
from meshwright.clusters import Cluster
from meshwright.dryrun.types import Collective, DryRun, Holder, Moment, OtherEngine, Placement
from meshwright.errors import InputError, MeshwrightError
from meshwright.models import find
from meshwright.planner import Plan, as_overrides, case_of, find_repair, with_fastest_micro_batch
from meshwright.recipes import overrides as override
from meshwright.recipes.case import Case, model_of
from meshwright.recipes.engine_models import require_traced
from meshwright.recipes.types import ENGINES, Recipe, field_value, recipe_fields
from meshwright.rules import RefusedError

Progress = Callable[[str], None]  # called with a line per stage

DIGITS = 6  # decimals of a GiB: single bytes do not matter


@verb(requests.DryRun, name="dry_run")
def dryrun(request: requests.DryRun) -> DryRun:
    """Execute a recipe's step at full size without GPUs: memory, FLOPs and traffic of every distinct rank."""
    options = {"framework": request.framework, "model": request.model}
    job = job_for(request.recipe, request.goal, request.gpus, request.overrides, **options)
    kept, auto = override.split_auto(request.overrides)
    recipe = override.apply(job.runnable(), kept)
    cluster = clusters.cluster(cluster_for(recipe, request.gpus, job.content))
    if auto:
        recipe = with_fastest_micro_batch(Case(recipe, model_of(recipe), cluster))
    _refuse_broken(recipe, cluster, request.overrides)
    found = _execute(recipe, cluster, request.exact, request.processes, request.progress)
    return msgspec.structs.replace(found, other_engine=other_engine(job, kept, recipe, cluster))


def _refuse_broken(recipe: Recipe, cluster: Cluster, overrides: Sequence[str]) -> None:
    """Raise RefusedError if rules other than memory's refuse the recipe, with one repair: of the layout, if one does.

    The engine refuses it too, after torch is imported; only a search knows which layout is as fast.
    """
    case = Case(recipe, model_of(recipe), cluster, memory_of=costs.memory)
    errors = [one for one in rules.check(case, ("error",)) if not one.rule.startswith("memory.")]
    if errors:
        typed = {recipe_fields()[key].flat for key in override.requested(recipe, override.split_auto(overrides)[0])}
        raise RefusedError(errors, repair=as_overrides(find_repair(case, typed)))


def other_engine(job: Job, overrides: Sequence[str], executed: Recipe, cluster: Cluster) -> OtherEngine | None:
    """Return the engine that the target is for, with its own estimate, if that is not ours."""
    if job.engine == ENGINES[0]:
        return None
    own = override.apply(job.recipe, overrides)
    estimate = costs.estimate(case_of(own, job.model, cluster, job.engine))
    keys = [key for key in recipe_fields() if field_value(own, key) != field_value(executed, key)]
    return OtherEngine(
        engine=job.engine,
        changed=tuple(f"{key} {field_value(own, key)} → {field_value(executed, key)}" for key in keys),
        estimate_gib=float(estimate.memory.total),
        capacity_gib=float(estimate.memory.capacity),
        fits=bool(estimate.fits),
        fit=estimate.fit,
    )


def dryrun_plan(plan: Plan, *, exact: bool = False, progress: Progress | None = None) -> DryRun:
    """Execute the layout of a plan on its cluster."""
    require_own_engine(plan.question.engine)
    return _execute(plan.recipe, plan.question.cluster, exact, None, progress)


def require_own_engine(engine: str) -> None:
    """Raise InputError for an engine other than ours, whose code cannot be executed here, or if ours is missing."""
    if engine != "meshwright":
        reason = "a dry run executes our engine and does not apply to another"
        raise InputError(reason, field="engine", value=engine, fix=("--engine meshwright", "without --dry-run"))
    extras.require("dryrun", *extras.ENGINE)


def _execute(recipe: Recipe, cluster: Cluster, exact: bool, processes: int | None, progress: Progress | None) -> DryRun:
    require_traced(find(recipe.model), recipe.goal, str(cluster))
    extras.require("dryrun", *extras.ENGINE)
    from meshwright.dryrun import cpu_budget, run
    from meshwright.engine.warning_filters import no_needless_warnings

    no_needless_warnings()
    cpu_budget.require_memory(recipe, cluster, processes)
    try:
        return run.dry_run(recipe, cluster, exact=exact, processes=processes, progress=progress or (lambda _: None))
    except (MeshwrightError, ImportError):
        raise
    except Exception as error:
        from meshwright.engine.faults import explain
        from meshwright.engine.rank_env import Process

        raise explain(error, Process()) from error


class Peak(Part, frozen=True, kw_only=True):
    """When a rank's memory is highest."""

    rank: int
    phase: str
    at: str
    allocated_gib: float
    reserved_gib: float


class RankPart(Part, frozen=True, kw_only=True):
    """What one rank computes, sends and holds in a step."""

    rank: int
    pp_rank: int
    represents: Sequence[int]
    layers: Sequence[int]
    memory_gib: Mapping[str, float]
    allocated_gib: float
    reserved_gib: float
    phases: Mapping[str, Mapping[str, float]]
    timeline: Sequence[Moment] | UnsetType = UNSET
    holders: Sequence[Holder]
    flops: Mapping[str, float]
    collectives: Sequence[Collective]
    placement: Sequence[Placement] | UnsetType = UNSET
    traced: str
    exact: bool
    cpu_s: float
    peak: Peak


class DryRunResponse(Response, frozen=True, kw_only=True):
    """The memory of the worst rank, and every distinct rank."""

    other_engine: OtherEngine | UnsetType = UNSET  # ours was executed in its place
    recipe: str
    model: str
    cluster: str
    world: int
    fits: bool
    memory_gib: MemoryGib
    estimate_gib: Mapping[str, float]
    difference_gib: Mapping[str, float]
    peak: Peak
    phases: Mapping[str, Mapping[str, float]]
    flops: Mapping[str, float]
    collectives: Sequence[Collective]
    holders: Sequence[Holder]
    timeline: Sequence[Moment] | UnsetType = UNSET
    placement: Sequence[Placement] | UnsetType = UNSET
    ranks: Sequence[RankPart]
    versions: Mapping[str, str]
    cpu_s: float
    wall_s: float
    assumed: Sequence[clusters.Assumption] = ()

    @property
    def ok(self) -> bool:
        """Return whether it fits: by the estimate, if it is for an engine that was not executed."""
        return self.fits if self.other_engine is UNSET else self.other_engine.fits


def dryrun_response(found: DryRun, request: requests.DryRun | None = None, *, brief: bool = False) -> DryRunResponse:
    """Return the response of dryrun; `brief` leaves out timelines and placements."""
    ranks = [_rank(one, brief) for one in found.ranks]
    worst = ranks[found.worst]
    shared = ("peak", "phases", "flops", "collectives", "holders", "timeline", "placement")
    response: DryRunResponse = rounded(
        DryRunResponse(
            other_engine=found.other_engine or UNSET,
            recipe=found.recipe,
            model=found.model,
            cluster=found.cluster,
            world=found.world,
            fits=found.fits,
            memory_gib=MemoryGib(**{name: found.memory_gib[name] for name in MemoryGib.__struct_fields__}),
            estimate_gib=found.estimate_gib,
            difference_gib=found.difference_gib,
            **{name: getattr(worst, name) for name in shared},
            ranks=ranks,
            versions=found.versions,
            cpu_s=found.cpu_s,
            wall_s=found.wall_s,
            assumed=(*(assumed_in(request.gpus) if request is not None else ()), *found.assumed),
        )
    )
    return response


def _rank(one: Any, brief: bool) -> RankPart:
    values = msgspec.structs.asdict(one)
    phase, at = values.pop("peak_phase"), values.pop("peak_at")
    peak = Peak(rank=one.rank, phase=phase, at=at, allocated_gib=one.allocated_gib, reserved_gib=one.reserved_gib)
    if brief:
        values |= {"timeline": UNSET, "placement": UNSET}
    return RankPart(**values, peak=peak)


def rounded(value: Any) -> Any:
    """Return a value with the digits of an answer, in structs, maps and lists too."""
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, msgspec.Struct):
        return type(value)(**{name: rounded(one) for name, one in msgspec.structs.asdict(value).items()})
    if isinstance(value, Mapping):
        return {name: rounded(one) for name, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list | tuple) else value
