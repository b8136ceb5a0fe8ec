"""Memory over a replayed step: peaks by part and who holds them, FLOPs and collectives."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.dryrun.allocation_log import SegmentKey
from meshwright.dryrun.replay import ReplayedSegment, StepLog, repetitions
from meshwright.dryrun.trace import Trace
from meshwright.dryrun.trace_hooks import AFTER, BEFORE
from meshwright.dryrun.types import GIB, PARTS, Collective, Holder, Moment

LAST_STEP = 1
MAX_MOMENTS = 400
MAX_HOLDERS = 40
PHASES = {"between": "backward", "filled": "backward"}  # pipeline work between passes counts as backward


@dataclass(frozen=True)
class SegmentPeak:
    """The memory peak of a segment."""

    key: SegmentKey
    peak: int
    at: int  # number of events up to the peak
    parts: dict[str, int]


def segment_peaks(trace: Trace, step: StepLog) -> list[SegmentPeak]:
    """Return the peak of every segment except those that only reconcile the log."""
    found = []
    blocks, traced_block = trace.log.blocks, step.traced_block
    current = dict.fromkeys(PARTS, 0)
    total = 0
    for segment in step.segments:
        peak, at, parts = total, 0, dict(current)
        for place, event in enumerate(segment.events, 1):
            block = blocks[traced_block[event if event >= 0 else ~event]]
            change = block.bytes if event >= 0 else -block.bytes
            current[block.part] += change
            total += change
            if total > peak:
                peak, at, parts = total, place, dict(current)
        if segment.key.phase != "filled":
            found.append(SegmentPeak(segment.key, peak, at, parts))
    return found


def phase_of(key: SegmentKey) -> str:
    """Return the phase of the step that a segment belongs to."""
    return PHASES.get(key.phase, key.phase)


def label_of(key: SegmentKey, chunks: int) -> str:
    """Return where in the step a segment is, as text."""
    if key.step < 0:
        return "building"
    words = [f"step {key.step + 1}"] if key.step != LAST_STEP else []
    if key.micro_batch >= 0:
        words.append(f"micro batch {key.micro_batch + 1}")
    if chunks > 1 and key.micro_batch >= 0:
        words.append(f"chunk {key.chunk + 1}")
    if key.phase in ("forward", "backward"):
        ends = {BEFORE: "before the layers", AFTER: "head and loss"}
        words.append(ends.get(key.layer, f"layer {key.layer}"))
    return ", ".join(words) or key.phase


def in_gib(parts: dict[str, int]) -> dict[str, float]:
    """Convert bytes by part to GiB."""
    return {name: value / GIB for name, value in parts.items()}


def timeline(found: list[SegmentPeak], chunks: int) -> tuple[Moment, ...]:
    """Return the moments of the last step in order; if there are too many, the peak of each group."""
    steps = [peak for peak in found if peak.key.step in (-1, LAST_STEP)]
    group = -(-len(steps) // MAX_MOMENTS)
    highest = [max(steps[i : i + group], key=lambda peak: peak.peak) for i in range(0, len(steps), group)]
    return tuple(Moment(phase_of(one.key), label_of(one.key, chunks), in_gib(one.parts)) for one in highest)


def by_phase(found: list[SegmentPeak]) -> dict[str, dict[str, float]]:
    """Return the peak of every phase, by part."""
    highest: dict[str, SegmentPeak] = {}
    for peak in found:
        phase = phase_of(peak.key)
        if phase not in highest or peak.peak > highest[phase].peak:
            highest[phase] = peak
    return {phase: in_gib(peak.parts) for phase, peak in highest.items()}


def holders(trace: Trace, step: StepLog, peak: SegmentPeak) -> tuple[Holder, ...]:
    """Return the lines of code whose allocations are alive at the peak, largest first."""
    bytes_of: Counter[tuple[str, str, str]] = Counter()
    blocks_of: Counter[tuple[str, str, str]] = Counter()
    for number in _alive_at(step, peak):
        block = trace.log.blocks[step.traced_block[number]]
        key = block.part, block.operation, block.origin.source
        bytes_of[key] += block.bytes
        blocks_of[key] += 1
    return tuple(Holder(*key, blocks_of[key], size / GIB) for key, size in bytes_of.most_common(MAX_HOLDERS))


def _alive_at(step: StepLog, peak: SegmentPeak) -> set[int]:
    alive: set[int] = set()
    for segment in step.segments:
        end = peak.at if segment.key == peak.key else len(segment.events)
        for event in segment.events[:end]:
            if event >= 0:
                alive.add(event)
            else:
                alive.discard(~event)
        if segment.key == peak.key:
            break
    return alive


def _last_step(trace: Trace, step: StepLog) -> Iterator[tuple[ReplayedSegment, int]]:
    for segment in step.segments:
        if segment.key.step == LAST_STEP:
            yield segment, repetitions(trace, segment.key)


def flops(trace: Trace, step: StepLog) -> dict[str, float]:
    """Return the floating-point operations of a step on this rank: forward, recompute, backward and total."""
    found: dict[str, float] = {"forward": 0.0, "recompute": 0.0, "backward": 0.0}
    for segment, times in _last_step(trace, step):
        for kind, count in segment.traced.flops.items():
            found[kind] = found.get(kind, 0.0) + float(count) * times
    return {**found, "total": sum(found.values())}


def collectives(trace: Trace, step: StepLog) -> tuple[Collective, ...]:
    """Return the communication of this rank in a step, by axis, kind and phase."""
    count: Counter[tuple[str, str, str, int]] = Counter()
    size: dict[tuple[str, str, str, int], float] = defaultdict(float)
    for segment, times in _last_step(trace, step):
        for group, kind, bytes_ in segment.traced.collectives:
            axis, ranks = trace.axes.get(group, ("other", 0))
            key = axis, kind, phase_of(segment.key), ranks
            count[key] += times
            size[key] += times * bytes_ / GIB
    rows = [
        Collective(axis, kind, phase, ranks, count[key], size[key])
        for key in count
        for axis, kind, phase, ranks in [key]
    ]
    return tuple(sorted(rows, key=lambda row: -row.gib))
