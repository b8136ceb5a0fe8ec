"""One repair of a framework's file: settings that remove every error when they are pasted together."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import combinations

import msgspec

from meshwright.errors import InputError
from meshwright.frameworks.framework import Content
from meshwright.frameworks.merged_fix import merged
from meshwright.frameworks.our_fixes import changed_content
from meshwright.frameworks.result import CheckResult
from meshwright.frameworks.script_arguments import argument_lists
from meshwright.frameworks.tried_fixes import REPLACED, as_typed
from meshwright.planner import Repair
from meshwright.planner.repair import COUNTED
from meshwright.recipes.types import Recipe, field_value, recipe_fields
from meshwright.rules import RULES, Finding

ROUNDS = 10  # fixes that are combined
MOST_COMBINED = 6  # settings of which every part is tried
AS_FAST = 1.02  # of the time of a sample: a setting that saves less of it is left out
MUCH_FASTER = 1.1  # times the speed of the smallest repair: a note names the settings that make it so
MOST_NEW = 3  # errors of the framework's own rules that our repair may lead to, each with a fix
WRITTEN = ("key.", "value.")
"""Findings about how a setting is written: they are resolved first, because other rules read its value."""
OF_LAYOUTS = ("batch.divides", "batch.smaller-than-data-parallel", "schedule.", "topology.world")
Recheck = Callable[[Content, bool], CheckResult]
OurRepair = Callable[[Content], tuple[str, ...]]
Part = tuple[Finding, str]  # a setting, and the finding whose fix it is
_LEAF = re.compile(r'((?:"?\w+"?: \{)+"?\w+"?):|(\S+\.py: (?:without )?\w+)')
"""The key of a setting inside its section, or of an argument in a program's code."""
_KEY = re.compile(r"(?:without |remove |torchrun |#SBATCH |export |unset )?([^\s=:]+)")


def needs_repair(findings: Sequence[Finding]) -> bool:
    """Return whether the fixes of single findings do not suffice: several errors, one without a fix or of a layout.

    A layout has many fixes of very different speed, and the fix of a rule is the first that works.
    """
    errors = [one for one in findings if one.severity == "error"]
    return len(errors) > 1 or any(not one.fix or one.rule.startswith(OF_LAYOUTS) for one in errors)


def only_fix_fails(content: Content, findings: Sequence[Finding], recheck: Recheck) -> bool:
    """Return whether the fix of a script's only error leaves one; those of other files are tried already."""
    errors = [one for one in findings if one.severity == "error"]
    if content.settings or len(errors) != 1:
        return False
    after = _after(content, [(errors[0], text) for text in errors[0].fix], recheck)
    return after is not None and not after.ok


def with_repair(
    content: Content, result: CheckResult, untried: Sequence[Finding], recheck: Recheck, our_repair: OurRepair
) -> CheckResult:
    """Return the result with one repair, and with findings whose fixes are parts of it; unchanged if none is found.

    `untried` are the findings with the fixes of their rules, of which some work only together with others.
    """
    every = _found(content, untried, recheck, our_repair)
    parts = _with_removals(content, _minimal(content, every, recheck, result.recipe), result, recheck)
    after = _after(content, parts, recheck) if parts else None
    if after is None or not after.ok or _warns_of_framework(result, after):
        return result
    left = {(one.rule, one.field) for one in after.findings}
    removed = [one for one in result.findings if one.severity != "advice" and (one.rule, one.field) not in left]
    before = {(one.rule, one.field) for one in result.findings}
    moved = {rule for rule, field in left - before}  # rules that the repaired file breaks at another key
    repair = Repair(
        overrides=tuple(_as_pasted(content, parts)),
        removes=tuple(one.rule for one in removed if one.rule not in moved) or tuple(one.rule for one in removed),
        leaves=tuple(sorted({one.rule for one in after.findings if one.severity == "warning"})),
        contract=bool(_contract_of(result.recipe, after)),
        step_s=None if after.estimate is None else float(after.estimate.step_s),
        total_gib=None if after.estimate is None else float(after.estimate.memory.total),
    )
    findings = _with_parts(content, result, removed, parts, recheck)
    new = [one for one in after.findings if one.severity == "warning" and one.rule not in {rule for rule, _ in before}]
    appear = [f"the repaired file also has {one.rule}: {one.message}" for one in new]
    notes = (*result.notes, *appear, *_batch_note(result, after), *_faster_note(content, parts, every, after, recheck))
    return msgspec.structs.replace(result, findings=findings, repair=repair, notes=notes)


