"""Ranks that are slower than others with equal work, in logs with the times of every rank."""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

from meshwright.doctor.run_stats import RunStats
from meshwright.doctor.thresholds import limit

STAGES = "--pipeline-model-parallel-size"
SPREADS = 4.0  # times the usual deviation of ranks by which a slow one must differ
MOST_SLOW = 0.5  # share of ranks with equal work above which none of them is an exception


class SlowRanks(NamedTuple):
    """Ranks that are slower than those with equal work."""

    ranks: tuple[int, ...]
    timer: str
    ratio: float  # of the slowest one's time to the usual

    def named(self, stats: RunStats) -> str:
        """Return the ranks with their hosts or nodes."""
        return stats.rank_names.of(self.ranks, lower=True)


def find_slow_ranks(stats: RunStats) -> SlowRanks | None:
    """Return the ranks that take longest for a timer without communication; None if no rank stands out.

    Ranks of one pipeline stage have equal work. If the stages are not known, only a single slow rank is reported.
    """
    found = [
        one for name in sorted({name for step in stats.steady for name in step.by_rank_s}) if (one := _of(stats, name))
    ]
    return max(found, key=lambda one: one.ratio, default=None)


def _of(stats: RunStats, timer: str) -> SlowRanks | None:
    times: dict[int, list[float]] = {}
    for step in stats.steady:
        for rank, seconds in step.by_rank_s.get(timer, {}).items():
            times.setdefault(rank, []).append(seconds)
    medians = {rank: median(one) for rank, one in times.items()}
    if not medians or len(times[min(times)]) < limit("enough_steps"):
        return None
    stages, slow = _stages(stats), dict[int, float]()
    stage = max(1, (1 + max(medians)) // (stages or 1))
    for first in range(0, max(medians) + 1, stage):
        alike = {rank: seconds for rank, seconds in medians.items() if first <= rank < first + stage}
        slow |= _above(alike)
    if not slow or (stages is None and len(slow) > 1):
        return None
    return SlowRanks(tuple(sorted(slow)), timer, max(slow.values()))


def _stages(stats: RunStats) -> int | None:
    """Return the pipeline stages of the run; None if neither the case nor the log has them."""
    if stats.case is not None:
        return int(stats.case.pp)
    header = stats.run.header
    stated = next((one.split()[-1] for one in header.arguments if one.startswith(f"{STAGES} ")), "")
    return int(stated) if stated.isdigit() else header.overrides.get("layout.pp")


def _above(alike: dict[int, float]) -> dict[int, float]:
    """Return the ranks above the usual time of ranks with equal work, by their ratio to it."""
    if len(alike) < limit("enough_ranks"):
        return {}
    usual = median(alike.values())
    spread = median(abs(seconds - usual) for seconds in alike.values())
    least = max(limit("slow_rank") * usual, usual + SPREADS * spread)
    found = {rank: seconds / usual for rank, seconds in alike.items() if seconds > least} if usual else {}
    return found if len(found) < MOST_SLOW * len(alike) else {}
