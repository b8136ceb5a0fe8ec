"""Rank all legal layouts: the fastest that fit, the Pareto front, and what was dropped and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from meshwright import costs, rules
from meshwright.display import Readable, Row, titled
from meshwright.planner.baseline import Baseline, baseline_for
from meshwright.planner.faster_step import FAST_FIELDS, fast_values
from meshwright.planner.levers import better_than, faster_on_the_gpus, faster_with_offload, lever_batches
from meshwright.planner.plan import Plan, Question
from meshwright.planner.recommend import plan_with, planned, recommend
from meshwright.planner.search import (
    HEADROOM_LIMIT,
    MAY_NOT_FIT,
    SEARCHED_NAMES,
    Candidate,
    ScoredBatch,
    choose,
    has_headroom,
    own_layout,
    preferred,
    score,
    surer,
    with_value,
)
from meshwright.planner.space import FULL_SPACE, candidates, degrees, with_pins
from meshwright.recipes.case import Case
from meshwright.recipes.types import Recipe
from meshwright.rules import Finding

CANDIDATES_PER_PLAN = 12  # candidates per plan: several options may result in the same layout
MAX_LISTED = 3_000  # of the layouts that fit
SHOWN_NAMES = ("strategy", "tp", "pp", "vp", "cp", "ep", "etp", "micro_batch_size", "recompute")


class Dropped(msgspec.Struct, frozen=True):
    """Layouts dropped for one reason."""

    reason: str
    count: int
    example: str


class Ranking(Readable, msgspec.Struct, frozen=True):
    """The best plans, the Pareto front of memory and speed, and the dropped layouts."""

    plans: tuple[Plan, ...]
    pareto: tuple[Candidate, ...]
    dropped: tuple[Dropped, ...]
    searched: int
    blocked: Plan | None = None  # if the user's values allow no layout: their findings and repair
    fitting: tuple[Candidate, ...] = ()  # every layout that fits, fastest first, if requested
    rejected: tuple[Finding, ...] = ()  # errors of another framework's file that its plans leave

    def summary(self) -> Sequence[Row]:
        """Return a line per plan, and what was dropped."""
        lines = [
            f"{float(p.estimate.step_s):.2f} s, {float(p.estimate.memory.total):.0f} GiB, {describe_case(p.case)}"
            for p in self.plans
        ]
        dropped = [f"{one.count:,} × {one.reason}" for one in self.dropped]
        found = [f"{one.severity}: {one.message}" for one in self.rejected]
        searched = ("Searched", f"{self.searched:,} legal layouts")
        plans, others = titled("Plans", lines or ["none"]), titled("Dropped", dropped or ["nothing"])
        return [*plans, *titled("Findings", found), *others, searched]


def rank_layouts(
    question: Question,
    overrides: Sequence[str] = (),
    top: int = 5,
    everything: bool = False,
    recipe: Recipe | None = None,
) -> Ranking:
    """Return the fastest plans of all legal layouts, of the question or a recipe with that contract.

    Overrides stay fixed; `everything` lists all layouts that fit.
    """
    baseline = baseline_for(question, overrides, recipe)
    batches = list(score(baseline.case, baseline.pinned, FULL_SPACE))
    batches += _with_levers(baseline, batches)
    first = planned(baseline, overrides) if batches else None
    ranked = [*batches, *own_layout(baseline.case)]  # the recipe's own may have values that no space has
    final = ranked if first is None else _with_loss_of(first, baseline, ranked)
    plans = () if first is None else _plans(baseline, first, final, top)
    blocked = None if batches else recommend(question, overrides, recipe)  # it refuses what no layout can have
    return Ranking(
        plans=plans,
        pareto=_frontier(baseline, plans, final),
        dropped=(
            *_pinned_errors(blocked),
            *_rejected_by_rules(baseline.case, baseline.pinned),
            *_too_large(batches),
            *_too_tight(batches),
        ),
        searched=sum(len(b) for b in batches),
        blocked=blocked,
        fitting=_fitting(final) if everything else (),
    )


def _plans(baseline: Baseline, first: Plan, batches: list[ScoredBatch], top: int) -> tuple[Plan, ...]:
    """Return the plan that `recommend` gives, then the fastest others."""
    plans = [first]
    for candidate in _fastest(batches, CANDIDATES_PER_PLAN * top):
        if len(plans) == top:
            break
        # What the engine runs instead, or the fastest kernels, may make two of them equal.
        one = plan_with(baseline, {**candidate.layout, **baseline.pinned})
        if one.estimate.fits and all(one.recipe != other.recipe for other in plans):
            plans.append(one)
    return tuple(plans)


def _with_levers(baseline: Baseline, batches: list[ScoredBatch]) -> list[ScoredBatch]:
    """Return layouts with levers if the others leave no headroom, do not fit or are slower, as `recommend` does."""
    case, pinned = baseline.case, baseline.pinned
    found, levers = choose(batches, case), list[ScoredBatch]()
    if found is None or not found.has_headroom:
        levers = lever_batches(case, pinned)
    elif found.chance >= MAY_NOT_FIT:
        levers = faster_on_the_gpus(case, pinned, found)
    if found is not None and found.fits and levers:
        levers = [b.rows(b.has_headroom) for b in levers if b.has_headroom.any()] or better_than(found, levers)
    plain = choose([*batches, *levers], case)
    if plain is None or plain.layout["offload"] != "none":
        return levers
    return [*levers, *faster_with_offload(case, pinned, plain)]


def _fitting(batches: list[ScoredBatch]) -> tuple[Candidate, ...]:
    """Return the distinct layouts that fit, fastest first; at most MAX_LISTED, sampled evenly."""
    found = sorted((float(b.step_s[i]), n, int(i)) for n, b in enumerate(batches) for i in np.flatnonzero(b.fits))
    stride = max(-(-len(found) // MAX_LISTED), 1)
    rows = [batches[n].row(i) for _, n, i in found[::stride]]
    return tuple({tuple(row.layout.values()): row for row in reversed(rows)}.values())[::-1]


def _fastest(batches: list[ScoredBatch], top: int) -> list[Candidate]:
    """Return the fastest distinct layouts that fit with headroom, else that fit, else the smallest one.

    Where `recommend` passes over the fastest because it may not fit, neither is it listed here.
    """
    if not batches:
        return []
    allowed = preferred(batches)
    if not any(mask.any() for mask in allowed):
        return [min((b.row(int(np.argmin(b.total_gib))) for b in batches), key=lambda c: c.total_gib)]
    allowed = surer(batches, allowed) or allowed
    steps = np.concatenate([np.where(mask, b.step_s, np.inf) for b, mask in zip(batches, allowed, strict=True)])
    ends = np.cumsum([len(b) for b in batches])
    distinct: dict[tuple[Any, ...], Candidate] = {}
    for place in np.argsort(steps, kind="stable")[: sum(int(mask.sum()) for mask in allowed)]:
        batch = int(np.searchsorted(ends, place, "right"))
        one = batches[batch].row(int(place - ends[batch]) + len(batches[batch]))
        distinct.setdefault(tuple(one.layout.values()), one)
        if len(distinct) == top:
            break
    return list(distinct.values())


def _with_loss_of(plan: Plan, baseline: Baseline, batches: list[ScoredBatch]) -> list[ScoredBatch]:
    """Return the layouts with a plan's loss, which is chosen after the search, where it is better."""
    if not baseline.fast:
        return batches
    return [one for batch in batches for one in with_value(batch, "loss", plan.case.loss)]


