"""Diagnoses of low speed: data loading, network, pipeline bubbles, or an unexplained gap to the estimate."""

from __future__ import annotations

import math
from collections.abc import Iterator

from meshwright.costs import Estimate
from meshwright.doctor import remedies
from meshwright.doctor.finding import Evidence, Finding, Remedy
from meshwright.doctor.nccl_network import SOCKET, socket_remedies
from meshwright.doctor.run import Step
from meshwright.doctor.run_stats import RunStats, median_of, span
from meshwright.doctor.slow_step import slow_step_remedies
from meshwright.doctor.slowdown import start_over_median
from meshwright.doctor.slower_baseline import is_larger
from meshwright.doctor.straggler_reports import reported_gap_s
from meshwright.doctor.thresholds import limit, share
from meshwright.doctor.throughput import rank_gap_s, stragglers

NEARLY_ALL = 0.8
COLLECTIVES = ("tp", "cp", "ep", "dp")
PARTS = {
    "forward_backward": ("compute", "tp", "cp", "ep", "pp_bubble", "dp"),
    "optimizer": ("optimizer",),
    "other": ("other",),
}
"""The parts that a run measures -> the parts of the estimate they include."""
NAMES = {
    "forward_backward": "forward and backward",
    "optimizer": "the optimizer",
    "other": "host overhead",
    "data": "waiting for data",
}


def low_mfu(stats: RunStats) -> Iterator[Finding]:
    """The run is slower than its estimate by more than the error band, and nothing else explains it."""
    estimate, slower, expected = stats.estimate, stats.slower, stats.estimated_step_s
    if estimate is None or slower is None or expected is None or stats.step_s is None or not stats.enough:
        return
    if stats.has_unlike_samples or stats.run.header.assumed_gpus:
        return  # the estimate is for samples of the full length, which run faster, or for other GPUs
    margin = _margin(estimate)
    if any(one.severity == "warning" for one in stats.findings_of(tcp_sockets)):
        return  # that network explains any slowness
    explained = _data_excess(stats) + _network_excess(stats) + _waiting_excess(stats)
    explained = max(explained, _slowdown_excess(stats))  # what became slower may be one of these
    left, slowest = stats.step_s - explained, stats.open_settings
    if left <= expected * slowest.ratio * (1 + margin):
        return  # as fast as estimated, with some value of what the log does not state
    part, evidence = _slow_part(stats, expected / float(estimate.step_s))
    mfu, expected_mfu = stats.mfu or 0.0, float(estimate.mfu)
    yield Finding(
        id="speed.low-mfu",
        severity="warning",
        message=(
            f"MFU is {mfu:.1%}, estimated {expected_mfu:.1%} (within a factor of "
            f"{1 + estimate.band.step_pct / 100:.2f}): a step takes "
            f"{stats.step_s:.3g} s instead of {expected:.3g} s"
            f"{f' ({slowest.ratio * expected:.3g} s with {slowest.slowest})' if slowest.slowest else ''}. {part}"
        ),
        steps=span(stats.steady),
        lines=stats.ends,
        evidence=(
            Evidence("MFU", round(mfu, 4), "", round(expected_mfu, 4), "estimate"),
            Evidence("step time", stats.step_s, "s", expected, "estimate"),
            Evidence("tokens/s/GPU", stats.tokens_per_s or 0.0, "", float(estimate.tokens_per_s_per_gpu), "estimate"),
            *evidence,
        ),
        remedies=(*_suspects(stats), *slow_step_remedies(stats)),
    )


def tcp_sockets(stats: RunStats) -> Iterator[Finding]:
    """NCCL uses TCP sockets between nodes, not InfiniBand, RoCE or EFA, and steps are slow."""
    network = stats.run.network
    if network is None or network.name != SOCKET or not stats.enough:
        return
    nodes = int(stats.case.cluster.nodes) if stats.case is not None else network.nodes
    is_slow = _is_slow(stats)
    if nodes < 2 or is_slow is False:
        return
    over = f" ({network.interface})" if network.interface else ""
    expected, taken = stats.estimated_step_s, stats.step_s
    times = f": a step takes {taken:.3g} s, estimated {expected:.3g} s" if is_slow and expected and taken else ""
    why = "; NCCL found no InfiniBand or RoCE device" if network.no_device else ""
    yield Finding(
        id="speed.tcp-sockets",
        severity="warning" if is_slow else "advice",
        message=f"NCCL uses TCP sockets{over} between {nodes} nodes, not InfiniBand or RoCE{why}{times}",
        steps=span(stats.steady),
        lines=(f"{network.file}:{network.line} {network.text}",),
        evidence=(
            Evidence("network of NCCL", network.name),
            *((Evidence("step time", taken, "s", expected, "estimate"),) if times and taken else ()),
        ),
        remedies=socket_remedies(network.forced_by),
    )


