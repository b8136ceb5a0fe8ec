"""What to try: changes of a layout with their effect by the cost model, those that cost least first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations
from typing import Any

import msgspec

from meshwright import costs, rules
from meshwright.costs.memory_constants import RESERVE
from meshwright.doctor.finding import Remedy, What
from meshwright.doctor.run_stats import View
from meshwright.doctor.their_keys import in_their_words
from meshwright.doctor.thresholds import share
from meshwright.errors import InputError
from meshwright.recipes import overrides as override
from meshwright.recipes.case import Case
from meshwright.recipes.format_override import format_override
from meshwright.recipes.types import recipe_fields

SHOWN = 5
JOINED = 8  # single changes that are tried two and three at a time, where none is enough
LEAST_SAVED_GIB = 0.05
CHEAP = 1.1  # of the step time: where one change costs more, two together may cost less
UNKNOWN_COST = 1.5  # of the step time, for what the cost model does not price: behind recomputing everything


class Change(msgspec.Struct, frozen=True):
    """Fields to change together, and why that may help."""

    values: dict[str, Any]
    why: str

    @property
    def typed(self) -> tuple[str, ...]:
        """As overrides."""
        return tuple(format_override(key, value) for key, value in self.values.items())


def changes_that_save_memory(case: Case) -> Iterator[Change]:
    """Every change of one thing that may lower the peak."""
    layout, kernels = case.recipe.layout, case.recipe.kernels
    rest = {"layout.dp_shard": -1} if layout.dp_shard != -1 else {}
    modules: dict[str, Any] = {"layout.recompute_modules": ()} if layout.recompute_modules else {}
    modules |= {"layout.recompute_layers": 0} if layout.recompute_layers else {}
    if layout.recompute == "none":
        yield Change({"layout.recompute": "selective", **modules}, "some activations are computed again")
    if layout.recompute != "full" or layout.recompute_layers:
        yield Change({"layout.recompute": "full", **modules}, "only the input of every layer is kept")
    size = layout.micro_batch_size
    for smaller in sorted({size // 2, 1} - {0, size}, reverse=True):
        yield Change({"layout.micro_batch_size": smaller}, "fewer samples are in flight at once; the batch stays")
    if kernels.loss not in ("chunked", "fused_linear"):
        yield Change({"kernels.loss": "chunked"}, "logits are made in pieces")
    if kernels.loss != "fused_linear":
        yield Change({"kernels.loss": "fused_linear"}, "logits are never whole")
    if not layout.reshard_after_forward:
        yield Change({"layout.reshard_after_forward": True}, "gathered weights are let go of after the forward pass")
    if layout.tp > 1 and not layout.sp:
        yield Change({"layout.sp": True}, "norms and residuals are cut over the tp ranks too")
    if layout.strategy == "ddp":
        yield Change({"layout.strategy": "fsdp2"}, "weights, gradients and optimizer state are cut over the ranks")
    if layout.dp_replicate > 1:
        yield Change({"layout.dp_replicate": 1, **rest}, "the state is cut over all data-parallel ranks")
    yield Change(
        {"layout.tp": 2 * layout.tp, "layout.sp": case.strategy != "megatron_fsdp", **rest},
        "every matrix is cut further",
    )
    yield Change({"layout.cp": 2 * layout.cp, **rest}, "every sequence is cut further")
    yield Change({"layout.pp": 2 * layout.pp, **rest}, "layers are spread over more stages")
    if case.is_moe:
        yield Change({"layout.ep": 2 * layout.ep, **rest}, "every rank holds fewer experts")
    if layout.offload == "none":
        yield Change({"layout.offload": "optimizer"}, "optimizer state waits in host memory")
        yield Change(
            {"layout.offload": "activations"}, "activations wait in host memory; the estimate has no price for it"
        )
    if case.recipe.precision.moments == "fp32":
        yield Change({"precision.moments": "bf16"}, "the first moment takes half; a new experiment")


def changes_that_save_time(case: Case) -> Iterator[Change]:
    """Every change of one thing that may make a step faster."""
    layout, kernels = case.recipe.layout, case.recipe.kernels
    rest = {"layout.dp_shard": -1} if layout.dp_shard != -1 else {}
    modules = {"layout.recompute_modules": ()} if layout.recompute_modules else {}
    for less in {"full": ("selective", "none"), "selective": ("none",)}.get(layout.recompute, ()):
        yield Change({"layout.recompute": less, **modules}, "less is computed again in the backward pass")
    yield Change({"layout.micro_batch_size": 2 * layout.micro_batch_size}, "larger products use the GPU better")
    if not kernels.compile:
        yield Change({"kernels.compile": True}, "fewer and larger kernels")
    if kernels.cuda_graphs == "none":
        yield Change({"kernels.cuda_graphs": "local", "kernels.te_rng_tracker": True}, "kernels start without the CPU")
    for name in ("overlap_grad_reduce", "overlap_param_gather", "tp_comm_overlap"):
        if not getattr(kernels, name):
            yield Change({f"kernels.{name}": True}, recipe_fields()[f"kernels.{name}"].text)
    for name, what in (("tp", "matrices are cut less"), ("cp", "sequences are cut less")):
        degree = getattr(layout, name)
        if degree > 1:
            follows = {"layout.sp": False} if name == "tp" and degree == 2 else {}
            yield Change({f"layout.{name}": degree // 2, **follows, **rest}, f"{what}: fewer collectives")
    yield from changes_that_fill_the_pipeline(case)


def changes_that_fill_the_pipeline(case: Case) -> Iterator[Change]:
    """Every change of one thing that may leave stages idle for less."""
    layout = case.recipe.layout
    if layout.pp == 1:
        return
    rest = {"layout.dp_shard": -1} if layout.dp_shard != -1 else {}
    if layout.micro_batch_size > 1:
        yield Change({"layout.micro_batch_size": layout.micro_batch_size // 2}, "more micro batches fill the pipeline")
    for chunks in (2 * layout.vp, 4 * layout.vp):
        together = {"layout.vp": chunks, "layout.pp_schedule": "interleaved_1f1b"}
        yield Change(together, "smaller chunks of layers leave a smaller bubble")
    even = {"layout.stage_layers": ()} if layout.stage_layers else {}
    plain = {"layout.vp": 1, "layout.pp_schedule": "1f1b"} if layout.pp == 2 else {}
    yield Change({"layout.pp": layout.pp // 2, **plain, **even, **rest}, "fewer stages wait for each other")
    if layout.pp_schedule == "1f1b":
        yield Change({"layout.vp": 2, "layout.pp_schedule": "zbv"}, "weight gradients fill the bubble")


def changes_that_send_less(case: Case) -> Iterator[Change]:
    """Every change of one thing that may lower what has to travel between nodes, or hide it."""
    layout, kernels = case.recipe.layout, case.recipe.kernels
    for name in ("overlap_grad_reduce", "overlap_param_gather"):
        if not getattr(kernels, name):
            yield Change({f"kernels.{name}": True}, recipe_fields()[f"kernels.{name}"].text)
    if layout.strategy == "fsdp2" and case.nodes > 1 and layout.dp_replicate == 1:
        together = {"layout.dp_replicate": int(case.nodes), "layout.dp_shard": -1}
        yield Change(together, "weights are gathered inside a node; only gradients cross nodes")
    yield Change({"layout.micro_batch_size": 2 * layout.micro_batch_size}, "more work between two collectives")
    if layout.reshard_after_forward and layout.strategy == "fsdp2":
        yield Change({"layout.reshard_after_forward": False}, "weights are gathered once a step instead of twice")
    if layout.tp > 1 and layout.tp > case.nvlink_domain:
        yield Change({"layout.tp": int(case.nvlink_domain), "layout.dp_shard": -1}, "tp stays inside a node")
    if not layout.defer_grad_sync:
        yield Change({"layout.defer_grad_sync": True}, "gradients travel once a step")


def that_fit(view: View, offset_gib: float = 0.0) -> tuple[Remedy, ...]:
    """Changes after which the step fits by the cost model, fastest first; two or three together where that is better.

    `offset_gib` is what the run was seen to need beyond its estimate: every estimate is raised by it.
    """
    case = view.case
    if case is None:
        return ()
    singles = [one for change in changes_that_save_memory(case) if (one := tried(view, change, offset_gib))]
    singles = [one for one in singles if (one.peak_gib or 0.0) < _peak(case, offset_gib) - LEAST_SAVED_GIB]
    found = [one for one in singles if one.fits]
    cheapest = min((_cost(one) for one in found), default=None)
    if cheapest is None or cheapest[1] > CHEAP:
        joined = _joined(view, singles, offset_gib)
        found += sorted((one for one in joined if cheapest is None or _cost(one) < cheapest), key=_cost)[:2]
    return tuple(sorted(found, key=_cost)[:SHOWN])


def that_speed_up(
    view: View, changes: Callable[[Case], Iterable[Change]], most: int = 3, offset_gib: float = 0.0
) -> tuple[Remedy, ...]:
    """Changes that fit and make the step faster by the cost model, the fastest first."""
    if view.case is None:
        return ()
    found = [one for change in changes(view.case) if (one := tried(view, change, offset_gib)) and one.fits]
    faster = [one for one in found if one.step_ratio is not None and one.step_ratio <= 1 - share("worth_trying")]
    return tuple(sorted(faster, key=lambda one: one.step_ratio or 1.0)[:most])


def tried(view: View, change: Change, offset_gib: float = 0.0) -> Remedy | None:
    """A change with its memory and step time by the cost model; None where it cannot be or changes nothing."""
    case = view.case
    if case is None:
        return None
    try:
        recipe, log = override.change(case.recipe, change.values)
        other = case.rebuild(recipe)
        if not log or not bool(rules.legal(other, ignoring=_broken_anyway(case))):
            return None
        memory, seconds = costs.memory(other), float(costs.step_time(other).step_s)
    except (InputError, ValueError, ZeroDivisionError):  # a layout that cannot be built has no price
        return None
    peak = float(memory.total) + offset_gib
    keys = [one.key for one in log]
    return Remedy(
        try_=tuple(format_override(one.key, one.new) for one in log),
        what=_what(keys),
        why=change.why,
        there=in_their_words(view.run.kind, case, recipe),
        peak_gib=round(peak, 2),
        fits=peak <= float(memory.capacity) * (1 - RESERVE),
        step_ratio=None if _unpriced(change) else round(seconds / float(costs.step_time(case).step_s), 4),
    )


def plainly(*texts: str, what: What = "action", why: str = "") -> Remedy:
    """Something to try that no estimate speaks of."""
    return Remedy(try_=texts, what=what, why=why)


def contract(view: View, values: dict[str, Any], why: str) -> Remedy:
    """A change of the training itself: a new experiment, whose effect only it will show."""
    there: tuple[str, ...] = ()
    if view.case is not None:
        there = in_their_words(view.run.kind, view.case, override.change(view.case.recipe, values)[0])
    return Remedy(
        try_=tuple(format_override(key, value) for key, value in values.items()), what="contract", why=why, there=there
    )


def _joined(view: View, singles: Sequence[Remedy], offset_gib: float) -> Iterator[Remedy]:
    """Two changes together that fit; three where no two do."""
    case = view.case
    if case is None:
        return
    best = sorted(singles, key=lambda one: one.peak_gib or 0.0)[:JOINED]
    for count in (2, 3):
        found = False
        for some in combinations(best, count):
            values: dict[str, Any] = {}
            for one in some:
                values |= override.requested(case.recipe, one.try_)
            joined = tried(view, Change(values, "; ".join(one.why for one in some)), offset_gib)
            if joined is not None and joined.fits:
                found = True
                yield joined
        if found:
            return


def _cost(remedy: Remedy) -> tuple[bool, float, int]:
    """What a remedy costs: a new experiment most of all, then time per step, then how much there is to change."""
    unknown = UNKNOWN_COST if remedy.step_ratio is None else remedy.step_ratio
    return remedy.what == "contract", unknown, len(remedy.try_)


def _peak(case: Case, offset_gib: float) -> float:
    return float(costs.memory(case).total) + offset_gib


def _broken_anyway(case: Case) -> frozenset[str]:
    """Rules that the run itself breaks, and it ran: no change is held to those."""
    return frozenset(rules.illegal_by_rule(case))


def _unpriced(change: Change) -> bool:
    return change.values.get("layout.offload") == "activations"


def _what(keys: Iterable[str]) -> What:
    kinds = {recipe_fields()[key].kind for key in keys}
    return "contract" if "contract" in kinds else "layout"