def _frontier(baseline: Baseline, plans: Sequence[Plan], batches: list[ScoredBatch]) -> tuple[Candidate, ...]:
    """Return the layouts that no other beats in both memory and speed, each as its plan would be, fastest first.

    What makes a step faster is chosen after the search, for the plans and for these alike.
    """
    cases = [plan.case for plan in plans if plan.estimate.fits]
    for one in pareto(batches):
        case = baseline.case.replace(**one.layout)
        cases.append(case.replace(**fast_values(baseline, case)))
    return _undominated([_as_candidate(baseline, case) for case in cases])


def _as_candidate(baseline: Baseline, case: Case) -> Candidate:
    """Return a case as a candidate whose layout has every value that was chosen, those of its kernels too."""
    kernels = [name for name in FAST_FIELDS if getattr(case, name) != getattr(baseline.case, name)]
    layout = {name: getattr(case, name) for name in dict.fromkeys((*SEARCHED_NAMES, *kernels))}
    memory = costs.memory(case)
    total = float(memory.total)
    return Candidate(
        layout, float(costs.step_time(case).step_s), total, bool(memory.fits), bool(has_headroom(total, case))
    )


def pareto(batches: list[ScoredBatch]) -> tuple[Candidate, ...]:
    """Return the layouts that no other beats in both memory and speed, fastest first."""
    found: list[Candidate] = []
    for b in batches:
        order = np.lexsort((b.total_gib, b.step_s))
        least = np.minimum.accumulate(b.total_gib[order])
        fronts = np.flatnonzero(b.total_gib[order] < np.concatenate(([np.inf], least[:-1])))
        found += [b.row(int(order[i])) for i in fronts if b.fits[order[i]]]
    return _undominated(found)


