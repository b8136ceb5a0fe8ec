"""Judging a case by all rules: findings with repairs for one case, a mask for many."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import islice, product
from string import Formatter
from typing import Any

import numpy as np

from meshwright.recipes.case import Case, Column
from meshwright.recipes.format_override import format_override
from meshwright.recipes.types import recipe_fields
from meshwright.rules.rule import SEVERITIES, Finding, Rule, Severity, all_rules

MAX_FIRST_CHANGES = 6  # first changes from which a second one is looked for
Change = dict[str, Any]  # values by flat name


class _Names(Formatter):
    """Fills {name} in a message with the rule's figure or the case's value of that name."""

    def get_value(self, key: Any, args: Any, kwargs: Any) -> Any:
        rule, case = args
        return rule.values[key](case) if key in rule.values else getattr(case, str(key))


def message(rule: Rule, case: Case) -> str:
    """What the rule says of this case."""
    return _Names().format(rule.message, rule, case)


@lru_cache(maxsize=1)
def keys_by_flat_name() -> dict[str, str]:
    """The recipe key of every flat name, e.g. tp → layout.tp; model facts lead to the architecture section."""
    return {info.flat: key for key, info in recipe_fields().items()}


@cache
def _rules_for(engine: str, severities: tuple[Severity, ...]) -> tuple[Rule, ...]:
    speaking = (r for r in all_rules().values() if engine in r.engines and r.severity in severities)
    return tuple(sorted(speaking, key=lambda r: r.subject == "memory"))  # estimates cost more than arithmetic


def applicable(case: Case, severities: Iterable[Severity] = SEVERITIES) -> tuple[Rule, ...]:
    """The rules that speak of this engine."""
    return _rules_for(case.engine, tuple(severities))


def _error_rules(case: Case) -> list[Rule]:
    """The error rules that need no estimate; whether a layout fits is for the estimate to say."""
    return [r for r in applicable(case, ("error",)) if r.subject != "memory"]


def legal(case: Case, ignoring: Container[str] = ()) -> Column:
    """True where no error rule is broken, memory and the ignored ones aside; the case may hold columns."""
    ok: Column = np.True_
    for r in _error_rules(case):
        if r.id not in ignoring:
            ok = ok & np.logical_not(r.broken(case))
    return ok


def illegal_by_rule(case: Case) -> dict[str, Column]:
    """For every error rule, memory aside, that some candidate breaks: where."""
    masks = {r.id: np.asarray(r.broken(case), dtype=bool) for r in _error_rules(case)}
    return {id: mask for id, mask in masks.items() if mask.any()}


def check(case: Case, severities: Iterable[Severity] = SEVERITIES, others: Sequence[Case] = ()) -> list[Finding]:
    """What the rules find in one case, errors first, each with overrides that repair it.

    With others, only what is broken in every one of them too: where a case is not fully known, what is certain.
    """
    found = sorted((r for r in applicable(case) if bool(r.broken(case))), key=lambda r: SEVERITIES.index(r.severity))
    broken = frozenset(r.id for r in found)
    wanted = tuple(severities)
    told = [r for r in found if r.severity in wanted and all(bool(r.broken(other)) for other in others)]
    findings = [_finding(r, case, broken) for r in told]
    return [f for f in findings if f.severity != "advice" or f.fix]  # advice that cannot be followed is none


def _finding(rule: Rule, case: Case, broken: frozenset[str]) -> Finding:
    field = keys_by_flat_name().get(rule.field, rule.field)
    return Finding(rule.id, rule.severity, field, message(rule, case), try_fixes(rule, case, broken))


def try_fixes(rule: Rule, case: Case, broken: frozenset[str] | None = None) -> tuple[str, ...]:
    """Overrides that make the rule's finding disappear and break no other error rule; none when there are none.

    A warning is not traded for another one where that can be helped. `broken` are the ids of the rules that the case
    breaks, when they are known already.
    """
    ruled = [r for r in applicable(case, ("error", "warning")) if r is not rule]
    if broken is None:
        broken = frozenset(r.id for r in ruled if bool(r.broken(case)))
    kept = [r for r in ruled if r.id not in broken]
    others = [r for r in kept if r.severity == "error"]
    change = _try_one_change(rule, case, kept) if rule.severity == "warning" else None
    if change is None:
        change = _try_one_change(rule, case, others)
    if change is None and rule.severity == "error":
        change = _try_two_changes(rule, case, others)
    keys = keys_by_flat_name()
    return tuple(format_override(keys[name], value) for name, value in (change or {}).items())


def _working_changes(rule: Rule, case: Case) -> Iterator[tuple[Change, Case]]:
    """Changes after which the rule is kept, each with the case it leads to."""
    for change in _candidate_changes(rule, case):
        trial = case.replace(**change)
        if not bool(rule.broken(trial)):
            yield change, trial


def _try_one_change(rule: Rule, case: Case, others: list[Rule]) -> Change | None:
    """The first change that keeps the rule and breaks none of the others."""
    clean = (change for change, trial in _working_changes(rule, case) if not any(bool(r.broken(trial)) for r in others))
    return next(clean, None)


def _try_two_changes(rule: Rule, case: Case, others: list[Rule]) -> Change | None:
    """A change that keeps the rule, together with one that makes up for what it broke."""
    for change, trial in islice(_working_changes(rule, case), MAX_FIRST_CHANGES):
        harmed = [r for r in others if bool(r.broken(trial))]
        second = _try_one_change(harmed[0], trial, [rule, *(r for r in others if r is not harmed[0])])
        if second is not None:
            return {**change, **second}
    return None


# A changed degree changes the data-parallel size, which a fixed shard count or micro batch may not fit.
COMPANIONS: tuple[Change, ...] = ({}, {"dp_shard": -1}, {"dp_shard": -1, "micro_batch_size": 1})


def _candidate_changes(rule: Rule, case: Case) -> Iterator[Change]:
    """Every change the rule's fixes allow, the plain ones first."""
    seen: set[tuple[Any, ...]] = set()
    for companion in COMPANIONS:
        for fix in rule.fixes:
            values = [list(v(case)) if callable(v) else list(v) for v in fix.values()]
            for combination in product(*values):
                change = {**companion, **dict(zip(fix, combination, strict=True))}
                change = {name: value for name, value in change.items() if value != getattr(case, name)}
                key = tuple(sorted(change.items()))
                if change and key not in seen:
                    seen.add(key)
                    yield change
