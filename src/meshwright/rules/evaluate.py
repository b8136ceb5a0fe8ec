"""Apply all rules to a case: findings with fixes for one case, a mask for a batch of cases.

`check` collects the broken rules, `try_fixes` tries the fixes of one rule until a change resolves its finding.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from functools import cache
from itertools import count, islice, product
from string import Formatter
from typing import Any

import numpy as np

from meshwright.recipes.case import Case, Column
from meshwright.recipes.format_override import format_override
from meshwright.recipes.types import keys_by_flat_name
from meshwright.rules.many_changes import breaks_any
from meshwright.rules.rule import SEVERITIES, Finding, Rule, Severity, all_rules
from meshwright.rules.search_values import divisors

_ONE_GPU = re.compile(r"(?<![\d.,])1 GPUs( are)?\b")
UNCERTAIN = "memory.uncertain"  # a fix of a tight memory should not leave its advice
MAX_FIRST_CHANGES = 6  # first changes to which a second one is added
TRIED_ALONE = 4  # changes that need an estimate and are tried one by one; the others are estimated together
Change = dict[str, Any]  # values by flat name
_Resolved = tuple[dict[str, Change], Change, list[Rule]]  # the change of each error, all changes, the errors left
Search = Callable[[Case, frozenset[str]], Change | None]
"""Returns the change to a layout that is legal, except for some rules, and fits; None if there is none."""
UNRELATED_TO_LAYOUT = (
    "peft",
    "data",
    "diffusion",
    "vision",
    "optimizer",
    "learning_rate",
    "engine",
    "prediction",
    "unused",
)
"""Subjects of rules that may stay broken in every layout."""


class _MessageFormatter(Formatter):
    """Replaces {name} in a message with the rule's value or the case's value of that name."""

    def get_value(self, key: Any, args: Any, kwargs: Any) -> Any:
        rule, case = args
        return rule.values[key](case) if key in rule.values else getattr(case, str(key))


def message(rule: Rule, case: Case) -> str:
    """Return the rule's message for this case."""
    text = _MessageFormatter().format(rule.message, rule, case)
    return _ONE_GPU.sub(lambda found: "1 GPU is" if found[1] else "1 GPU", text)


@cache
def _rules_for(engine: str, severities: tuple[Severity, ...]) -> tuple[Rule, ...]:
    matching = (r for r in all_rules().values() if engine in r.engines and r.severity in severities)
    return tuple(sorted(matching, key=lambda r: r.subject == "memory"))  # estimates cost more than arithmetic


def applicable(case: Case, severities: Iterable[Severity] = SEVERITIES) -> tuple[Rule, ...]:
    """Return the rules of the case's engine."""
    return _rules_for(case.engine, tuple(severities))


@cache
def _error_rules(engine: str) -> tuple[Rule, ...]:
    """Return the error rules that need no estimate; the planner filters by memory itself."""
    return tuple(r for r in _rules_for(engine, ("error",)) if r.subject != "memory")


def legal(case: Case, ignoring: Container[str] = ()) -> Column:
    """Return where no error rule is broken, except memory and ignored rules; the case may hold columns."""
    ok: Column = np.True_
    for r in _error_rules(case.engine):
        broken = r.broken(case) if r.id not in ignoring else False
        if isinstance(broken, np.ndarray) or broken:  # most rules say once for all candidates that they hold
            ok = ok & np.logical_not(broken)
    return ok


def illegal_by_rule(case: Case) -> dict[str, Column]:
    """Return the mask of broken candidates for every error rule that some candidate breaks, except memory."""
    masks = {r.id: np.asarray(r.broken(case), dtype=bool) for r in _error_rules(case.engine)}
    return {id: mask for id, mask in masks.items() if mask.any()}


def check(
    case: Case,
    severities: Iterable[Severity] = SEVERITIES,
    others: Sequence[Case] = (),
    search: Search | None = None,
    fixes: bool = True,
    typed: Collection[str] = (),
) -> list[Finding]:
    """Return the findings of one case, errors first, each with overrides that resolve it.

    `others` are alternatives for a case that is not fully known: a finding must then hold in all of them. `search`
    looks for a layout if the rules' own fixes leave errors. Without `fixes`, none are tried, which is faster. `typed`
    are the fields the user set, by flat name: a fix changes them only if no other works.
    """
    found = sorted((r for r in applicable(case) if bool(r.broken(case))), key=lambda r: SEVERITIES.index(r.severity))
    broken = frozenset(r.id for r in found)
    wanted = tuple(severities)
    reported = [r for r in found if r.severity in wanted and all(bool(r.broken(other)) for other in others)]
    if not fixes:
        return [_finding_of(r, case, ()) for r in reported]
    kept = frozenset(typed)
    together = _fixes_together(case, [r for r in found if r.severity == "error"], search, kept)
    changes = [together.get(r.id) if r.severity == "error" else one_fix(r, case, broken, kept) for r in reported]
    followed = _that_agree(case, list(zip(reported, changes, strict=True)), kept)
    findings = [_finding_of(r, case, _overrides(change), undone(change or (), kept)) for r, change in followed]
    return [f for f in findings if f.severity != "advice" or f.fix]  # advice needs a fix that works


