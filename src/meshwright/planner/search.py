"""Estimate all candidate layouts as arrays and select the best that are legal and fit."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from meshwright import costs, rules
from meshwright.costs.memory import FITS
from meshwright.planner.space import (
    COARSE_SPACE,
    DEFAULT_SPACE,
    FULL_SPACE,
    GROWN_SPACE,
    QUICK_SPACE,
    Space,
    candidates,
    degrees,
    legal_degrees,
    option_batches,
    with_options,
    with_pins,
)
from meshwright.recipes.case import Case
from meshwright.recipes.format_override import format_override
from meshwright.recipes.types import keys_by_flat_name
from meshwright.rules.memory import REDUCES_AT_WILL

LAYOUT_NAMES = (
    "strategy",
    "tp",
    "pp",
    "vp",
    "cp",
    "ep",
    "etp",
    "dp_shard",
    "dp_replicate",
    "sp",
    "micro_batch_size",
    "recompute",
    "recompute_modules",
    "recompute_layers",
    "pp_schedule",
    "pp_micro_batches",
    "stage_layers",
    "embedding_as_layer",
    "head_as_layer",
    "offload",
)
LEVER_NAMES = ("defer_grad_sync", "loss")
"""Other layout-kind fields that a plan may change to fit; planner/levers.py tries them."""
SEARCHED_NAMES = (*LAYOUT_NAMES, *LEVER_NAMES, "reshard_after_forward")
SAME_SPEED = 1.02  # of the fastest step time; among these layouts, the closest to the recipe wins
SEARCH_AT_ONCE = 40  # degrees of a space that is searched in one pass
COARSE_MARGIN = 1.3  # of the fastest step time of a coarse search: more than its other options gain
MAX_PROMISING = 56  # degrees for which all options are tried
HEADROOM_LIMIT = 0.92  # of GPU memory; above it, a small estimate error means out of memory
SURELY_FITS, MAY_NOT_FIT = (least for least, verdict in FITS if verdict in ("fits", "probably fits"))
"""Chance from which a layout fits in words, and below which it may not."""
COSTS_LITTLE = 1.1  # of the step time: less than running out of memory and starting again
GRADIENTS_AND_CACHE = 1.25  # of the gradients: with the allocator cache that they cause, at most


def has_headroom(total_gib: Any, case: Case) -> Any:
    """Return whether this much memory leaves headroom for an estimate error."""
    return total_gib <= HEADROOM_LIMIT * case.capacity_gib


class Candidate(msgspec.Struct, frozen=True):
    """One layout with its estimated step time and memory."""

    layout: dict[str, Any]
    step_s: float
    total_gib: float
    fits: bool
    has_headroom: bool  # for an estimate error
    chance: float = 1.0  # that it fits, given the error band of the estimate
    faster: Candidate | None = None  # one that may not fit, passed over for this one


class ScoredBatch(msgspec.Struct, frozen=True):
    """A batch of legal layouts with their estimated step time and memory."""

    case: Case
    step_s: Any
    total_gib: Any
    fits: Any
    chance: Any  # that it fits, given the error band of the estimate

    @property
    def has_headroom(self) -> Any:
        """Where the layout fits with headroom for an estimate error."""
        return self.fits & has_headroom(self.total_gib, self.case)

    def __len__(self) -> int:
        return len(self.step_s)

    def rows(self, chosen: Any) -> ScoredBatch:
        """Return some layouts of the batch."""
        kept = (column[chosen] for column in (self.step_s, self.total_gib, self.fits, self.chance))
        return ScoredBatch(self.case.rows(chosen), *kept)

    def row(self, i: int) -> Candidate:
        """Return one layout of the batch."""
        alone = self.case.rows(i)
        layout = {name: getattr(alone, name) for name in SEARCHED_NAMES}
        numbers = float(self.step_s[i]), float(self.total_gib[i])
        return Candidate(layout, *numbers, bool(self.fits[i]), bool(self.has_headroom[i]), float(self.chance[i]))


def score(
    case: Case,
    pinned: Mapping[str, Any],
    space: Space = DEFAULT_SPACE,
    ignoring: Container[str] = (),
    timed: bool = True,
) -> Iterator[ScoredBatch]:
    """Yield all legal candidates with the pinned values, estimated, in batches; without step times if not wanted."""
    for batch in candidates(case, space, pinned, ignoring):
        yield from _scored(batch, pinned, ignoring, timed)


def _scored(
    batch: Case, pinned: Mapping[str, Any], ignoring: Container[str], timed: bool = True
) -> Iterator[ScoredBatch]:
    """Yield the legal layouts of a batch with memory and, if wanted, step time; nothing if none is legal."""
    ok = np.broadcast_to(rules.legal(batch, ignoring), batch.tp.shape)
    if "sp" in pinned:
        ok = ok & (batch.sp == pinned["sp"])
    if not ok.any():
        return
    kept = batch.rows(ok)
    memory = costs.memory(kept)
    found = _estimated(kept, memory, timed)
    yield found
    yield from _reduced_otherwise(found, memory, pinned, ignoring, timed)
    yield from _gathered_otherwise(found, pinned, ignoring, timed)


def _estimated(kept: Case, memory: costs.Memory, timed: bool) -> ScoredBatch:
    """Return legal layouts with memory and, where they fit, step time."""
    fits = np.broadcast_to(memory.fits & (memory.host <= kept.host_gib), kept.tp.shape)
    step_s = np.full(kept.tp.shape, np.inf)
    if timed and fits.any():
        step_s[fits] = costs.step_time(kept if fits.all() else kept.rows(fits)).step_s
    total, chance = (np.broadcast_to(one, kept.tp.shape) for one in (memory.total, memory.fit_probability))
    return ScoredBatch(kept, step_s, total, fits, chance)


def with_value(batch: ScoredBatch, name: str, value: Any) -> Iterator[ScoredBatch]:
    """Yield the layouts with another value of a field where that is legal and not worse, and the others as they are."""
    if not len(batch) or getattr(batch.case, name) == value:
        yield batch
        return
    other = batch.case.replace(**{name: value})
    scored = _estimated(other, costs.memory(other), timed=True)
    better = (
        scored.fits & (scored.step_s <= batch.step_s) & (scored.has_headroom | (scored.total_gib <= batch.total_gib))
    )
    better = better & np.broadcast_to(rules.legal(other), better.shape)
    yield from (part for part in (scored.rows(better), batch.rows(~better)) if len(part))


def own_layout(case: Case) -> list[ScoredBatch]:
    """Return the recipe's own layout, scored, if it is legal."""
    alone = case.replace(**{name: np.asarray([getattr(case, name)]) for name in ("tp", "pp", "cp", "ep")})
    return list(_scored(alone, {}, ()))[:1]


