"""Diagnoses of uneven throughput: slow steps and slow ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import gcd
from statistics import median

import numpy as np

from meshwright.display import ordinal, plural
from meshwright.doctor import remedies
from meshwright.doctor.finding import Evidence, Finding, Remedy
from meshwright.doctor.run import Step
from meshwright.doctor.run_stats import RunStats, deviation, median_of, running_median, span
from meshwright.doctor.slow_ranks import SlowRanks, find_slow_ranks
from meshwright.doctor.straggler_reports import reported_ranks
from meshwright.doctor.thresholds import limit, share

NEIGHBORS = 10  # lines before and after a step that it is compared with
FEWEST_PERIODS = 3
MOST_PERIODIC = 0.5  # share of slow lines above which they are not exceptions


def uneven_steps(stats: RunStats) -> Iterator[Finding]:
    """Some steps take much longer than their neighbors, at random or periodically."""
    rows = [step for step in stats.steady if not step.blocked_s]
    if len(rows) < limit("enough_for_trends"):
        return
    times = _relative_to_neighbors(rows)
    much = limit("slow_step")
    slow = [step for step, ratio in zip(rows, times, strict=True) if ratio > much]
    lost = sum((ratio - 1) * step.covers for step, ratio in zip(rows, times, strict=True) if ratio > much)
    part = lost / sum(ratio * step.covers for step, ratio in zip(rows, times, strict=True))
    if len(slow) >= limit("slow_steps") and part > share("slow_steps_time"):
        yield _slow_steps_finding(stats, slow, part, median(ratio for ratio in times if ratio > much), len(rows))
        return
    spread = step_spread(rows)
    if spread > share("spread"):
        yield Finding(
            id="speed.uneven-steps",
            severity="warning",
            message=f"step times vary by {spread:.0%} around those of their neighbors",
            steps=span(rows),
            lines=stats.ends,
            evidence=(Evidence("spread of step times", round(spread, 4), "", share("spread"), "limit"),),
            remedies=check_ranks(stats),
        )


def step_spread(rows: Sequence[Step]) -> float:
    """Return how much step times vary around those of their neighbors: a steady slowdown is another finding."""
    return deviation(_relative_to_neighbors(rows))


def _relative_to_neighbors(rows: Sequence[Step]) -> list[float]:
    """Return the time of every step over the median of its neighbors, so that a steady slowdown is not uneven."""
    paces = np.array([step.seconds_per_unit or 0.0 for step in rows])
    ratios: list[float] = (paces / running_median(paces, NEIGHBORS, NEIGHBORS)).tolist()
    return ratios


def _slow_steps_finding(stats: RunStats, slow: Sequence[Step], part: float, times: float, rows: int) -> Finding:
    every = period([step.step for step in slow]) if len(slow) <= MOST_PERIODIC * rows else None
    if every is None:
        cause, fixes = _cause_of_slow_steps(stats, slow)
        share_of_time = f"{part:.0%} of the run time{cause}"
        message = f"{len(slow)} of {rows} steps take {times:.1f} times as long as the others: {share_of_time}"
    else:
        covers = max(1, round(median(step.covers for step in slow)))
        which = f"every {ordinal(every)} step"
        if covers > 1:  # a line is the mean of its steps: which of them is slow is not known
            lines = max(1, round(every / covers))
            which = f"every {ordinal(lines)} log line (every {every} steps, a line is the mean of {covers})"
        message = f"{which} takes {times:.1f} times as long as the others: {part:.0%} of the run time"
        fixes = _periodic(stats, every)
    return Finding(
        id="speed.uneven-steps" if every is None else "speed.periodic-steps",
        severity="warning",
        message=message,
        steps=(slow[0].step, slow[-1].step),
        lines=tuple(stats.location(step) for step in slow[:3]),
        evidence=(
            Evidence("time lost to slow steps", round(part, 4), "of run time", share("slow_steps_time"), "limit"),
            Evidence("slow steps", float(len(slow)), "", float(rows), "steps"),
            *(() if every is None else (Evidence("period", float(every), "steps"),)),
        ),
        remedies=fixes,
    )


WAITS_FOR_DATA = 0.5  # of the extra time of slow steps


def _cause_of_slow_steps(stats: RunStats, slow: Sequence[Step]) -> tuple[str, tuple[Remedy, ...]]:
    """Return what single slow steps wait for, as far as the log shows it, and what to do."""
    if not stats.run.header.on_gpu:
        return "", check_ranks(stats)
    usual, waited = median_of(step.seconds for step in stats.steady), stats.part_s("data")
    if waited is None:
        text = (
            ". The log has no data-loading times. The steps between them run at full speed, so no GPU is slow: most "
            "often the data loader stalls, else the file system or the host"
        )
        return text, (*data_remedies(stats), *_data_timers(stats), *check_ranks(stats))
    extra = sum(max(0.0, (step.seconds or 0.0) - (usual or 0.0)) for step in slow)
    data = sum(max(0.0, step.parts_s.get("data", 0.0) - waited) for step in slow)
    if extra and data > WAITS_FOR_DATA * extra:
        return f". They wait for data: {data / extra:.0%} of their extra time", data_remedies(stats)
    return "", check_ranks(stats)


def data_remedies(stats: RunStats) -> tuple[Remedy, ...]:
    """Return how to load data earlier."""
    recipe = stats.case.recipe if stats.case is not None else None
    workers, ahead = (recipe.data.workers, recipe.data.prefetch) if recipe else (4, 2)
    return (
        Remedy(try_=(f"data.workers={max(2, 2 * workers)}",), what="layout", why="more loader threads"),
        Remedy(try_=(f"data.prefetch={max(2, 2 * ahead)}",), what="layout", why="prefetches more steps"),
        remedies.advice("copy the dataset to a local disk", why="shared file systems have high latency"),
    )


DATA_TIMERS = {
    "megatron": ("--timing-log-level 2", "logs the time of batch-generator"),
    "torchtitan": ("metrics.enable_tensorboard", "time_metrics/data_loading(%) is only there and in W&B"),
}
"""Format -> the setting with which its log shows waits for data."""


def _data_timers(stats: RunStats) -> tuple[Remedy, ...]:
    found = DATA_TIMERS.get(stats.run.kind)
    return (remedies.advice(found[0], why=found[1]),) if found else ()


def stragglers(stats: RunStats) -> Iterator[Finding]:
    """Some ranks take longer than others for equal work."""
    if reported := tuple(reported_ranks(stats)):
        yield from reported
        return
    worst: tuple[float, str] = (0.0, "")
    for name, pairs in _rank_pairs(stats).items():
        apart = median_of(slowest / fastest for fastest, slowest in pairs if fastest > 0)
        if apart is not None and len(pairs) >= limit("enough_steps"):
            worst = max(worst, (apart, name))
    apart, name = worst
    if apart <= limit("ranks_apart"):
        named = find_slow_ranks(stats)
        yield from _waiting_ranks(stats) if named is None else _named_ranks(stats, named)
        return
    slow = _slow_rank(stats, name)
    stages = slow is None and stats.case is not None and stats.case.pp > 1
    fixes = list(check_ranks(stats, slow))
    if stages:
        fixes.insert(
            0,
            Remedy(
                try_=("layout.embedding_as_layer=true", "layout.head_as_layer=true"),
                what="layout",
                why="gives the stages with embedding and head one layer less",
            ),
        )
    yield Finding(
        id="speed.stragglers",
        severity="warning",
        message=(
            f"{'the slowest rank' if slow is None else slow} takes {apart:.2f} times as long as the fastest for {name}"
            + (": unequal work per stage, or a slow GPU" if stages else ": a slow GPU or node")
        ),
        steps=span(stats.steady),
        lines=stats.ends,
        evidence=(Evidence(f"slowest over fastest rank, {name}", round(apart, 3), "×", limit("ranks_apart"), "limit"),),
        remedies=tuple(fixes),
    )


def rank_gap_s(stats: RunStats) -> float:
    """Return the seconds by which the slowest rank takes longer than the fastest; 0 if stages may have unequal work."""
    if stats.case is None or stats.case.pp > 1:
        return 0.0
    gaps = (median_of(slowest - fastest for fastest, slowest in pairs) for pairs in _rank_pairs(stats).values())
    return max((one or 0.0 for one in gaps), default=0.0)


def _rank_pairs(stats: RunStats) -> dict[str, list[tuple[float, float]]]:
    """Return the seconds of the fastest and slowest rank in every step, by what is timed."""
    names = {name for step in stats.steady for name in step.ranks_s}
    return {name: [step.ranks_s[name] for step in stats.steady if name in step.ranks_s] for name in names}


def _named_ranks(stats: RunStats, found: SlowRanks) -> Iterator[Finding]:
    """Yield the ranks that the times of every rank show to be slow, with what the others wait for them."""
    names, waited, part = found.named(stats), stats.part_s("waiting"), stats.part_share("waiting")
    takes = "takes" if len(found.ranks) == 1 else "take"
    waits = f"; the others wait up to {waited:.3g} s per step ({part:.0%}) for it" if waited and part else ""
    yield Finding(
        id="speed.stragglers",
        severity="warning",
        message=f"{names} {takes} {found.ratio:.2f} times as long as ranks with equal work for {found.timer}{waits}: "
        "a slow GPU or node",
        steps=span(stats.steady),
        lines=stats.ends,
        evidence=(
            Evidence(
                f"slow rank over usual rank, {found.timer}", round(found.ratio, 3), "×", limit("slow_rank"), "limit"
            ),
        ),
        remedies=check_ranks(stats, names),
    )


def _waiting_ranks(stats: RunStats) -> Iterator[Finding]:
    """Yield a slow rank that shows only in the collectives: it arrives last and does not wait, all others do."""
    waited, part, network = stats.part_s("waiting"), stats.part_share("waiting"), stats.part_s("collectives")
    if waited is None or part is None or network is None or not stats.enough:
        return
    if part <= share("network_share") or waited + network <= limit("network_times") * network:
        return
    yield Finding(
        id="speed.stragglers",
        severity="warning",
        message=(
            f"ranks wait up to {waited:.3g} s per step ({part:.0%}) in collectives that take the last rank "
            f"{network:.3g} s: a slow GPU or node, or unequal work, not a slow network"
        ),
        steps=span(stats.steady),
        lines=stats.ends,
        evidence=(
            Evidence("waiting for the slowest rank", waited, "s per step"),
            Evidence("waiting for the slowest rank", round(part, 4), "of a step", share("network_share"), "limit"),
        ),
        remedies=(
            *check_ranks(stats),
            remedies.advice(
                "--timing-log-level 2 --timing-log-option all", why="logs the times of every rank, to name the slow one"
            ),
        ),
    )


def _slow_rank(stats: RunStats, name: str) -> str | None:
    """Return the rank that is slower than others with equal work, with its node; None if no rank is known to be."""
    times: dict[int, list[float]] = {}
    for step in stats.steady:
        for rank, seconds in step.by_rank_s.get(name, {}).items():
            times.setdefault(rank, []).append(seconds)
    medians = {rank: median(one) for rank, one in times.items()}
    if len(medians) < 2:
        return None
    case = stats.case
    stage = max(1, 1 + max(medians) if case is None else int(case.world) // int(case.pp))  # ranks with equal work
    slowest = max(medians, key=lambda rank: medians[rank])
    alike = [seconds for rank, seconds in medians.items() if rank // stage == slowest // stage and rank != slowest]
    if not alike or medians[slowest] <= limit("ranks_apart") * median(alike):
        return None
    each = 0 if case is None else case.cluster.gpus_per_node
    return f"rank {slowest}" + (f" (GPU {slowest % each} of node {slowest // each})" if each else "")


def period(numbers: Sequence[int]) -> int | None:
    """Return the common distance of numbers; None if they have none."""
    apart = [after - before for before, after in pairwise(numbers) if after > before]
    if len(apart) < FEWEST_PERIODS - 1:
        return None
    common = gcd(*apart)
    return common if common > 1 and sum(one == common for one in apart) * 2 >= len(apart) else None


def check_ranks(stats: RunStats, slow: str | None = None) -> tuple[Remedy, ...]:
    """Return how to find the slow rank, or to confirm that it is this one."""
    if not stats.run.header.on_gpu:
        return (remedies.advice("check what else runs on the machine", why="CPU ranks share its cores"),)
    if slow is not None:
        return (
            remedies.advice(f"nvidia-smi -q -d PERFORMANCE,ECC on the node of {slow}", why="a hot GPU slows all ranks"),
            remedies.advice(f"exclude the node of {slow}", why="steps are faster without it"),
        )
    if stats.case is not None and stats.case.cluster.nodes == 1:
        return (remedies.advice("nvidia-smi -q -d PERFORMANCE,ECC", why="a hot or failing GPU slows all ranks"),)
    return (
        remedies.advice("nvidia-smi -q -d PERFORMANCE,ECC on every node", why="a hot or failing GPU slows all ranks"),
        remedies.advice("exclude one node at a time", why="steps are even without the slow one"),
    )


def _periodic(stats: RunStats, every: int) -> tuple[Remedy, ...]:
    """Return remedies for what happens every so many steps."""
    fixes = []
    recipe = stats.case.recipe if stats.case is not None else None
    if recipe is not None and recipe.checkpoint.save_every and every % recipe.checkpoint.save_every == 0:
        fixes.append(
            Remedy(try_=("checkpoint.async_save=true",), what="layout", why="the period matches the checkpoints")
        )
    if recipe is not None and recipe.train.eval_every and every % recipe.train.eval_every == 0:
        fixes.append(
            Remedy(
                try_=(f"train.eval_every={10 * recipe.train.eval_every}",),
                what="layout",
                why="the period matches the evaluations",
            )
        )
    fixes.append(
        remedies.advice(
            f"check what runs every {plural(every, 'step')}: garbage collection, logging, checkpoints, evaluations",
            why="a fixed period points to the run itself",
        )
    )
    return tuple(fixes)