def _is_slow(stats: RunStats) -> bool | None:
    """Return whether the steps are slower than the network of the cluster explains; None if nothing shows it."""
    if stats.findings_of(slow_network):
        return True
    if stats.slower is None or stats.estimate is None:
        return None
    return stats.slower > 1 + _margin(stats.estimate)


def _margin(estimate: Estimate) -> float:
    """Return the share above its estimate from which a step is slow."""
    return max(share("slower_than_estimate"), estimate.band.step_pct / 100)


def slow_data(stats: RunStats) -> Iterator[Finding]:
    """The GPU waits for data."""
    waited, seconds = stats.part_share("data"), stats.part_s("data")
    if waited is None or seconds is None or not stats.enough or waited <= share("data_share"):
        return
    rows = _slow_since(stats, "data", share("data_share"))
    seconds = median_of(step.parts_s["data"] for step in rows) or seconds
    waited = median_of(step.parts_s["data"] / (step.seconds or math.inf) for step in rows) or waited
    recipe = stats.case.recipe if stats.case is not None else None
    workers, ahead = (recipe.data.workers, recipe.data.prefetch) if recipe else (4, 2)
    gain = round(1 - waited, 4)
    tries = [
        Remedy(
            try_=(f"data.workers={max(2, 2 * workers)}",), what="layout", why="more loader threads", step_ratio=gain
        ),
        Remedy(
            try_=(f"data.prefetch={max(2, 2 * ahead)}",), what="layout", why="prefetches more steps", step_ratio=gain
        ),
    ]
    if recipe is not None and recipe.data.streaming:
        tries.append(Remedy(try_=("data.streaming=false",), what="layout", why="indexed access to samples"))
    tries.append(remedies.advice("meshwright tokenize DATA", why="tokenizes once, before the run"))
    tries.append(remedies.advice("copy the dataset to a local disk", why="shared file systems have high latency"))
    yield Finding(
        id="speed.slow-data",
        severity="warning",
        message=f"the GPU waits {seconds:.3g} s per step for data ({waited:.0%})",
        steps=span(rows),
        lines=stats.ends_of(rows),
        evidence=(Evidence("waiting for data", round(waited, 4), "of a step", share("data_share"), "limit"),),
        remedies=tuple(tries),
    )


def _slow_since(stats: RunStats, part: str, limit: float) -> list[Step]:
    """Return the steps from the first on whose share of a part is above the limit in nearly all that follow."""
    rows = [step for step in stats.steady if part in step.parts_s and step.seconds]
    slow = [step.parts_s[part] > limit * (step.seconds or 0.0) for step in rows]
    first = slow.index(True) if True in slow else 0
    return rows[first:] if sum(slow[first:]) >= NEARLY_ALL * len(slow[first:]) else rows


def slow_network(stats: RunStats) -> Iterator[Finding]:
    """Collectives take longer than these links should need, or scaling to more nodes costs too much."""
    yield from stats.findings_of(_slow_collectives)
    yield from _poor_scaling(stats)


def _slow_collectives(stats: RunStats) -> Iterator[Finding]:
    taken, part = stats.part_s("collectives"), stats.part_share("collectives")
    if taken is None or part is None or not stats.enough:
        return
    expected = _expected_collectives(stats)
    if expected is None:
        too_slow = part > share("network_share_alone")
    else:
        too_slow = part > share("network_share") and taken > limit("network_times") * expected
    if not too_slow:
        return
    beside = f", estimated {expected:.3g} s" if expected is not None else ""
    yield Finding(
        id="speed.slow-network",
        severity="warning",
        message=f"collectives take {taken:.3g} s per step ({part:.0%}){beside}",
        steps=span(stats.steady),
        lines=stats.ends,
        evidence=(
            Evidence("collectives", taken, "s per step", expected, "estimate"),
            Evidence("collectives", round(part, 4), "of a step", share("network_share"), "limit"),
        ),
        remedies=(*_check_links(stats), *remedies.faster_remedies(stats, remedies.network_candidates)),
    )


def _poor_scaling(stats: RunStats) -> Iterator[Finding]:
    """Compare tokens/s/GPU with a run on fewer GPUs."""
    small = stats.baseline
    if small is None or stats.tokens_per_s is None or small.tokens_per_s is None or not is_larger(stats, small):
        return
    # A run that gets slower later has another cause for that: its start shows what the network costs.
    speed = stats.tokens_per_s * start_over_median(stats)
    scaling, expected_scaling = speed / small.tokens_per_s, 1.0
    if stats.estimate is not None and small.estimate is not None:
        expected_scaling = float(stats.estimate.tokens_per_s_per_gpu) / float(small.estimate.tokens_per_s_per_gpu)
    if scaling >= expected_scaling * (1 - share("scaling_loss")):
        return
    untimed = "; the log does not time collectives, which would show it" if stats.part_s("collectives") is None else ""
    start = " at the start, before the run gets slower" if speed != stats.tokens_per_s else ""
    yield Finding(
        id="speed.slow-network",
        severity="warning",
        message=(
            f"tokens/s/GPU is {scaling:.0%} of {small.run.path}{start}, expected {expected_scaling:.0%}: usually the "
            f"network between nodes is the cause{untimed}"
        ),
        evidence=(
            Evidence("tokens/s/GPU", speed, "", small.tokens_per_s, "baseline"),
            Evidence(
                "scaling",
                round(scaling, 4),
                "",
                round(expected_scaling, 4),
                "estimate" if expected_scaling != 1.0 else "ideal",
            ),
        ),
        remedies=(*_check_links(stats), *remedies.faster_remedies(stats, remedies.network_candidates)),
    )