def _reduced_otherwise(
    found: ScoredBatch, memory: costs.Memory, pinned: Mapping[str, Any], ignoring: Container[str], timed: bool
) -> Iterator[ScoredBatch]:
    """Yield layouts that leave headroom with the other value of defer_grad_sync, where that may be faster.

    Reducing in every micro batch saves gradients, not time: it is tried where deferred gradients leave no headroom.
    """
    case = found.case
    if not reduces_otherwise(case, pinned):
        return
    if case.defer_grad_sync != case.recipe.layout.defer_grad_sync:  # set to save memory: planner/levers.py
        return
    tried = (case.pp == 1) & (case.accumulation > 1)  # elsewhere both values run the same
    if case.defer_grad_sync:
        without = memory.total - GRADIENTS_AND_CACHE * memory.gradients
        tried = tried & ~found.has_headroom & has_headroom(without, case)
    else:
        tried = tried & found.has_headroom
    if not tried.any():
        return
    other = case.rows(tried).replace(defer_grad_sync=not case.defer_grad_sync)
    reduced = costs.memory(other)
    useful = rules.legal(other, ignoring) & has_headroom(reduced.total, case)
    useful = np.broadcast_to(useful, other.tp.shape)
    if useful.any():
        yield _estimated(other.rows(useful), reduced.rows(useful), timed)


def _gathered_otherwise(
    found: ScoredBatch, pinned: Mapping[str, Any], ignoring: Container[str], timed: bool
) -> Iterator[ScoredBatch]:
    """Yield layouts of DeepSpeed with the other of ZeRO-2 and ZeRO-3: whole weights on every rank, or sharded ones."""
    case = found.case
    if case.engine != "deepspeed" or not bool(case.strategy == "fsdp2") or "reshard_after_forward" in pinned:
        return
    other = case.replace(reshard_after_forward=not case.reshard_after_forward)
    allowed = np.broadcast_to(rules.legal(other, ignoring), other.tp.shape)
    if allowed.any():
        kept = other.rows(allowed)
        yield _estimated(kept, costs.memory(kept), timed)


def reduces_otherwise(case: Case, pinned: Mapping[str, Any]) -> bool:
    """Return whether a search may turn the switch that defers the reduction of gradients."""
    return "defer_grad_sync" not in pinned and case.engine in REDUCES_AT_WILL and bool(case.strategy == "fsdp2")


def any_legal(case: Case, ignoring: Container[str] = (), pinned: Mapping[str, Any] | None = None) -> bool:
    """Return whether some layout of this case breaks no error rule except memory and ignored rules."""
    pins = pinned or {}
    if not pins.keys() - {"tp", "pp", "cp", "ep"}:  # degrees legal with the simplest options are a layout of the space
        return any(True for _ in legal_degrees(case, FULL_SPACE, pins, ignoring))
    for batch in candidates(case, FULL_SPACE, pins, ignoring):
        ok = np.broadcast_to(rules.legal(batch, ignoring), batch.tp.shape)
        if np.any(ok & (batch.sp == pins["sp"]) if "sp" in pins else ok):
            return True
    return False


