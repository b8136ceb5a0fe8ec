"""Why a run is slow: its data, network or pipeline, single steps or ranks, or what the estimate cannot explain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import gcd
from statistics import median

import numpy as np

from meshwright.doctor import remedies
from meshwright.doctor.finding import Evidence, Finding, Remedy
from meshwright.doctor.run import Step
from meshwright.doctor.thresholds import limit, share
from meshwright.doctor.view import View, deviation, middle, running_median, sections

COLLECTIVES = ("tp", "cp", "ep", "dp")
PARTS = {
    "forward_backward": ("compute", "tp", "cp", "ep", "pp_bubble", "dp"),
    "optimizer": ("optimizer",),
    "other": ("other",),
}
"""The parts that a run measures, and those of the estimate that they hold."""
NAMES = {
    "forward_backward": "forward and backward",
    "optimizer": "the optimizer",
    "other": "host work and waiting",
    "data": "waiting for data",
}
NEIGHBOURS = 10  # lines before and behind a step that it is held against
FEWEST_PERIODS = 3
MOST_PERIODIC = 0.5  # of the lines; where every second one is slow, they are not exceptions


def low_mfu(view: View) -> Iterator[Finding]:
    """The run is slower than its estimate by more than the estimate's own error, and nothing else explains it."""
    estimate, slower, expected = view.estimate, view.slower, view.estimated_step_s
    if estimate is None or slower is None or expected is None or view.step_s is None or not view.enough:
        return
    margin = max(share("slower_than_estimate"), estimate.band.step_pct / 100)
    explained = _data_excess(view) + _network_excess(view)
    left = view.step_s - explained
    if left <= expected * (1 + margin):
        return
    part, evidence = _slow_part(view, expected / float(estimate.step_s))
    mfu, hoped = view.mfu or 0.0, float(estimate.mfu)
    yield Finding(
        id="speed.low-mfu",
        severity="warning",
        message=(
            f"MFU is {mfu:.1%} where {hoped:.1%} is estimated (±{estimate.band.step_pct:.0f} %): a step takes "
            f"{view.step_s:.3g} s, not {expected:.3g} s. {part}"
        ),
        steps=_span(view.steady),
        lines=_ends(view),
        evidence=(
            Evidence("MFU", round(mfu, 4), "", round(hoped, 4), "estimate"),
            Evidence("step time", view.step_s, "s", expected, "estimate"),
            Evidence("tokens/s/GPU", view.tokens_per_s or 0.0, "", float(estimate.tokens_per_s_per_gpu), "estimate"),
            *evidence,
        ),
        remedies=(*_suspects(view), *remedies.that_speed_up(view, remedies.changes_that_save_time), _profile(view)),
    )


def slow_data(view: View) -> Iterator[Finding]:
    """The GPU waits for samples."""
    waited, seconds = view.part_share("data"), view.part_s("data")
    if waited is None or seconds is None or not view.enough or waited <= share("data_share"):
        return
    recipe = view.case.recipe if view.case is not None else None
    workers, ahead = (recipe.data.workers, recipe.data.prefetch) if recipe else (4, 2)
    gain = round(1 - waited, 4)
    tries = [
        Remedy(try_=(f"data.workers={max(2, 2 * workers)}",), what="layout", why="more threads read", step_ratio=gain),
        Remedy(try_=(f"data.prefetch={max(2, 2 * ahead)}",), what="layout", why="more steps ahead", step_ratio=gain),
    ]
    if recipe is not None and recipe.data.streaming:
        tries.append(Remedy(try_=("data.streaming=false",), what="layout", why="samples are found by number"))
    tries.append(remedies.plainly("meshwright tokenize DATA", why="texts become tokens once, before the run"))
    tries.append(remedies.plainly("copy the data set to a local disk", why="shared file systems answer late"))
    yield Finding(
        id="speed.slow-data",
        severity="warning",
        message=f"{waited:.0%} of every step ({seconds:.3g} s) is waiting for data",
        steps=_span(view.steady),
        lines=_ends(view),
        evidence=(Evidence("waiting for data", round(waited, 4), "of a step", share("data_share"), "limit"),),
        remedies=tuple(tries),
    )