def _undominated(found: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Return the candidates that no other beats in both memory and speed, fastest first."""
    kept: list[Candidate] = []
    for candidate in sorted(found, key=lambda c: (c.step_s, c.total_gib)):
        if not kept or candidate.total_gib < kept[-1].total_gib:
            kept.append(candidate)
    return tuple(kept)


def _pinned_errors(blocked: Plan | None) -> Iterator[Dropped]:
    """Yield the errors of the user's pinned values if no layout can satisfy them."""
    if blocked is None:
        return
    for one in blocked.findings:
        if one.severity == "error" and not one.rule.startswith("memory."):
            yield Dropped(f"{one.rule}: {one.message}", 1, describe_case(blocked.case))


def _rejected_by_rules(case: Case, pinned: Mapping[str, Any]) -> Iterator[Dropped]:
    """Yield, for every rule that rejects layouts, their number and one example."""
    counts: Counter[str] = Counter()
    examples: dict[str, Case] = {}
    space = with_pins(FULL_SPACE, case, pinned)
    for batch in (*degrees(case, space, pinned), *candidates(case, space, pinned)):
        for id, mask in rules.illegal_by_rule(batch).items():
            where = np.flatnonzero(np.broadcast_to(mask, batch.tp.shape))
            if not len(where):  # a rule that holds for every layout, of a batch without any
                continue
            counts[id] += len(where)
            examples.setdefault(id, batch.rows(int(where[0])))
    for id, count in counts.most_common():
        yield Dropped(f"{id}: {rules.message(rules.RULES[id], examples[id])}", count, describe_case(examples[id]))


def _too_large(batches: list[ScoredBatch]) -> Iterator[Dropped]:
    count = sum(int((~b.fits).sum()) for b in batches)
    if count:
        worst = next(b for b in batches if (~b.fits).any())
        row = int(np.flatnonzero(~worst.fits)[0])
        need, have = worst.total_gib[row], worst.case.capacity_gib
        yield Dropped(
            "does not fit in memory", count, f"{describe_case(worst.case.rows(row))}: {need:.0f} of {have:.0f} GiB"
        )


def _too_tight(batches: list[ScoredBatch]) -> Iterator[Dropped]:
    """Yield the layouts that fit without headroom for an estimate error, if others have it."""
    tight = [b.fits & ~b.has_headroom for b in batches]
    count = sum(int(mask.sum()) for mask in tight)
    if not count or not any(b.has_headroom.any() for b in batches):
        return
    batch, mask = next((b, mask) for b, mask in zip(batches, tight, strict=True) if mask.any())
    row = int(np.flatnonzero(mask)[np.argmin(batch.step_s[mask])])
    need, have = batch.total_gib[row], batch.case.capacity_gib
    example = f"{describe_case(batch.case.rows(row))}: {need:.0f} of {have:.0f} GiB, {batch.step_s[row]:.2f} s"
    yield Dropped(f"fits, but leaves less than {1 - HEADROOM_LIMIT:.0%} of the memory free", count, example)


def describe_case(case: Case) -> str:
    """Describe the layout of a case in one line."""
    values: list[tuple[str, Any]] = [(name, getattr(case, name)) for name in SHOWN_NAMES]
    return " ".join(f"{name}={value}" for name, value in values if value != 1)
