"""Diagnoses of a run that gets slower: at a certain step, or gradually."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from meshwright.doctor import remedies
from meshwright.doctor.change_points import SIGMAS, Level, Trend, error_of, levels, trend
from meshwright.doctor.finding import Evidence, Finding, Remedy
from meshwright.doctor.run import Fault, Step
from meshwright.doctor.run_stats import RunStats, median_of
from meshwright.doctor.straggler_reports import reported_ranks
from meshwright.doctor.thresholds import limit, share
from meshwright.doctor.throughput import check_ranks

MAX_SHOWN = 4  # changes in a message
FEWEST_PHASES = 3  # slow phases at equal distances that make a period
NEAR = 3  # log lines before a slowdown whose errors may have caused it
HARDWARE = {"network": "a network link", "gpu_fault": "a GPU"}  # faults that slow a run down before they end it
AT_START = 5  # log lines that show the speed before a run gets slower
SAME_DISTANCE = 0.15  # by which such distances may differ


class Slowdown(NamedTuple):
    """The sections of a run with one pace each, and the steps of every section."""

    rows: tuple[Step, ...]
    levels: tuple[Level, ...]

    def steps(self, index: int) -> tuple[Step, ...]:
        """Return the steps of a section."""
        one = self.levels[index]
        return self.rows[one.start : one.end]


def sustained_slowdown(stats: RunStats) -> Iterator[Finding]:
    """Steps become slower at a certain step and stay slower."""
    rows = _rows(stats)
    if len(rows) < limit("enough_for_trends") or _drift(rows) is not None:
        return
    found = Slowdown(rows, tuple(levels(_paces(rows), int(limit("shift_lines")), share("shift"))))
    slower = [index for index in range(1, len(found.levels)) if _pace(found, index) > _pace(found, index - 1)]
    if not slower or not _matters(found) or _is_jitter(stats, rows):
        return
    every = _phases_every(found, slower)
    first = max(slower, key=lambda index: _pace(found, index) / _pace(found, index - 1))
    causes, fixes = _likely_causes(stats, found, first)
    reported = _reported(stats, found, first)[:MAX_SHOWN]
    message = _periodic_message(found, slower, every) if every else _message(found)
    yield Finding(
        id="speed.periodic-steps" if every else "speed.sustained-slowdown",
        severity="warning",
        message=f"{message}. {causes}",
        steps=(found.steps(slower[0])[0].first, _last_slow(found).step),
        lines=(
            *(stats.location(found.steps(index)[0]) for index in slower[:MAX_SHOWN]),
            *(one.located for one in reported),
        ),
        evidence=tuple(_evidence(found, index) for index in slower[:MAX_SHOWN]),
        remedies=fixes,
    )


def slowing_down(stats: RunStats) -> Iterator[Finding]:
    """Steps get slower gradually over the run."""
    rows = _rows(stats)
    line = _drift(rows) if len(rows) >= limit("enough_for_trends") else None
    if line is None or _is_jitter(stats, rows):
        return
    times = line.end / line.start
    yield Finding(
        id="speed.slowing-down",
        severity="warning",
        message=f"steps get slower gradually: at the end they take {times:.2f} times as long as at the beginning",
        steps=(rows[0].first, rows[-1].step),
        lines=tuple(dict.fromkeys((stats.location(rows[0]), stats.location(rows[-1])))),
        evidence=(Evidence("pace at the end over the start", round(times, 4), "×", 1 + share("slowdown"), "limit"),),
        remedies=(*throttling(stats), *_host_causes(), *_fragmentation(stats)),
    )


def start_over_median(stats: RunStats) -> float:
    """Return the speed at the start of a run over its median, if it gets slower later; else 1."""
    slower = (*stats.findings_of(sustained_slowdown), *stats.findings_of(slowing_down))
    paces = _paces(_rows(stats))
    if not slower or not paces:
        return 1.0
    first = median_of(paces[: max(AT_START, len(paces) // 20)])
    return (stats.seconds_per_unit or first) / first if first else 1.0  # of the same steps as the run's speed


def _rows(stats: RunStats) -> tuple[Step, ...]:
    """Return the steps with a pace that no checkpoint blocked."""
    return tuple(step for step in stats.steady if step.seconds_per_unit and not step.blocked_s)


def _paces(rows: Sequence[Step]) -> list[float]:
    return [step.seconds_per_unit or math.nan for step in rows]


def _drift(rows: Sequence[Step]) -> Trend | None:
    """Return the line that a run's pace follows; None if levels describe it better or it rises too little."""
    paces = _paces(rows)
    line = trend(paces)
    rise = math.log(line.end / line.start)
    if rise <= math.log1p(share("slowdown")) or rise < SIGMAS * line.error * math.sqrt(12 / len(rows)):
        return None
    return line if line.error < error_of(paces, levels(paces, int(limit("shift_lines")), share("shift"))) else None


