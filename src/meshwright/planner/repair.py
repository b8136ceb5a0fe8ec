"""One repair per answer: a small and fast joint change that removes every error; the overrides that contradict."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from math import log2
from typing import Any

import numpy as np

from meshwright import costs, rules
from meshwright.planner.explain import with_value
from meshwright.planner.missing_fixes import has_no_layout_fix, layout_fix
from meshwright.planner.plan import Contradiction, Repair
from meshwright.planner.search import SEARCHED_NAMES, ScoredBatch, as_overrides, choose, scored_layouts
from meshwright.recipes.case import Case
from meshwright.recipes.types import keys_by_flat_name, recipe_fields
from meshwright.rules import Finding
from meshwright.rules.many_changes import breaks_any, in_columns
from meshwright.rules.search_values import divisors, nearest_split

Change = dict[str, Any]  # values by flat name
COUNTED = ("strategy", "tp", "pp", "vp", "cp", "ep", "etp", "dp_replicate", "micro_batch_size", "recompute", "offload")
"""Fields that count as changes of a layout; the others follow from them."""
NEW_AXES = ("pp", "cp", "ep")
"""Degrees that count twice from 1 to more: a pipeline or a split sequence is another program than a smaller batch."""
SINGLE = ("tp", "pp", "cp", "ep", "micro_batch_size", "recompute")
TYPED_WEIGHT = 100  # a field that the user set counts more than all others together
SMALL = 3  # fields that a small change of the layout has at most
NEARLY_AS_FAST = 1.1  # of the step time of the fastest small repair: fewer changes are preferred up to it
NEAR_BATCH = 0.1  # of a file's batch: another one up to here is rather a slip than another plan
MUCH_SLOWER = 1.3  # of the step time of the fastest layout: a repair says so


def find_repair(case: Case, typed: Collection[str] = ()) -> Change:
    """Return the smallest change that leaves no error and is about as fast as any small one; empty if there is none.

    `typed` are fields the user set, by flat name: they change last. Contract fields change only if no layout works.
    """
    if not has_errors(case):
        return {}
    joint = rules.joint_change(case, typed)
    outside = {name: value for name, value in joint.items() if name not in SEARCHED_NAMES}
    batches = case.cached(_searched)
    tried = [joint, *_single_changes(case), *_near_layouts(case, {}, batches, typed)]
    same_training = {name: value for name, value in outside.items() if not _contract([name])}
    for fixes in [same_training, outside] if same_training != outside else [outside]:
        tried += _near_layouts(case, fixes, scored_layouts(case.replace(**fixes), {}), typed) if fixes else ()
    works = _without_errors(case, [change for change in tried if change])
    if not works:  # levers that save memory
        lean = layout_fix(case, frozenset(), batches) or {}
        works = [lean] if lean and not has_errors(case.replace(**lean)) else []
    if not works:
        return _leaner_repair(case, typed)
    works, fastest = _fast_enough(case, works, typed)
    return _with_warnings(case, _minimal(case, _cheapest(case, works, typed), NEARLY_AS_FAST * fastest), typed)


def _leaner_repair(case: Case, typed: Collection[str]) -> Change:
    """Return a repair that also changes settings outside the layout that warnings are about, if that saves memory."""
    fixes: Change = {}
    for rule in rules.applicable(case, ("warning",)):
        fix = rules.one_fix(rule, case, typed=typed) if bool(rule.broken(case)) else {}
        is_outside = bool(fix) and not fix.keys() & {*SEARCHED_NAMES, *fixes} and not _contract(fix)
        if is_outside and not rules.undone(fix, typed) and _total_memory(case.replace(**fix)) < _total_memory(case):
            fixes |= fix
    leaner = case.replace(**fixes)
    if not fixes:
        return {}
    rest = find_repair(leaner, typed)
    return {**fixes, **rest} if rest or not has_errors(leaner) else {}


def _total_memory(case: Case) -> float:
    return float(costs.estimate(case).memory.total)


def find_repair_of_file(case: Case, follows_ranks: bool = False) -> Change:
    """Return the repair of a file, whose author chose layout and batch together.

    If its ranks cannot split the batch, a smaller micro batch or a batch next to it is taken where that leaves more of
    the layout as it is: 128 sequences instead of 130, rather than other parallelism for 130. If the parallelism has to
    change in any case, the batch stays, unless only much slower layouts can split it. A batch that the file does not
    name follows the data-parallel ranks (`follows_ranks`): it is kept only if there is a number of them.
    """
    change = find_repair(case)
    if change and follows_ranks and (one := _repair_of_ranks(case)):
        return one
    if not change or int(case.global_batch_size) % max(int(case.dp * case.micro_batch_size), 1) == 0:
        return change
    found = [change]
    for first in _near_batches(case):
        corrected = case.replace(**first)
        rest = find_repair(corrected)
        other = {**first, **rest}
        if (rest or not has_errors(corrected)) and (_keeps_ranks(rest) or _is_much_slower(case, change, other)):
            found.append(other)
    return min(found, key=lambda one: sum(name in COUNTED for name in one) + _new_axes(case, one))


def _keeps_ranks(change: Change) -> bool:
    """Return whether as many ranks split the batch after a change."""
    return not change.keys() & {"tp", "pp", "cp", "dp_replicate"}


def _is_much_slower(case: Case, change: Change, other: Change) -> bool:
    """Return whether a change takes much more time per token than another one."""
    time, least = _token_times(case, [change, other])
    return time > MUCH_SLOWER * least


def _repair_of_ranks(case: Case) -> Change:
    """Return the repair that changes one degree to the next that divides the GPUs, with the batch of its ranks.

    It is empty if the GPUs are divisible, or no such degree leaves no error.
    """
    per_model, world = int(case.tp * case.pp * case.cp), int(case.world)
    if world % per_model == 0:
        return {}
    near = [
        max(one for one in divisors(world) if one < per_model),
        *(one for one in divisors(world) if one > per_model),
    ]
    changes: list[Change] = []
    for size in near[:2]:
        batch = int(case.global_batch_size) // int(case.dp) * (world // size)
        for name in ("tp", "pp", "cp"):
            degree, rest = divmod(size * int(getattr(case, name)), per_model)
            changes += [{name: degree, "global_batch_size": batch}] if degree and not rest else []
    works = _without_errors(case, changes)
    return works[int(np.argmin(_token_times(case, works)))] if works else {}


def _near_batches(case: Case) -> Iterator[Change]:
    """Yield the nearest batches that the ranks can split, and those that also fill an interleaved schedule's groups."""
    batch, micro, dp = int(case.global_batch_size), int(case.micro_batch_size), max(int(case.dp), 1)
    for units in dict.fromkeys((1, int(case.pp) if int(case.vp) > 1 else 1)):
        near, size = nearest_split(batch, micro, dp * units)
        if abs(near - batch) <= NEAR_BATCH * batch:
            change = {"global_batch_size": near, "micro_batch_size": size}
            yield {name: value for name, value in change.items() if value != getattr(case, name)}


