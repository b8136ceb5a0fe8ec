"""Diagnoses of memory: out of memory, growing usage, and runs that barely fit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from meshwright.doctor import remedies
from meshwright.doctor.finding import Evidence, Finding, Remedy
from meshwright.doctor.run import Fault, OutOfMemory
from meshwright.doctor.run_stats import RunStats, sections
from meshwright.doctor.thresholds import limit, share
from meshwright.recipes.model_changes import shape_overrides

SEGMENTS = Remedy(
    try_=("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",),
    what="environment",
    why="the allocator can merge free segments; nothing else changes",
)
LEAKS = (
    remedies.advice("look for tensors kept across steps (losses without .item(), hooks, caches)"),
    remedies.advice("torch.cuda.memory._record_memory_history() and a snapshot", why="shows what allocated the memory"),
)
GENERAL_REMEDIES = (
    ("layout.recompute=selective", "recomputes some activations"),
    ("layout.micro_batch_size=1", "fewer samples in flight; the global batch size stays"),
    ("kernels.loss=fused_linear", "never materializes all logits"),
    ("layout.recompute=full", "keeps only the input of every layer"),
    ("layout.offload=optimizer", "keeps optimizer state in host memory"),
)
"""What to try if the model and layout are unknown, cheapest first."""
MEASURED = {
    "weights": ("weights",),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "other": ("activations", "logits", "buffers"),
}
"""The parts that our engine measures -> the parts of the estimate they include."""


PARTS_OF_MEMORY = ("weights", "gradients", "optimizer", "activations", "logits", "buffers")
PLACES = {
    "logits": "the loss",
    "optimizer": "the optimizer",
    "buffers": "a collective",
    "weights": "creating or loading weights",
    "activations": "the forward or backward pass",
}
"""Code in which an allocation failed, by the part of memory that grows there."""


def out_of_memory(stats: RunStats) -> Iterator[Finding]:
    """A GPU ran out of memory."""
    found = [fault for fault in stats.fatal if fault.name == "out_of_memory"]
    if not found:
        return
    fault = max(found, key=lambda one: (one.memory is not None and one.memory.wanted is not None, bool(one.where)))
    oom = fault.memory or OutOfMemory()
    offset = _beyond_estimate(stats, oom)
    grew = _largest_part(stats, fault)
    yield Finding(
        id="memory.out-of-memory",
        severity="error",
        message=_message(stats, fault, oom, grew, offset) + _grown(stats),
        steps=None if fault.step is None else (fault.step, fault.step + 1),
        lines=tuple(one.located for one in found[:3]),
        evidence=tuple(_evidence(stats, oom, offset)),
        remedies=tuple(_remedies(stats, oom, offset)),
    )


def _grown(stats: RunStats) -> str:
    """Return that memory had been growing, with the steps; empty if it had not."""
    found = next((one for one in stats.findings_of(growing_memory) if one.steps), None)
    if found is None or found.steps is None:
        return ""
    return f". Memory had been growing since step {found.steps[0]:,}, which another layout only delays: {found.message}"


def growing_memory(stats: RunStats) -> Iterator[Finding]:
    """Memory usage grows from step to step."""
    if not stats.enough_for_trends:
        return
    rows = [step for step in stats.steady if step.memory_gib is not None]
    if len(rows) < limit("enough_for_trends"):
        return
    usage = sections(rows, lambda step: step.memory_gib)
    rises = [after - before for before, after in pairwise(usage)]
    grown = usage[-1] - usage[0]
    least = max(limit("leak_gib"), share("leak_share") * usage[0])
    if grown <= least or any(rise <= 0 for rise in rises) or rises[-1] < 0.5 * grown / len(rises):
        return
    steps = rows[-1].step - rows[0].step
    per_thousand = grown / max(1, steps) * 1000 * len(usage) / len(rises)
    capacity = stats.capacity_gib
    room = f"; {capacity - usage[-1]:.1f} GiB left" if capacity and stats.run.header.on_gpu else ""
    yield Finding(
        id="memory.growing",
        severity="warning",
        message=f"memory grows by {per_thousand:.2g} GiB per 1,000 steps: {usage[0]:.1f} to {usage[-1]:.1f} GiB{room}",
        steps=(rows[0].step, rows[-1].step),
        lines=(stats.location(rows[0]), stats.location(rows[-1])),
        evidence=(
            Evidence("growth", round(grown, 3), "GiB", round(least, 3), "limit"),
            Evidence("final memory", usage[-1], "GiB", capacity, "capacity"),
        ),
        remedies=(*LEAKS, SEGMENTS),
    )


def allocator_retries(stats: RunStats) -> Iterator[Finding]:
    """The run barely fits: the allocator repeatedly flushes its cache, which stalls the GPU."""
    if stats.run.retries < limit("retries") or any(fault.name == "out_of_memory" for fault in stats.fatal):
        return
    usage, capacity = stats.peak_gib, stats.capacity_gib
    beside = f" at {usage:.1f} of {capacity:.1f} GiB" if usage and capacity else ""
    yield Finding(
        id="memory.only-just-fits",
        severity="warning",
        message=f"{stats.run.retries} allocations succeeded only after flushing the allocator's cache{beside}",
        lines=(f"{stats.run.file}:{stats.run.retry_line}",),
        evidence=(Evidence("allocation retries", float(stats.run.retries), "", limit("retries"), "limit"),),
        remedies=(SEGMENTS, *remedies.fitting_remedies(stats, _beyond_estimate(stats, OutOfMemory()))[:3]),
    )


def _message(stats: RunStats, fault: Fault, oom: OutOfMemory, grew: str, offset: float) -> str:
    when = f" after step {fault.step}" if fault.step else " before its first step was logged"
    text = f"a GPU ran out of memory{when}"
    if oom.wanted is not None:
        usage = oom.in_use if oom.in_use is not None else oom.allocated
        where = f" with {usage:.1f} of {oom.capacity:.1f} GiB in use" if usage and oom.capacity else ""
        text += f": {oom.wanted:.2f} GiB more were requested{where}"
    if stats.estimate is not None:
        memory = stats.estimate.memory
        verdict = "does not fit" if not bool(memory.fits) else "should fit"
        text += f". The layout is estimated at {float(memory.total):.1f} GiB and {verdict}"
        if offset:
            needed = float(memory.total) + offset
            text += f"; this run needed at least {needed:.1f} GiB, so {offset:.1f} GiB are added to every remedy below"
    return f"{text}. {grew}" if grew else text


def _largest_part(stats: RunStats, fault: Fault) -> str:
    """Return which part of memory is too large, and how that is known."""
    measured = next((step.memory_parts for step in reversed(stats.run.steps) if step.memory_parts), {})
    if measured and stats.estimate is not None:
        memory = stats.estimate.memory
        beyond = {
            name: measured[name] - sum(float(getattr(memory, one)) for one in ours)
            for name, ours in MEASURED.items()
            if name in measured
        }
        most = max(beyond, key=lambda name: beyond[name])
        if beyond[most] > 1.0:
            part = "activations" if most == "other" else most
            return f"{part.capitalize()} were {beyond[most]:.1f} GiB above the estimate"
    place = f"The allocation failed in {PLACES[fault.where]}" if fault.where else ""
    if stats.estimate is None:
        return f"{place}: {fault.where} grew" if place else ""
    memory = stats.estimate.memory
    most = max(PARTS_OF_MEMORY, key=lambda name: float(getattr(memory, name)))
    named = "optimizer states" if most == "optimizer" else most
    oom = f"{named} are estimated to be largest, {float(getattr(memory, most)):.1f} GiB"
    return f"{place}; {oom}" if place else f"{oom[:1].upper()}{oom[1:]}"


def _evidence(stats: RunStats, oom: OutOfMemory, offset: float) -> Iterator[Evidence]:
    for name, value in (("requested", oom.wanted), ("in use", oom.in_use), ("in tensors", oom.allocated)):
        if value is not None:
            yield Evidence(name, round(value, 3), "GiB", oom.capacity, "capacity")
    if stats.run.retries:
        yield Evidence("allocation retries before it", float(stats.run.retries), "", limit("retries"), "limit")
    if oom.unused is not None:
        yield Evidence("fragmented", round(oom.unused, 3), "GiB")
    if stats.estimate is not None:
        memory = stats.estimate.memory
        yield Evidence("estimate", round(float(memory.total), 2), "GiB", float(memory.capacity), "capacity")
        if offset:
            needed = round(float(memory.total) + offset, 2)
            yield Evidence("needed by this run", needed, "GiB", float(memory.capacity), "capacity")
        for name in PARTS_OF_MEMORY:
            yield Evidence(f"estimated {name}", round(float(getattr(memory, name)), 2), "GiB")


def _remedies(stats: RunStats, oom: OutOfMemory, offset: float) -> Iterator[Remedy]:
    """Yield remedies, cheapest first: defragmentation costs nothing."""
    if stats.findings_of(growing_memory):
        yield from LEAKS
    capacity = oom.capacity or stats.capacity_gib
    if oom.unused and capacity and oom.unused > share("fragments") * capacity and oom.unused >= (oom.wanted or 0.0):
        yield SEGMENTS
    fitting = remedies.fitting_remedies(stats, offset)
    yield from fitting
    if stats.case is None:
        yield from (Remedy(try_=(text,), what="layout", why=why) for text, why in GENERAL_REMEDIES)
    elif not fitting:
        recipe = stats.case.recipe
        words = (recipe.model, f"--gpus {stats.case.cluster} --goal {recipe.goal}", *shape_overrides(recipe))
        command = " ".join(("meshwright recommend", *words))
        yield remedies.advice(command, why="no combination of up to three changes fits; this plans a new layout")


def _beyond_estimate(stats: RunStats, oom: OutOfMemory) -> float:
    """Return the GiB that the run needed beyond its estimate."""
    if stats.estimate is None:
        return 0.0
    memory = stats.estimate.memory
    needs = [oom.needed]
    if stats.peak_gib is not None and stats.run.header.on_gpu:
        needs.append(stats.peak_gib + stats.outside_torch_gib)
    most = max((need for need in needs if need is not None), default=0.0)
    return round(max(0.0, most - float(memory.total)), 3)