_Fixed = tuple[Rule, Change | None]


def _that_agree(case: Case, fixed: Sequence[_Fixed], typed: frozenset[str]) -> list[_Fixed]:
    """Return the rules with fixes that can all be followed: of two that undo each other, one resolves both findings.

    If neither does without a change of the user's settings, the advice loses its fix. Errors have one change together.
    """
    agreed: list[_Fixed] = []
    for rule, change in fixed:
        rivals = [
            place for place, (other, theirs) in enumerate(agreed) if _undo_another(case, other, theirs, rule, change)
        ]
        if rivals and change:
            alone = case.replace(**change)
            resolves = not typed & change.keys() and not any(bool(agreed[one][0].broken(alone)) for one in rivals)
            for place in rivals if resolves else ():
                agreed[place] = agreed[place][0], change
            if not resolves and rule.severity == "advice":
                change = None
        agreed.append((rule, change))
    return agreed


def _undo_another(case: Case, first: Rule, before: Change | None, second: Rule, after: Change | None) -> bool:
    """Return whether a finding comes back if the fixes of two are both made."""
    if not before or not after or before == after or "error" in (first.severity, second.severity):
        return False
    both = case.replace(**{**before, **after})
    return bool(first.broken(both)) or bool(second.broken(both))


def _finding_of(rule: Rule, case: Case, fix: tuple[str, ...], undoes: tuple[str, ...] = ()) -> Finding:
    field = keys_by_flat_name().get(rule.field, rule.field)
    return Finding(rule.id, rule.severity, field, message(rule, case), fix, undoes=undoes)


def undone(change: Iterable[str], typed: Container[str]) -> tuple[str, ...]:
    """Return the keys of the user's own settings that a change, by flat name, replaces."""
    return tuple(keys_by_flat_name()[name] for name in change if name in typed)


def _fixes_together(
    case: Case, broken: Sequence[Rule], search: Search | None, typed: frozenset[str]
) -> dict[str, Change]:
    """Return the change for every error that has one; all changes can be made at once and break no other error rule."""
    resolved, total = _fixed_in_turn(case, broken, search, typed)
    intact = [r for r in applicable(case, ("error",)) if r not in broken]
    by_id = {r.id: r for r in broken}
    return {id: _smallest_part(by_id[id], case, intact, total, step) for id, step in resolved.items()}


def joint_change(case: Case, typed: Collection[str] = ()) -> Change:
    """Return one change from the rules' own fixes for as many errors of a case as possible."""
    return _changed_values(case, _fixed_by_rules(case, frozenset(typed))[1])


def _fixed_in_turn(
    case: Case, broken: Sequence[Rule], search: Search | None, typed: frozenset[str]
) -> tuple[dict[str, Change], Change]:
    """Return the change that resolved each error, and all of them together.

    The errors are fixed one after the other, each on the case that the changes before it lead to. So no two changes
    set one field to different values, and the last case breaks only errors that no change resolves.
    """
    resolved, total, left = _fixed_by_rules(case, typed)
    if search is not None and left:
        resolved, total, left = _fixed_from(case, (resolved, total, left), search, typed)
    ids = {r.id for r in broken}
    return {id: step for id, step in resolved.items() if id in ids}, _changed_values(case, total)


def _changed_values(case: Case, change: Change) -> Change:
    return {name: value for name, value in change.items() if value != getattr(case, name)}


def _fixed_by_rules(case: Case, typed: frozenset[str]) -> _Resolved:
    """Return what the rules' own fixes resolve, all changes, and the errors left; cached, as two callers need it."""
    known = case.cached(_resolved_by_typed)
    if typed not in known:
        broken = [r for r in applicable(case, ("error",)) if bool(r.broken(case))]
        known[typed] = _fixed_from(case, ({}, {}, broken), None, typed)
    return known[typed]


def _resolved_by_typed(case: Case) -> dict[frozenset[str], _Resolved]:
    return {}