def _searched(case: Case) -> list[ScoredBatch]:
    """Return the layouts of the case, also with its own replicas; none if a search has found that none fits.

    A search of layouts replicates whole shard groups only, and a repair keeps what a file says where it can.
    """
    if has_no_layout_fix(case):
        return []
    own = {"dp_replicate": int(case.dp_replicate)}
    return [*scored_layouts(case, {}), *(scored_layouts(case, own) if own["dp_replicate"] > 1 else ())]


def much_faster_step(case: Case, step_s: float) -> float | None:
    """Return the step time of the fastest layout of a repaired case, if the repair is much slower."""
    found = choose(case.cached(_searched), case)
    return found.step_s if found is not None and found.fits and step_s > MUCH_SLOWER * found.step_s else None


def _fast_enough(case: Case, changes: list[Change], typed: Collection[str]) -> tuple[list[Change], float]:
    """Return the changes that keep most of what must be kept and are nearly as fast as the fastest, and its time.

    Times are per token: a contract change may be another batch.
    """
    kept = [_cost_at_least(case, change, typed)[:KEPT] for change in changes]
    best = [change for change, cost in zip(changes, kept, strict=True) if cost == min(kept)]
    times = _token_times(case, best)
    fastest = min(times)
    return [change for change, one in zip(best, times, strict=True) if one <= NEARLY_AS_FAST * fastest], fastest


def _token_times(case: Case, changes: list[Change]) -> list[float]:
    """Return the time per token of every changed case; all are estimated together."""
    found = [0.0] * len(changes)
    for places, batch in in_columns(case, changes):
        tokens = batch.global_batch_size * batch.seq_length
        times = np.broadcast_to(costs.step_time(batch).step_s / tokens, (len(places),))
        for place, value in zip(places, times.tolist(), strict=True):
            found[place] = value
    return found


