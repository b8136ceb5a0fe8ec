"""What to try on a step that is slow without a known cause: faster settings by the cost model, then a trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.clusters import AMD_ARCHS
from meshwright.doctor import remedies
from meshwright.doctor.better_layout import best_layout_change, better_layout
from meshwright.doctor.finding import Remedy
from meshwright.doctor.profiler_trace import profiler_trace
from meshwright.doctor.run_stats import RunStats
from meshwright.doctor.thresholds import share

WORKERS = "dataloader_num_workers"
FAR_SLOWER = 2.0  # times the estimate: a slower GPU or other kernels seldom explain that
MOST = 4  # single changes
CLOCKS, AMD_CLOCKS = "nvidia-smi -q -d PERFORMANCE,CLOCK", "amd-smi metric --clock --power"
NOTHING = "no other layout or kernel is much faster by the cost model; "


def slow_step_remedies(stats: RunStats) -> tuple[Remedy, ...]:
    """Return the fastest layout, single changes and all of them together, the clocks, and a profiler trace."""
    singles = remedies.faster_remedies(stats, remedies.speed_candidates, MOST)
    tried = [*_fastest_layout(stats), *_together(stats, singles), *singles]
    found: dict[frozenset[str], Remedy] = {}
    for one in tried:
        found.setdefault(frozenset(one.try_), one)
    estimated = sorted(found.values(), key=lambda one: one.step_ratio or 1.0)
    clocks = _clocks(stats, "" if estimated else NOTHING)
    return (*estimated, *_loader_workers(stats), clocks, profiler_trace(stats))


def _loader_workers(stats: RunStats) -> tuple[Remedy, ...]:
    """Return worker processes for the Trainer's loader, which has none by default, if its log shows no data times."""
    case = stats.case
    if stats.run.kind != "transformers" or stats.part_s("data") is not None or (stats.slower or 0.0) < FAR_SLOWER:
        return ()
    setting = stats.run.header.settings.get(WORKERS)
    if case is None or (setting is not None and (setting.unresolved or setting.value)):
        return ()
    why = "the log has no data times, and without workers every step waits until its batch is loaded and collated"
    return (remedies.advice(f"{WORKERS}=4", why=why),)


def _clocks(stats: RunStats, before: str) -> Remedy:
    is_amd = stats.case is not None and stats.case.cluster.gpu.arch in AMD_ARCHS
    return remedies.advice(AMD_CLOCKS if is_amd else CLOCKS, why=f"{before}a GPU that is hot or short of power is slow")


def _fastest_layout(stats: RunStats) -> tuple[Remedy, ...]:
    """Return the best layout of the search; none if that is a finding of its own or gains too little."""
    change = best_layout_change(stats)
    if change is None or stats.findings_of(better_layout):
        return ()
    one = remedies.evaluate_change(stats, change)
    is_faster = one is not None and one.fits and (one.step_ratio or 1.0) <= 1 - share("worth_trying")
    return (one,) if is_faster and one is not None else ()


def _together(stats: RunStats, singles: Sequence[Remedy]) -> tuple[Remedy, ...]:
    """Return the single changes that are faster together than alone: each is added if the step gets faster with it."""
    best: Remedy | None = None
    values: dict[str, Any] = {}
    for single in singles:
        more = values | remedies.changed_values(stats, single)
        one = remedies.evaluate_change(stats, remedies.Change(more, "these changes together"))
        before = 1.0 if best is None else best.step_ratio or 1.0
        if one is not None and one.fits and (one.step_ratio or 1.0) <= before - share("worth_trying"):
            best, values = one, more
    return () if best is None else (best,)
