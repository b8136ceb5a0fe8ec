"""Memory: a run that ran out of it, one that needs more and more, one that only just fits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from meshwright.doctor import remedies
from meshwright.doctor.finding import Evidence, Finding, Remedy
from meshwright.doctor.run import Fault, OutOfMemory
from meshwright.doctor.run_stats import View, sections
from meshwright.doctor.thresholds import limit, share

SEGMENTS = Remedy(
    try_=("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",),
    what="environment",
    why="the allocator joins free pieces, and nothing else changes",
)
IN_GENERAL = (
    ("layout.recompute=selective", "some activations are computed again"),
    ("layout.micro_batch_size=1", "one sample in flight at once; the batch stays"),
    ("kernels.loss=fused_linear", "logits are never whole"),
    ("layout.recompute=full", "only the input of every layer is kept"),
    ("layout.offload=optimizer", "optimizer state waits in host memory"),
)
"""What to try where nothing is known of the run, cheapest first."""
MEASURED = {
    "weights": ("weights",),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "other": ("activations", "logits", "buffers"),
}
"""The parts that our engine measures, and those of the estimate that they hold."""


HELD = ("weights", "gradients", "optimizer", "activations", "logits", "buffers")
PLACES = {
    "logits": "the loss",
    "optimizer": "the optimizer",
    "buffers": "a collective",
    "weights": "the making or loading of weights",
    "activations": "the forward or backward pass",
}
"""Where an allocation failed, by the part that grows there."""


def out_of_memory(view: View) -> Iterator[Finding]:
    """The run ended because a GPU had no memory left."""
    found = [fault for fault in view.fatal if fault.name == "out_of_memory"]
    if not found:
        return
    fault = max(found, key=lambda one: (one.memory is not None and one.memory.wanted is not None, bool(one.where)))
    told = fault.memory or OutOfMemory()
    offset = _beyond_estimate(view, told)
    grew = _grown(view, fault)
    yield Finding(
        id="memory.out-of-memory",
        severity="error",
        message=_message(view, fault, told, grew),
        steps=None if fault.step is None else (fault.step, fault.step + 1),
        lines=tuple(f"{one.file}:{one.line} {one.text}" for one in found[:3]),
        evidence=tuple(_evidence(view, told)),
        remedies=tuple(_tries(view, told, offset)),
    )


def growing_memory(view: View) -> Iterator[Finding]:
    """Steps need more and more memory."""
    if not view.enough_for_trends:
        return
    rows = [step for step in view.steady if step.memory_gib is not None]
    if len(rows) < limit("enough_for_trends"):
        return
    held = sections(rows, lambda step: step.memory_gib)
    rises = [after - before for before, after in pairwise(held)]
    grown = held[-1] - held[0]
    least = max(limit("leak_gib"), share("leak_share") * held[0])
    if grown <= least or any(rise <= 0 for rise in rises) or rises[-1] < 0.5 * grown / len(rises):
        return
    steps = rows[-1].step - rows[0].step
    per_thousand = grown / max(1, steps) * 1000 * len(held) / len(rises)
    capacity = view.capacity_gib
    room = f"; {capacity - held[-1]:.1f} GiB are left" if capacity and view.run.told.on_gpu else ""
    yield Finding(
        id="memory.growing",
        severity="warning",
        message=f"memory grows by {per_thousand:.2g} GiB in 1,000 steps: {held[0]:.1f} to {held[-1]:.1f} GiB{room}",
        steps=(rows[0].step, rows[-1].step),
        lines=(view.place(rows[0]), view.place(rows[-1])),
        evidence=(
            Evidence("grown", round(grown, 3), "GiB", round(least, 3), "limit"),
            Evidence("memory at the end", held[-1], "GiB", capacity, "capacity"),
        ),
        remedies=(
            remedies.plainly("look for tensors kept from step to step (losses without .item(), hooks, caches)"),
            remedies.plainly("torch.cuda.memory._record_memory_history() and a snapshot", why="it names what holds it"),
            SEGMENTS,
        ),
    )


def allocator_retries(view: View) -> Iterator[Finding]:
    """The run fits only because the allocator empties its cache again and again, which stops the GPU."""
    if view.run.retries < limit("retries") or any(fault.name == "out_of_memory" for fault in view.fatal):
        return
    held, capacity = view.peak_gib, view.capacity_gib
    beside = f" at {held:.1f} of {capacity:.1f} GiB" if held and capacity else ""
    yield Finding(
        id="memory.only-just-fits",
        severity="warning",
        message=f"{view.run.retries} allocations had to wait until the allocator's cache was emptied{beside}",
        lines=(f"{view.run.file}:{view.run.retry_line}",),
        evidence=(Evidence("allocation retries", float(view.run.retries), "", limit("retries"), "limit"),),
        remedies=(SEGMENTS, *remedies.that_fit(view, _beyond_estimate(view, OutOfMemory()))[:3]),
    )


def _message(view: View, fault: Fault, told: OutOfMemory, grew: str) -> str:
    when = f" after step {fault.step}" if fault.step else " before its first step was told"
    text = f"a GPU ran out of memory{when}"
    if told.wanted is not None:
        held = told.in_use if told.in_use is not None else told.allocated
        where = f" where {held:.1f} of {told.capacity:.1f} GiB were in use" if held and told.capacity else ""
        text += f": {told.wanted:.2f} GiB more were asked for{where}"
    if view.estimate is not None:
        memory = view.estimate.memory
        verdict = "does not fit" if not bool(memory.fits) else "should fit"
        text += f". By the estimate the layout needs {float(memory.total):.1f} GiB and {verdict}"
    return f"{text}. {grew}" if grew else text


def _grown(view: View, fault: Fault) -> str:
    """Which part of memory is too large, and how that is known."""
    measured = next((step.memory_parts for step in reversed(view.run.steps) if step.memory_parts), {})
    if measured and view.estimate is not None:
        memory = view.estimate.memory
        beyond = {
            name: measured[name] - sum(float(getattr(memory, one)) for one in ours)
            for name, ours in MEASURED.items()
            if name in measured
        }
        most = max(beyond, key=lambda name: beyond[name])
        if beyond[most] > 1.0:
            part = "activations" if most == "other" else most
            return f"{part.capitalize()} were {beyond[most]:.1f} GiB above the estimate"
    place = f"It failed in {PLACES[fault.where]}" if fault.where else ""
    if view.estimate is None:
        return f"{place}: {fault.where} grew" if place else ""
    memory = view.estimate.memory
    most = max(HELD, key=lambda name: float(getattr(memory, name)))
    named = "optimizer states" if most == "optimizer" else most
    told = f"{named} are the most, {float(getattr(memory, most)):.1f} GiB"
    return f"{place}; by the estimate {told}" if place else f"By the estimate {told}"


def _evidence(view: View, told: OutOfMemory) -> Iterator[Evidence]:
    for name, value in (("asked for", told.wanted), ("in use", told.in_use), ("in tensors", told.allocated)):
        if value is not None:
            yield Evidence(name, round(value, 3), "GiB", told.capacity, "capacity")
    if told.unused is not None:
        yield Evidence("held in pieces", round(told.unused, 3), "GiB")
    if view.estimate is not None:
        memory = view.estimate.memory
        yield Evidence("estimate", round(float(memory.total), 2), "GiB", float(memory.capacity), "capacity")
        for name in HELD:
            yield Evidence(f"{name} by the estimate", round(float(getattr(memory, name)), 2), "GiB")


def _tries(view: View, told: OutOfMemory, offset: float) -> Iterator[Remedy]:
    """What to try, cheapest first: nothing is cheaper than joining the pieces that lie about."""
    capacity = told.capacity or view.capacity_gib
    if told.unused and capacity and told.unused > share("fragments") * capacity and told.unused >= (told.wanted or 0.0):
        yield SEGMENTS
    fitting = remedies.that_fit(view, offset)
    yield from fitting
    if view.case is None:
        yield from (Remedy(try_=(text,), what="layout", why=why) for text, why in IN_GENERAL)
    elif not fitting:
        recipe = view.case.recipe
        command = f"meshwright recommend {recipe.model} --gpus {view.case.cluster} --goal {recipe.goal}"
        yield remedies.plainly(command, why="no change of up to three things fits; it sizes the layout anew")


def _beyond_estimate(view: View, told: OutOfMemory) -> float:
    """GiB that the run was seen to need beyond its estimate."""
    if view.estimate is None:
        return 0.0
    memory = view.estimate.memory
    needs = [told.needed]
    if view.peak_gib is not None and view.run.told.on_gpu:
        needs.append(view.peak_gib + view.outside_torch_gib)
    most = max((need for need in needs if need is not None), default=0.0)
    return round(max(0.0, most - float(memory.total)), 3)