def _batch_note(before: CheckResult, after: CheckResult) -> Iterator[str]:
    """Yield a note on another global batch, which follows from a repair that does not name it."""
    old, new = (one.recipe.train.global_batch_size for one in (before, after))
    if old != new and before.cluster is not None:
        yield f"the repair changes the global batch from {old:,} to {new:,} samples"


def _faster_note(
    content: Content, parts: Sequence[Part], every: Sequence[Part], after: CheckResult, recheck: Recheck
) -> Iterator[str]:
    """Yield a note on settings that the repair does not need and that make it much faster."""
    more = [text for _, text in every if text not in _settings_of(parts)]
    faster = _after(content, every, recheck) if more else None
    if faster is None or not faster.ok or after.estimate is None or faster.estimate is None:
        return
    if _sample_s(after) > MUCH_FASTER * _sample_s(faster):
        times = f"{faster.estimate.step_s:.2f} s instead of {after.estimate.step_s:.2f} s per step"
        yield f"the repair needs no more, but it is faster with {' '.join(merged(more))}: {times}"


def _with_removals(content: Content, parts: list[Part], before: CheckResult, recheck: Recheck) -> list[Part]:
    """Return the settings of a repair, and the removal of keys that the repaired file ignores as the file did."""
    after = _after(content, parts, recheck) if parts else None
    known = _warned(before)
    left = [] if after is None else [one for one in after.findings if (one.rule, one.field) in known & _warned(after)]
    ignored = [one for one in left if one.fix and all(text.startswith("without ") for text in one.fix)]
    joined = _joined(parts, [(one, text) for one in ignored for text in one.fix])
    cleaner = _after(content, joined, recheck) if ignored else None
    is_better = cleaner is not None and after is not None and cleaner.ok and _warned(cleaner) < _warned(after)
    return joined if is_better else parts


def _warns_of_framework(before: CheckResult, after: CheckResult) -> bool:
    """Return whether a repair leads to a new warning of the framework's own rules: settings it does not support.

    It is offered all the same where an error has no fix of its own.
    """
    if any(one.severity == "error" and not one.fix for one in before.findings):
        return False
    known = {one.rule for one in before.findings}
    own = f"{before.framework}."
    return any(
        one.rule.startswith(own) and one.severity == "warning" and one.rule not in known for one in after.findings
    )


def _found(content: Content, findings: Sequence[Finding], recheck: Recheck, our_repair: OurRepair) -> list[Part]:
    """Return settings that leave no error: fixes of how settings are written, our repair, then what is left."""
    parts: list[Part] = []
    seen = {_settings_of(parts)}
    for _ in range(ROUNDS):
        errors = [one for one in findings if one.severity == "error"]
        if not errors:
            return parts
        for more, is_joint in _steps(content, parts, errors, our_repair):
            tried = _joined(parts, more)
            if _settings_of(tried) in seen:
                continue
            after = _after(content, tried, recheck, fixes=True)
            if after is not None and (
                after.ok or (_lessens(errors, after) if is_joint else _resolves(more[0][0], errors, after.findings))
            ):
                parts, findings = tried, after.findings
                seen.add(_settings_of(parts))
                break
        else:
            return []
    return []


