"""Ranks that the run's own straggler detector names: nvidia-resiliency-ext, in logs of Megatron-Bridge and NeMo."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence

from meshwright.doctor import remedies
from meshwright.doctor.finding import Evidence, Finding
from meshwright.doctor.formats.text import Line, has_any
from meshwright.doctor.hang import RankNames
from meshwright.doctor.run import RankHosts, Step, StragglerReport
from meshwright.doctor.run_stats import RunStats
from meshwright.doctor.slow_ranks import MOST_SLOW

HINTS = ("STRAGGLER DETECTION WARNING", "GPU relative performance", " Score=")
AFFECTED = re.compile(r"STRAGGLER DETECTION WARNING: .*?Affected ranks: (.*)")
NAMED = re.compile(r"rank=(\d+), node='([^']*)'")
SCORE = re.compile(r"\bRank=(\d+) Node=(\S+) Score=(\d+\.\d+)")


def find_reports(lines: Sequence[Line], steps: Sequence[Step]) -> tuple[StragglerReport, ...]:
    """Return the detector's reports in the order of the log; the lines between two steps are one report."""
    at, found = [step.line for step in steps], dict[int, StragglerReport]()
    for line in lines:
        if not has_any(line.text, HINTS):
            continue
        place = bisect_right(at, line.number)
        step = steps[place - 1].step if place else None
        report = found.setdefault(place, StragglerReport(line=line.number, step=step))
        if affected := AFFECTED.search(line.text):
            report.slow.update((int(rank), node) for rank, node in NAMED.findall(affected[1]))
        elif score := SCORE.search(line.text):
            rank, value = int(score[1]), float(score[3])
            report.scores[rank] = min(value, report.scores.get(rank, value))
    return tuple(found.values())


def reported_ranks(stats: RunStats) -> Iterator[Finding]:
    """Yield the ranks of the last report, unless they are most of the run: then no rank is an exception."""
    reports = stats.run.straggler_reports
    warned = [one for one in reports if one.slow]
    if not warned or warned[-1] is not reports[-1] or warned[-1].step is None:  # none, or the ranks have recovered
        return
    slow, file = warned[-1].slow, stats.run.file
    if stats.world and len(slow) > MOST_SLOW * stats.world:
        return
    names, score = RankNames(RankHosts(ranks=slow)).of(sorted(slow), lower=True), _score(warned[-1])
    speed = "" if score is None else f", at {score:.2f} of the speed of the fastest rank or of their own best"
    of = f"{len(warned)} of its {len(reports)} reports" if len(warned) < len(reports) else "all of its reports"
    nodes = ", ".join(dict.fromkeys(filter(None, slow.values()))) or f"the node of {names}"
    first = next(one.step for one in warned if one.slow.keys() & slow.keys() and one.step is not None)
    yield Finding(
        id="speed.stragglers",
        severity="warning",
        message=f"the run's straggler detector names {names} as slow in {of}, from step {first} on{speed}: all other "
        "ranks wait for them",
        steps=(first, stats.run.last_step),
        lines=tuple(dict.fromkeys(f"{file}:{one.line}" for one in (warned[0], warned[-1]))),
        evidence=() if score is None else (Evidence("score of the slowest rank", score, "", 1.0, "of the fastest"),),
        remedies=(
            remedies.advice(f"nvidia-smi -q -d PERFORMANCE,ECC on {nodes}", why="a hot GPU slows all ranks"),
            remedies.advice(f"exclude {nodes}", why="steps are faster without it"),
        ),
    )


def reported_gap_s(stats: RunStats) -> float:
    """Return the seconds of a step for which the others wait, by the score of the slowest rank; 0 if none is named."""
    score = _score(stats.run.straggler_reports[-1]) if any(reported_ranks(stats)) else None
    return 0.0 if score is None else (stats.step_s or 0.0) * (1 - score)


def _score(report: StragglerReport) -> float | None:
    return min((report.scores[rank] for rank in report.slow if rank in report.scores), default=None)
