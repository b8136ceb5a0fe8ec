"""Remedies: layout changes with the effect the cost model predicts, cheapest first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, pairwise
from typing import Any

import msgspec

from meshwright import costs, rules
from meshwright.costs.memory_constants import RESERVE
from meshwright.doctor.advised_rate import LR, advised_rate
from meshwright.doctor.finding import Remedy, What
from meshwright.doctor.logged_rate import rate_unlike_file
from meshwright.doctor.run import Run
from meshwright.doctor.run_stats import RunStats
from meshwright.doctor.their_keys import is_impossible, named_setting, stated_settings, to_framework_settings
from meshwright.doctor.thresholds import share
from meshwright.errors import InputError
from meshwright.planner import as_overrides, find_repair_of_file
from meshwright.recipes import overrides as override
from meshwright.recipes.capabilities import can_export
from meshwright.recipes.case import Case
from meshwright.recipes.format_override import format_override
from meshwright.recipes.types import recipe_fields
from meshwright.rules.graphs import recomputes_experts, scopes_outside_experts

MAX_SHOWN = 5
COMBINED = 8  # single changes to combine if none is enough
LEAST_SAVED_GIB = 0.05
MODEL_PARALLEL = ("layout.tp", "layout.pp", "layout.cp", "layout.ep")
CHEAP = 1.1  # step time ratio above which combinations are evaluated too
UNKNOWN_COST = 1.5  # step time ratio assumed for changes without an estimate: worse than full recompute


class Change(msgspec.Struct, frozen=True):
    """Fields to change together, and why that may help."""

    values: dict[str, Any]
    why: str

    @property
    def overrides(self) -> tuple[str, ...]:
        """The change as overrides."""
        return tuple(format_override(key, value) for key, value in self.values.items())


def memory_candidates(case: Case) -> Iterator[Change]:
    """Yield every single change that may lower peak memory."""
    layout, kernels = case.recipe.layout, case.recipe.kernels
    rest = {"layout.dp_shard": -1} if layout.dp_shard != -1 else {}
    modules: dict[str, Any] = {"layout.recompute_modules": ()} if layout.recompute_modules else {}
    modules |= {"layout.recompute_layers": 0} if layout.recompute_layers else {}
    if layout.recompute == "none":
        yield Change({"layout.recompute": "selective", **modules}, "recomputes some activations")
    if layout.recompute != "full" or layout.recompute_layers:
        yield Change({"layout.recompute": "full", **modules}, "keeps only the input of every layer")
    size = layout.micro_batch_size
    for smaller in sorted({size // 2, 1} - {0, size}, reverse=True):
        yield Change({"layout.micro_batch_size": smaller}, "fewer samples in flight; the global batch size stays")
    if kernels.loss not in ("chunked", "fused_linear"):
        yield Change({"kernels.loss": "chunked"}, "computes logits in chunks")
    if kernels.loss != "fused_linear":
        yield Change({"kernels.loss": "fused_linear"}, "never materializes all logits")
    if not layout.reshard_after_forward:
        yield Change({"layout.reshard_after_forward": True}, "frees gathered weights after the forward pass")
    if layout.tp > 1 and not layout.sp:
        yield Change({"layout.sp": True}, "also shards norms and residuals over the tp ranks")
    if layout.strategy == "ddp":
        yield Change({"layout.strategy": "fsdp2"}, "shards weights, gradients and optimizer state over the ranks")
    if layout.dp_replicate > 1:
        yield Change({"layout.dp_replicate": 1, **rest}, "shards the state over all data-parallel ranks")
    yield Change(
        {"layout.tp": 2 * layout.tp, "layout.sp": case.strategy != "megatron_fsdp", **rest},
        "shards every matrix further",
    )
    yield Change({"layout.cp": 2 * layout.cp, **rest}, "shards every sequence further")
    yield Change({"layout.pp": 2 * layout.pp, **rest}, "spreads layers over more stages")
    if case.is_moe:
        yield Change({"layout.ep": 2 * layout.ep, **rest}, "fewer experts per rank")
    if layout.offload == "none":
        yield Change({"layout.offload": "optimizer"}, "keeps optimizer state in host memory")
        yield Change({"layout.offload": "params"}, "keeps weights, gradients and optimizer state in host memory")
        yield Change({"layout.offload": "activations"}, "keeps activations in host memory; its cost is not estimated")
    if case.recipe.precision.moments == "fp32":
        yield Change({"precision.moments": "bf16"}, "halves the first moment; changes the experiment")
    if case.recipe.goal == "peft" and case.recipe.peft.method == "lora":
        yield Change({"peft.method": "qlora"}, "stores the frozen weights in 4 bits; changes the experiment")


def speed_candidates(case: Case) -> Iterator[Change]:
    """Yield every single change that may make a step faster."""
    layout, kernels = case.recipe.layout, case.recipe.kernels
    rest = {"layout.dp_shard": -1} if layout.dp_shard != -1 else {}
    modules = {"layout.recompute_modules": ()} if layout.recompute_modules else {}
    for less in {"full": ("selective", "none"), "selective": ("none",)}.get(layout.recompute, ()):
        yield Change({"layout.recompute": less, **modules}, "recomputes less in the backward pass")
    yield Change({"layout.micro_batch_size": 2 * layout.micro_batch_size}, "larger matmuls use the GPU better")
    if not kernels.compile:
        yield Change({"kernels.compile": True}, "fewer and larger kernels")
    yield from loss_candidates(case)
    if layout.reshard_after_forward and layout.strategy == "fsdp2":
        yield Change({"layout.reshard_after_forward": False}, "gathers weights once per step instead of twice")
    if kernels.cuda_graphs == "none":
        yield from graph_candidates(case)
    for name in ("overlap_grad_reduce", "overlap_param_gather", "tp_comm_overlap"):
        if not getattr(kernels, name):
            yield Change({f"kernels.{name}": True}, recipe_fields()[f"kernels.{name}"].text)
    for name, what in (("tp", "less tensor parallelism"), ("cp", "less context parallelism")):
        degree = getattr(layout, name)
        if degree > 1:
            follows = {"layout.sp": False} if name == "tp" and degree == 2 else {}
            yield Change({f"layout.{name}": degree // 2, **follows, **rest}, f"{what}: fewer collectives")
    yield from pipeline_candidates(case)


def loss_candidates(case: Case) -> Iterator[Change]:
    """Yield the other losses that the engine has; they differ in the memory and the time of the logits."""
    for loss in ("fused_linear", "vocab_parallel", "chunked") if case.vocab else ():
        if loss != case.loss and can_export("loss", case.engine, loss):
            yield Change({"kernels.loss": loss}, recipe_fields()["kernels.loss"].text)


def graph_candidates(case: Case) -> Iterator[Change]:
    """Yield CUDA graphs of whole layers; of what has fixed shapes, if the experts have not."""
    why = "launches kernels without the CPU"
    if not case.is_moe or case.capacity_factor:
        yield Change({"kernels.cuda_graphs": "local", "kernels.te_rng_tracker": True}, why)
        return
    router, *_, attention = scopes_outside_experts(case)
    scope = attention if recomputes_experts(case) else router
    together = {"kernels.cuda_graphs": "transformer_engine", "kernels.cuda_graph_scope": scope}
    yield Change({**together, "kernels.te_rng_tracker": True}, f"{why}, except for those of dropless experts")


def pipeline_candidates(case: Case) -> Iterator[Change]:
    """Yield every single change that may reduce the pipeline bubble."""
    layout = case.recipe.layout
    if layout.pp == 1:
        return
    rest = {"layout.dp_shard": -1} if layout.dp_shard != -1 else {}
    if layout.micro_batch_size > 1:
        yield Change({"layout.micro_batch_size": layout.micro_batch_size // 2}, "more micro batches fill the pipeline")
    for chunks in (2 * layout.vp, 4 * layout.vp):
        together = {"layout.vp": chunks, "layout.pp_schedule": "interleaved_1f1b"}
        yield Change(together, "smaller chunks leave a smaller bubble")
    even = {"layout.stage_layers": ()} if layout.stage_layers else {}
    plain = {"layout.vp": 1, "layout.pp_schedule": "1f1b"} if layout.pp == 2 else {}
    yield Change({"layout.pp": layout.pp // 2, **plain, **even, **rest}, "fewer stages to wait for")
    if layout.pp_schedule == "1f1b":
        yield Change({"layout.vp": 2, "layout.pp_schedule": "zbv"}, "weight gradients fill the bubble")


def network_candidates(case: Case) -> Iterator[Change]:
    """Yield every single change that may reduce or hide traffic between nodes."""
    layout, kernels = case.recipe.layout, case.recipe.kernels
    for name in ("overlap_grad_reduce", "overlap_param_gather"):
        if not getattr(kernels, name):
            yield Change({f"kernels.{name}": True}, recipe_fields()[f"kernels.{name}"].text)
    if layout.strategy == "fsdp2" and case.nodes > 1 and layout.dp_replicate == 1:
        together = {"layout.dp_replicate": int(case.nodes), "layout.dp_shard": -1}
        yield Change(together, "gathers weights inside a node; only gradients cross nodes")
    yield Change({"layout.micro_batch_size": 2 * layout.micro_batch_size}, "more work between two collectives")
    if layout.reshard_after_forward and layout.strategy == "fsdp2":
        yield Change({"layout.reshard_after_forward": False}, "gathers weights once per step instead of twice")
    if layout.tp > 1 and layout.tp > case.nvlink_domain:
        yield Change({"layout.tp": int(case.nvlink_domain), "layout.dp_shard": -1}, "keeps tp inside a node")
    if not layout.defer_grad_sync:
        yield Change({"layout.defer_grad_sync": True}, "reduces gradients once per step")


def fitting_remedies(stats: RunStats) -> tuple[Remedy, ...]:
    """Return changes with which the step fits by the cost model, fastest first; combinations if that is better."""
    case = stats.case
    if case is None:
        return ()
    singles = [one for change in memory_candidates(case) if (one := evaluate_change(stats, change))]
    singles = [one for one in singles if (one.peak_gib or 0.0) < _peak(stats, case) - LEAST_SAVED_GIB]
    found = [one for one in singles if one.fits]
    cheapest = min((_cost(one) for one in found), default=None)
    if cheapest is None or cheapest[1] > CHEAP:
        joined = _combined(stats, singles)
        found += sorted((one for one in joined if cheapest is None or _cost(one) < cheapest), key=_cost)[:2]
    shown = sorted(found, key=_cost)[:MAX_SHOWN]
    repair = _repair_of_check(stats, case) if stats.run.header.file or not shown else None
    known = repair is None or any({*one.try_} == {*repair.try_} for one in shown)
    return tuple(shown if known or repair is None else sorted((*shown, repair), key=_cost))


def _repair_of_check(stats: RunStats, case: Case) -> Remedy | None:
    """Return the repair that check has for the file, if the run fits with it."""
    texts = as_overrides(find_repair_of_file(case))
    if not texts:
        return None
    change = Change(override.requested(case.recipe, texts), "the smallest repair of the layout, as check finds it")
    one = evaluate_change(stats, change)
    return one if one is not None and one.fits else None


def faster_remedies(stats: RunStats, changes: Callable[[Case], Iterable[Change]], most: int = 3) -> tuple[Remedy, ...]:
    """Return changes that fit and make the step faster by the cost model, fastest first."""
    if stats.case is None:
        return ()
    found = [one for change in changes(stats.case) if (one := evaluate_change(stats, change)) and one.fits]
    faster = [one for one in found if one.step_ratio is not None and one.step_ratio <= 1 - share("worth_trying")]
    return tuple(sorted(faster, key=lambda one: one.step_ratio or 1.0)[:most])


def evaluate_change(stats: RunStats, change: Change) -> Remedy | None:
    """Return a change with its predicted memory and step time; None if it is invalid or changes nothing.

    The memory includes what the run needed beyond its own estimate.
    """
    case = stats.case
    if case is None:
        return None
    try:
        recipe, log = override.change(case.recipe, change.values)
        other = case.rebuild(recipe)
        if not log or not bool(rules.legal(other, ignoring=_violated_by_run(case))):
            return None
        memory, seconds = costs.memory(other), float(costs.step_time(stats.timed(other)).step_s)
    except (InputError, ValueError, ZeroDivisionError):  # the layout is invalid
        return None
    peak, before = float(memory.total) + stats.beyond_estimate_gib, float(costs.step_time(stats.timed(case)).step_s)
    keys = [one.key for one in log]
    there = to_framework_settings(stats.run, case, recipe)
    if not there and is_impossible(stats.run, case, recipe):
        return None
    if stats.run.kind == "transformers" and not there and ({*keys} & {*MODEL_PARALLEL} or stats.run.header.front_end):
        return None  # the Trainer is data parallel, and its front ends have no other keys
    return Remedy(
        try_=tuple(format_override(one.key, one.new) for one in log),
        what=change_kind(keys),
        why=change.why,
        there=there,
        peak_gib=round(peak, 2),
        fits=peak <= min(float(memory.capacity), stats.smaller_gpu_gib or math.inf) * (1 - RESERVE),
        step_ratio=None if _has_no_estimate(change) else round(seconds / before, 4),
    )


def changed_values(stats: RunStats, remedy: Remedy) -> dict[str, Any]:
    """Return the fields that a remedy of the run's case changes, with their values."""
    return {} if stats.case is None else override.requested(stats.case.recipe, remedy.try_)