def _steps(
    content: Content, parts: Sequence[Part], errors: Sequence[Finding], our_repair: OurRepair
) -> Iterator[tuple[list[Part], bool]]:
    """Yield the settings to try next, and whether they are our repair: last if no error is of our rules."""
    first = any(one.rule in RULES for one in errors)
    written = [one for one in errors if one.rule.startswith(WRITTEN)]
    if len(written) < len(errors):
        changed = _changed(content, parts)
        joint = [(errors[0], text) for text in our_repair(changed)] if changed is not None else []
        if joint and first and not written:
            yield joint, True
    else:
        joint = []
    others = [one for one in errors if one not in written]
    yield from (([(one, text) for text in one.fix], False) for one in written if one.fix)
    # A key that has no successor. Without its value a key would have its default, which is another training.
    without = [one for one in written if not one.rule.startswith("value.") or one.rule == "value.stray"]
    yield from (([(one, f"without {_spelled(content, one.field)}")], False) for one in without)
    if joint and first and written:
        yield joint, True
    yield from (([(one, text) for text in one.fix], False) for one in others if one.fix)
    yield from (([(one, text)], False) for one in others for text in one.fix if len(one.fix) > 1)
    if joint and not first:
        yield joint, True


def _settings_of(parts: Sequence[Part]) -> frozenset[str]:
    return frozenset(text for _, text in parts)


def _lessens(errors: Sequence[Finding], after: CheckResult) -> bool:
    """Return whether errors are gone and none is new, or the framework's own rules report the new ones with a fix."""
    left = [one for one in after.findings if one.severity == "error"]
    if {(one.rule, one.field) for one in left} < {(one.rule, one.field) for one in errors}:
        return True
    return len(left) <= MOST_NEW and all(one.fix and one.rule not in RULES for one in left)


def _resolves(finding: Finding, errors: Sequence[Finding], after: Sequence[Finding]) -> bool:
    """Return whether a finding is gone, at the price of at most one other; memory is estimated anew."""
    left = [one for one in after if one.severity == "error" and not one.rule.startswith("memory.")]
    before = [one for one in errors if not one.rule.startswith("memory.")]
    is_gone = (finding.rule, finding.field) not in {(one.rule, one.field) for one in after}
    return is_gone and len(left) <= max(len(before), 1)


def _joined(parts: Sequence[Part], more: Sequence[Part]) -> list[Part]:
    """Return both lists of settings; a later value of a key replaces an earlier one.

    A key that takes the place of another one still does with a later value.
    """
    found = {_key(text): (finding, text) for finding, text in parts}
    renames = {key: finding for key, (finding, _) in found.items() if finding.rule.startswith(REPLACED)}
    return list((found | {_key(text): (renames.get(_key(text), one), text) for one, text in more}).values())


def _key(text: str) -> str:
    match = _LEAF.match(text)
    if match:
        return (match[1] or match[2]).replace(": without ", ": ")
    match = _KEY.match(text)
    return match[1] if match else text


def _changed(content: Content, parts: Sequence[Part]) -> Content | None:
    """Return the file with all settings; None if one is not written as a setting."""
    changed: Content | None = content
    for finding, text in parts:
        changed = changed and changed_content(changed, msgspec.structs.replace(finding, fix=(text,)))
    return changed


def _removes_new_name(finding: Finding, text: str) -> bool:
    """Return whether a setting removes a key that the file has under the name that a finding replaces."""
    is_renamed = finding.rule.startswith(REPLACED) and text.startswith("without ")
    return is_renamed and any(_key(one) == _key(text) and not one.startswith("without ") for one in finding.fix)


def pasted_fixes(content: Content, findings: Sequence[Finding]) -> tuple[str, ...]:
    """Return the fixes of single findings as all that is to be changed: a key that another one replaces is removed."""
    return tuple(_as_pasted(content, [(one, text) for one in findings for text in one.fix]))


def _as_pasted(content: Content, parts: Sequence[Part]) -> Iterator[str]:
    """Yield all settings; a key that another replaces is removed explicitly."""
    texts = [text for finding, text in parts if not _removes_new_name(finding, text)]
    yield from texts
    for finding, text in parts:
        kept = text.startswith("without ") and not _removes_new_name(finding, text)
        if not finding.rule.startswith(REPLACED) or _key(text) == finding.field or kept:
            continue
        flag = _removed(content, finding.field)
        if f"without {flag}" not in texts:
            yield f"without {flag}"