def _fixed_from(case: Case, before: _Resolved, search: Search | None, typed: frozenset[str]) -> _Resolved:
    """Resolve the errors left after some changes."""
    errors = applicable(case, ("error",))
    steps, change, open_ = {**before[0]}, {**before[1]}, list(before[2])
    while step := _next_step(case.replace(**change) if change else case, errors, open_, search, typed):
        change |= step
        still = [r for r in open_ if bool(r.broken(case.replace(**change)))]
        steps |= {r.id: step for r in open_ if r not in still}
        open_ = still
    return steps, change, open_


def _next_step(
    case: Case, errors: Sequence[Rule], left: Sequence[Rule], search: Search | None, typed: frozenset[str]
) -> Change | None:
    """Return a change that resolves one of the errors left; if possible, all that are about its fields."""
    intact = [r for r in errors if r not in left]
    for rule, kept in product(left, _kept_first(typed)):
        others = [r for r in errors if r is not rule and (r not in left or r.subject != "memory")]
        change = _try_one_change(rule, case, others, kept) or _try_one_change(rule, case, intact, kept)
        change = change or _try_two_changes(rule, case, intact, kept)
        if change is not None:
            return change
    return _searched(case, intact, left, search) if search is not None and left else None


def _searched(case: Case, intact: Sequence[Rule], left: Sequence[Rule], search: Search) -> Change | None:
    """Return the layout that a search finds, if it resolves an error and breaks no intact rule."""
    change = search(case, frozenset(r.id for r in left if r.subject in UNRELATED_TO_LAYOUT))
    if not change:
        return None
    trial = case.replace(**change)
    resolves = not all(bool(r.broken(trial)) for r in left)
    return change if resolves and not any(bool(r.broken(trial)) for r in intact) else None


def _smallest_part(rule: Rule, case: Case, intact: Sequence[Rule], total: Change, step: Change) -> Change:
    """Return the part of the total change that resolves this finding alone without breaking an intact rule."""
    part = {name: value for name, value in total.items() if name in step}
    alone = case.replace(**part)
    works = part and not bool(rule.broken(alone)) and not any(bool(r.broken(alone)) for r in intact)
    return part if works else total


def _overrides(change: Change | None) -> tuple[str, ...]:
    keys = keys_by_flat_name()
    return tuple(format_override(keys[name], value) for name, value in (change or {}).items())


def fix_texts(rule: Rule) -> tuple[str, ...]:
    """Return the fixes of a rule for no particular case: overrides, or the fields whose value depends on the case."""
    keys = keys_by_flat_name()
    found = []
    for fix in rule.fixes:
        fixed = [format_override(keys[name], values[0]) for name, values in fix.items() if not callable(values)]
        open_ = [f"another {keys[name]}" for name, values in fix.items() if callable(values)]
        found.append(" ".join(fixed) + (" with " if fixed and open_ else "") + " and ".join(open_))
    return tuple(dict.fromkeys(found))


def try_fixes(
    rule: Rule, case: Case, broken: frozenset[str] | None = None, typed: Collection[str] = ()
) -> tuple[str, ...]:
    """Return overrides that resolve the rule's finding and break no other error rule; empty if none do.

    The fix of a warning avoids new warnings if possible, that of an advice always. `broken` are the ids of the rules
    that the case breaks, if the caller has them already. Fields in `typed` change only if no other change works.
    """
    return _overrides(one_fix(rule, case, broken, typed))


def one_fix(rule: Rule, case: Case, broken: frozenset[str] | None = None, typed: Collection[str] = ()) -> Change:
    """Return the change of `try_fixes` by flat name; empty if there is none."""
    other_rules = [r for r in applicable(case, ("error", "warning")) if r is not rule]
    if broken is None:
        broken = frozenset(r.id for r in other_rules if bool(r.broken(case)))
    intact = [r for r in other_rules if r.id not in broken]
    intact_errors = [r for r in intact if r.severity == "error"]
    tries = [intact_errors]
    uncertain = [r for r in applicable(case, ("advice",)) if r.id == UNCERTAIN and r is not rule]
    if rule.severity == "warning":
        advised = [r for r in uncertain if r.subject == rule.subject]
        tries = [*([[*intact, *advised]] if advised else []), intact, intact_errors]
    if rule.severity == "advice":  # nothing is wrong: a change that is worse in another way is no advice
        certain = [*intact, *(r for r in uncertain if not bool(r.broken(case)))]
        tries = [certain, *([] if rule.subject == "memory" else [intact])]
    for kept in _kept_first(typed):
        changes = (_try_one_change(rule, case, others, kept) for others in tries)
        change = next((one for one in changes if one is not None), None)
        if change is None and (rule.severity == "error" or (rule.severity == "advice" and rule.subject != "memory")):
            change = _try_two_changes(rule, case, tries[-1], kept)
        if change is not None:
            return change
    return {}


