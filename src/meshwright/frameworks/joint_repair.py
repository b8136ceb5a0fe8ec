"""One repair of a framework's file: settings that remove every error when they are pasted together."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from meshwright.errors import InputError
from meshwright.frameworks.framework import Content
from meshwright.frameworks.our_fixes import changed_content
from meshwright.frameworks.result import CheckResult
from meshwright.planner import Repair
from meshwright.recipes.types import Recipe, field_value, recipe_fields
from meshwright.rules import Finding

ROUNDS = 6  # fixes of the framework's own rules that are combined
Recheck = Callable[[Content, bool], CheckResult]
OurRepair = Callable[[Content], tuple[str, ...]]
Part = tuple[Finding, str]  # a setting, and the finding whose fix it is
_KEY = re.compile(r"(?:without |remove )?([^\s=:]+)")


def needs_repair(findings: Sequence[Finding]) -> bool:
    """Return whether the fixes of single findings do not suffice: several errors, or one without a fix."""
    errors = [one for one in findings if one.severity == "error"]
    return len(errors) > 1 or any(not one.fix for one in errors)


def with_repair(
    content: Content, result: CheckResult, untried: Sequence[Finding], recheck: Recheck, our_repair: OurRepair
) -> CheckResult:
    """Return the result with one repair, and with findings whose fixes are parts of it; unchanged if none is found.

    `untried` are the findings with the fixes of their rules, of which some work only together with others.
    """
    parts = _minimal(content, _found(content, untried, recheck, our_repair), recheck)
    after = _after(content, parts, recheck) if parts else None
    if after is None or not after.ok:
        return result
    left = {(one.rule, one.field) for one in after.findings}
    removed = [one for one in result.findings if one.severity != "advice" and (one.rule, one.field) not in left]
    repair = Repair(
        overrides=tuple(text for _, text in parts),
        removes=tuple(one.rule for one in removed),
        leaves=tuple(sorted({one.rule for one in after.findings if one.severity == "warning"})),
        contract=_changes_contract(result.recipe, after.recipe),
        step_s=None if after.estimate is None else float(after.estimate.step_s),
        total_gib=None if after.estimate is None else float(after.estimate.memory.total),
    )
    findings = _with_parts(content, result, removed, parts, recheck)
    return msgspec.structs.replace(result, findings=findings, repair=repair)


def _found(content: Content, findings: Sequence[Finding], recheck: Recheck, our_repair: OurRepair) -> list[Part]:
    """Return settings that leave no error: our repair, after as few fixes of the framework's rules as it needs."""
    parts: list[Part] = []
    for _ in range(ROUNDS):
        errors = [one for one in findings if one.severity == "error"]
        if not errors:
            return parts
        changed = _changed(content, parts)
        joint = [(errors[0], text) for text in our_repair(changed)] if changed is not None else []
        for more in (joint, *([(one, text) for text in one.fix] for one in errors if one.fix)):
            tried = _joined(parts, more)
            after = _after(content, tried, recheck, fixes=True) if tried != parts else None
            if after is not None and (
                after.ok or (more is not joint and _resolves(more[0][0], errors, after.findings))
            ):
                parts, findings = tried, after.findings
                break
        else:
            return []
    return []


def _resolves(finding: Finding, errors: Sequence[Finding], after: Sequence[Finding]) -> bool:
    """Return whether a finding is gone, at the price of at most one other; memory is estimated anew."""
    left = [one for one in after if one.severity == "error" and not one.rule.startswith("memory.")]
    before = [one for one in errors if not one.rule.startswith("memory.")]
    is_gone = (finding.rule, finding.field) not in {(one.rule, one.field) for one in after}
    return is_gone and len(left) <= max(len(before), 1)


def _joined(parts: Sequence[Part], more: Sequence[Part]) -> list[Part]:
    """Return both lists of settings; a later value of a key replaces an earlier one."""
    found = {_key(text): (finding, text) for finding, text in parts}
    return list((found | {_key(text): (finding, text) for finding, text in more}).values())


def _key(text: str) -> str:
    match = _KEY.match(text)
    return match[1] if match else text


def _changed(content: Content, parts: Sequence[Part]) -> Content | None:
    """Return the file with all settings; None if one is not written as a setting."""
    changed: Content | None = content
    for finding, text in parts:
        changed = changed and changed_content(changed, msgspec.structs.replace(finding, fix=(text,)))
    return changed


def _after(content: Content, parts: Sequence[Part], recheck: Recheck, fixes: bool = False) -> CheckResult | None:
    with suppress(InputError):
        changed = _changed(content, parts)
        return None if changed is None else recheck(changed, fixes)
    return None


def _minimal(content: Content, parts: list[Part], recheck: Recheck) -> list[Part]:
    """Return the settings without those that are not needed."""
    for part in tuple(parts):
        rest = [one for one in parts if one is not part]
        after = _after(content, rest, recheck) if rest else None
        parts = rest if after is not None and after.ok else parts
    return parts


def _with_parts(
    content: Content, result: CheckResult, removed: Sequence[Finding], parts: Sequence[Part], recheck: Recheck
) -> tuple[Finding, ...]:
    """Return the findings; the fix of one that the repair removes is one setting of it, if that suffices, or all."""
    errors = {(one.rule, one.field) for one in result.findings if one.severity == "error"}
    alone = [(part[1], _after(content, [part], recheck)) for part in parts]
    every = tuple(text for _, text in parts)

    def fix(finding: Finding) -> tuple[str, ...]:
        for text, after in alone:
            left = None if after is None else {(one.rule, one.field) for one in after.findings}
            new = set() if after is None else {(f.rule, f.field) for f in after.findings if f.severity == "error"}
            if left is not None and (finding.rule, finding.field) not in left and new <= errors:
                return (text,)
        return every

    return tuple(
        msgspec.structs.replace(one, fix=fix(one), no_fix="") if one in removed else one for one in result.findings
    )


def _changes_contract(before: Recipe, after: Recipe) -> bool:
    contract = [key for key, info in recipe_fields().items() if info.kind == "contract"]
    return any(field_value(before, key) != field_value(after, key) for key in contract)
