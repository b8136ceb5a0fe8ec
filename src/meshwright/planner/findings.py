"""The findings of a case and its one repair: the same for `recommend`, `plan`, `check`, `train` and `launch`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from math import inf
from typing import NamedTuple

import msgspec

from meshwright import costs, rules
from meshwright.planner.missing_fixes import explain_missing, layout_fix
from meshwright.planner.plan import Repair
from meshwright.planner.repair import COUNTED, Change, as_repair, errors_of, find_repair, has_errors
from meshwright.planner.saving import saving_findings
from meshwright.planner.search import SEARCHED_NAMES, as_overrides, best, changed_values, has_headroom
from meshwright.planner.space import DEGREES, module_sets
from meshwright.recipes import overrides as override
from meshwright.recipes.case import Case
from meshwright.rules import SEVERITIES, Finding, Rule, Severity

ADVISE_BELOW = 0.99  # of the step time
WORTH_SAYING = 0.05  # of the step time that a fix costs
MOST_CHANGED = 3  # fields of the layout that the fix of another setting changes
WORK = ("global_batch_size", "seq_length")  # with another value of these, step times are not comparable
FOR_MEMORY = ("memory.tight", "memory.uncertain")
"""Findings whose fixes save memory; they need not be faster."""


class Examined(NamedTuple):
    """The findings of a case, and the repair if there are errors or several fixes."""

    findings: tuple[Finding, ...]
    repair: Repair | None


def examine(
    case: Case,
    typed: Collection[str] = (),
    severities: Sequence[Severity] = SEVERITIES,
    stated: Collection[str] = (),
    states_interval: bool = False,
    options: Sequence[str] = (),
) -> Examined:
    """Return the findings of a case with their fixes, and one repair; `typed` are fields the user set, by flat name.

    `stated` are the contract fields of the user's file: no warning is a reason to replace them. With
    `states_interval` the file sets the steps between checkpoints. Printed commands repeat the user's `options`.
    """
    if has_errors(case):
        return _with_errors(case, typed, severities, options)
    typed = {*typed, *stated}
    checked = [_in_another_layout(one, case, typed) for one in rules.check(case, severities, typed=typed)]
    found = tuple(explain_missing(_drop_useless_fixes(checked, case, typed), case, typed, options))
    fixable = [one for one in found if one.severity == "warning" and one.fix]
    change = _together(case, fixable, typed) if len(fixable) > 1 else {}
    saving = saving_findings(case, states_interval or "save_every" in typed) if "warning" in severities else ()
    every = sorted((*found, *saving), key=lambda one: SEVERITIES.index(one.severity))
    return Examined(tuple(every), as_repair(case, change, fixable, typed))


OF_MEMORY = ("micro_batch_size", "recompute", "recompute_modules", "recompute_layers", "offload")
"""Fields with which a search uses the memory that a fix frees."""


def held_in_a_search(findings: Iterable[Finding], case: Case) -> tuple[Finding, ...]:
    """Return the findings of a plan; fixes that save memory also state what the next search would change for it."""
    return tuple(_held(one, case) if one.rule in FOR_MEMORY and one.fix else one for one in findings)


def _held(finding: Finding, case: Case) -> Finding:
    after = case.rebuild(override.apply_fix(case.recipe, finding.fix))
    known = {one.partition("=")[0] for one in finding.fix}
    kept = as_overrides({name: value for name in OF_MEMORY if (value := getattr(after, name)) and value != "none"})
    more = (one for one in kept if one.partition("=")[0] not in known)
    return msgspec.structs.replace(finding, fix=(*finding.fix, *more))


def _with_errors(
    case: Case, typed: Collection[str], severities: Sequence[Severity], options: Sequence[str]
) -> Examined:
    """Return the findings of a case that cannot run: every error has the same fix, and advice waits for a layout."""
    change = find_repair(case, typed)
    if not change:
        found = rules.check(case, [s for s in severities if s != "advice"], search=layout_fix, typed=typed)
        return Examined(tuple(explain_missing(found, case, typed, options)), None)
    found = rules.check(case, [s for s in severities if s != "advice"], fixes=False)
    findings = tuple(_repaired(one, case, change, typed) for one in found)
    return Examined(findings, as_repair(case, change, findings, typed))


def _repaired(finding: Finding, case: Case, change: Change, typed: Collection[str]) -> Finding:
    """Return the finding with its part of the repair; its own fix if the repair leaves it."""
    rule, after = rules.all_rules()[finding.rule], case.replace(**change)
    if not bool(rule.broken(after)):
        part = _part(rule, case, change)
        return msgspec.structs.replace(finding, fix=as_overrides(part), undoes=rules.undone(part, typed))
    own = rules.one_fix(rule, after, typed=typed)
    no_fix = "" if own else "no setting resolves it without breaking another rule"
    undoes = rules.undone(own, typed)
    return msgspec.structs.replace(finding, fix=as_overrides(own), no_fix=no_fix, undoes=undoes)


def _part(rule: Rule, case: Case, change: Change) -> Change:
    """Return the part of a repair that resolves one finding alone and breaks no other error rule.

    The part of a memory finding leaves the headroom that the whole repair leaves: who follows it must not be short.
    """
    before, part = set(errors_of(case)), change
    of_memory = rule.subject == "memory" and _leaves_headroom(case.replace(**change))
    for name in reversed(tuple(change)):
        rest = {n: value for n, value in part.items() if n != name}
        trial = case.replace(**rest)
        resolves = rest and not bool(rule.broken(trial)) and set(errors_of(trial)) <= before
        if resolves and (not of_memory or _leaves_headroom(trial)):
            part = rest
    return part


def _leaves_headroom(case: Case) -> bool:
    return bool(has_headroom(float(costs.estimate(case).memory.total), case))


def _together(case: Case, findings: Iterable[Finding], typed: Collection[str]) -> Change:
    """Return one change that resolves several warnings; empty if their fixes cannot be combined."""
    change: Change = {}
    resolved = [rules.all_rules()[one.rule] for one in findings]
    for rule in resolved:
        trial = case.replace(**change)
        if bool(rule.broken(trial)):
            change |= rules.one_fix(rule, trial, typed=typed)
    trial = case.replace(**change)
    return {} if has_errors(trial) or any(bool(rule.broken(trial)) for rule in resolved) else change


def _in_another_layout(finding: Finding, case: Case, typed: Collection[str]) -> Finding:
    """Return a warning about other settings than the layout with a fix in a layout for it, where that costs less.

    A rule makes room with smaller micro batches only, or leaves too little memory; other degrees may cost less.
    """
    rule = rules.all_rules()[finding.rule]
    change = rules.one_fix(rule, case, typed=typed) if finding.severity == "warning" else {}
    own = _own_settings(rule, change)
    if finding.severity != "warning" or rule.subject == "memory" or not own or own.keys() & {*SEARCHED_NAMES, *WORK}:
        return finding
    intact = [one for one in rules.applicable(case, ("error", "warning")) if not bool(one.broken(case))]
    trial = case.replace(**change)
    is_tight = any(one.subject == "memory" and bool(one.broken(trial)) for one in intact)
    if change and not is_tight and _step_s(trial) <= (1 + WORTH_SAYING) * _step_s(case):
        return finding
    limit_s = _step_s(trial) if change and not is_tight else inf
    found = best(case.replace(**own), {name: getattr(case, name) for name in SEARCHED_NAMES if name in typed})
    if found is None or not found.has_headroom or found.step_s >= limit_s:
        return finding
    layout = changed_values(found.layout, case)
    after = case.replace(**own, **layout)
    if sum(name in COUNTED for name in layout) > MOST_CHANGED or any(
        bool(one.broken(after)) for one in (rule, *intact)
    ):
        return finding
    return msgspec.structs.replace(finding, fix=as_overrides({**layout, **own}), undoes=rules.undone(own, typed))


def _own_settings(rule: Rule, change: Change) -> Change:
    """Return what a rule's fix sets, without what makes room for it; of its first fix, if none works in this layout."""
    if change:
        return {name: value for name, value in change.items() if any(name in fix for fix in rule.fixes)}
    fix = rule.fixes[0] if rule.fixes else {}
    return {name: next(iter(values)) for name, values in fix.items() if not callable(values)}


