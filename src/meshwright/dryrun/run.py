"""A recipe proven: every distinct pipeline rank traced, and what the worst of them needs."""

from __future__ import annotations

import logging
import platform
import time
import warnings
from collections.abc import Callable
from typing import Any

import msgspec

from meshwright import costs
from meshwright.clusters import Cluster
from meshwright.costs.memory_constants import FRAGMENTATION_FLOOR, RESERVE
from meshwright.dryrun.types import PARTS, DryRun, RankDryRun
from meshwright.engine.validate import blocking_findings
from meshwright.errors import InputError
from meshwright.models import ModelSpec
from meshwright.recipes.case import Case
from meshwright.recipes.types import Recipe
from meshwright.rules import RefusedError
from meshwright.version import VERSION

INEXACT = 0.002  # of the peak: a replay that is off by more is not taken
Progress = Callable[[str], None]


def dry_run(
    recipe: Recipe,
    cluster: Cluster,
    *,
    exact: bool = False,
    processes: int | None = None,
    progress: Progress = lambda _: None,
) -> DryRun:
    """Takes two steps of a recipe at full size on tensors without data, on every pipeline rank that differs."""
    began, cpu = time.monotonic(), time.process_time()
    from meshwright.dryrun.ranks import side_by_side
    from meshwright.engine.model_families import family_of

    _be_quiet()
    kind = family_of(recipe)
    config = kind.config_for(recipe)
    case = validate(recipe, kind.spec_of(recipe, config), cluster)
    told = [RankTask(recipe, config.to_dict(), cluster, rank, same, exact) for rank, same in distinct(case)]
    preload(recipe, config)
    ranks = tuple(side_by_side(prove_rank, told, processes, progress, _named))
    estimates = costs.memory_by_stage(case)
    sums = [_memory(rank, estimates[rank.pp_rank]) for rank in ranks]
    worst = max(range(len(ranks)), key=lambda i: sums[i]["total"])
    return DryRun(
        recipe=recipe.name,
        model=recipe.model,
        cluster=str(cluster),
        world=cluster.world,
        ranks=ranks,
        worst=worst,
        memory_gib=sums[worst],
        fits=sums[worst]["total"] <= cluster.gpu.memory_gib * (1 - RESERVE),
        estimate_gib=_estimated(estimates[ranks[worst].pp_rank]),
        versions=versions(),
        cpu_s=max(time.process_time() - cpu, sum(rank.cpu_s for rank in ranks)),
        wall_s=time.monotonic() - began,
    )


class RankTask(msgspec.Struct, frozen=True):
    """What is needed to trace one rank."""

    recipe: Recipe
    config: dict[str, Any]
    cluster: Cluster
    pp_rank: int
    represents: tuple[int, ...]
    exact: bool


def _named(told: RankTask) -> str:
    pp = told.recipe.layout.pp
    return f"pipeline rank {told.pp_rank} of {pp}" if pp > 1 else "the step"


def validate(recipe: Recipe, model: ModelSpec, cluster: Cluster) -> Case:
    """The recipe on a cluster, or the findings that refuse it; whether it fits is what the dry run finds out."""
    case = Case(recipe, model, cluster, memory_of=costs.memory)
    refused = [finding for finding in blocking_findings(case) if not finding.rule.startswith("memory.")]
    if refused:
        raise RefusedError(refused)
    return case


def distinct(case: Case) -> list[tuple[int, tuple[int, ...]]]:
    """The pipeline ranks to trace, each with those it stands for.

    Middle ranks with like layers run the same passes; the earlier keeps more micro batches at once, so that the first
    of them needs most.
    """
    from meshwright.engine.mesh import GroupInfo
    from meshwright.engine.parallelize.pipeline import stage_layers, stage_numbers

    layout = case.recipe.layout
    if layout.pp == 1:
        return [(0, (0,))]
    kinds = [repr(group.layer) for group in case.model.groups for _ in range(group.count)]
    cuts = stage_layers(layout, len(kinds))
    groups: dict[Any, list[int]] = {}
    for rank in range(layout.pp):
        numbers = stage_numbers(layout, GroupInfo(layout.pp, rank))
        held = tuple(tuple(kinds[i] for i in cuts[number]) for number in numbers)
        ends = tuple((number == 0, number == len(cuts) - 1) for number in numbers)
        groups.setdefault((held, ends), []).append(rank)
    return [(ranks[0], tuple(ranks)) for ranks in groups.values()]