def _spelled(content: Content, key: str) -> str:
    """Return a key as the file spells it."""
    if content.settings or content.format == "python":
        return key
    typed = (as_typed(one, key) for one in argument_lists(content))
    return next(filter(None, typed), f"--{key.lstrip('-').replace('_', '-')}")


def _removed(content: Content, key: str) -> str:
    """Return what to remove for a key: its flag, or its section if that has no other key."""
    if not content.settings:
        return _spelled(content, key)
    section = key.rpartition(".")[0]
    others = [one for one in content.settings if one.startswith(f"{section}.") and one != key]
    return section if section and not others else key


def _after(content: Content, parts: Sequence[Part], recheck: Recheck, fixes: bool = False) -> CheckResult | None:
    with suppress(InputError):
        changed = _changed(content, parts)
        return None if changed is None else recheck(changed, fixes)
    return None


def _minimal(content: Content, parts: list[Part], recheck: Recheck, before: Recipe) -> list[Part]:
    """Return the smallest part of the settings that leaves no error and no more warnings than all of them.

    A setting that keeps a field of the contract as it was before is needed.
    """
    every = _after(content, parts, recheck) if len(parts) > 1 else None
    if every is None:
        return parts
    allowed = _contract_of(before, every)

    def suffices(some: Sequence[Part]) -> bool:
        after = _after(content, some, recheck)
        return after is not None and _is_as_good(after, every) and _contract_of(before, after) <= allowed

    if len(parts) > MOST_COMBINED:
        for part in tuple(parts):
            rest = [one for one in parts if one is not part]
            parts = rest if suffices(rest) else parts
    if len(parts) > MOST_COMBINED:
        return parts
    fewer = (list(some) for size in range(1, len(parts)) for some in combinations(parts, size))
    return next((some for some in fewer if suffices(some)), parts)


def _is_as_good(after: CheckResult, every: CheckResult) -> bool:
    """Return whether fewer settings remove what all of them remove.

    A setting that follows from another one, as sequence parallelism from tensor parallelism, stays if it saves time.
    """
    if not after.ok or _warned(after) - _warned(every):
        return False
    chosen = any(getattr(after.recipe.layout, one) != getattr(every.recipe.layout, one) for one in COUNTED)
    return chosen or _sample_s(after) <= AS_FAST * _sample_s(every)


def _sample_s(result: CheckResult) -> float:
    """Return the time of a sample: fewer settings may be another batch."""
    return 0.0 if result.estimate is None else float(result.estimate.step_s) / result.recipe.train.global_batch_size


def _warned(result: CheckResult) -> set[tuple[str, str]]:
    return {(one.rule, one.field) for one in result.findings if one.severity == "warning"}


def _with_parts(
    content: Content, result: CheckResult, removed: Sequence[Finding], parts: Sequence[Part], recheck: Recheck
) -> tuple[Finding, ...]:
    """Return the findings; the fix of one that the repair removes is one setting of it, if that suffices, or all."""
    errors = {(one.rule, one.field) for one in result.findings if one.severity == "error"}
    alone = [(part[1], _after(content, [part], recheck)) for part in parts]
    every = tuple(text for _, text in parts)
    joint = _after(content, parts, recheck)
    allowed = set() if joint is None else _contract_of(result.recipe, joint)

    def fix(finding: Finding) -> tuple[str, ...]:
        for text, after in alone:
            left = None if after is None else {(one.rule, one.field) for one in after.findings}
            new = set() if after is None else {(f.rule, f.field) for f in after.findings if f.severity == "error"}
            is_gone = left is not None and (finding.rule, finding.field) not in left and new <= errors
            if is_gone and after is not None and _contract_of(result.recipe, after) <= allowed:
                return (text,)
        return every

    return tuple(
        msgspec.structs.replace(one, fix=fix(one), no_fix="") if one in removed else one for one in result.findings
    )


def _contract_of(before: Recipe, after: CheckResult) -> set[str]:
    """Return the fields of the contract that a repair changes."""
    contract = [key for key, info in recipe_fields().items() if info.kind == "contract"]
    return {key for key in contract if field_value(before, key) != field_value(after.recipe, key)}
