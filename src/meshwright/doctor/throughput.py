"""How even a run is: single steps or ranks that take longer, and steps that take longer and longer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import gcd
from statistics import median

import numpy as np

from meshwright.doctor import remedies
from meshwright.doctor.finding import Evidence, Finding, Remedy
from meshwright.doctor.run import Step
from meshwright.doctor.run_stats import View, deviation, middle, running_median, sections, span
from meshwright.doctor.thresholds import limit, share

NEIGHBOURS = 10  # lines before and behind a step that it is held against
FEWEST_PERIODS = 3
MOST_PERIODIC = 0.5  # of the lines; where every second one is slow, they are not exceptions


def uneven_steps(view: View) -> Iterator[Finding]:
    """Some steps take much longer than those around them, now and then or every so often."""
    rows = [step for step in view.steady if not step.blocked_s]
    if len(rows) < limit("enough_for_trends"):
        return
    times = _beside_neighbours(rows)
    much = limit("slow_step")
    slow = [step for step, ratio in zip(rows, times, strict=True) if ratio > much]
    lost = sum((ratio - 1) * step.covers for step, ratio in zip(rows, times, strict=True) if ratio > much)
    part = lost / sum(ratio * step.covers for step, ratio in zip(rows, times, strict=True))
    if len(slow) >= limit("slow_steps") and part > share("slow_steps_time"):
        yield _slow_ones(view, slow, part, median(ratio for ratio in times if ratio > much), len(rows))
        return
    spread = deviation(times)
    if spread > share("spread"):
        yield Finding(
            id="speed.uneven-steps",
            severity="warning",
            message=f"step times spread by {spread:.0%} around their median",
            steps=span(rows),
            lines=view.ends,
            evidence=(Evidence("spread of step times", round(spread, 4), "", share("spread"), "limit"),),
            remedies=_look_at_ranks(view),
        )


def _beside_neighbours(rows: Sequence[Step]) -> list[float]:
    """The time of every step over the median of those around it: a run that slows down evenly is not uneven."""
    paces = np.array([step.pace or 0.0 for step in rows])
    ratios: list[float] = (paces / running_median(paces, NEIGHBOURS, NEIGHBOURS)).tolist()
    return ratios


def _slow_ones(view: View, slow: Sequence[Step], part: float, times: float, rows: int) -> Finding:
    every = period([step.step for step in slow]) if len(slow) <= MOST_PERIODIC * rows else None
    if every is None:
        message = f"{len(slow)} of {rows} steps take {times:.1f} times as long as the others: {part:.0%} of all time"
        tries = _look_at_ranks(view)
    else:
        message = f"every {every} steps one takes {times:.1f} times as long as the others: {part:.0%} of all time"
        tries = _periodic(view, every)
    return Finding(
        id="speed.uneven-steps" if every is None else "speed.periodic-steps",
        severity="warning",
        message=message,
        steps=(slow[0].step, slow[-1].step),
        lines=tuple(view.place(step) for step in slow[:3]),
        evidence=(
            Evidence("time lost to slow steps", round(part, 4), "of all", share("slow_steps_time"), "limit"),
            Evidence("slow steps", float(len(slow)), "", float(rows), "steps"),
            *(() if every is None else (Evidence("period", float(every), "steps"),)),
        ),
        remedies=tries,
    )


def slowing_down(view: View) -> Iterator[Finding]:
    """Steps take longer and longer."""
    if not view.enough_for_trends:
        return
    paces = sections(view.steady, lambda step: step.pace)
    rising = sum(after > before for before, after in pairwise(paces))
    if len(paces) < 2 or rising < len(paces) - 2 or paces[-1] <= paces[0] * (1 + share("slowdown")):
        return
    times = paces[-1] / paces[0]
    if not _keeps_rising(paces):
        return
    yield Finding(
        id="speed.slowing-down",
        severity="warning",
        message=f"steps at the end take {times:.2f} times as long as at the beginning, and longer all the way",
        steps=span(view.steady),
        lines=view.ends,
        evidence=(Evidence("last over first fifth", round(times, 4), "×", 1 + share("slowdown"), "limit"),),
        remedies=(
            remedies.plainly("nvidia-smi -q -d PERFORMANCE,CLOCK", why="GPUs that are hot or short of power slow down"),
            Remedy(
                try_=("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",),
                what="environment",
                why="an allocator that runs into fragments stops the GPU more and more often",
            ),
            remedies.plainly("look at host memory and at what is kept from step to step", why="lists that only grow"),
        ),
    )


def stragglers(view: View) -> Iterator[Finding]:
    """Some ranks need longer than others for work that is equal."""
    worst: tuple[float, str] = (0.0, "")
    for name in {name for step in view.steady for name in step.ranks_s}:
        pairs = [step.ranks_s[name] for step in view.steady if name in step.ranks_s]
        apart = middle(slowest / fastest for fastest, slowest in pairs if fastest > 0)
        if apart is not None and len(pairs) >= limit("enough_steps"):
            worst = max(worst, (apart, name))
    apart, name = worst
    if apart <= limit("ranks_apart"):
        return
    stages = view.case is not None and view.case.pp > 1
    tries = list(_look_at_ranks(view))
    if stages:
        tries.insert(
            0,
            Remedy(
                try_=("layout.embedding_as_layer=true", "layout.head_as_layer=true"),
                what="layout",
                why="the stages of embedding and head get a layer less",
            ),
        )
    yield Finding(
        id="speed.stragglers",
        severity="warning",
        message=(
            f"the slowest rank takes {apart:.2f} times as long as the fastest for {name}"
            + (": stages have unequal work, or a GPU is slow" if stages else ": a GPU or its node is slow")
        ),
        steps=span(view.steady),
        lines=view.ends,
        evidence=(Evidence(f"slowest over fastest rank, {name}", round(apart, 3), "×", limit("ranks_apart"), "limit"),),
        remedies=tuple(tries),
    )


def period(numbers: Sequence[int]) -> int | None:
    """The distance that numbers have from each other, or a multiple of; None where they have none in common."""
    apart = [after - before for before, after in pairwise(numbers) if after > before]
    if len(apart) < FEWEST_PERIODS - 1:
        return None
    common = gcd(*apart)
    return common if common > 1 and sum(one == common for one in apart) * 2 >= len(apart) else None


def _keeps_rising(values: Sequence[float]) -> bool:
    """Whether the last of several steps upwards is no small one: what settles does not count."""
    rises = [after - before for before, after in pairwise(values)]
    return rises[-1] >= 0.25 * sum(rises) / len(rises)


def _look_at_ranks(view: View) -> tuple[Remedy, ...]:
    if not view.run.told.on_gpu:
        return (remedies.plainly("see what else runs on the machine", why="ranks without GPUs share its cores"),)
    return (
        remedies.plainly("nvidia-smi -q -d PERFORMANCE,ECC on every node", why="a hot or failing GPU holds up all"),
        remedies.plainly("leave out one node after the other", why="the one without which steps are even is the cause"),
    )


def _periodic(view: View, every: int) -> tuple[Remedy, ...]:
    """What happens every so many steps."""
    tries = []
    recipe = view.case.recipe if view.case is not None else None
    if recipe is not None and recipe.checkpoint.save_every and every % recipe.checkpoint.save_every == 0:
        tries.append(
            Remedy(try_=("checkpoint.async_save=true",), what="layout", why="the period is that of checkpoints")
        )
    if recipe is not None and recipe.train.eval_every and every % recipe.train.eval_every == 0:
        tries.append(
            Remedy(
                try_=(f"train.eval_every={10 * recipe.train.eval_every}",),
                what="layout",
                why="the period is that of evaluations",
            )
        )
    tries.append(
        remedies.plainly(
            f"look at what runs every {every} steps: garbage collection, logging, checkpoints, evaluations",
            why="what comes that regularly is started by the run itself",
        )
    )
    return tuple(tries)
