"""Suggest QLoRA where an adapter training does not fit: the same adapters on base weights in four bits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from meshwright import costs, rules
from meshwright.planner.baseline import Baseline
from meshwright.planner.plan import Suggestion
from meshwright.planner.search import LAYOUT_NAMES, Candidate, always_broken, best
from meshwright.recipes.case import Case
from meshwright.recipes.format_override import format_override
from meshwright.recipes.overrides import apply
from meshwright.rules.evaluate import message

TITLE = "QLoRA"


def qlora_suggestion(baseline: Baseline, case: Case, estimate: costs.Estimate) -> Iterable[Suggestion]:
    """Yield QLoRA for adapters that do not fit, with its own layout and estimate, or why it does not help."""
    if case.goal != "peft" or case.method == "qlora" or bool(estimate.fits):
        return
    recipe = baseline.requested
    four_bit = msgspec.structs.replace(recipe, peft=msgspec.structs.replace(recipe.peft, method="qlora"))
    tried = baseline.case.rebuild(four_bit)
    found = best(tried, baseline.pinned)
    if found is None:
        yield Suggestion(TITLE, (), f"4-bit base weights are not supported here: {_why_not(tried, case)}")
        return
    overrides = _overrides(found, case)
    price = costs.estimate(case.rebuild(apply(case.recipe, overrides)))
    total, capacity = float(price.memory.total), float(case.capacity_gib)
    if bool(price.fits):
        why = f"base weights in 4 bits: an estimated {total:.1f} of {capacity:.1f} GiB per GPU"
        yield Suggestion(TITLE, overrides, f"{why} instead of {float(estimate.memory.total):.1f}")
    else:
        yield Suggestion(TITLE, (), f"4-bit base weights do not fit either: {total:.1f} of {capacity:.1f} GiB per GPU")


def _overrides(found: Candidate, case: Case) -> tuple[str, ...]:
    changed: dict[str, Any] = {n: found.layout[n] for n in LAYOUT_NAMES if found.layout[n] != getattr(case, n)}
    return ("peft.method=qlora", *(format_override(f"layout.{name}", value) for name, value in changed.items()))


def _why_not(tried: Case, case: Case) -> str:
    """Return the first rule that 4-bit base weights break in every layout."""
    broken = sorted(always_broken(tried) - always_broken(case))
    reasons = [message(rules.RULES[id], tried) for id in broken]
    return reasons[0] if reasons else "no layout of this cluster supports them"
