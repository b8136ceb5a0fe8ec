"""Why a run is slow: its data, its network, its pipeline, or what the estimate cannot explain."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.doctor import remedies
from meshwright.doctor.finding import Evidence, Finding, Remedy
from meshwright.doctor.run_stats import View, span
from meshwright.doctor.thresholds import limit, share

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
        steps=span(view.steady),
        lines=view.ends,
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
        steps=span(view.steady),
        lines=view.ends,
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
        steps=span(view.steady),
        lines=view.ends,
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


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
