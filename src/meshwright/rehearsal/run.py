"""Rehearses a recipe: runs every kind of rank on this machine's device and composes a step of the cluster."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from meshwright import costs
from meshwright.clusters import Cluster, Gpu
from meshwright.costs.time import step_time
from meshwright.dryrun.run import distinct, preload, validate
from meshwright.errors import InputError
from meshwright.recipes.case import Case
from meshwright.recipes.types import Recipe
from meshwright.rehearsal.compose import TimedRank
from meshwright.rehearsal.network import ClusterNetwork, Network
from meshwright.rehearsal.rank import RankResult, rehearse_rank
from meshwright.rehearsal.result import rehearsal_of
from meshwright.rehearsal.run_plan import Device, RunPlan, label_of
from meshwright.rehearsal.types import Rehearsal

BUDGET_S = 100.0  # of timed steps, over all kinds of ranks
LARGEST_ON_CPU = 2e8  # parameters of a rank
START: dict[str, Literal["fork", "spawn"]] = {"cuda": "spawn", "cpu": "fork"}  # of the process of a rank
Progress = Callable[[str], None]


def rehearse(
    recipe: Recipe,
    cluster: Cluster,
    device: Device,
    *,
    config: Any = None,
    network: Network | None = None,
    network_name: str = "",
    scale_to: Gpu | None = None,
    layers: int | None = None,
    budget_s: float = BUDGET_S,
    progress: Progress = lambda _: None,
) -> Rehearsal:
    """Run every kind of rank of a recipe on a cluster; `layers`: the most that run in each pipeline chunk."""
    start = time.monotonic()
    progress("importing torch")
    from meshwright.engine.model_families import family_of

    family = family_of(recipe)
    config = family.config_for(recipe) if config is None else config
    case = validate(recipe, family.spec_of(recipe, config), cluster)
    links = network or ClusterNetwork(case)
    slowdown = kernel_scale(case, device.gpu, scale_to)
    kinds = distinct(case)
    preload(recipe, config)
    plan = RunPlan(case, config, device, links, slowdown, kinds, layers, budget_s)
    ranks = [_run_rank(plan, kind, progress) for kind in kinds]
    return rehearsal_of(plan, ranks, network_name, scale_to if slowdown != 1 else None, time.monotonic() - start)


def kernel_scale(case: Case, here: Gpu | None, to: Gpu | None) -> float:
    """Return the factor from kernel times here to those of another GPU, by the rates of both in the cost model."""
    if here is None or to is None or here.name == to.name:
        return 1.0
    times = [
        step_time(case.rebuild(cluster=msgspec.structs.replace(case.cluster, gpu=gpu))).compute for gpu in (here, to)
    ]
    return float(times[1] / times[0])


def _run_rank(plan: RunPlan, kind: tuple[int, tuple[int, ...]], progress: Progress) -> TimedRank:
    """Run one kind of rank in a process of its own; with fewer layers if all of them do not fit the GPU."""
    from meshwright.dryrun.ranks import run_parallel

    longest = max(len(chunk) for chunk in plan.chunks[kind[0]])
    most = plan.layers_in_budget(kind[0])
    while True:
        task = plan.task(kind, most)
        ran: RankResult = run_parallel(
            rehearse_rank, [task], 1, progress, label_of, activity="rehearsing", children=START[plan.device.kind]
        )[0]
        if not ran.out_of_memory:
            return TimedRank(task, ran, plan.micro_batches)
        next_most = (longest if most is None else most) // 2
        if plan.case.is_diffusion or next_most < 1 or plan.task(kind, next_most).kept == task.kept:
            raise _too_large(plan, kind[0], max(map(len, task.kept)), longest, ran.out_of_memory)
        progress(f"out of memory with {max(map(len, task.kept))} layers: trying {next_most}")
        most = next_most


def _too_large(plan: RunPlan, rank: int, ran: int, layers: int, message: str) -> InputError:
    """Return the error of a rank of which not even the fewest layers fit this GPU, with what would fit."""
    need, layout = float(costs.memory_by_stage(plan.case)[rank].total), plan.layout
    smaller = {"layout.recompute=full": layout.recompute != "full"}
    smaller["layout.micro_batch_size=1"] = layout.micro_batch_size > 1
    doubled = 2 * layout.tp
    smaller[f"layout.tp={doubled}"] = (
        doubled <= min(plan.world, 8) and plan.world % (doubled * layout.pp * layout.cp) == 0
    )
    return InputError(
        f"a rank does not fit this GPU of {plan.device.memory_gib:.0f} GiB, not even with {ran} of its {layers} layers "
        f"({message}); all of them need about {need:.0f} GiB",
        field="layout",
        value=plan.recipe.name,
        fix=(
            *(change for change, helps in smaller.items() if helps),
            "a GPU with more memory",
            f"meshwright dryrun {plan.recipe.name} --gpus {plan.case.cluster} needs no GPU",
        ),
    )