def can_start(case: Case, values: Mapping[str, Any]) -> bool:
    """Return whether values change a run into one that no rule refuses but those that the run itself violates."""
    try:
        recipe, log = override.change(case.recipe, values)
        return bool(log) and bool(rules.legal(case.rebuild(recipe), ignoring=_violated_by_run(case)))
    except (InputError, ValueError, ZeroDivisionError):  # the layout is invalid
        return False


def advice(*texts: str, what: What = "action", why: str = "") -> Remedy:
    """Return a remedy without an estimated effect."""
    return Remedy(try_=texts, what=what, why=why)


def contract(stats: RunStats, values: dict[str, Any], why: str) -> Remedy:
    """Return a change of the training itself: a new experiment, without a predicted effect."""
    there: tuple[str, ...] = ()
    if stats.case is not None:
        there = to_framework_settings(stats.run, stats.case, override.change(stats.case.recipe, values)[0])
    return Remedy(
        try_=tuple(format_override(key, value) for key, value in values.items()), what="contract", why=why, there=there
    )


LONGEST_WARMUP = 0.5  # share of the training
MANY = {0.5: "half of", 3.0: "three times"}


def other_rate(stats: RunStats, factor: float, why: str) -> Remedy:
    """Return a learning rate of this factor that no rule finds too high; a minimum that is known scales with it.

    It is in words if the run's own is unknown.
    """
    case, lr, least = stats.case, LR, "schedule.min_lr"
    ran = rate_that_ran(stats)
    if ran is None:
        text = f"{MANY[factor]} the learning rate that ran and of its minimum"
        there = named_setting(stats.run, lr, f"<{MANY[factor]} now>")
        return Remedy(try_=(text,), what="action", why=why, there=there)
    if case is None or not stats.states(lr):
        rate = _within_rules(stats, ran, factor)
        return Remedy(try_=(format_override(lr, rate),), what="contract", why=why)
    values = {lr: _within_rules(stats, ran, factor)}
    if stats.states(least) and (low := case.recipe.schedule.min_lr):
        is_rules = values[lr] < _scaled(ran, factor)  # whose minimum is the run's, as in the fix of check
        follows = _scaled(low, values[lr] / ran)  # as it follows a rate that is typed
        values[least] = min(low, _scaled(values[lr], 0.1)) if is_rules else follows
        return contract(stats, values, why)
    # The minimum of our recipe is not the run's: framework settings that derive from it would be wrong.
    other = RunStats(stats.run, case.rebuild(override.change(case.recipe, {least: 0.0})[0]))
    return contract(other, values, why)


