"""What the book of a whole step says: levels and peaks by part, who holds them, products and collectives."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.dryrun.allocation_log import Key
from meshwright.dryrun.replay import StepLog, Stretch, counted
from meshwright.dryrun.trace import Trace
from meshwright.dryrun.trace_hooks import AFTER, BEFORE
from meshwright.dryrun.types import PARTS, Collective, Holder, Moment

GIB = 2**30
LAST_STEP = 1
MOST_MOMENTS = 400
MOST_HOLDERS = 40
PHASES = {"between": "backward", "filled": "backward"}  # what a pipeline does between passes is of its passes


@dataclass(frozen=True)
class Level:
    """The highest point of a stretch."""

    key: Key
    peak: int
    at: int  # how many of the stretch's events had happened
    parts: dict[str, int]


def levels(trace: Trace, whole: StepLog) -> list[Level]:
    """The highest point of every stretch but those where the book is put in order."""
    found = []
    blocks, of = trace.ledger.blocks, whole.of
    now = dict.fromkeys(PARTS, 0)
    total = 0
    for stretch in whole.stretches:
        peak, at, parts = total, 0, dict(now)
        for place, event in enumerate(stretch.events, 1):
            block = blocks[of[event if event >= 0 else ~event]]
            change = block.bytes if event >= 0 else -block.bytes
            now[block.part] += change
            total += change
            if total > peak:
                peak, at, parts = total, place, dict(now)
        if stretch.key.phase != "filled":
            found.append(Level(stretch.key, peak, at, parts))
    return found


def phase_of(key: Key) -> str:
    """The phase of the step that a stretch belongs to."""
    return PHASES.get(key.phase, key.phase)


def label_of(key: Key, chunks: int) -> str:
    """Where in the step a stretch is, in words."""
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
    """Bytes by part, in GiB."""
    return {name: value / GIB for name, value in parts.items()}


def timeline(found: list[Level], chunks: int) -> tuple[Moment, ...]:
    """The last step's moments in order; of very many, the highest of each bunch."""
    steps = [level for level in found if level.key.step in (-1, LAST_STEP)]
    bunch = -(-len(steps) // MOST_MOMENTS)
    highest = [max(steps[i : i + bunch], key=lambda level: level.peak) for i in range(0, len(steps), bunch)]
    return tuple(Moment(phase_of(one.key), label_of(one.key, chunks), in_gib(one.parts)) for one in highest)


def by_phase(found: list[Level]) -> dict[str, dict[str, float]]:
    """The peak of every phase, by part."""
    highest: dict[str, Level] = {}
    for level in found:
        phase = phase_of(level.key)
        if phase not in highest or level.peak > highest[phase].peak:
            highest[phase] = level
    return {phase: in_gib(level.parts) for phase, level in highest.items()}


def holders(trace: Trace, whole: StepLog, peak: Level) -> tuple[Holder, ...]:
    """The lines of code whose blocks are alive at the peak, those that hold most first."""
    bytes_of: Counter[tuple[str, str, str]] = Counter()
    blocks_of: Counter[tuple[str, str, str]] = Counter()
    for number in _alive_at(whole, peak):
        block = trace.ledger.blocks[whole.of[number]]
        key = block.part, block.operation, block.origin.source
        bytes_of[key] += block.bytes
        blocks_of[key] += 1
    return tuple(Holder(*key, blocks_of[key], size / GIB) for key, size in bytes_of.most_common(MOST_HOLDERS))


def _alive_at(whole: StepLog, peak: Level) -> set[int]:
    alive: set[int] = set()
    for stretch in whole.stretches:
        end = peak.at if stretch.key == peak.key else len(stretch.events)
        for event in stretch.events[:end]:
            if event >= 0:
                alive.add(event)
            else:
                alive.discard(~event)
        if stretch.key == peak.key:
            break
    return alive


def _last_step(trace: Trace, whole: StepLog) -> Iterator[tuple[Stretch, int]]:
    for stretch in whole.stretches:
        if stretch.key.step == LAST_STEP:
            yield stretch, counted(trace, stretch.key)


def flops(trace: Trace, whole: StepLog) -> dict[str, float]:
    """Floating-point operations of a step on this rank, by what they are for."""
    found: dict[str, float] = {"forward": 0.0, "recompute": 0.0, "backward": 0.0}
    for stretch, times in _last_step(trace, whole):
        for kind, count in stretch.traced.flops.items():
            found[kind] = found.get(kind, 0.0) + float(count) * times
    return {**found, "total": sum(found.values())}


def collectives(trace: Trace, whole: StepLog) -> tuple[Collective, ...]:
    """What this rank sends and gets in a step, by axis, kind and phase."""
    count: Counter[tuple[str, str, str, int]] = Counter()
    size: dict[tuple[str, str, str, int], float] = defaultdict(float)
    for stretch, times in _last_step(trace, whole):
        for group, kind, bytes_ in stretch.traced.collectives:
            axis, ranks = trace.axes.get(group, ("other", 0))
            key = axis, kind, phase_of(stretch.key), ranks
            count[key] += times
            size[key] += times * bytes_ / GIB
    rows = [
        Collective(axis, kind, phase, ranks, count[key], size[key])
        for key in count
        for axis, kind, phase, ranks in [key]
    ]
    return tuple(sorted(rows, key=lambda row: -row.gib))