def always_broken(case: Case) -> frozenset[str]:
    """Return the rules that every choice of degrees breaks; no layout fixes those."""
    found: set[str] | None = None
    for batch in degrees(case):
        masks = rules.illegal_by_rule(batch)
        here = {id for id, mask in masks.items() if np.broadcast_to(mask, batch.tp.shape).all()}
        found = here if found is None else found & here
    return frozenset(found or ())


def scored_layouts(case: Case, pinned: Mapping[str, Any], ignoring: Container[str] = ()) -> list[ScoredBatch]:
    """Return the layouts of FULL_SPACE; in a large space, all options only for degrees that may be the fastest."""
    places = list(legal_degrees(case, FULL_SPACE, pinned, ignoring))
    coarse: list[list[ScoredBatch]] = []
    if sum(len(bare.tp) for bare in places) > SEARCH_AT_ONCE:
        coarse = [list(_with_options(bare, COARSE_SPACE, pinned, ignoring)) for bare in places]
        places = _promising(places, coarse)
    found = (_with_options(bare, FULL_SPACE, pinned, ignoring) for bare in places)
    return [batch for batches in (*coarse, *found) for batch in batches]


def _with_options(
    bare: Case, space: Space, pinned: Mapping[str, Any], ignoring: Container[str] = (), timed: bool = True
) -> Iterator[ScoredBatch]:
    """Yield legal degrees with every option of a space, estimated."""
    for batch in option_batches(bare, space, pinned):
        yield from _scored(batch, pinned, ignoring, timed)


def grown(
    case: Case, pinned: Mapping[str, Any], space: Space, batches: Iterable[ScoredBatch], limit_s: float
) -> Iterator[ScoredBatch]:
    """Yield the layouts of GROWN_SPACE that a space lacks, for the degrees of those that are faster than the limit."""
    fast = [degree_keys(batch.case)[batch.step_s <= limit_s] for batch in batches]
    keys, known = np.concatenate(fast or [np.zeros(0, np.int64)]), with_pins(space, case, pinned)
    for bare in legal_degrees(case, space, pinned) if len(keys) else ():
        rows = np.isin(degree_keys(bare), keys)
        if not rows.any():
            continue
        larger = with_options(bare.rows(rows), GROWN_SPACE, pinned)
        tried = np.isin(larger.micro_batch_size, known.micro_batches) & np.isin(larger.recompute, known.recompute)
        if case.defer_grad_sync != case.recipe.layout.defer_grad_sync:
            tried |= larger.accumulation == 1  # both values run the same
        if not tried.all():
            yield from _scored(larger.rows(~tried), pinned, ())


def any_fits(case: Case, pinned: Mapping[str, Any]) -> bool:
    """Return whether one of `scored_layouts` fits, without step times."""
    places = list(legal_degrees(case, FULL_SPACE, pinned))
    coarse: list[list[ScoredBatch]] = []
    if sum(len(bare.tp) for bare in places) > SEARCH_AT_ONCE:
        for bare in places:
            coarse.append(list(_with_options(bare, COARSE_SPACE, pinned, timed=False)))
            if any(batch.fits.any() for batch in coarse[-1]):
                return True
        places = _promising(places, coarse)
    found = (_with_options(bare, FULL_SPACE, pinned, timed=False) for bare in places)
    return any(batch.fits.any() for batches in found for batch in batches)


def _promising(places: list[Case], coarse: list[list[ScoredBatch]]) -> list[Case]:
    """Return the degrees near the fastest layout of a coarse search, or near the smallest one if none fits."""
    for value in (_step_with_headroom, _step_that_fits, _memory):
        best = [_per_degree(bare, batches, value) for bare, batches in zip(places, coarse, strict=True)]
        joined = np.sort(np.concatenate(best)) if best else np.array([np.inf])
        if np.isfinite(joined[0]):
            break
    limit = min(COARSE_MARGIN * joined[0], joined[min(MAX_PROMISING, len(joined)) - 1])
    return [bare.rows(one <= limit) for bare, one in zip(places, best, strict=True) if (one <= limit).any()]


def _step_with_headroom(batch: ScoredBatch) -> Any:
    return np.where(batch.has_headroom, batch.step_s, np.inf)


def _step_that_fits(batch: ScoredBatch) -> Any:
    return np.where(batch.fits, batch.step_s, np.inf)


def _memory(batch: ScoredBatch) -> Any:
    return batch.total_gib


