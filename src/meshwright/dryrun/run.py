"""Dry-runs a recipe: traces every distinct pipeline rank and reports what the worst of them needs."""

from __future__ import annotations

import logging
import platform
import time
import warnings
from collections.abc import Callable
from typing import Any

import msgspec

from meshwright import costs
from meshwright.clusters import AMD_ARCHS, Assumption, Cluster
from meshwright.costs.memory_constants import FRAGMENTATION_FLOOR, RESERVE
from meshwright.dryrun.types import GIB, PARTS, DryRun, RankDryRun
from meshwright.engine.allocator_settings import is_expandable
from meshwright.engine.validate import blocking_findings
from meshwright.errors import InputError
from meshwright.models import ModelSpec
from meshwright.recipes.case import Case
from meshwright.recipes.types import Recipe
from meshwright.rules import RefusedError
from meshwright.version import VERSION

INEXACT = 0.002  # share of the peak: a replay that is off by more is rejected
Progress = Callable[[str], None]


def dry_run(
    recipe: Recipe,
    cluster: Cluster,
    *,
    exact: bool = False,
    processes: int | None = None,
    progress: Progress = lambda _: None,
) -> DryRun:
    """Run two steps of a recipe at full size on fake tensors, on every distinct pipeline rank."""
    start, cpu = time.monotonic(), time.process_time()
    progress("importing torch")
    from meshwright.dryrun.ranks import run_parallel
    from meshwright.engine.model_families import family_of

    silence_warnings()
    family = family_of(recipe)
    config = family.config_for(recipe)
    case = validate(recipe, family.spec_of(recipe, config), cluster)
    tasks = [RankTask(recipe, config.to_dict(), cluster, rank, same, exact) for rank, same in distinct(case)]
    preload(recipe, config)
    ranks = tuple(run_parallel(dry_run_rank, tasks, processes, progress, _label))
    estimates = costs.memory_by_stage(case)
    totals = [_memory(rank, estimates[rank.pp_rank]) for rank in ranks]
    worst = max(range(len(ranks)), key=lambda i: totals[i]["total"])
    return DryRun(
        recipe=recipe.name,
        model=recipe.model,
        cluster=str(cluster),
        world=cluster.world,
        ranks=ranks,
        worst=worst,
        memory_gib=totals[worst],
        fits=totals[worst]["total"] <= cluster.gpu.memory_gib * (1 - RESERVE),
        estimate_gib=_estimated(estimates[ranks[worst].pp_rank]),
        versions=versions(),
        cpu_s=max(time.process_time() - cpu, sum(rank.cpu_s for rank in ranks)),
        wall_s=time.monotonic() - start,
        assumed=_assumed(case),
    )


def _assumed(case: Case) -> tuple[Assumption, ...]:
    """Return what is modelled in place of what would run: our own scans for those of fla."""
    from meshwright.engine.kernels.fla_scan import FIELD, may_run

    if not case.is_hybrid or not may_run(case.recipe.kernels):
        return ()
    text = "Mamba-2 and gated-delta layers are modelled with our own kernels; with fla's, their memory differs"
    return (Assumption(FIELD, "torch", text),)


class RankTask(msgspec.Struct, frozen=True):
    """The input for tracing one rank."""

    recipe: Recipe
    config: dict[str, Any]
    cluster: Cluster
    pp_rank: int
    represents: tuple[int, ...]
    exact: bool


def _label(task: RankTask) -> str:
    pp = task.recipe.layout.pp
    return f"pipeline rank {task.pp_rank} of {pp}" if pp > 1 else "the step"


def validate(recipe: Recipe, model: ModelSpec, cluster: Cluster) -> Case:
    """Return the case of a recipe on a cluster; raise RefusedError for blocking findings other than memory."""
    case = Case(recipe, model, cluster, memory_of=costs.memory)
    refused = [finding for finding in blocking_findings(case) if not finding.rule.startswith("memory.")]
    if refused:
        raise RefusedError(refused)
    return case


def distinct(case: Case) -> list[tuple[int, tuple[int, ...]]]:
    """Return the pipeline ranks to trace, each with the ranks it represents.

    Middle ranks with the same layers run the same passes. Earlier ranks hold more micro batches in flight, so the first
    of them needs most memory.
    """
    from meshwright.engine.mesh import GroupInfo
    from meshwright.engine.parallelize.pipeline import stage_layers, stage_numbers

    layout = case.recipe.layout
    if layout.pp == 1:
        return [(0, (0,))]
    layer_types = [repr(group.layer) for group in case.model.groups for _ in range(group.count)]
    stages = stage_layers(layout, len(layer_types))
    groups: dict[Any, list[int]] = {}
    for rank in range(layout.pp):
        numbers = stage_numbers(layout, GroupInfo(layout.pp, rank))
        layers_of_rank = tuple(tuple(layer_types[i] for i in stages[number]) for number in numbers)
        ends = tuple((number == 0, number == len(stages) - 1) for number in numbers)
        groups.setdefault((layers_of_rank, ends), []).append(rank)
    return [(ranks[0], tuple(ranks)) for ranks in groups.values()]