def bubbles(stats: RunStats) -> Iterator[Finding]:
    """Pipeline stages idle, and another layout would idle less."""
    case, estimate = stats.case, stats.estimate
    if case is None or estimate is None or case.pp == 1:
        return
    idle = float(estimate.parts["pp_bubble"]) / float(estimate.step_s)
    if idle <= share("bubble_share"):
        return
    better = remedies.faster_remedies(stats, remedies.pipeline_candidates)
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


def _slow_part(stats: RunStats, scale: float) -> tuple[str, list[Evidence]]:
    """Return which part of the step takes the extra time, as a sentence and as evidence."""
    estimate = stats.estimate
    if estimate is None:
        return "", []
    measured = {name: stats.part_s(name) for name in PARTS}
    logged = {name: value for name, value in measured.items() if value is not None}
    if not logged:
        most = max(estimate.parts, key=lambda name: float(estimate.parts[name]))
        part = float(estimate.parts[most]) / float(estimate.step_s)
        return f"The log does not split steps into parts; the largest estimated part is {most} ({part:.0%}).", []
    expected = {name: scale * sum(float(estimate.parts[one]) for one in PARTS[name]) for name in logged}
    worst = max(logged, key=lambda name: logged[name] - expected[name])
    sentence = f"{_capital(NAMES[worst])} took {logged[worst]:.3g} s, estimated {expected[worst]:.3g} s."
    return sentence, [Evidence(NAMES[name], logged[name], "s", expected[name], "estimate") for name in logged]


def _data_excess(stats: RunStats) -> float:
    waited = stats.part_share("data")
    found = waited is not None and waited > share("data_share")
    return (stats.part_s("data") or 0.0) if found else 0.0


def _network_excess(stats: RunStats) -> float:
    if not stats.findings_of(_slow_collectives):
        return 0.0
    return max(0.0, (stats.part_s("collectives") or 0.0) - (_expected_collectives(stats) or 0.0))


def _waiting_excess(stats: RunStats) -> float:
    """Return the seconds for which ranks wait for a straggler, as logged or as the times of the ranks show."""
    waits = (stats.part_s("waiting") or 0.0, rank_gap_s(stats), reported_gap_s(stats))
    return max(waits) if stats.findings_of(stragglers) else 0.0


def _slowdown_excess(stats: RunStats) -> float:
    """Return the seconds by which the median step is slower than the first ones of a run that gets slower."""
    return (stats.step_s or 0.0) * (1 - 1 / max(1.0, start_over_median(stats)))


def _expected_collectives(stats: RunStats) -> float | None:
    """Return the estimated seconds of what the log calls collectives; Megatron's timers cover gradients and weights."""
    if stats.estimate is None:
        return None
    names = ("dp",) if stats.run.kind == "megatron" else COLLECTIVES
    return sum(float(stats.estimate.parts[name]) for name in names)


SLOW_SWITCHES = (
    ("kernels.deterministic", True, False, "deterministic kernels are slower"),
    ("train.profile", True, False, "profiling slows the recorded steps"),
    ("kernels.attention", "eager", "auto", "eager attention materializes the score matrix"),
    ("moe.grouped_gemm", False, True, "launches one kernel per expert"),
)


def _suspects(stats: RunStats) -> tuple[Remedy, ...]:
    """Return settings of the run that are known to be slow."""
    if stats.case is None:
        return ()
    found = []
    for key, slow, fast, why in SLOW_SWITCHES:
        section, name = key.split(".")
        if getattr(getattr(stats.case.recipe, section), name) == slow and (section != "moe" or stats.case.is_moe):
            one = remedies.evaluate_change(stats, remedies.Change({key: fast}, why))
            if one is not None:
                found.append(one)
    return tuple(found)


def _check_links(stats: RunStats) -> tuple[Remedy, ...]:
    """Return how to find the fault of the network; a log with NCCL's lines already shows which one is used."""
    network = stats.run.network
    if network is not None and network.name == SOCKET:
        return socket_remedies(network.forced_by)
    debug = Remedy(try_=("NCCL_DEBUG=INFO",), what="environment", why="shows which network and links are used")
    shown = remedies.advice(
        "ibstat on every node, and the switch's error counters", why="a link may run at a lower rate"
    )
    return (
        debug if network is None else shown,
        remedies.advice("run nccl-tests all_reduce_perf over the same nodes", why="measures the links in isolation"),
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
