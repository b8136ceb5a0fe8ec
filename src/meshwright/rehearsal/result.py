"""A rehearsal from the times of every kind of rank: the step, its parts, limits and errors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from meshwright.clusters import Gpu
from meshwright.costs.estimate import estimate
from meshwright.costs.flops import flops_per_token
from meshwright.costs.memory_constants import RESERVE
from meshwright.costs.speeds import linear_precision, peak_flops, speeds
from meshwright.costs.vectorize import BYTES
from meshwright.dryrun.run import versions
from meshwright.recipes.case import Case
from meshwright.rehearsal.compose import RankTime, TimedRank, schedule
from meshwright.rehearsal.network import ClusterNetwork
from meshwright.rehearsal.rank import ALL, NONE
from meshwright.rehearsal.run_plan import CONTEXT_GIB, RunPlan, label_of
from meshwright.rehearsal.types import CollectiveTime, RankRehearsal, Rehearsal, Span

GIB = 2**30
MEASURED_PCT = 2.0  # error of a timed step: clocks, other work on the machine
NETWORK_PCT = 30.0  # error of a collective's time by the communication model
SHORTENED_PCT = 3.0  # error from layers and micro batches that did not run
SCALED_PCT = 4.0  # error of kernel times scaled to another GPU, and a third of the scaling itself
MOST_SPANS = 20_000


def rehearsal_of(
    plan: RunPlan, timed: list[TimedRank], network_name: str, scaled: Gpu | None, wall_s: float
) -> Rehearsal:
    """Return the rehearsal of a step on the cluster; `scaled`: the GPU to which kernel times were scaled."""
    case, layout, slowdown = plan.case, plan.layout, plan.slowdown
    by_rank = {rank: one for one in timed for rank in one.task.represents}
    times = [{ALL: one.time(one.training), NONE: one.time(NONE)} for one in timed]
    send_s = _send_s(plan) / slowdown
    if layout.pp > 1:
        passes = schedule(layout, by_rank, plan.micro_batches, ALL, send_s)
        span = max(one.end_s for one in passes)
    else:
        passes, span = [], times[0][ALL].busy_s
    rest = max(one[ALL].rest_s for one in times)
    slowest = max(range(len(timed)), key=lambda i: times[i][ALL].busy_s)
    here = _parts(timed[slowest], times[slowest], span, rest)
    parts = {name: slowdown * seconds for name, seconds in here.items()}
    ranks = tuple(_rank(plan, one, found) for one, found in zip(timed, times, strict=True))
    if isinstance(plan.network, ClusterNetwork):
        _add_cluster_effects(case, parts, ranks[slowest])
    step_s = sum(parts.values())
    predicted = estimate(case)
    tokens = case.global_batch_size * case.seq_length / step_s / case.world
    allocated = max((one.allocated_gib for one in ranks if one.allocated_gib is not None), default=None)
    reserved = max((one.reserved_gib for one in ranks if one.reserved_gib is not None), default=None)
    capacity = float(case.cluster.gpu.memory_gib)
    precision = linear_precision(case)
    scaled_passes = tuple(
        msgspec.structs.replace(one, start_s=slowdown * one.start_s, end_s=slowdown * one.end_s) for one in passes
    )
    return Rehearsal(
        recipe=plan.recipe.name,
        model=plan.recipe.model,
        cluster=str(case.cluster),
        world=plan.world,
        device=next((one.result.device for one in timed if one.result.device), plan.device.kind),
        scaled_to=scaled.name if scaled is not None else None,
        scale=slowdown,
        network=network_name or f"the communication model of {case.cluster}",
        step_s=step_s,
        parts=parts,
        band_pct=round(_band(plan, parts, ranks), 1),
        tokens_per_s_per_gpu=float(tokens),
        tflops_per_gpu=float(tokens * flops_per_token(case)) / 1e12,
        mfu=float(tokens * flops_per_token(case) / peak_flops(case, precision)) if plan.device.kind == "cuda" else None,
        mfu_convention=predicted.mfu_convention,
        estimate_s=float(predicted.step_s),
        allocated_gib=allocated,
        reserved_gib=reserved,
        capacity_gib=capacity,
        fits=allocated is None or allocated + CONTEXT_GIB <= capacity * (1 - RESERVE),
        limits=_limits(parts, step_s),
        ranks=ranks,
        schedule=str(layout.pp_schedule) if layout.pp > 1 else "",
        passes=scaled_passes,
        versions=versions(),
        wall_s=wall_s,
        settings=msgspec.to_builtins(plan.recipe),
        notes=_notes(plan, timed),
    )


def _send_s(plan: RunPlan) -> float:
    """Return the seconds of a send between two stages."""
    layout, case = plan.layout, plan.case
    if layout.pp == 1:
        return 0.0
    tokens = layout.micro_batch_size * case.seq_length // layout.cp // (layout.tp if layout.sp else 1)
    size = int(tokens * case.model.hidden * BYTES[plan.recipe.precision.compute])
    stride = plan.world // layout.pp
    return plan.network.seconds("send", size, tuple(range(0, plan.world, stride)), "pp")


def _parts(one: TimedRank, times: dict[str, RankTime], span: float, rest: float) -> dict[str, float]:
    """Return the parts of the step on its slowest rank, in seconds on this device."""
    with_network, without = times[ALL], times[NONE]
    exposed = exposed_by_axis(one, times)
    update = min(without.optimizer_s, rest)
    parts = {
        "compute": without.busy_s,
        **{axis: exposed.get(axis, 0.0) for axis in ("tp", "cp", "ep", "dp", "control")},
        "pp_bubble": max(span - with_network.busy_s, 0.0) + exposed.get("pp", 0.0),
        "optimizer": update,
        "other": 0.0,
    }
    parts["other"] = span + rest - sum(parts.values())
    if parts["other"] < 0:  # noise: communication cannot shorten a step
        parts["compute"] += parts["other"]
        parts["other"] = 0.0
    return parts


def exposed_by_axis(one: TimedRank, times: dict[str, RankTime]) -> dict[str, float]:
    """Return the exposed communication by axis: what a step without an axis saves, scaled to what all together cost."""
    balanced = one.time(ALL).step_s
    waiting = max(times[ALL].step_s - balanced, 0.0)  # for the fullest expert rank
    total = max(balanced - times[NONE].step_s, 0.0)
    axes = sorted({axis for axis, _ in one.result.totals} - {"pp"})
    saved = {axis: max(balanced - one.time(axis).step_s, 0.0) for axis in axes if axis in one.result.variants}
    exposed = _shared(one, axes, saved, total)
    if waiting:
        exposed["ep"] = exposed.get("ep", 0.0) + waiting
    return exposed


def _shared(one: TimedRank, axes: Sequence[str], saved: dict[str, float], total: float) -> dict[str, float]:
    """Return a total by axis, in proportion to what each of them saved."""
    if not saved:
        return dict.fromkeys(axes, total) if len(axes) == 1 else _by_time(one, total)
    if not sum(saved.values()):
        return _by_time(one, total)
    return {axis: total * value / sum(saved.values()) for axis, value in saved.items()}


def _by_time(one: TimedRank, total: float) -> dict[str, float]:
    """Return a total by axis in proportion to the axes' own times."""
    by_axis: dict[str, float] = {}
    for (axis, _), (_, _, seconds) in one.result.totals.items():
        by_axis[axis] = by_axis.get(axis, 0.0) + seconds
    whole = sum(by_axis.values())
    return {axis: total * value / whole for axis, value in by_axis.items()} if whole else {}