def prove_rank(told: RankTask) -> RankDryRun:
    """One pipeline rank, traced and read."""
    from meshwright.dryrun.trace import Trace, trace
    from meshwright.engine.model_families import family_of

    recipe, cluster = told.recipe, told.cluster
    kind = family_of(recipe)
    config = kind.read_config(told.config)
    rank = told.pp_rank * (cluster.world // recipe.layout.pp)
    began = time.process_time()

    def traced(shortened: bool) -> Trace:
        return trace(recipe, kind, config, cluster.world, rank, _capability(cluster), shortened)

    found = read(traced(not told.exact), told, rank)
    if found is None:  # layers that looked alike were not
        found = read(traced(False), msgspec.structs.replace(told, exact=True), rank)
    if found is None:
        raise InputError("the traced step does not add up", field="dryrun")
    return msgspec.structs.replace(found, cpu_s=time.process_time() - began)


def _capability(cluster: Cluster) -> tuple[int, int]:
    """What the GPU can compute, by NVIDIA's numbers; AMD's count as Hopper."""
    number = round(10 * (cluster.gpu.capability or 9.0))
    return number // 10, number % 10


def read(trace: Any, told: RankTask, rank: int) -> RankDryRun | None:
    """What the book of a rank says; None where what was left out could not be written in."""
    from meshwright.dryrun import memory_curve
    from meshwright.dryrun.allocator import events_of, reserved
    from meshwright.dryrun.replay import whole_step

    whole = whole_step(trace)
    found = memory_curve.levels(trace, whole)
    peak = max(found, key=lambda level: level.peak)
    if trace.left_out != (0, 0) and whole.drift > INEXACT * peak.peak:
        return None
    chunks = len(trace.chunks)
    return RankDryRun(
        rank=rank,
        pp_rank=told.pp_rank,
        represents=told.represents,
        layers=tuple(number for cut in trace.chunks for number in cut.layers),
        memory_gib=memory_curve.in_gib(peak.parts),
        allocated_gib=peak.peak / memory_curve.GIB,
        reserved_gib=reserved(events_of(whole, trace)) / memory_curve.GIB,
        peak_phase=memory_curve.phase_of(peak.key),
        peak_at=memory_curve.label_of(peak.key, chunks),
        phases=memory_curve.by_phase(found),
        timeline=memory_curve.timeline(found, chunks),
        holders=memory_curve.holders(trace, whole, peak),
        flops=memory_curve.flops(trace, whole),
        collectives=memory_curve.collectives(trace, whole),
        placement=trace.placement,
        traced=_in_words(trace),
        exact=trace.left_out == (0, 0),
        cpu_s=trace.cpu_s,
    )


def _in_words(trace: Any) -> str:
    layers, batches = trace.left_out
    held = sum(len(cut.layers) for cut in trace.chunks)
    said = [
        f"{held - layers} of {held} layers",
        f"{trace.micro_batches - batches} of {trace.micro_batches} micro batches",
    ]
    return f"traced {' and '.join(said)} of 2 steps" + (
        "; the rest replayed from identical ones" if layers + batches else ""
    )


def _memory(rank: RankDryRun, estimate: costs.Memory) -> dict[str, float]:
    """The parts of a rank with what is no tensor's: CUDA's context, communicators, what the allocator holds back."""
    fixed = estimate.overhead - estimate.cache
    room = estimate.capacity * (1 - RESERVE) - rank.allocated_gib - fixed
    # Cached blocks go back before an allocation fails, all but a small share.
    held = max(min(rank.reserved_gib - rank.allocated_gib, room), FRAGMENTATION_FLOOR * rank.allocated_gib)
    overhead = float(fixed + held)
    total = rank.allocated_gib + overhead
    return {**rank.memory_gib, "overhead": overhead, "total": total, "capacity": float(estimate.capacity)}


def _estimated(estimate: costs.Memory) -> dict[str, float]:
    return {name: float(getattr(estimate, name)) for name in (*PARTS, "overhead", "total")}


def preload(recipe: Recipe, config: Any) -> None:
    """Imports once, before ranks are traced in processes of their own."""
    from importlib import import_module

    from meshwright.engine.model_families import family_of

    for name in ("torch._dynamo", "meshwright.dryrun.trace", *family_of(recipe).modules(config)):
        import_module(name)


def _be_quiet() -> None:
    """What torch says of a step that nobody will read."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for name in ("torch.distributed", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def versions() -> dict[str, str]:
    """What a dry run's numbers depend on."""
    from importlib.metadata import version

    named = {name: version(name) for name in ("torch", "transformers")}
    return {"meshwright": VERSION, **named, "python": platform.python_version()}