def _kept_first(typed: Collection[str]) -> tuple[frozenset[str], ...]:
    """Return the fields to keep, try by try: first all that the user set, then none."""
    return (frozenset(typed), frozenset()) if typed else (frozenset(),)


def _working_changes(rule: Rule, case: Case) -> Iterator[tuple[Change, Case]]:
    """Yield the changes that resolve the rule's finding, each with the changed case; each is tried once per case."""
    key = (rule.id, *map(id, rule.fixes))  # the doctor tries the fixes of a rule one by one
    known, more = case.cached(_tried_changes).setdefault(key, ([], _resolving_changes(rule, case)))
    for place in count():
        if place == len(known):
            found = next(more, None)
            if found is None:
                return
            known.append(found)
        yield known[place]


def _tried_changes(case: Case) -> dict[tuple[Any, ...], Any]:
    return {}


def _resolving_changes(rule: Rule, case: Case) -> Iterator[tuple[Change, Case]]:
    changes = _candidate_changes(rule, case)
    for change in islice(changes, TRIED_ALONE) if rule.subject == "memory" else changes:
        trial = case.replace(**change)
        if not bool(rule.broken(trial)):
            yield change, trial
    rest = list(changes)  # of a memory rule, which needs an estimate
    for change, broken in zip(rest, breaks_any([rule], case, rest), strict=True):
        if not broken:
            yield change, case.replace(**change)


def _try_one_change(rule: Rule, case: Case, intact: list[Rule], kept: frozenset[str]) -> Change | None:
    """Return the first change that resolves the finding, breaks no intact rule and leaves the kept fields."""
    estimated = [r for r in intact if r.subject == "memory"]
    others = [r for r in intact if r.subject != "memory"]
    working = (one for one in _working_changes(rule, case) if kept.isdisjoint(one[0]))
    legal = (one for one in working if not _breaks_one(others, one[1]))
    for change, trial in islice(legal, TRIED_ALONE):
        if not any(bool(r.broken(trial)) for r in estimated):
            return change
    rest = [change for change, _ in legal]
    clean = (change for change, fails in zip(rest, breaks_any(estimated, case, rest), strict=True) if not fails)
    return next(clean, None)


def _breaks_one(tried: list[Rule], trial: Case) -> bool:
    """Return whether a case breaks a rule; that rule is tried first on the next case, which is often like this one."""
    for place, one in enumerate(tried):
        if bool(one.broken(trial)):
            tried.insert(0, tried.pop(place))
            return True
    return False


def _try_two_changes(rule: Rule, case: Case, intact: list[Rule], kept: frozenset[str]) -> Change | None:
    """Return a change that resolves the finding, plus a second one that fixes the rule the first one broke."""
    working = (one for one in _working_changes(rule, case) if kept.isdisjoint(one[0]))
    for change, trial in islice(working, MAX_FIRST_CHANGES):
        newly_broken = next(r for r in intact if bool(r.broken(trial)))
        second = _try_one_change(newly_broken, trial, [rule, *(r for r in intact if r is not newly_broken)], kept)
        if second is not None:
            return {**change, **second}
    return None


def _companions(case: Case) -> Iterator[Change]:
    """Yield changes to make next to a fix: none, a free dp_shard, smaller micro batches, the largest first.

    A changed degree changes the data-parallel size, which may not match a fixed dp_shard or micro batch; a fix that
    takes memory may fit with a smaller micro batch, and the largest that fits costs the least time.
    """
    yield {}
    yield {"dp_shard": -1}
    micro_batch = int(case.micro_batch_size)
    for smaller in reversed(divisors(micro_batch)[:-1] if micro_batch > 1 else [1]):
        yield {"dp_shard": -1, "micro_batch_size": smaller}


def _candidate_changes(rule: Rule, case: Case) -> Iterator[Change]:
    """Yield every change the rule's fixes allow, those without companions first."""
    seen: set[tuple[Any, ...]] = set()
    for companion in _companions(case):
        for fix in rule.fixes:
            values = [list(v(case)) if callable(v) else list(v) for v in fix.values()]
            for combination in product(*values):
                change = {**companion, **dict(zip(fix, combination, strict=True))}
                change = {name: value for name, value in change.items() if value != getattr(case, name)}
                key = tuple(sorted(change.items()))
                if change and key not in seen:
                    seen.add(key)
                    yield change
