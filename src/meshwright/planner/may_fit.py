"""Which GPU counts may hold a training: the leanest layouts of all counts in one batch, before any is searched."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from meshwright import costs, rules
from meshwright.clusters import Cluster
from meshwright.costs.state import least_state_gib, master_bytes, moment_bytes, reduction_saves_memory
from meshwright.planner.baseline import is_adaptable
from meshwright.planner.levers import with_offload, without_offload
from meshwright.planner.search import LEVER_NAMES, has_headroom, reduces_otherwise
from meshwright.planner.space import (
    BATCH_RULES,
    DEGREES,
    FULL_SPACE,
    KEEPS_OUTPUTS,
    PASS_ROUNDS,
    SIMPLEST_OPTIONS,
    SPLIT_PINS,
    axes_of,
    strategies_of,
    with_pins,
)
from meshwright.recipes.case import Case
from meshwright.recipes.stage_layers import BALANCED
from meshwright.rules import Rule

SLACK = 1.05  # of the memory: what other options of the search may save
OWN_SLACK = 1.01  # the same on a row's own count, where only schedules and selective recompute differ
LEVERS = ("offload", *LEVER_NAMES)
COMPRESS_BELOW = 0.7  # of the rows that are legal so far


class MayFit(NamedTuple):
    """GPU counts of which some layout may fit: without host memory, and with or without it."""

    without_offload: frozenset[int]
    with_offload: frozenset[int]


def may_fit(
    case: Case, pinned: Mapping[str, Any], clusters: Sequence[Cluster], adapts: bool, offloads: bool = True
) -> MayFit:
    """Return the counts that may hold a training with this contract; the others hold it in no layout.

    `adapts` says that settings outside the search differ by count: rules that such settings resolve are left out.
    Without `offloads`, host memory is not tried.

    More data parallelism shards the state further and never needs more of anything else. So every choice of the other
    degrees is estimated once, with the most data parallelism, and only the least state depends on the count. What may
    fit by that is estimated on its own count.
    """
    plain: list[Mapping[str, Any]] = [{}]
    if case.offload != "none" and "offload" not in pinned:
        plain.append({"offload": "none"})
    levers = without_offload(case, pinned)[-1:]
    tried = with_offload(case, pinned) if offloads else []
    kinds = {one["offload"]: one for one in tried}  # the last of a kind is the leanest
    without: set[int] = set()
    with_: set[int] = set()
    checked = _checked_rules(case, adapts)
    for rows in _legal_rows(case, pinned, clusters, checked):
        own = rows.strategy == case.strategy  # levers are tried with the recipe's strategy only
        leanest = Leanest(rows, pinned, checked)
        reduced = {"defer_grad_sync": False} if reduces_otherwise(rows, pinned) and case.defer_grad_sync else {}
        kept = [] if reduced and reduction_saves_memory(case) else plain
        without |= leanest.counts([*kept, *({**one, **reduced} for one in plain if reduced)], without)
        if own:
            without |= leanest.counts(levers, without, levers=True)
            with_ |= leanest.counts([{**reduced, **one} for one in kinds.values()], without | with_, levers=True)
    return MayFit(frozenset(without), frozenset(without | with_))


class Leanest:
    """The leanest layouts of some rows, estimated with the most data parallelism."""

    def __init__(self, rows: Case, pinned: Mapping[str, Any], checked: Sequence[Rule]) -> None:
        self.rows, self.checked, self.sizes = rows, checked, with_pins(FULL_SPACE, rows, pinned).micro_batches
        self.most, self.place = _with_most_data_parallelism(rows)
        self.options = list(_leanest(self.most, pinned, checked))
        self.state = _least_updated_gib(rows) * rows.cluster.world / rows.world

    def counts(self, changes: Sequence[Mapping[str, Any]], known: Collection[int], levers: bool = False) -> set[int]:
        """Return the counts, besides those known, of which a row may fit with one of the changes.

        Layouts with levers are searched in a smaller space.
        """
        rows, found = self.rows, set[int]()
        left = ~np.isin(rows.world, list(known))  # rows of counts that are not known to fit
        for change in changes:
            for where, lean, splits_experts in self.options:
                if levers and splits_experts:
                    continue
                for batch in _with_change(lean, {"offload": rows.recipe.layout.offload, **change}):
                    new = self._counts(batch, where, left, levers)
                    left &= ~np.isin(rows.world, list(new))
                    found |= new
        return found

    def _counts(self, batch: Case, where: Any, left: Any, levers: bool) -> set[int]:
        """Return the counts of which one of the rows left may fit with the options of a batch."""
        rows = self.rows
        tried = where[self.place] & left
        if batch.offload == "none":
            tried &= self.state <= _usable_gib(batch)  # most rows of counts that are too small
        if not tried.any():
            return set()
        part = np.flatnonzero(tried)
        used, at = np.unique((np.cumsum(where) - 1)[self.place[part]], return_inverse=True)
        batch = batch.rows(used)
        may = _may_hold(batch, at, self.state[part])
        fits, at = part[may], at[may]
        own = _like(rows.rows(fits), batch, at)
        legal = _is_legal(own, self.checked)
        return self._held(own.rows(legal), levers) if legal.any() else set()

    def _held(self, own: Case, levers: bool) -> set[int]:
        """Return the counts of which a row may fit on its own count: with the smallest micro batch, or a whole one."""
        samples = own.global_batch_size // np.maximum(own.dp, 1)
        whole = np.flatnonzero(np.isin(samples, self.sizes))
        sizes = np.concatenate((np.full(len(own.tp), min(self.sizes)), samples[whole]))
        both = own.rows(np.concatenate((np.arange(len(own.tp)), whole))).replace(micro_batch_size=sizes)
        return set(both.world[_holds(both, levers)].tolist())


def _usable_gib(case: Case) -> float:
    return SLACK * float(case.capacity_gib)


def _may_hold(batch: Case, at: Any, state: Any) -> Any:
    """Return whether each row may fit: what it needs at most data parallelism, and the least state of its count."""
    memory = costs.memory(batch)
    usable = _usable_gib(batch)
    small = (memory.total <= usable) & (memory.host <= SLACK * float(batch.host_gib))
    if not small.any():
        return np.zeros(len(at), dtype=bool)
    rest = memory.total - memory.weights - memory.gradients - memory.optimizer
    return small[at] & (rest[at] + state <= usable) if batch.offload == "none" else small[at]


def _holds(rows: Case, levers: bool) -> Any:
    """Return whether the GPUs and hosts of each row hold what it needs, but for what other options may save.

    Without levers, gradients are reduced otherwise than the recipe says only where that leaves headroom.
    """
    memory, said = costs.memory(rows), rows.recipe.layout.defer_grad_sync
    held = (memory.total <= OWN_SLACK * memory.usable) & (memory.host <= OWN_SLACK * float(rows.host_gib))
    if levers or rows.defer_grad_sync == said:
        return held
    tight = held & ~has_headroom(memory.total / OWN_SLACK, rows)
    if tight.any():
        held[tight] = _holds(rows.rows(tight).replace(defer_grad_sync=said), levers)
    return held


def _like(rows: Case, batch: Case, at: Any) -> Case:
    """Return rows with the options of these places of a batch; each has its own micro batch if that is a whole one."""
    names = ("recompute", "etp", "micro_batch_size")
    options = {n: v[at] if isinstance(v := getattr(batch, n), np.ndarray) else v for n in names}
    if isinstance(batch.micro_batch_size, np.ndarray):
        options["micro_batch_size"] = rows.global_batch_size // np.maximum(rows.dp, 1)
    return rows.replace(**{n: getattr(batch, n) for n in LEVERS}, **options)


def _with_change(lean: Case, change: Mapping[str, Any]) -> list[Case]:
    """Return the rows with a change; activations in host memory need no recompute, whose working memory is larger."""
    batch = lean.replace(**change)
    return [batch, batch.replace(recompute="selective")] if change["offload"] == "activations" else [batch]


def _least_updated_gib(case: Case) -> float:
    """Return GiB per GPU of weights and moments if all GPUs shared them equally; gradients may come and go."""
    share = 1.0 if case.goal == "peft" else 1 - master_bytes(case) / (2 * master_bytes(case) + moment_bytes(case))
    return share * least_state_gib(case)


def _legal_rows(
    case: Case, pinned: Mapping[str, Any], clusters: Sequence[Cluster], checked: Sequence[Rule]
) -> Iterator[Case]:
    """Yield the degrees of all clusters that are legal with the simplest options, for every strategy."""
    columns = _columns(case, pinned, clusters)
    if not len(columns["world"]):
        return
    space = with_pins(FULL_SPACE, case, pinned)
    fixed = {**SIMPLEST_OPTIONS, "stage_layers": BALANCED, **{n: pinned[n] for n in SPLIT_PINS if n in pinned}}
    fixed["offload"] = pinned.get("offload", "none")  # refused nowhere
    for strategy in strategies_of(case, space):
        sp = (columns["tp"] > 1) & (strategy != "megatron_fsdp")
        batch = _where_legal(case.replace(**{**fixed, **columns, "strategy": strategy, "sp": sp}), checked)
        if case.engine in KEEPS_OUTPUTS:
            batch = batch.replace(pp_micro_batches=pinned.get("pp_micro_batches", PASS_ROUNDS[0] * batch.pp))
        if len(batch.tp):
            yield batch


def _columns(case: Case, pinned: Mapping[str, Any], clusters: Sequence[Cluster]) -> dict[str, Any]:
    """Return the degrees of every cluster that have the pinned values and divide the batch, if it must be divided."""
    divided = {r.id for r in rules.applicable(case, ("error",))} >= BATCH_RULES
    smallest = min(with_pins(FULL_SPACE, case, pinned).micro_batches)
    found: list[dict[str, Any]] = []
    for one in clusters:
        degrees = axes_of(one, case, pinned)
        columns = {name: getattr(degrees, name) for name in DEGREES}
        wanted = np.ones(len(degrees.tp), dtype=bool)
        for name in (name for name in DEGREES if name in pinned):
            wanted &= columns[name] == pinned[name]
        if divided:
            wanted &= case.global_batch_size % (smallest * case.replace(world=one.world, **columns).dp) == 0
        facts = {"world": one.world, "nvlink_domain": one.nvlink_domain}
        kept = {name: column[wanted] for name, column in columns.items()}
        found.append({**kept, **{name: np.full(len(kept["tp"]), value) for name, value in facts.items()}})
    return {name: np.concatenate([one[name] for one in found]) for name in found[0]}


def _where_legal(batch: Case, checked: Sequence[Rule]) -> Case:
    """Return the rows that break none of these rules."""
    legal = np.ones(len(batch.tp), dtype=bool)
    for rule in checked:
        legal = legal & np.logical_not(rule.broken(batch))
        if np.count_nonzero(legal) < COMPRESS_BELOW * len(legal):
            batch = batch.rows(legal)
            legal = np.ones(len(batch.tp), dtype=bool)
    return batch.rows(legal)


def _checked_rules(case: Case, adapts: bool) -> list[Rule]:
    """Return the error rules that hold for every count, those first that refuse most degrees."""
    errors = (r for r in rules.applicable(case, ("error",)) if r.subject != "memory")
    found = [r for r in errors if not (adapts and is_adaptable(r))]
    return sorted(found, key=lambda rule: rule.subject not in ("heads", "network"))


def _is_legal(batch: Case, checked: Sequence[Rule]) -> Any:
    """Return where rows break none of these rules."""
    legal = np.ones(len(batch.tp), dtype=bool)
    for rule in checked if len(legal) else ():
        legal = legal & np.logical_not(rule.broken(batch))
    return legal


def _with_most_data_parallelism(rows: Case) -> tuple[Case, Any]:
    """Return one row for all rows of the same other degrees, and its place for each of them.

    A rank that shares nothing gathers no weights, so it stays a row of its own.
    """
    code = ((rows.tp * 4096 + rows.pp) * 65536 + rows.cp) * 65536 + rows.ep
    code = code * 2 + (rows.world == rows.pp)
    order = np.lexsort((-rows.world, code))
    _, first, inverse = np.unique(code[order], return_index=True, return_inverse=True)
    place = np.empty(len(order), dtype=np.int64)
    place[order] = inverse
    return rows.rows(order[first]), place


def _most_recompute(rows: Case, allowed: Sequence[str], checked: Sequence[Rule]) -> Any:
    """Return the most recompute that is legal, for each row."""
    found = np.full(len(rows.tp), allowed[-1], dtype="<U16")  # also where other fields break a rule
    open_ = np.ones(len(rows.tp), dtype=bool)
    for kind in reversed(allowed):
        legal = open_ & _is_legal(rows.replace(recompute=kind), checked)
        found[legal] = kind
        open_ &= ~legal
        if not open_.any():
            break
    return found


def _leanest(rows: Case, pinned: Mapping[str, Any], checked: Sequence[Rule]) -> Iterator[tuple[Any, Case, bool]]:
    """Yield rows with the options that need least memory: one sample or one micro batch, as much recomputed as may.

    The last value says whether tp splits the experts too (etp).
    """
    space = with_pins(FULL_SPACE, rows, pinned)
    lean = rows.replace(**{n: v for n, v in pinned.items() if n not in DEGREES})
    lean = lean.replace(recompute=_most_recompute(lean, space.recompute, checked))
    smallest, samples = min(space.micro_batches), rows.global_batch_size // np.maximum(rows.dp, 1)
    everywhere = np.ones(len(rows.tp), dtype=bool)
    whole = np.isin(samples, space.micro_batches) & (samples != smallest)
    split = (rows.tp > 1) & bool(rows.is_moe) & (0 in space.etps)
    simple = 1 if 0 in space.etps else space.etps[0]
    both = whole & split
    for where, size, etp in (
        (everywhere, smallest, simple),
        (whole, samples, simple),
        (split, smallest, 0),
        (both, samples, 0),
    ):
        if where.any():
            part = lean if where.all() else lean.rows(where)
            sizes = size[where] if isinstance(size, np.ndarray) else size
            yield where, part.replace(micro_batch_size=sizes, etp=part.tp if etp == 0 else etp), etp == 0