def _add_cluster_effects(case: Case, parts: dict[str, float], rank: RankRehearsal) -> None:
    """Add what one GPU cannot show: collectives that slow kernels beside them, and the slowest of many nodes."""
    speed = speeds(case)
    whole = sum(one.seconds for one in rank.collectives if one.axis == "dp")
    hidden = max(whole - parts["dp"], 0.0)
    parts["dp"] += speed.engine.dp_visible * hidden
    nodes = max(case.world / case.cluster.gpu.gpus_per_node, 1)
    parts["other"] += speed.shared.jitter * math.log2(nodes) * sum(parts.values())


def _rank(plan: RunPlan, one: TimedRank, times: dict[str, RankTime]) -> RankRehearsal:
    task, result, scale = one.task, one.result, plan.slowdown
    extra = one.left_out_bytes()
    allocated = (result.allocated + extra) / GIB if result.allocated is not None else None
    reserved = None
    if result.reserved is not None and result.allocated:
        reserved = result.reserved * (1 + extra / result.allocated) / GIB
    ran, count = sum(map(len, task.kept)), sum(map(len, task.chunks))
    batches = plan.micro_batches / plan.run_batches
    found = result.variants[ALL]
    exposed = exposed_by_axis(one, times)
    return RankRehearsal(
        rank=task.rank,
        pp_rank=task.pp_rank,
        represents=task.represents,
        layers=count,
        layers_run=ran,
        micro_batches=plan.micro_batches,
        micro_batches_run=plan.run_batches,
        steps=found.steps,
        busy_s=scale * times[ALL].busy_s,
        rest_s=scale * times[ALL].rest_s,
        compute_s=scale * times[NONE].busy_s,
        optimizer_s=scale * times[NONE].optimizer_s,
        exposed_s={axis: scale * seconds for axis, seconds in exposed.items()},
        spread_pct=round(100 * found.spread, 2),
        allocated_gib=allocated,
        reserved_gib=reserved,
        collectives=tuple(
            _times(CollectiveTime(axis, kind, *entry), batches * count / ran)
            for (axis, kind), entry in sorted(result.totals.items())
        ),
        spans=tuple(
            Span(axis, kind, size / GIB, scale * a, scale * b) for axis, kind, size, a, b in result.spans[:MOST_SPANS]
        ),
        wall_s=result.wall_s,
    )