def _drop_useless_fixes(findings: Iterable[Finding], case: Case, typed: Collection[str]) -> Iterator[Finding]:
    """Keep advice only if following it is faster and leaves headroom; warnings stay, but lose such a fix."""
    for finding in findings:
        of_memory = finding.rule in FOR_MEMORY
        about_layout = bool(finding.fix) and all(key.startswith("layout.") for key in finding.fix)
        if of_memory and finding.fix and finding.severity == "advice":
            yield with_cost(finding, case, frozenset(typed))
        elif finding.severity == "error" or of_memory or not about_layout or _helps(finding, case):
            yield finding
        elif finding.severity == "warning":
            tried = f"{' '.join(finding.fix)} resolves it, but is not faster here or leaves too little memory"
            yield msgspec.structs.replace(finding, fix=(), no_fix=tried, undoes=())


def with_cost(finding: Finding, case: Case, typed: frozenset[str], others: bool = True) -> Finding:
    """Return a finding on memory with its cheapest fix, and with the step time that this costs, if it is much.

    Without `others`, the fix stays.
    """
    before = float(case.cached(costs.estimate).step_s)
    slower = _step_s(case.rebuild(override.apply_fix(case.recipe, finding.fix))) / before - 1
    if slower < WORTH_SAYING:
        return finding
    rule, fix = rules.all_rules()[finding.rule], finding.fix
    kept = [one for one in rules.applicable(case, ("warning",)) if not bool(one.broken(case))]
    for change in _milder(case) if others else ():
        trial = case.replace(**change)
        changed = {name for name, value in change.items() if value != getattr(case, name)}
        if typed & changed or not bool(rules.legal(trial)) or bool(rule.broken(trial)):
            continue
        cost = _step_s(trial) / before - 1
        less = float(costs.memory(trial).total) < float(costs.memory(case).total)
        if less and cost < slower and not any(bool(one.broken(trial)) for one in kept):
            stated = changed | ({*change} - typed if changed & {*DEGREES} else set())  # else a search grows them
            slower, fix = cost, as_overrides({n: value for n, value in change.items() if n in stated})
    message = f"{finding.message}; its fix takes {slower:.0%} longer per step"
    return msgspec.structs.replace(finding, fix=fix, message=message if slower >= WORTH_SAYING else finding.message)


