"""The dry run: the engine's own step at full size on tensors without data; imports torch inside the verb."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright import clusters
from meshwright.api.resolve import recipe_from
from meshwright.clusters import Cluster
from meshwright.errors import InputError, MeshwrightError
from meshwright.planner import Plan
from meshwright.recipes import overrides as override
from meshwright.recipes.types import Recipe
from meshwright.serialize import SCHEMA

if TYPE_CHECKING:
    from meshwright.dryrun.types import DryRun

Progress = Callable[[str], None]  # gets a line for each part of the work

NEEDED = ("torch", "transformers")
MEMORY = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "overhead", "total", "capacity")
BULKY = ("timeline", "placement")
DIGITS = 6  # after the point: a GiB has 1e9 bytes


def dryrun(
    target: str | Recipe,
    *,
    gpus: str | int | None = None,
    exact: bool = False,
    processes: int | None = None,
    overrides: Sequence[str] = (),
    progress: Progress | None = None,
) -> DryRun:
    """Executes a recipe's step at full size without GPUs: memory, FLOPs and traffic of every kind of rank.

    `exact` traces every layer instead of replaying like ones.
    """
    found = target if isinstance(target, Recipe) else recipe_from(target)
    asked = override.apply(found, list(overrides))
    cluster = clusters.cluster(str(gpus) if gpus is not None else asked.cluster)
    return _proven(asked, cluster, exact, processes, progress)


def prove_plan(plan: Plan, *, exact: bool = False, progress: Progress | None = None) -> DryRun:
    """The dry run of the layout that a recommendation picked, on the cluster it was asked for."""
    refuse_other_engines(plan.question.engine)
    return _proven(plan.recipe, plan.question.cluster, exact, None, progress)


def refuse_other_engines(engine: str) -> None:
    """Only what our own engine will run can be executed here."""
    if engine != "meshwright":
        reason = "a dry run executes our own engine and says nothing about another"
        raise InputError(reason, field="engine", value=engine, fix=("--engine meshwright", "without --dry-run"))


def _proven(recipe: Recipe, cluster: Cluster, exact: bool, processes: int | None, progress: Progress | None) -> DryRun:
    _refuse_without_torch()
    if processes is not None and processes < 1:
        raise InputError("must be at least 1", field="processes", value=processes)
    from meshwright.dryrun import cpu_budget, run

    cpu_budget.require_memory(recipe, cluster, processes)
    try:
        return run.dry_run(recipe, cluster, exact=exact, processes=processes, progress=progress or (lambda _: None))
    except MeshwrightError:
        raise
    except Exception as error:
        from meshwright.engine.faults import explain
        from meshwright.engine.rank_env import Process

        raise explain(error, Process()) from error


def _refuse_without_torch() -> None:
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        reason = f"a dry run needs {' and '.join(missing)}, which this Python does not have"
        raise InputError(reason, field="dryrun", fix=('pip install "meshwright[train]"',))


def dryrun_to_dict(proof: DryRun, *, brief: bool = False) -> dict[str, Any]:
    """The dry run's object: what the worst rank needs, and every rank; `brief` leaves timelines and placements out."""
    ranks = [{**r, "peak": _peak(r)} for r in msgspec.to_builtins(proof.ranks)]
    worst = ranks[proof.worst]
    answer = {
        "schema": SCHEMA,
        "recipe": proof.recipe,
        "model": proof.model,
        "cluster": proof.cluster,
        "world": proof.world,
        "fits": proof.fits,
        "memory_gib": {name: proof.memory_gib[name] for name in MEMORY},
        "estimate_gib": dict(proof.estimate_gib),
        "difference_gib": proof.difference_gib,
        **{name: worst[name] for name in ("peak", "phases", "flops", "collectives", "holders", *BULKY)},
        "ranks": ranks,
        "versions": dict(proof.versions),
        "cpu_s": proof.cpu_s,
        "wall_s": proof.wall_s,
    }
    for holder in (answer, *ranks) if brief else ():
        for name in BULKY:
            del holder[name]
    rounded: dict[str, Any] = _rounded(answer)
    return rounded


def _peak(rank: dict[str, Any]) -> dict[str, Any]:
    named = {"phase": rank.pop("peak_phase"), "at": rank.pop("peak_at")}
    return {"rank": rank["rank"], **named, **{name: rank[name] for name in ("allocated_gib", "reserved_gib")}}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list | tuple) else value