def _times(one: CollectiveTime, factor: float) -> CollectiveTime:
    """Return collectives of a full step: control ones happen once, the others as often as layers and micro batches."""
    factor = 1.0 if one.axis == "control" else factor
    return CollectiveTime(one.axis, one.kind, factor * one.count, factor * one.gib / GIB, factor * one.seconds)


def _band(plan: RunPlan, parts: dict[str, float], ranks: Sequence[RankRehearsal]) -> float:
    """Return the half-width of the band of the step time in per cent.

    The errors of what was measured, simulated, left out and scaled are independent of each other.
    """
    step = sum(parts.values())
    exposed = sum(parts[axis] for axis in ("tp", "cp", "ep", "dp", "control")) / step
    errors = [MEASURED_PCT, max(one.spread_pct for one in ranks)]
    if isinstance(plan.network, ClusterNetwork):
        errors.append(NETWORK_PCT * exposed)
    if any(one.layers_run < one.layers or one.micro_batches_run < one.micro_batches for one in ranks):
        errors.append(SHORTENED_PCT)
    if plan.slowdown != 1:
        errors.append(SCALED_PCT + 100 * abs(plan.slowdown - 1) / 3)
    return math.sqrt(sum(one**2 for one in errors))


NAMES = {
    "compute": "kernels",
    "tp": "exposed tensor-parallel communication",
    "cp": "exposed context-parallel communication",
    "ep": "exposed expert-parallel communication",
    "dp": "exposed data-parallel communication (weight gathers, gradient reduction)",
    "control": "small collectives (losses, gradient norm)",
    "pp_bubble": "the pipeline bubble",
    "optimizer": "gradient norm and optimizer update",
    "other": "stragglers, data and launch gaps",
}
ADVICE = {
    "tp": "a smaller layout.tp keeps more of each matmul on one GPU",
    "cp": "a smaller layout.cp, or layout.cp_comm=a2a",
    "ep": "layout.ep within one NVLink domain",
    "dp": "a larger micro batch or more accumulation hides gathers behind more compute",
    "pp_bubble": "more micro batches per step, a smaller layout.pp, or an interleaved schedule",
    "optimizer": "more micro batches per step",
}
LARGE_PART = 0.08


def _limits(parts: dict[str, float], step_s: float) -> tuple[str, ...]:
    """Return the parts that limit the step, largest first, with what would shorten them."""
    large = sorted((name for name in parts if parts[name] >= LARGE_PART * step_s), key=lambda name: -parts[name])
    return tuple(
        f"{NAMES[name]}: {100 * parts[name] / step_s:.0f} % of the step"
        + (f"; {ADVICE[name]}" if name in ADVICE else "")
        for name in large or ["compute"]
    )


def _notes(plan: RunPlan, timed: Sequence[TimedRank]) -> tuple[str, ...]:
    """Return what was not run, and what was scaled."""
    notes = []
    for one in timed:
        ran, count = sum(map(len, one.task.kept)), sum(map(len, one.task.chunks))
        if ran < count:
            notes.append(
                f"{label_of(one.task)}: the other {count - ran} layers are added from those of the same type, in time "
                "and memory"
            )
    if plan.run_batches < plan.micro_batches:
        notes.append(f"{plan.run_batches} of {plan.micro_batches} micro batches ran; the others repeat the usual one")
    if plan.case.is_moe and plan.layout.ep > 1:
        notes.append(
            f"the fullest expert rank has {timed[0].task.imbalance:g} times the mean number of tokens, and all wait "
            "for it; memory is that of a rank with the mean number"
        )
    if plan.device.kind == "cpu":
        notes.append("kernels were timed on this machine's CPU: the step says nothing about a GPU")
    return tuple(dict.fromkeys(notes))