def rate_that_ran(stats: RunStats) -> float | None:
    """Return the highest learning rate of the run's schedule: as stated, else the highest in the log."""
    if stats.case is None or not stats.states(LR):
        return max((step.lr for step in stats.run.steps if step.lr), default=None)
    unlike = rate_unlike_file(stats)
    return stats.case.recipe.optimizer.lr if unlike is None else unlike.logged


def _within_rules(stats: RunStats, rate: float, factor: float) -> float:
    """Return the rate times the factor, or what a rule advises in its place; a larger one grows less where it must."""
    if factor <= 1:
        return advised_rate(stats, _scaled(rate, factor))[0]
    larger = [_scaled(rate, one) for one in (factor, 2.0, 1.5, 1.1)]
    return next((one for one in larger if not advised_rate(stats, one)[1]), larger[-1])


def _scaled(rate: float, factor: float) -> float:
    return float(f"{factor * rate:.3g}")


def other_warmup(stats: RunStats, steps: Callable[[int], int], words: str, why: str) -> Remedy:
    """Return another number of warmup steps; in words if the run's own is unknown."""
    if stats.case is None or not stats.states("schedule.warmup_steps"):
        ran = warmup_that_ran(stats)
        if ran is None:
            there = named_setting(stats.run, "schedule.warmup_steps", f"<{words.split()[1]} than now>")
            return Remedy(try_=(words,), what="action", why=why, there=there)
        most = (stats.run.header.total_steps or 0) // 2 or steps(ran)
        return Remedy(try_=(f"schedule.warmup_steps={max(1, min(steps(ran), most))}",), what="contract", why=why)
    recipe = stats.case.recipe
    ran = warmup_that_ran(stats) or 0
    lengths = [one for one in (stats.run.header.total_steps, recipe.train.steps) if one]
    # The run's own file or arguments state its length; a recipe that is named beside a log need not have the run's.
    total = min(lengths, default=0) if stated_settings(stats.run) else next(iter(lengths), 0)
    end = recipe.schedule.decay_steps or total
    wanted = steps(ran)
    # A warmup of more than half of the training never lets it learn at its rate: the run's own is kept, a no-op.
    longest = max(ran, int(end * LONGEST_WARMUP)) if end else wanted
    in_full = RunStats(stats.run, stats.case.rebuild(override.change(recipe, {"train.steps": total})[0]))
    return contract(in_full if total else stats, {"schedule.warmup_steps": min(wanted, longest)}, why)