def slow_network(view: View) -> Iterator[Finding]:
    """Collectives take longer than links of this kind need, or more nodes cost more than they should."""
    yield from view.finds(_slow_collectives)
    yield from _poor_scaling(view)


def _slow_collectives(view: View) -> Iterator[Finding]:
    taken, part = view.part_s("collectives"), view.part_share("collectives")
    if taken is None or part is None or not view.enough:
        return
    expected = _expected_collectives(view)
    if expected is None:
        too_slow = part > share("network_share_alone")
    else:
        too_slow = part > share("network_share") and taken > limit("network_times") * expected
    if not too_slow:
        return
    beside = f", not {expected:.3g} s as estimated" if expected is not None else ""
    yield Finding(
        id="speed.slow-network",
        severity="warning",
        message=f"collectives take {taken:.3g} s of every step ({part:.0%}){beside}",
        steps=_span(view.steady),
        lines=_ends(view),
        evidence=(
            Evidence("collectives", taken, "s a step", expected, "estimate"),
            Evidence("collectives", round(part, 4), "of a step", share("network_share"), "limit"),
        ),
        remedies=(*_look_at_links(), *remedies.that_speed_up(view, remedies.changes_that_send_less)),
    )


def _poor_scaling(view: View) -> Iterator[Finding]:
    """Against a run on fewer GPUs: what every GPU loses to the others."""
    small = view.baseline
    if small is None or view.tokens_per_s is None or small.tokens_per_s is None:
        return
    kept, hoped = view.tokens_per_s / small.tokens_per_s, 1.0
    if view.estimate is not None and small.estimate is not None:
        hoped = float(view.estimate.tokens_per_s_per_gpu) / float(small.estimate.tokens_per_s_per_gpu)
    if kept >= hoped * (1 - share("scaling_loss")):
        return
    yield Finding(
        id="speed.slow-network",
        severity="warning",
        message=(
            f"every GPU does {kept:.0%} of the tokens/s it does in {small.run.path}, where {hoped:.0%} is expected: "
            "what is between the nodes is slow"
        ),
        evidence=(
            Evidence("tokens/s/GPU", view.tokens_per_s, "", small.tokens_per_s, "the other run"),
            Evidence("kept", round(kept, 4), "", round(hoped, 4), "estimate" if hoped != 1.0 else "nothing lost"),
        ),
        remedies=(*_look_at_links(), *remedies.that_speed_up(view, remedies.changes_that_send_less)),
    )