def _without_errors(case: Case, changes: list[Change]) -> list[Change]:
    """Return the changes that leave no error; the memory of all changes is estimated together."""
    checked = [r for r in rules.applicable(case, ("error",)) if r.subject != "memory"]
    tried = [(change, case.replace(**change)) for change in changes]
    legal = [change for change, trial in tried if not any(bool(r.broken(trial)) for r in checked)]
    estimated = [r for r in rules.applicable(case, ("error",)) if r.subject == "memory"]
    return [change for change, fails in zip(legal, breaks_any(estimated, case, legal), strict=True) if not fails]


def _cheapest(case: Case, changes: list[Change], typed: Collection[str]) -> Change:
    """Return the change of least cost, the first of equals; those that cannot win are not estimated."""
    least = sorted((_cost_at_least(case, change, typed), place) for place, change in enumerate(changes))
    best: tuple[tuple[float, ...], int] | None = None
    for bound, place in least:
        if best is not None and bound > best[0]:
            break
        cost = _cost(case, changes[place], typed), place
        best = cost if best is None else min(best, cost)
    return changes[best[1] if best is not None else 0]


def _with_warnings(case: Case, change: Change, typed: Collection[str]) -> Change:
    """Return the change with fixes of warnings that it leaves, if they keep the contract and cost no time."""
    for rule in rules.applicable(case, ("warning",)):
        after = case.replace(**change)
        if not (bool(rule.broken(case)) and bool(rule.broken(after))):
            continue
        fix = rules.one_fix(rule, after, typed=typed)
        both = case.replace(**change, **fix) if fix and not fix.keys() & change.keys() else after
        slower = float(costs.step_time(both).step_s) > float(costs.step_time(after).step_s)
        kept = not _contract(fix) and not rules.undone(fix, typed)
        if both is not after and kept and not slower and len(_warnings(both)) < len(_warnings(after)):
            change = {**change, **fix}
    return change


def errors_of(case: Case) -> list[str]:
    """Return the ids of the error rules that a case breaks."""
    return [r.id for r in rules.applicable(case, ("error",)) if bool(r.broken(case))]


def has_errors(case: Case) -> bool:
    """Return whether a case breaks an error rule; estimates come last."""
    return any(bool(r.broken(case)) for r in rules.applicable(case, ("error",)))


def _warnings(case: Case) -> list[str]:
    return [r.id for r in rules.applicable(case, ("warning",)) if bool(r.broken(case))]


def _cost(case: Case, change: Change, typed: Collection[str]) -> tuple[float, ...]:
    """Rank changes: contract fields that the user set, contract fields, other fields that the user set, those of them
    that no error is about, fields and warnings together, their size, step time."""
    changed = case.replace(**change)
    *kept, fields, size, _ = _cost_at_least(case, change, typed)
    return (*kept, fields + len(_warnings(changed)), size, float(costs.step_time(changed).step_s))


def _cost_at_least(case: Case, change: Change, typed: Collection[str]) -> tuple[float, ...]:
    """Return the cost of a change that leaves no warning and takes no time."""
    fields = sum(name in COUNTED or name not in SEARCHED_NAMES for name in change) + _new_axes(case, change)
    own = [name for name in change if name in typed]
    blameless = sum(name not in case.cached(_refused_fields) for name in own)
    return (_contract(own), _contract(change), len(own), blameless, fields, _size(case, change), 0.0)


def _new_axes(case: Case, change: Change) -> int:
    """Return how many axes of parallelism a change adds that the case does not use."""
    return sum(getattr(case, name) == 1 < change.get(name, 1) for name in NEW_AXES)


KEPT = 4  # of these numbers come before the speed


def _refused_fields(case: Case) -> frozenset[str]:
    """Return the fields that the broken error rules are about."""
    return frozenset(r.field for r in rules.applicable(case, ("error",)) if bool(r.broken(case)))


def _size(case: Case, change: Change) -> float:
    """Return how far degrees and batch sizes move, in doublings."""
    numbers = [(getattr(case, name), value) for name, value in change.items() if type(value) is int]
    return sum(abs(log2(new / old)) for old, new in numbers if old > 0 and new > 0)


def _contract(change: Iterable[str]) -> int:
    fields, keys = recipe_fields(), keys_by_flat_name()
    return sum(fields[keys[name]].kind == "contract" for name in change)