def warmup_that_ran(stats: RunStats) -> int | None:
    """Return the steps of warmup by the log or by the recipe that it states; None if unknown."""
    if stats.case is None or not stats.states("schedule.warmup_steps"):
        now = stats.run.header.overrides.get("schedule.warmup_steps")
        return _logged_warmup(stats.run) if now is None else int(now)
    # A warmup that is a share of the training is not in steps, and that of a shipped recipe need not be the run's.
    stated = stats.case.recipe.schedule.warmup_steps or _logged_warmup(stats.run) or 0
    return max(stated, rising_steps(stats.run))


def rising_steps(run: Run) -> int:
    """Return the step until which the logged learning rate rises from the first line on; 0 if it does not."""
    rates = [(step.lr, step.step) for step in run.steps if step.lr]
    falls = (now for (before, now), (after, _) in pairwise(rates) if after <= before)
    until = next(falls, rates[-1][1] if rates else 0)
    return until if rates and until > rates[0][1] else 0


def _logged_warmup(run: Run) -> int | None:
    """Return the steps after which the logged learning rate is highest; None if none is logged, or it still rises."""
    rates = [(step.lr, step.step) for step in run.steps if step.lr]
    if not rates or (rates[-1][0] == max(rates)[0] and rates[-1][0] > rates[0][0]):
        return None
    highest = max(rate for rate, _ in rates)
    return next(step for rate, step in rates if rate == highest)


