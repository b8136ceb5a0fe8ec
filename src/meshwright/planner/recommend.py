"""From a question to a plan: find the recipe, size it to the cluster, price it, judge it, say what changed and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from meshwright import costs, rules
from meshwright.planner.baseline import ENGINE_STRATEGY, Baseline, baseline_for
from meshwright.planner.divisors import no_layout
from meshwright.planner.explain import why_changed
from meshwright.planner.plan import Change, Match, Plan, Question, Suggestion
from meshwright.planner.scaling import suggestions
from meshwright.planner.search import KEEP_WITHIN, LAYOUT_NAMES, Candidate, always_broken, any_legal, best, is_roomy
from meshwright.recipes import overrides as override
from meshwright.recipes.case import Case
from meshwright.recipes.format_override import spell
from meshwright.recipes.types import Recipe, recipe_fields
from meshwright.rules import Finding

ARITHMETIC = {*LAYOUT_NAMES, "global_batch_size"}
"""Fields whose rules speak of degrees and batches: when those block everything, it is the GPU count that is wrong."""
WORTH_OFFERING = 0.95  # of the kept layout's step time
WORTH_ADVISING = 0.99


def recommend(question: Question, overrides: Sequence[str] = ()) -> Plan:
    """The plan for a question; layout overrides are kept as given and the rest is sized around them."""
    start = baseline_for(question, overrides)
    found = best(start.case, start.pinned)
    if found is None:
        return plan_with(start, _without_legal_layout(start))
    if keeps_own(start, found):
        return plan_with(start, {}, faster=found)
    return plan_with(start, {**found.layout, **start.pinned})


def plan_fixed(question: Question, recipe: Recipe | None, overrides: Sequence[str] = ()) -> Plan:
    """The plan of exactly this recipe (or of the question's own) with overrides, its layout not searched."""
    return plan_with(baseline_for(question, overrides, recipe), {})


def keeps_own(start: Baseline, found: Candidate) -> bool:
    """Whether the recipe's layout stays: always on the cluster it was made for, elsewhere when it is about as good."""
    if not bool(rules.legal(start.case)):
        return False
    price = costs.estimate(start.case)
    if not bool(price.fits):
        return False
    if start.at_home:
        return True
    roomy = is_roomy(float(price.memory.total), start.case)
    return float(price.step_s) <= KEEP_WITHIN * found.step_s and (roomy or not found.roomy)


def _without_legal_layout(start: Baseline) -> dict[str, Any]:
    """The layout to show with its findings when none is legal; a count that nothing divides is an error instead."""
    blocking = {id for id in always_broken(start.case) if rules.RULES[id].field not in ARITHMETIC}
    found = best(start.case, start.pinned, blocking) if blocking else None
    if found is not None:
        return {**found.layout, **start.pinned}
    if start.pinned and any_legal(start.case):  # the user's own numbers are judged, not replaced
        return {}
    raise no_layout(start.case)


def plan_with(start: Baseline, layout: Mapping[str, Any], faster: Candidate | None = None) -> Plan:
    """The plan that runs this layout, priced and judged; empty keeps the recipe's own."""
    recipe = with_layout(start.asked, layout)
    case = start.case.renewed(recipe)
    estimate = costs.estimate(case)
    changes = changes_between(start, recipe, case)
    return Plan(
        question=start.question,
        base=start.base,
        recipe=recipe,
        match=_match(start, changes),
        case=case,
        estimate=estimate,
        changes=changes,
        findings=tuple(_weighed(rules.judge(case), case, float(estimate.step_s))),
        suggestions=(*_faster_layout(case, estimate, faster), *suggestions(start.base, start.base_cluster.world, case)),
    )


def with_layout(recipe: Recipe, layout: Mapping[str, Any]) -> Recipe:
    """The recipe with these layout values."""
    return msgspec.structs.replace(recipe, layout=msgspec.structs.replace(recipe.layout, **layout))


def _weighed(findings: Iterable[Finding], case: Case, step_s: float) -> Iterable[Finding]:
    """Advice stays when following it is really faster and leaves room; a warning stays, its fix only then."""
    for finding in findings:
        of_memory = finding.rule.startswith("memory.") and finding.severity == "warning"
        about_layout = bool(finding.fix) and all(key.startswith("layout.") for key in finding.fix)
        if finding.severity == "error" or of_memory or not about_layout or _helps(finding, case, step_s):
            yield finding
        elif finding.severity == "warning":
            yield msgspec.structs.replace(finding, fix=())


def _helps(finding: Finding, case: Case, step_s: float) -> bool:
    price = costs.estimate(case.renewed(override.apply(case.recipe, finding.fix)))
    roomy = is_roomy(float(price.memory.total), case)
    return roomy and float(price.step_s) <= WORTH_ADVISING * step_s


def _faster_layout(case: Case, estimate: costs.Estimate, faster: Candidate | None) -> Iterable[Suggestion]:
    """The layout our estimate would rather have than the kept one, when it is worth a try."""
    if faster is None or not faster.roomy or faster.step_s > WORTH_OFFERING * float(estimate.step_s):
        return
    different = {name: faster.layout[name] for name in LAYOUT_NAMES if faster.layout[name] != getattr(case, name)}
    gain = 1 - faster.step_s / float(estimate.step_s)
    why = f"by our estimate {gain:.0%} less time per step at {faster.total_gib:.0f} GiB; the published layout was kept"
    yield Suggestion(
        "a faster layout", tuple(spell(f"layout.{n}", v) for n, v in different.items()), why, kind="layout"
    )


def changes_between(start: Baseline, recipe: Recipe, case: Case) -> tuple[Change, ...]:
    """Every field that differs from the starting recipe, with its kind and reason."""
    found = []
    for key, info in recipe_fields().items():
        section, name = key.split(".")
        old, new = getattr(getattr(start.base, section), name), getattr(getattr(recipe, section), name)
        if old != new:
            why = start.reasons.get(key) or _why(info.flat, old, case)
            found.append(Change(key, old, new, info.kind, why))
    return tuple(found)


def _why(name: str, old: Any, case: Case) -> str:
    if name == "strategy" and ENGINE_STRATEGY.get(case.engine) == case.strategy:
        return f"what the {case.engine} engine makes of {old}"
    return why_changed(case, name, old)


def _match(start: Baseline, changes: tuple[Change, ...]) -> Match:
    if start.kind != "own":
        return start.kind
    return "exact" if start.same_gpus and not changes else "resized"