def _single_changes(case: Case) -> Iterator[Change]:
    """Yield layouts that differ in one field, with what follows from it."""
    for name in SINGLE:
        for value in _values(case, name):
            changed = with_value(case, name, value)
            yield {n: getattr(changed, n) for n in SEARCHED_NAMES if getattr(changed, n) != getattr(case, n)}


def _values(case: Case, name: str) -> list[Any]:
    if name == "recompute":
        return ["none", "selective", "full"]
    total = {"ep": int(case.experts), "micro_batch_size": max(int(case.global_batch_size) // int(case.dp), 1)}
    found = divisors(max(total.get(name, int(case.world)), 1))
    return [d for d in found if d <= {"tp": case.nvlink_domain, "pp": case.layers}.get(name, d)]


def _near_layouts(case: Case, outside: Change, batches: list[ScoredBatch], typed: Collection[str]) -> Iterator[Change]:
    """Yield the fastest legal layout that fits for every small number of changes, next to changes outside the search.

    If none is small, yield the one that differs least.
    """
    fastest: dict[int, tuple[float, int, int]] = {}  # step time and place, by how much changes
    for place, batch in enumerate(batches):
        if batch.fits.any():
            for weight, row in _fastest_by_weight(case, batch, typed):
                found = float(batch.step_s[row]), place, row
                fastest[weight] = min(fastest.get(weight, found), found)
    least = min(fastest, default=0)
    for weight in sorted(fastest):
        if weight == least or weight <= least - least % TYPED_WEIGHT + SMALL:
            _, place, row = fastest[weight]
            layout = batches[place].row(row).layout
            yield {**outside, **{name: value for name, value in layout.items() if value != getattr(case, name)}}


def _fastest_by_weight(case: Case, batch: ScoredBatch, typed: Collection[str]) -> Iterator[tuple[int, int]]:
    """Yield how much layouts of a batch change, and the row of the fastest of those that change as much."""
    weight = np.zeros(len(batch), dtype=int)
    for name in COUNTED:
        differs = np.broadcast_to(getattr(batch.case, name) != getattr(case, name), weight.shape)
        weight = weight + differs * (TYPED_WEIGHT if name in typed else 1)
        weight = weight + differs * (name in NEW_AXES and getattr(case, name) == 1)
    for one in sorted(set(weight[batch.fits].tolist())):  # np.unique would import numpy.ma
        yield one, int(np.argmin(np.where(batch.fits & (weight == one), batch.step_s, np.inf)))


def _minimal(case: Case, change: Change, slowest: float) -> Change:
    """Return the change without fields that need not change: without them no error, no other warning, fast enough."""
    most = len(_warnings(case.replace(**change)))
    for name in sorted(change, key=lambda one: one in COUNTED):
        rest = {n: value for n, value in change.items() if n != name}
        trial = case.replace(**rest)
        if (
            rest
            and not has_errors(trial)
            and len(_warnings(trial)) <= most
            and _token_times(case, [rest])[0] <= slowest
        ):
            change = rest
    return change


def as_repair(case: Case, change: Change, findings: Sequence[Finding], typed: Collection[str] = ()) -> Repair | None:
    """Return the change as the repair of a case, with what it removes, leaves and costs."""
    if not change:
        return None
    changed = case.replace(**change)
    price = costs.estimate(changed)
    after = {*errors_of(changed), *_warnings(changed)}
    return Repair(
        overrides=as_overrides(change),
        removes=tuple(f.rule for f in findings if f.severity != "advice" and f.rule not in after),
        leaves=tuple(sorted(after)),
        contract=bool(_contract(change)),
        step_s=float(price.step_s),
        total_gib=float(price.memory.total),
        undoes=rules.undone(change, typed),
    )


def error_messages(case: Case) -> list[str]:
    """Return the messages of the error rules that a case breaks."""
    return [rules.message(r, case) for r in rules.applicable(case, ("error",)) if bool(r.broken(case))]


def contradiction(overrides: Sequence[str], errors: Callable[[Sequence[str]], list[str]]) -> Contradiction | None:
    """Return the smallest set of overrides that cannot be combined; None if one of them, or none, is at fault.

    `errors` returns the messages that hold for some of the overrides, empty if they can be combined.
    """
    if len(overrides) < 2 or errors(()) or not errors(overrides):
        return None
    kept = list(overrides)
    for one in overrides:
        rest = [text for text in kept if text != one]
        if errors(rest):
            kept = rest
    if len(kept) < 2:
        return None
    return Contradiction(overrides=tuple(kept), reason=errors(kept)[0], fix=tuple(f"remove {one}" for one in kept))