def dry_run_rank(task: RankTask) -> RankDryRun:
    """Trace one pipeline rank and summarize it."""
    from meshwright.dryrun.trace import Trace, trace
    from meshwright.engine.model_families import family_of

    recipe, cluster = task.recipe, task.cluster
    family = family_of(recipe)
    config = family.read_config(task.config)
    rank = task.pp_rank * (cluster.world // recipe.layout.pp)
    start = time.process_time()

    def traced(shortened: bool) -> Trace:
        return trace(recipe, family, config, cluster.world, rank, _capability(cluster), shortened)

    found = read_trace(traced(not task.exact), task, rank)
    if found is None:  # layers with the same signature behaved differently
        found = read_trace(traced(False), msgspec.structs.replace(task, exact=True), rank)
    if found is None:
        raise InputError(
            "the replayed step does not match the traced one even with every layer traced: please report it",
            field="dryrun",
        )
    return msgspec.structs.replace(found, cpu_s=time.process_time() - start)


def _capability(cluster: Cluster) -> tuple[int, int]:
    """Return the GPU's compute capability in NVIDIA's numbers; AMD GPUs count as Hopper."""
    number = round(10 * (cluster.gpu.capability or 9.0))
    return number // 10, number % 10


def read_trace(trace: Any, task: RankTask, rank: int) -> RankDryRun | None:
    """Summarize the trace of a rank; return None if what was left out could not be replayed."""
    from meshwright.dryrun import memory_curve
    from meshwright.dryrun.allocator import events_of, reserved
    from meshwright.dryrun.replay import replay_step

    step = replay_step(trace)
    found = memory_curve.segment_peaks(trace, step)
    peak = max(found, key=lambda segment: segment.peak)
    if trace.left_out != (0, 0) and step.drift > INEXACT * peak.peak:
        return None
    chunks = len(trace.chunks)
    return RankDryRun(
        rank=rank,
        pp_rank=task.pp_rank,
        represents=task.represents,
        layers=tuple(number for chunk in trace.chunks for number in chunk.layers),
        memory_gib=memory_curve.in_gib(peak.parts),
        allocated_gib=peak.peak / GIB,
        reserved_gib=reserved(events_of(step, trace), is_expandable(task.cluster.gpu.arch in AMD_ARCHS)) / GIB,
        peak_phase=memory_curve.phase_of(peak.key),
        peak_at=memory_curve.label_of(peak.key, chunks),
        phases=memory_curve.by_phase(found),
        timeline=memory_curve.timeline(found, chunks),
        holders=memory_curve.holders(trace, step, peak),
        flops=memory_curve.flops(trace, step),
        collectives=memory_curve.collectives(trace, step),
        placement=trace.placement,
        traced=_describe(trace),
        exact=trace.left_out == (0, 0),
        cpu_s=trace.cpu_s,
    )


def _describe(trace: Any) -> str:
    layers, batches = trace.left_out
    count = sum(len(chunk.layers) for chunk in trace.chunks)
    text = f"traced {count - layers} of {count} layers"
    text += f" and {trace.micro_batches - batches} of {trace.micro_batches} micro batches of 2 steps"
    return text + ("; the rest replayed from identical ones" if layers + batches else "")


def _memory(rank: RankDryRun, estimate: costs.Memory) -> dict[str, float]:
    """Return the parts of a rank plus non-tensor memory: CUDA context, communicators, allocator cache."""
    fixed = estimate.overhead - estimate.cache
    room = estimate.capacity * (1 - RESERVE) - rank.allocated_gib - fixed
    # torch releases cached blocks before an allocation fails, except for a small share.
    cached = max(min(rank.reserved_gib - rank.allocated_gib, room), FRAGMENTATION_FLOOR * rank.allocated_gib)
    overhead = float(fixed + cached)
    total = rank.allocated_gib + overhead
    return {**rank.memory_gib, "overhead": overhead, "total": total, "capacity": float(estimate.capacity)}


def _estimated(estimate: costs.Memory) -> dict[str, float]:
    return {name: float(getattr(estimate, name)) for name in (*PARTS, "overhead", "total")}


def preload(recipe: Recipe, config: Any) -> None:
    """Import modules once, before ranks are traced in forked processes."""
    from importlib import import_module

    from meshwright.engine.model_families import family_of

    for name in ("torch._dynamo", "meshwright.dryrun.trace", *family_of(recipe).modules(config)):
        import_module(name)


def silence_warnings() -> None:
    """Silence torch warnings about a step whose output nobody reads."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for name in ("torch.distributed", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def versions() -> dict[str, str]:
    """Return the versions that a dry run's figures depend on."""
    from importlib.metadata import version

    packages = {name: version(name) for name in ("torch", "transformers")}
    return {"meshwright": VERSION, **packages, "python": platform.python_version()}