def bubbles(view: View) -> Iterator[Finding]:
    """Pipeline stages wait for each other, and another layout would make them wait for less."""
    case, estimate = view.case, view.estimate
    if case is None or estimate is None or case.pp == 1:
        return
    idle = float(estimate.parts["pp_bubble"]) / float(estimate.step_s)
    if idle <= share("bubble_share"):
        return
    better = remedies.that_speed_up(view, remedies.changes_that_fill_the_pipeline)
    if not better:
        return
    rounds = int(case.accumulation)
    yield Finding(
        id="speed.bubbles",
        severity="warning",
        message=(
            f"{idle:.0%} of a step is pipeline bubble: {rounds} micro batches over {case.pp} stages "
            f"({case.pp_schedule}, vp {case.vp})"
        ),
        evidence=(
            Evidence("bubble", round(idle, 4), "of a step", share("bubble_share"), "limit"),
            Evidence("micro batches", float(rounds), "", float(case.pp), "stages"),
        ),
        remedies=better,
    )


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
    if slow and part > share("slow_steps_time"):
        yield _slow_ones(view, slow, part, median(ratio for ratio in times if ratio > much), len(rows))
        return
    spread = deviation(times)
    if spread > share("spread"):
        yield Finding(
            id="speed.uneven-steps",
            severity="warning",
            message=f"step times spread by {spread:.0%} around their median",
            steps=_span(rows),
            lines=_ends(view),
            evidence=(Evidence("spread of step times", round(spread, 4), "", share("spread"), "limit"),),
            remedies=_look_at_ranks(),
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
        tries = _look_at_ranks()
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
        steps=_span(view.steady),
        lines=_ends(view),
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
    tries = list(_look_at_ranks())
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
        steps=_span(view.steady),
        lines=_ends(view),
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


def _slow_part(view: View, scale: float) -> tuple[str, list[Evidence]]:
    """Which part of the step takes the time that was not estimated, as a sentence and as figures."""
    estimate = view.estimate
    if estimate is None:
        return "", []
    measured = {name: view.part_s(name) for name in PARTS}
    told = {name: value for name, value in measured.items() if value is not None}
    if not told:
        most = max(estimate.parts, key=lambda name: float(estimate.parts[name]))
        part = float(estimate.parts[most]) / float(estimate.step_s)
        return f"The log tells no parts; by the estimate most of a step is {most} ({part:.0%}).", []
    expected = {name: scale * sum(float(estimate.parts[one]) for one in PARTS[name]) for name in told}
    worst = max(told, key=lambda name: told[name] - expected[name])
    sentence = f"{_capital(NAMES[worst])} took {told[worst]:.3g} s where {expected[worst]:.3g} s are estimated."
    return sentence, [Evidence(NAMES[name], told[name], "s", expected[name], "estimate") for name in told]


def _data_excess(view: View) -> float:
    waited = view.part_share("data")
    found = waited is not None and waited > share("data_share")
    return (view.part_s("data") or 0.0) if found else 0.0


def _network_excess(view: View) -> float:
    if not view.finds(_slow_collectives):
        return 0.0
    return max(0.0, (view.part_s("collectives") or 0.0) - (_expected_collectives(view) or 0.0))


def _expected_collectives(view: View) -> float | None:
    """Seconds of what the log calls collectives, by the estimate: Megatron's timers are of gradients and weights."""
    if view.estimate is None:
        return None
    names = ("dp",) if view.run.kind == "megatron" else COLLECTIVES
    return sum(float(view.estimate.parts[name]) for name in names)


SLOW_SWITCHES = (
    ("kernels.deterministic", True, False, "deterministic kernels are slower"),
    ("train.profile", True, False, "a profiler slows the steps it records"),
    ("kernels.attention", "eager", "auto", "eager attention writes its whole matrix"),
    ("moe.grouped_gemm", False, True, "one kernel for every expert"),
)


def _suspects(view: View) -> tuple[Remedy, ...]:
    """Settings of the run that are known to be slow."""
    if view.case is None:
        return ()
    found = []
    for key, slow, fast, why in SLOW_SWITCHES:
        section, name = key.split(".")
        if getattr(getattr(view.case.recipe, section), name) == slow and (section != "moe" or view.case.is_moe):
            one = remedies.tried(view, remedies.Change({key: fast}, why))
            if one is not None:
                found.append(one)
    return tuple(found)


def _profile(view: View) -> Remedy:
    if view.run.kind == "meshwright":
        return Remedy(try_=("train.profile=true",), what="layout", why="a trace of a few steps names the kernels")
    return remedies.plainly("record a profiler trace of a few steps", why="it names the kernels that take the time")


def _look_at_links() -> tuple[Remedy, ...]:
    return (
        Remedy(try_=("NCCL_DEBUG=INFO",), what="environment", why="it says which network and which links are used"),
        remedies.plainly("run nccl-tests all_reduce_perf over the same nodes", why="it measures the links alone"),
    )


def _look_at_ranks() -> tuple[Remedy, ...]:
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


def _span(steps: Sequence[Step]) -> tuple[int, int] | None:
    return (steps[0].first, steps[-1].step) if steps else None


def _ends(view: View) -> tuple[str, ...]:
    """The first and last line that were looked at."""
    rows = view.steady
    return tuple(dict.fromkeys(view.place(step) for step in (rows[0], rows[-1]))) if rows else ()


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