def _pace(found: Slowdown, index: int) -> float:
    return found.levels[index].value


def _last_slow(found: Slowdown) -> Step:
    """Return the last step that is slower than the fastest section before it; later ones have recovered."""
    slow = [
        index
        for index in range(1, len(found.levels))
        if _pace(found, index) > min(one.value for one in found.levels[:index]) * (1 + share("shift"))
    ]
    return found.steps(slow[-1])[-1] if slow else found.rows[-1]


def _matters(found: Slowdown) -> bool:
    """Return whether the run ended slower than it was, or lost much time in slow phases that passed."""
    best = min(one.value for one in found.levels[:-1])
    if found.levels[-1].value > best * (1 + share("shift")):
        return True
    before, lost, total = found.levels[0].value, 0.0, 0.0
    for level in found.levels:
        lost += max(0.0, level.value - before) * (level.end - level.start)
        total += level.value * (level.end - level.start)
        before = min(before, level.value)
    return lost > share("slow_steps_time") * total


def _is_jitter(stats: RunStats, rows: Sequence[Step]) -> bool:
    """Return whether slower steps lost too little time to mean anything: seconds in all, or milliseconds each."""
    timed = [(step.seconds, step.step - step.first + 1) for step in rows if step.seconds]
    if len(timed) < len(rows):
        return False
    quarter = max(1, len(timed) // 4)
    usual = median_of(sorted(seconds for seconds, _ in timed)[:quarter]) or 0.0  # the fast ones may be few
    lost = sum(max(0.0, seconds - usual) * steps for seconds, steps in timed)
    if lost >= limit("slowdown_s"):
        return False
    slow = median_of(sorted(seconds for seconds, _ in timed)[-quarter:]) or 0.0
    return not stats.run.header.on_gpu or slow - usual < limit("shift_s")


def _phases_every(found: Slowdown, slower: Sequence[int]) -> int | None:
    """Return the steps between slow phases that recur at equal distances and pass each time; None otherwise."""
    if len(slower) < FEWEST_PHASES or any(after - before != 2 for before, after in pairwise(slower)):
        return None
    starts = [found.steps(index)[0].first for index in slower]
    apart = [after - before for before, after in pairwise(starts)]
    typical = median_of([float(one) for one in apart]) or 0.0
    return round(typical) if all(abs(one - typical) <= SAME_DISTANCE * typical for one in apart) else None


def _message(found: Slowdown) -> str:
    """Return where the pace changed, from what to what, by how much."""
    subject, values = _shown(found)
    texts = []
    for index in range(1, len(found.levels)):
        change = _pace(found, index) / _pace(found, index - 1) - 1
        start = found.steps(index)[0].first
        texts.append(f"then {values[index]} from step {start:,} on ({abs(change):.0%} {_direction(change)})")
    more = f", and {len(texts) - MAX_SHOWN} more changes" if len(texts) > MAX_SHOWN else ""
    last = found.steps(0)[-1].step
    return f"{subject} {values[0]} to step {last:,}, {', '.join(texts[:MAX_SHOWN])}{more}"


def _direction(change: float) -> str:
    return "longer" if change > 0 else "shorter"


def _periodic_message(found: Slowdown, slower: Sequence[int], every: int) -> str:
    subject, values = _shown(found)
    lines = median_of(float(found.levels[index].end - found.levels[index].start) for index in slower) or 0.0
    return (
        f"about every {every:,} steps the run is slow for about {lines:.0f} log lines: "
        f"{subject} {values[slower[0]]} instead of {values[slower[0] - 1]}"
    )


def _shown(found: Slowdown) -> tuple[str, list[str]]:
    """Return a subject and the pace of every section: seconds per step, if logged and the batch is constant."""
    sections = [found.steps(index) for index in range(len(found.levels))]
    seconds = [median_of(step.seconds for step in rows) for rows in sections]
    samples = {median_of(float(step.samples) for step in rows if step.samples) for rows in sections}
    if len(samples) == 1 and all(seconds):
        return "steps take", [f"{one:.4g} s" for one in seconds]
    rates = [f"{1 / one.value:,.0f}" for one in found.levels]
    for name, unit in (("tokens_per_s", "tokens/s/GPU"), ("all_tokens_per_s", "tokens/s")):
        if all(getattr(step, name) for step in found.rows):
            return "the run processes", [f"{rate} {unit}" for rate in rates]
    return "the batch size changes, and a sample takes", [f"{one.value:.4g} s" for one in found.levels]


def _evidence(found: Slowdown, index: int) -> Evidence:
    """Return one change as evidence: in seconds if they are logged."""
    before, after = (median_of(step.seconds for step in found.steps(one)) for one in (index - 1, index))
    start = found.steps(index)[0].first
    if before is not None and after is not None:
        return Evidence(f"step time from step {start:,} on", after, "s", before, "before")
    ratio = round(_pace(found, index) / _pace(found, index - 1), 4)
    return Evidence(f"pace from step {start:,} on", ratio, "×", 1.0, "before")


PART_CAUSES = {
    "data": "loading data",
    "collectives": "communication",
    "forward_backward": "forward and backward",
    "optimizer": "the optimizer",
    "other": "the host",
}
"""Parts of a step that a log measures -> what to call them."""


def _likely_causes(stats: RunStats, found: Slowdown, index: int) -> tuple[str, tuple[Remedy, ...]]:
    """Return what else changed at a slowdown, as a sentence, and the checks that follow from it."""
    before, after = found.steps(index - 1), found.steps(index)
    texts: list[str] = []
    fixes: list[Remedy] = []
    if before[-1].attempt != after[0].attempt:
        texts.append("the run was restarted there, perhaps on other nodes")
        fixes.append(remedies.advice("compare the node lists of both starts", why="one slow node slows all ranks"))
    if reported := _reported(stats, found, index):
        texts.append(_errors_there(reported))
        fixes += _checks_of_node(reported[0])
    part = slower_part(before, after)
    if part is not None:
        name, extra, share_of_extra = part
        texts.append(f"{share_of_extra:.0%} of the extra time ({extra:.3g} s) is in {PART_CAUSES[name]}")
        fixes += checks_of_part(stats, name)
    texts += _memory_change(before, after)
    apart = [median_of(ranks_apart(step) for step in rows) for rows in (before, after)]
    if apart[0] and apart[1] and apart[1] > apart[0] * (1 + share("shift")):
        texts.append(f"the slowest rank takes {apart[1]:.2f} times as long as the fastest, before {apart[0]:.2f}")
        fixes += check_ranks(stats)
    named = next(reported_ranks(stats), None)
    if named is not None and named.steps is not None and named.steps[0] >= before[-1].step:
        texts.append("the run's straggler detector begins to name slow ranks (speed.stragglers)")
        fixes += named.remedies
    elif part is None:
        fixes += [*throttling(stats), *check_ranks(stats), *_data_checks()]
    unknown = "The log does not show what else changed there"
    sentence = "At that point " + "; ".join(texts) if texts else unknown
    return sentence, tuple({one.try_: one for one in [*fixes, *_host_causes()]}.values())


def _reported(stats: RunStats, found: Slowdown, index: int) -> list[Fault]:
    """Return the errors of links and GPUs that a log reports from just before a slow section to its end."""
    first, last = found.steps(index - 1)[-NEAR:][0].step, found.steps(index)[-1].step
    hardware = [one for one in stats.run.faults if one.name in HARDWARE and one not in stats.fatal]
    return [one for one in hardware if one.step is not None and first <= one.step <= last]


def _errors_there(reported: Sequence[Fault]) -> str:
    what = HARDWARE[reported[0].name]
    count = f"an error of {what}" if len(reported) == 1 else f"{len(reported)} errors, the first of {what}"
    return f"the log reports {count}, after step {reported[0].step}: {reported[0].shown}"


def _checks_of_node(fault: Fault) -> tuple[Remedy, ...]:
    node = f"the node of {fault.prefix.rstrip(':')}" if fault.prefix else "the node that the message names"
    tool = "ibstat, and the switch's error counters" if fault.name == "network" else "nvidia-smi -q -d ECC, dmesg"
    return (
        remedies.advice(
            f"check {node}: {tool}", why=f"{HARDWARE[fault.name]} reported errors when steps became slower"
        ),
        remedies.advice(f"exclude {node}", why="one slow node slows all ranks"),
    )


def slower_part(before: Sequence[Step], after: Sequence[Step]) -> tuple[str, float, float] | None:
    """Return the part that took most of the extra time, its seconds, and its share of the extra time."""
    totals = [median_of(step.seconds for step in rows) for rows in (before, after)]
    if totals[0] is None or totals[1] is None or totals[1] <= totals[0]:
        return None
    extra = {}
    for name in PART_CAUSES:
        parts = [median_of(step.parts_s.get(name) for step in rows) for rows in (before, after)]
        if parts[0] is not None and parts[1] is not None:
            extra[name] = parts[1] - parts[0]
    if "collectives" in extra and "forward_backward" in extra:  # nested in it, or beside it: count it once
        extra["forward_backward"] -= max(0.0, extra["collectives"])
    worst = max(extra, key=lambda name: extra[name], default=None)
    if worst is None or extra[worst] < 0.5 * (totals[1] - totals[0]):
        return None
    return worst, extra[worst], min(1.0, extra[worst] / (totals[1] - totals[0]))


def _memory_change(before: Sequence[Step], after: Sequence[Step]) -> list[str]:
    gib = [median_of(step.memory_gib for step in rows) for rows in (before, after)]
    if gib[0] is None or gib[1] is None or gib[1] - gib[0] <= limit("leak_gib"):
        return []
    return [f"peak memory rises from {gib[0]:.1f} to {gib[1]:.1f} GiB"]


def ranks_apart(step: Step) -> float | None:
    """Return the slowest rank's time over the fastest's, for the work that differs most."""
    ratios = [slowest / fastest for fastest, slowest in step.ranks_s.values() if fastest > 0]
    return max(ratios, default=None)


def checks_of_part(stats: RunStats, part: str) -> tuple[Remedy, ...]:
    """Return what to check if a part of a step became slower."""
    if part == "data":
        return _data_checks()
    if part == "collectives":
        return (
            Remedy(try_=("NCCL_DEBUG=INFO",), what="environment", why="shows which network and links are used"),
            remedies.advice(
                "check the links: ibstat, and the switch's error counters", why="a link may run at a lower rate"
            ),
        )
    if part == "forward_backward":
        return (*throttling(stats), *check_ranks(stats))
    return ()


def throttling(stats: RunStats) -> tuple[Remedy, ...]:
    """Return how to see whether a GPU lowers its clock."""
    if not stats.run.header.on_gpu:
        return check_ranks(stats)
    return (remedies.advice("nvidia-smi -q -d PERFORMANCE,CLOCK", why="shows thermal or power throttling"),)


def _fragmentation(stats: RunStats) -> tuple[Remedy, ...]:
    if not stats.run.header.on_gpu:
        return ()
    fix = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    return (Remedy(try_=(fix,), what="environment", why="a fragmented allocator stalls the GPU increasingly often"),)


def _data_checks() -> tuple[Remedy, ...]:
    return (
        remedies.advice(
            "check the load of the file system, and whether samples got longer there",
            why="other jobs share the storage; longer samples cost more attention",
        ),
    )


def _host_causes() -> tuple[Remedy, ...]:
    return (remedies.advice("check host memory and objects kept across steps", why="growing lists slow the host"),)
