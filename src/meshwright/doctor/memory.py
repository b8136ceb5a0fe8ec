"""Diagnoses of memory: out of memory, growing usage, and runs that barely fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from statistics import median

from meshwright.display import two_digits
from meshwright.doctor import remedies
from meshwright.doctor.change_points import SIGMAS, hinge, levels
from meshwright.doctor.finding import Evidence, Finding, Remedy
from meshwright.doctor.general_remedies import general_remedies
from meshwright.doctor.logged_settings import missing_arguments
from meshwright.doctor.match_recipe import closest_recipe
from meshwright.doctor.run import VALIDATION, Fault, OutOfMemory, Step
from meshwright.doctor.run_stats import RunStats, median_of, sections
from meshwright.doctor.thresholds import limit, share
from meshwright.doctor.validation_memory import reason, validation_remedies
from meshwright.planner import Question, command_for_model
from meshwright.recipes.case import Case
from meshwright.recipes.model_changes import argument, request_overrides

SEGMENTS = Remedy(
    try_=("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",),
    what="environment",
    why="the allocator can merge free segments; nothing else changes",
)
LEAKS = (
    remedies.advice("look for tensors kept across steps (losses without .item(), hooks, caches)"),
    remedies.advice("torch.cuda.memory._record_memory_history() and a snapshot", why="shows what allocated the memory"),
)
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
    offset = stats.beyond_estimate_gib
    if fault.where == VALIDATION:  # the estimate and what is tried on it are of a training step
        message, evidence = f"{_request(stats, fault, oom)}. {reason(stats.run, fault)}", _requested(stats, oom)
        tries = (*validation_remedies(stats.run), *([SEGMENTS] if is_fragmented(oom, stats.capacity_gib) else ()))
    else:
        grew = _largest_part(stats, fault)
        message = _message(stats, fault, oom, grew, offset) + _grown(stats) + f". {_caveat(stats)}"
        evidence, tries = _evidence(stats, oom, offset), tuple(_remedies(stats, oom))
    yield Finding(
        id="memory.out-of-memory",
        severity="error",
        message=message,
        steps=None if fault.step is None else (fault.step, fault.step + 1),
        lines=tuple(one.located for one in found[:3]),
        evidence=tuple(evidence),
        remedies=tries,
    )


def _caveat(stats: RunStats) -> str:
    """Return what the remedies rest on: the plan they are tried on, and the error of the estimate."""
    header = stats.run.header
    if stats.case is None or stats.estimate is None:
        if header.states_settings and not missing_arguments(stats.run) and header.on_gpu and header.gpus_option:
            return f"Whether a remedy below is enough cannot be known without the GPUs:{header.gpus_option}"
        layout = "the model" if header.states_layout else "the model and the layout"
        missing = f"{layout} and the GPUs".replace("model and the layout and", "model, the layout and")
        file = (missing if header.gpus_option else layout) if header.on_gpu else "a run on GPUs"
        return f"Whether a remedy below is enough cannot be known without {file}: --recipe FILE{header.gpus_option}"
    if header.file:
        plan = header.file
    elif header.recipe is not None:
        plan = "this run's recipe"
    elif header.arguments:
        plan = "the arguments in the log"
    elif header.config:
        plan = "the config in the log"
    else:
        settings = stats.case.recipe.name
        plan = f"{stats.case.model.name} with the settings of {settings}" if closest_recipe(stats.case) else settings
        plan += ", which may not be what ran (--recipe FILE tries them on your own file)"
    text = f"The remedies are tried on {plan}: what fits is estimated, not measured"
    times = 1 + stats.estimate.band.memory_pct / 100
    text += f" (within a factor of {times:.2g} for four of five runs)"
    logged, ours = stats.peak_gib, stats.estimated_peak_gib
    if logged and ours and ours > logged * times and stats.run.steps:
        text += f". The estimate is {ours / logged:.1f} times the {logged:.1f} GiB that the log reports: check the file"
    return text


def _grown(stats: RunStats) -> str:
    """Return that memory had been growing or had jumped, with the step; empty if it had not."""
    for diagnosis, text in ((growing_memory, "Memory had been growing"), (jumped_memory, "Memory has been higher")):
        found = next((one for one in stats.findings_of(diagnosis) if one.steps), None)
        if found is not None and found.steps is not None:
            return f". {text} since step {found.steps[0]:,}, which another layout only delays: {found.message}"
    return ""


def growing_memory(stats: RunStats) -> Iterator[Finding]:
    """Memory usage grows from step to step, from the start or later on."""
    starts = [found for rows in _memory_of_starts(stats) if (found := _growth(rows)) is not None]
    if not starts:
        return
    rows, usage, least = starts[-1]
    grown, rises = usage[-1] - usage[0], len(usage) - 1
    per_thousand = grown / max(1, rows[-1].step - rows[0].step) * 1000 * len(usage) / rises
    capacity = stats.capacity_gib
    late = "" if rows[0] is _first_of_start(stats, rows[0]) else f" since step {rows[0].step:,}"
    yield Finding(
        id="memory.growing",
        severity="warning",
        message=f"memory grows by {two_digits(per_thousand)} GiB per 1,000 steps{late}: {usage[0]:.1f} to "
        f"{usage[-1]:.1f} GiB{_room_left(stats, usage[-1])}",
        steps=(rows[0].step, rows[-1].step),
        lines=(stats.location(rows[0]), stats.location(rows[-1])),
        evidence=(
            Evidence("growth", round(grown, 3), "GiB", round(least, 3), "limit"),
            Evidence("final memory", usage[-1], "GiB", capacity, "capacity"),
        ),
        remedies=(*LEAKS, SEGMENTS),
    )


def _room_left(stats: RunStats, gib: float) -> str:
    left = stats.capacity_gib - gib if stats.capacity_gib and stats.run.header.on_gpu else None
    return "" if left is None else f"; {left:.1f} GiB left"


def jumped_memory(stats: RunStats) -> Iterator[Finding]:
    """Memory usage jumps to a higher level and stays there."""
    jumps = [found for rows in _memory_of_starts(stats) for found in _jumps(stats, rows)]
    if not jumps:
        return
    before, after = jumps[-1]
    low, high = (median_of(step.memory_gib for step in rows) or 0.0 for rows in (before, after))
    capacity = stats.capacity_gib
    yield Finding(
        id="memory.jumped",
        severity="warning",
        message=f"memory rose from {low:.1f} to {high:.1f} GiB ({high / low - 1:.0%}) in step {after[0].first:,} and "
        f"stayed there{_room_left(stats, high)}{_seconds_change(before, after)}"
        f"{HIGHEST_SO_FAR.get(stats.run.kind, '')}",
        steps=(after[0].first, after[-1].step),
        lines=(stats.location(before[-1]), stats.location(after[0])),
        evidence=(
            Evidence("rise", round(high - low, 3), "GiB", round(share("memory_jump") * low, 3), "limit"),
            Evidence("final memory", high, "GiB", capacity, "capacity"),
        ),
        remedies=(
            remedies.advice(
                f"look at what starts in step {after[0].first:,}",
                why="longer samples, a data phase, unfrozen weights or a hook",
            ),
            *LEAKS,
        ),
    )


HIGHEST_SO_FAR: dict[str, str] = dict.fromkeys(
    ("megatron", "kempnerforge"), ". The log has the highest usage so far: one larger step is enough for a jump"
)
"""Formats whose memory figure is never reset."""
KEPT_AFTER_PAUSE = ("torchtitan", *HIGHEST_SO_FAR)
"""Formats whose figure stays high after an evaluation or a checkpoint: a peak, or memory that the allocator keeps."""


def _memory_of_starts(stats: RunStats) -> list[list[Step]]:
    """Return the steps with their memory of every start that is long enough for a trend; a restart frees memory."""
    rows = [step for step in stats.steady if step.memory_gib]
    starts = [list(part) for _, part in groupby(rows, key=lambda step: step.attempt)]
    return [part for part in starts if len(part) >= limit("enough_for_trends")]


def _first_of_start(stats: RunStats, row: Step) -> Step:
    return next(step for step in stats.steady if step.memory_gib and step.attempt == row.attempt)


def _growth(rows: Sequence[Step]) -> tuple[Sequence[Step], list[float], float] | None:
    """Return the lines in which memory grows to the end, the medians of their sections, and the least growth."""
    values = [float(step.memory_gib or 0.0) for step in rows]
    least = max(limit("leak_gib"), share("leak_share") * values[0])
    line = hinge(values)
    growing = rows[line.onset :]
    if len(growing) < limit("enough_for_trends") or line.end - line.level <= least:
        return None
    if line.end - line.level < SIGMAS * line.error * math.sqrt(12 / len(growing)):
        return None  # noise
    usage = sections(growing, lambda step: step.memory_gib)
    rises = [after - before for before, after in pairwise(usage)]
    grown = usage[-1] - usage[0]
    if any(rise <= 0 for rise in rises) or rises[-1] < 0.5 * grown / len(rises) or max(rises) > LARGEST_RISE * grown:
        return None
    return growing, usage, least


EARLY = 0.05  # share of the lines in which caches fill and the largest samples come for the first time
SUDDEN = 0.7  # of a rise
LARGEST_RISE = 0.6  # of the growth between two of five sections; more is a jump


def _jumps(stats: RunStats, rows: Sequence[Step]) -> Iterator[tuple[Sequence[Step], Sequence[Step]]]:
    """Yield the lines before and after a jump that lasts to the end of a start; growth is no jump."""
    if _growth(rows) is not None:
        return
    values = [float(step.memory_gib or 0.0) for step in rows]
    found = levels(values, int(limit("shift_lines")), share("memory_jump"))
    for index in range(1, len(found)):
        before, after = found[index - 1], found[index]
        rise = min(one.value for one in found[index:]) - before.value
        if after.start < max(limit("warm_up_most"), EARLY * len(rows)):
            continue
        if rise < max(limit("leak_gib"), share("memory_jump") * before.value) or not _sudden(values, after.start, rise):
            continue
        if stats.run.kind in KEPT_AFTER_PAUSE and _paused(stats, rows[after.start - 1], rows[after.start]):
            continue
        yield rows[before.start : before.end], rows[after.start : after.end]


def _sudden(values: Sequence[float], start: int, rise: float) -> bool:
    """Return whether a rise happens at one line: usage that climbs to a plateau is no jump."""
    near = int(limit("shift_lines"))
    before, after = values[max(0, start - near) : start], values[start : start + near]
    return median(after) - median(before) >= SUDDEN * rise


def _paused(stats: RunStats, before: Step, after: Step) -> bool:
    """Return whether a checkpoint was saved or the model evaluated between two lines."""
    validated = any(before.step <= one.step <= after.step for one in stats.run.validations)
    return validated or bool(after.blocked_s)


def _seconds_change(before: Sequence[Step], after: Sequence[Step]) -> str:
    """Return that steps take longer or shorter since a jump, which points to other samples; empty if they do not."""
    paces = [median_of(step.seconds for step in rows) for rows in (before, after)]
    if not paces[0] or not paces[1] or abs(paces[1] / paces[0] - 1) <= share("spread"):
        return ""
    return f"; steps take {paces[1]:.4g} s instead of {paces[0]:.4g} s since then"


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
        remedies=(SEGMENTS, *remedies.fitting_remedies(stats)[:3]),
    )


def _request(stats: RunStats, fault: Fault, oom: OutOfMemory) -> str:
    """Return who ran out of memory, when, and what was requested."""
    when = f" after step {fault.step}" if fault.step else " before its first step was logged"
    who = "a GPU" if fault.rank is None else stats.rank_names.of((fault.rank,), lower=True)
    text = f"{who} ran out of memory{when}"
    if oom.wanted is not None:
        usage = oom.in_use if oom.in_use is not None else oom.allocated
        where = f" with {usage:.1f} of {oom.capacity:.1f} GiB in use" if usage and oom.capacity else ""
        text += f": {oom.wanted:.2f} GiB more were requested{where}"
    return text


def _message(stats: RunStats, fault: Fault, oom: OutOfMemory, grew: str, offset: float) -> str:
    text = _request(stats, fault, oom)
    if stats.case is not None and (gib := stats.smaller_gpu_gib):
        named = f"the {float(stats.case.capacity_gib):.1f} GiB of {stats.case.cluster.gpu.name}"
        text += f". The log's GPUs have {gib:.1f} GiB, not {named}: the remedies are sized for {gib:.1f} GiB"
    if stats.estimate is not None:
        memory = stats.estimate.memory
        verdict = "does not fit" if not bool(memory.fits) else "should fit"
        text += f". The layout is estimated at {float(memory.total):.1f} GiB and {verdict}"
        if offset:
            needed = float(memory.total) + offset
            outside = stats.outside_torch_gib if stats.peak_gib is not None else 0.0
            beside = f" ({outside:.1f} of them outside PyTorch)" if outside >= 0.1 else ""
            text += f"; this run needed at least {needed:.1f} GiB{beside}, "
            text += f"so {offset:.1f} GiB are added to every remedy below"
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


def _requested(stats: RunStats, oom: OutOfMemory) -> Iterator[Evidence]:
    for name, value in (("requested", oom.wanted), ("in use", oom.in_use), ("in tensors", oom.allocated)):
        if value is not None:
            yield Evidence(name, round(value, 3), "GiB", oom.capacity, "capacity")
    if stats.run.retries:
        yield Evidence("allocation retries before it", float(stats.run.retries), "", limit("retries"), "limit")
    if oom.unused is not None:
        yield Evidence("fragmented", round(oom.unused, 3), "GiB")


def _evidence(stats: RunStats, oom: OutOfMemory, offset: float) -> Iterator[Evidence]:
    yield from _requested(stats, oom)
    if stats.estimate is not None:
        memory = stats.estimate.memory
        yield Evidence("estimate", round(float(memory.total), 2), "GiB", float(memory.capacity), "capacity")
        if offset:
            needed = round(float(memory.total) + offset, 2)
            yield Evidence("needed by this run", needed, "GiB", float(memory.capacity), "capacity")
        for name in PARTS_OF_MEMORY:
            yield Evidence(f"estimated {name}", round(float(getattr(memory, name)), 2), "GiB")


def is_fragmented(oom: OutOfMemory, capacity_gib: float | None = None) -> bool:
    """Return whether the request would have fit in the free memory and what the allocator caches in fragments."""
    capacity = oom.capacity or capacity_gib
    large = bool(oom.unused and capacity and oom.unused > share("fragments") * capacity)
    return large and (oom.unused or 0.0) + (oom.free or 0.0) >= (oom.wanted or 0.0)


def _remedies(stats: RunStats, oom: OutOfMemory) -> Iterator[Remedy]:
    """Yield remedies, cheapest first: defragmentation costs nothing."""
    if stats.findings_of(growing_memory) or stats.findings_of(jumped_memory):
        yield from LEAKS
    if is_fragmented(oom, stats.capacity_gib):
        yield SEGMENTS
    fitting = remedies.fitting_remedies(stats)
    yield from fitting
    if stats.case is None:
        yield from general_remedies(stats.run)
    elif not fitting:
        why = "no combination of up to three changes fits; this plans a new layout"
        yield remedies.advice(_plan_command(stats, stats.case), why=why)


def _plan_command(stats: RunStats, case: Case) -> str:
    """Return the command that plans another layout for the training that ran, on its engine."""
    recipe, calibration = case.recipe, stats.run.header.options.get("--calibration")
    options = () if calibration is None else ("--calibration", calibration)
    question = Question(case.model, recipe.model, case.cluster, recipe.goal, engine=case.engine, options=options)
    return command_for_model(question, "recommend", argument(recipe), recipe.goal, request_overrides(recipe))
