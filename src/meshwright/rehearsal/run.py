"""Rehearses a recipe: runs every kind of rank on this machine's device and composes a step of the cluster."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from meshwright import costs
from meshwright.clusters import Cluster, Gpu
from meshwright.costs.estimate import estimate
from meshwright.costs.flops import flops_per_token
from meshwright.costs.gemm import routing_imbalance
from meshwright.costs.memory_constants import RESERVE
from meshwright.costs.speeds import linear_precision, peak_flops, speeds
from meshwright.costs.time import pass_seconds, step_time
from meshwright.costs.vectorize import BYTES
from meshwright.dryrun.run import distinct, preload, validate, versions
from meshwright.errors import InputError
from meshwright.recipes.case import Case
from meshwright.recipes.types import Recipe
from meshwright.rehearsal.compose import RankTime, TimedRank, schedule
from meshwright.rehearsal.network import ClusterNetwork, Network
from meshwright.rehearsal.rank import ALL, LEAST_STEPS, NONE, WARM_UP, RankResult, RankTask, rehearse_rank
from meshwright.rehearsal.types import CollectiveTime, RankRehearsal, Rehearsal, Span

GIB = 2**30
BUDGET_S = 100.0  # of timed steps, over all kinds of ranks
MICRO_BATCHES = 3  # run without a pipeline: the first, a usual one, the last
LARGEST_ON_CPU = 2e8  # parameters of a rank
ROOM = 0.9  # share of the GPU's memory that a rank may need by the estimate before layers are left out
CONTEXT_GIB = 1.5  # of the process, outside torch's allocator
MEASURED_PCT = 2.0  # error of a timed step: clocks, other work on the machine
NETWORK_PCT = 30.0  # error of a collective's time by the communication model
SHORTENED_PCT = 3.0  # error from layers and micro batches that did not run
SCALED_PCT = 4.0  # error of kernel times scaled to another GPU, and a third of the scaling itself
MOST_SPANS = 20_000
START: dict[str, Literal["fork", "spawn"]] = {"cuda": "spawn", "cpu": "fork"}  # of the process of a rank
Progress = Callable[[str], None]


class Device(msgspec.Struct, frozen=True):
    """The device that runs the kernels."""

    kind: str  # cuda or cpu
    gpu: Gpu | None = None  # its catalogue entry, if there is one
    memory_gib: float = math.inf


def rehearse(
    recipe: Recipe,
    cluster: Cluster,
    device: Device,
    *,
    config: Any = None,
    network: Network | None = None,
    network_name: str = "",
    scale_to: Gpu | None = None,
    layers: int | None = None,
    budget_s: float = BUDGET_S,
    progress: Progress = lambda _: None,
) -> Rehearsal:
    """Run every kind of rank of a recipe on a cluster; `layers`: the most that run in each pipeline chunk."""
    start = time.monotonic()
    progress("importing torch")
    from meshwright.engine.model_families import family_of

    family = family_of(recipe)
    config = family.config_for(recipe) if config is None else config
    case = validate(recipe, family.spec_of(recipe, config), cluster)
    links = network or ClusterNetwork(case)
    slowdown = kernel_scale(case, device.gpu, scale_to)
    kinds = distinct(case)
    preload(recipe, config)
    plan = _Plan(case, config, device, links, slowdown, kinds, layers, budget_s)
    ranks = [_run_rank(plan, kind, progress) for kind in kinds]
    return _compose(plan, ranks, network_name, scale_to if slowdown != 1 else None, time.monotonic() - start)


def kernel_scale(case: Case, here: Gpu | None, to: Gpu | None) -> float:
    """Return the factor from kernel times here to those of another GPU, by the rates of both in the cost model."""
    if here is None or to is None or here.name == to.name:
        return 1.0
    times = [
        step_time(case.rebuild(cluster=msgspec.structs.replace(case.cluster, gpu=gpu))).compute for gpu in (here, to)
    ]
    return float(times[1] / times[0])


class _Plan:
    """What to run of a case on a device."""

    def __init__(
        self,
        case: Case,
        config: Any,
        device: Device,
        network: Network,
        slowdown: float,
        kinds: Sequence[Any],
        layers: int | None,
        budget_s: float,
    ) -> None:
        from meshwright.engine.mesh import GroupInfo
        from meshwright.engine.parallelize.pipeline import stage_layers, stage_numbers

        self.case, self.config, self.device, self.network, self.slowdown = case, config, device, network, slowdown
        self.recipe: Recipe = case.recipe
        self.layout = self.recipe.layout
        self.world = case.cluster.world
        self.dp = max(self.world // (self.layout.tp * self.layout.pp * self.layout.cp), 1)
        unit = self.layout.micro_batch_size * self.dp
        self.micro_batches = self.recipe.train.global_batch_size // unit
        self.most_layers, self.budget_s = layers, budget_s / len(kinds)
        self.layer_types = tuple(repr(group.layer) for group in case.model.groups for _ in range(group.count))
        stages = stage_layers(self.layout, len(self.layer_types))
        self.chunks = {
            rank: tuple(tuple(stages[i]) for i in stage_numbers(self.layout, GroupInfo(self.layout.pp, rank)))
            for rank in range(self.layout.pp)
        }
        self.run_batches = min(self.micro_batches, self._enough_batches())
        self.run_recipe = _mock_data(self.recipe, self.run_batches * unit)

    def _enough_batches(self) -> int:
        """Return the micro batches that show all passes, and hold as many activations as the full step."""
        if self.layout.pp == 1:
            return MICRO_BATCHES
        if self.layout.pp_schedule in ("gpipe", "looped_bfs"):  # they hold the activations of all
            return self.micro_batches
        # The last activations come after a backward pass, which leaves gradients.
        enough = self.layout.pp + 1 if self.layout.pp_schedule == "1f1b" else 2 * self.layout.pp
        return max(enough, MICRO_BATCHES)

    def task(self, kind: tuple[int, tuple[int, ...]], most: int | None) -> RankTask:
        """Return the task of a kind of rank with at most so many layers in each chunk."""
        rank, represents = kind
        chunks = self.chunks[rank]
        return RankTask(
            recipe=self.run_recipe,
            config=self.config.to_dict(),
            world=self.world,
            pp_rank=rank,
            represents=represents,
            chunks=chunks,
            kept=chunks if most is None else tuple(self._prefix(chunk, most) for chunk in chunks),
            layer_types=self.layer_types,
            network=self.network,
            device=self.device.kind,
            gpu=self.device.gpu,
            slowdown=self.slowdown,
            budget_s=self.budget_s,
            imbalance=self._imbalance(),
        )

    def _imbalance(self) -> float:
        """Return the tokens of the fullest expert rank over the mean; 1 where every rank has all experts."""
        moe = self.case.model.moe
        if moe is None or self.layout.ep == 1 or not isinstance(self.network, ClusterNetwork):
            return 1.0
        return float(routing_imbalance(self.case, speeds(self.case), moe))

    def _prefix(self, chunk: tuple[int, ...], most: int) -> tuple[int, ...]:
        """Return the first layers of a chunk: as many as allowed, and at least one of every type in it."""
        types = {self.layer_types[layer] for layer in chunk}
        needed = next(
            (n for n in range(len(chunk) + 1) if {self.layer_types[layer] for layer in chunk[:n]} == types), len(chunk)
        )
        return chunk[: max(most, needed)]

    def layers_in_budget(self, rank: int) -> int | None:
        """Return how many layers of a chunk to run in the time and memory there is; None: all."""
        if self.case.is_diffusion or self.device.kind == "cpu":
            return self.most_layers
        longest = max(len(chunk) for chunk in self.chunks[rank])
        gpu = self.device.gpu
        here = self.case.rebuild(cluster=msgspec.structs.replace(self.case.cluster, gpu=gpu)) if gpu else self.case
        forward, backward = pass_seconds(here)[rank]
        axes = sum(getattr(self.layout, name) > 1 for name in ("tp", "cp", "ep")) + (self.dp > 1)
        steps = WARM_UP + LEAST_STEPS + 1 + (axes + 1 if axes > 1 else 0)
        seconds = steps * self.run_batches * (forward + backward)
        shares = [1.0, self.budget_s / seconds]
        memory = costs.memory_by_stage(self.case)[rank]
        room = ROOM * self.device.memory_gib - CONTEXT_GIB
        need = float(memory.total - memory.overhead)
        ends = float(memory.logits)  # not of layers
        shares.append((room - ends) / max(need - ends, 1e-9))
        most = max(int(longest * min(shares)), 1)
        found = [one for one in (most if most < longest else None, self.most_layers) if one is not None]
        return max(min(found), min(2, longest)) if found else None


def _mock_data(recipe: Recipe, batch: int) -> Recipe:
    """Return the recipe with mock data, as bench has it, and the micro batches that run."""
    replace = msgspec.structs.replace
    data = replace(recipe.data, dataset="mock", blend={}, anneal_blend={}, anneal_steps=0, validation="",
                   validation_part=0.0, group_by_length=False, streaming=False)  # fmt: skip
    train = replace(
        recipe.train, global_batch_size=batch, eval_every=0, steps=max(recipe.train.steps, 1000), epochs=0.0
    )
    return replace(recipe, data=data, train=train)


def _run_rank(plan: _Plan, kind: tuple[int, tuple[int, ...]], progress: Progress) -> TimedRank:
    """Run one kind of rank in a process of its own; with fewer layers if all of them do not fit the GPU."""
    from meshwright.dryrun.ranks import run_parallel

    longest = max(len(chunk) for chunk in plan.chunks[kind[0]])
    most = plan.layers_in_budget(kind[0])
    while True:
        task = plan.task(kind, most)
        ran: RankResult = run_parallel(
            rehearse_rank, [task], 1, progress, _label, activity="rehearsing", children=START[plan.device.kind]
        )[0]
        if not ran.out_of_memory:
            return TimedRank(task, ran, plan.micro_batches)
        next_most = (longest if most is None else most) // 2
        if plan.case.is_diffusion or next_most < 1 or plan.task(kind, next_most).kept == task.kept:
            raise _too_large(plan, kind[0], max(map(len, task.kept)), longest, ran.out_of_memory)
        progress(f"out of memory with {max(map(len, task.kept))} layers: trying {next_most}")
        most = next_most


def _too_large(plan: _Plan, rank: int, ran: int, layers: int, message: str) -> InputError:
    """Return the error of a rank of which not even the fewest layers fit this GPU, with what would fit."""
    need, layout = float(costs.memory_by_stage(plan.case)[rank].total), plan.layout
    smaller = {"layout.recompute=full": layout.recompute != "full"}
    smaller["layout.micro_batch_size=1"] = layout.micro_batch_size > 1
    doubled = 2 * layout.tp
    smaller[f"layout.tp={doubled}"] = (
        doubled <= min(plan.world, 8) and plan.world % (doubled * layout.pp * layout.cp) == 0
    )
    return InputError(
        f"a rank does not fit this GPU of {plan.device.memory_gib:.0f} GiB, not even with {ran} of its {layers} layers "
        f"({message}); all of them need about {need:.0f} GiB",
        field="layout",
        value=plan.recipe.name,
        fix=(
            *(change for change, helps in smaller.items() if helps),
            "a GPU with more memory",
            f"meshwright dryrun {plan.recipe.name} --gpus {plan.case.cluster} needs no GPU",
        ),
    )


def _label(task: RankTask) -> str:
    pp = task.recipe.layout.pp
    ran, count = sum(map(len, task.kept)), sum(map(len, task.chunks))
    what = f"pipeline rank {task.pp_rank} of {pp}" if pp > 1 else "the step"
    return what + (f" with {ran} of {count} layers" if ran < count else "")


def _compose(plan: _Plan, timed: list[TimedRank], network_name: str, scaled: Gpu | None, wall_s: float) -> Rehearsal:
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
    parts = _parts(timed[slowest], times[slowest], span, rest)
    parts = {name: slowdown * seconds for name, seconds in parts.items()}
    ranks = tuple(_rank(plan, one, found) for one, found in zip(timed, times, strict=True))
    if isinstance(plan.network, ClusterNetwork):
        _add_cluster_effects(case, parts, ranks[slowest])
    step_s = sum(parts.values())
    predicted = estimate(case)
    tokens = case.global_batch_size * case.seq_length / step_s / case.world
    on_gpu = plan.device.kind == "cuda"
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
        mfu=float(tokens * flops_per_token(case) / peak_flops(case, precision)) if on_gpu else None,
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


def _send_s(plan: _Plan) -> float:
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


def _rank(plan: _Plan, one: TimedRank, times: dict[str, RankTime]) -> RankRehearsal:
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


def _band(plan: _Plan, parts: dict[str, float], ranks: Sequence[RankRehearsal]) -> float:
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


def _notes(plan: _Plan, timed: Sequence[TimedRank]) -> tuple[str, ...]:
    """Return what was not run, and what was scaled."""
    notes = []
    for one in timed:
        ran, count = sum(map(len, one.task.kept)), sum(map(len, one.task.chunks))
        if ran < count:
            notes.append(
                f"{_label(one.task)}: the other {count - ran} layers are added from those of the same type, in time "
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