def _per_degree(bare: Case, batches: list[ScoredBatch], value: Callable[[ScoredBatch], Any]) -> Any:
    """Return the least value of the layouts of each row of degrees."""
    least, keys = np.full(len(bare.tp), np.inf), degree_keys(bare)
    order = np.argsort(keys)
    for batch in batches:
        rows = order[np.searchsorted(keys[order], degree_keys(batch.case))]
        np.minimum.at(least, rows, value(batch))
    return least


def degree_keys(case: Case) -> Any:
    """Return one integer per row that identifies tp, pp, cp and ep."""
    tp, pp, cp, ep = (np.asarray(column, dtype=np.int64) for column in (case.tp, case.pp, case.cp, case.ep))
    return ((tp << 16 | pp) << 16 | cp) << 16 | ep


def best(case: Case, pinned: Mapping[str, Any], ignoring: Container[str] = (), quick: bool = False) -> Candidate | None:
    """Return the fastest layout that fits, preferably with headroom; the smallest one if none fits.

    A quick search tries few options: enough to see whether another batch size would be faster.
    """
    if quick:
        return choose(list(score(case, pinned, QUICK_SPACE, ignoring)), case)
    return choose(scored_layouts(case, pinned, ignoring), case)


def choose(batches: list[ScoredBatch], case: Case) -> Candidate | None:
    """Return the fastest layout that fits, preferably with headroom; the smallest one if none fits.

    One that may not fit is passed over for one that fits if that costs little.
    """
    if not batches:
        return None
    allowed = preferred(batches)
    if not any(mask.any() for mask in allowed):
        return min((b.row(int(np.argmin(b.total_gib))) for b in batches), key=lambda c: c.total_gib)
    found = _fastest(batches, allowed, case)
    sure = surer(batches, allowed)
    return found if sure is None else msgspec.structs.replace(_fastest(batches, sure, case), faster=found)


def preferred(batches: list[ScoredBatch]) -> list[Any]:
    """Return where layouts fit with headroom; where they fit, if none has it."""
    masks = [b.has_headroom for b in batches]
    return masks if any(mask.any() for mask in masks) else [b.fits for b in batches]


def surer(batches: list[ScoredBatch], allowed: list[Any]) -> list[Any] | None:
    """Return where layouts fit for sure, or probably, and cost little, if the fastest allowed one may not fit."""
    pairs = list(zip(batches, allowed, strict=True))
    step_s, chance = min(
        (float(b.step_s[i]), -float(b.chance[i]))
        for b, mask in pairs
        if mask.any()
        for i in [np.flatnonzero(mask)[np.argmin(b.step_s[mask])]]
    )
    if -chance >= MAY_NOT_FIT:
        return None
    for least in (SURELY_FITS, MAY_NOT_FIT):
        masks = [mask & (b.chance >= least) & (b.step_s <= COSTS_LITTLE * step_s) for b, mask in pairs]
        if any(mask.any() for mask in masks):
            return masks
    return None


def _fastest(batches: list[ScoredBatch], allowed: list[Any], case: Case) -> Candidate:
    """Return the allowed layout closest to the recipe among those within SAME_SPEED of the fastest."""
    limit = SAME_SPEED * min(float(b.step_s[m].min()) for b, m in zip(batches, allowed, strict=True) if m.any())
    finalists = [
        b.row(int(i)) for b, m in zip(batches, allowed, strict=True) for i in np.flatnonzero(m & (b.step_s <= limit))
    ]
    least = [c for c in finalists if not any(_dominates(other, c) for other in finalists)]
    return min(least, key=lambda c: (distance(c.layout, case), c.step_s))


def _dominates(one: Candidate, other: Candidate) -> bool:
    """Return whether a layout is faster and needs no more memory."""
    return one.step_s < other.step_s and one.total_gib <= other.total_gib


def distance(layout: dict[str, Any], case: Case) -> float:
    """Return the distance to the recipe's layout: |log2| of the ratio per degree, 1 for each other choice."""
    total = 0.0
    for name in ("tp", "pp", "vp", "cp", "ep", "etp", "micro_batch_size", "dp_replicate"):
        total += abs(float(np.log2(layout[name] / getattr(case, name))))
    choices = ("strategy", "reshard_after_forward", "recompute", "pp_schedule", "offload", *LEVER_NAMES)
    changed = [name for name in choices if layout[name] != getattr(case, name)]
    return total + float(len(changed))


def changed_values(layout: Mapping[str, Any], case: Case, names: Iterable[str] = SEARCHED_NAMES) -> dict[str, Any]:
    """Return the values of a layout, by flat name, that differ from a case's."""
    return {name: layout[name] for name in names if layout[name] != getattr(case, name)}


def as_overrides(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return values by flat name as overrides, e.g. layout.tp=2."""
    keys = keys_by_flat_name()
    return tuple(format_override(keys[name], value) for name, value in values.items())