def _combined(stats: RunStats, singles: Sequence[Remedy]) -> Iterator[Remedy]:
    """Yield combinations of two changes that fit, or of three if no two do."""
    case = stats.case
    if case is None:
        return
    best = sorted(singles, key=lambda one: one.peak_gib or 0.0)[:COMBINED]
    for count in (2, 3):
        found = False
        for some in combinations(best, count):
            values: dict[str, Any] = {}
            for one in some:
                values |= override.requested(case.recipe, one.try_)
            joined = evaluate_change(stats, Change(values, "; ".join(one.why for one in some)))
            if joined is not None and joined.fits:
                found = True
                yield joined
        if found:
            return


def _cost(remedy: Remedy) -> tuple[bool, float, int]:
    """Return the sort key of a remedy: new experiments last, then step time, then the number of changes."""
    unknown = UNKNOWN_COST if remedy.step_ratio is None else remedy.step_ratio
    return remedy.what == "contract", unknown, len(remedy.try_)


def _peak(stats: RunStats, case: Case) -> float:
    return float(costs.memory(case).total) + stats.beyond_estimate_gib


def _violated_by_run(case: Case) -> frozenset[str]:
    """Return the rules that the run itself violates although it ran: changes may violate them too.

    No change may need other GPUs than there are.
    """
    return frozenset(rules.illegal_by_rule(case)) - {"topology.world"}


def _has_no_estimate(change: Change) -> bool:
    return change.values.get("layout.offload") == "activations"


def change_kind(keys: Iterable[str]) -> What:
    """Return whether a change of these fields changes the training or only its layout."""
    kinds = {recipe_fields()[key].kind for key in keys}
    return "contract" if "contract" in kinds else "layout"