def _milder(case: Case) -> Iterator[Change]:
    """Yield changes that free memory: weights sharded again, recompute of more modules, half of the micro batch.

    Also twice a degree that splits samples or experts.
    """
    frugal = {name: getattr(case, name) for name in ("recompute", "recompute_modules", "recompute_layers")}
    split = {name: int(getattr(case, name)) for name in DEGREES if int(getattr(case, name)) > 1}
    kept = {"micro_batch_size": int(case.micro_batch_size)} | {n: v for n, v in frugal.items() if v and v != "none"}
    yield {**split, "cp": 2 * int(case.cp), **kept}
    yield {**split, "tp": 2 * int(case.tp), "sp": True, **kept}
    if case.is_moe:
        yield {**split, "ep": 2 * int(case.ep), **kept}
    if case.strategy == "fsdp2" and not bool(case.reshard_after_forward):
        yield {"reshard_after_forward": True}
    for modules in module_sets(case):
        yield {"recompute": "selective", "recompute_modules": modules, "recompute_layers": 0}
    yield {"recompute": "full", "recompute_modules": (), "recompute_layers": 0}
    if int(case.micro_batch_size) % 2 == 0:
        yield {"micro_batch_size": int(case.micro_batch_size) // 2}


def _step_s(case: Case) -> float:
    return float(costs.step_time(case).step_s)


def _helps(finding: Finding, case: Case) -> bool:
    price = costs.estimate(case.rebuild(override.apply_fix(case.recipe, finding.fix)))
    headroom = has_headroom(float(price.memory.total), case)
    return headroom and float(price.step_s) <= ADVISE_BELOW * float(case.cached(costs.estimate).step_s)
