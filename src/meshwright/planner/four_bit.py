"""Suggest QLoRA where an adapter training does not fit: the same adapters on base weights in four bits."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright import costs, rules
from meshwright.planner.baseline import Baseline
from meshwright.planner.levers import changed_contract, with_levers
from meshwright.planner.plan import Suggestion
from meshwright.planner.search import Candidate, always_broken, as_overrides, best, changed_values
from meshwright.recipes.case import Case
from meshwright.recipes.overrides import apply
from meshwright.rules.evaluate import message
from meshwright.rules.memory import LIKELY

TITLE = "QLoRA"


def qlora_suggestion(baseline: Baseline, case: Case, estimate: costs.Estimate) -> Iterable[Suggestion]:
    """Yield QLoRA for adapters that may not fit on the GPUs, with its own layout and estimate, or why it does not help.

    That includes plans which fit only because frozen weights are kept in host memory.
    """
    resident = baseline.requested.layout.offload == case.offload
    fits = bool(estimate.fits) and resident
    if case.goal != "peft" or case.method == "qlora" or (fits and bool(estimate.memory.fit_probability >= LIKELY)):
        return
    four_bit = changed_contract(baseline, {"peft.method": "qlora"})
    if four_bit is None:
        return
    tried = four_bit.case
    found = best(tried, baseline.pinned)
    if found is None and fits:
        return
    if found is None:
        yield Suggestion(TITLE, (), f"4-bit base weights are not supported here: {_why_not(tried, case)}")
        return
    if not bool(estimate.fits):
        found = with_levers(tried, baseline.pinned, found)
    overrides = _overrides(found, case)
    price = costs.estimate(case.rebuild(apply(case.recipe, overrides)))
    total, capacity = float(price.memory.total), float(case.capacity_gib)
    if fits and not bool(price.memory.fit_probability >= LIKELY):
        return
    if bool(price.fits):
        why = f"base weights in 4 bits: an estimated {total:.1f} of {capacity:.1f} GiB per GPU"
        step = f", {float(price.step_s):.3g} s per step"
        yield Suggestion(TITLE, overrides, f"{why} instead of {float(estimate.memory.total):.1f}{step}")
    else:
        yield Suggestion(TITLE, (), f"4-bit base weights do not fit either: {total:.1f} of {capacity:.1f} GiB per GPU")


def _overrides(found: Candidate, case: Case) -> tuple[str, ...]:
    return ("peft.method=qlora", *as_overrides(changed_values(found.layout, case)))


def _why_not(tried: Case, case: Case) -> str:
    """Return the first rule that 4-bit base weights break in every layout."""
    broken = sorted(always_broken(tried) - always_broken(case))
    reasons = [message(rules.RULES[id], tried) for id in broken]
    return reasons[0] if reasons else "no layout of this cluster supports them"
