"""Plan a question: find the recipe, size it to the cluster, estimate and check it, explain the changes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from meshwright import costs, rules
from meshwright.errors import InputError
from meshwright.planner.baseline import Baseline, baseline_for
from meshwright.planner.blocked import least_broken, without_pins
from meshwright.planner.divisors import no_layout
from meshwright.planner.explain import why_adapted, why_changed
from meshwright.planner.faster_step import FAST_FIELDS, fast_values, faster_step
from meshwright.planner.fewer_nodes import fewer_nodes, is_worth
from meshwright.planner.fewer_nodes import title as fewer_title
from meshwright.planner.fewer_nodes import why as why_fewer
from meshwright.planner.findings import examine, held_in_a_search
from meshwright.planner.four_bit import qlora_suggestion
from meshwright.planner.levers import (
    fits_with_levers,
    may_fit,
    options_for,
    options_of_fixed,
    with_levers,
    without_offload,
)
from meshwright.planner.micro_batch import with_fastest_micro_batch, with_freed_memory
from meshwright.planner.missing_fixes import note_no_layout_fix
from meshwright.planner.plan import Change, Contradiction, Match, Plan, Question, Suggestion
from meshwright.planner.published import keeps_recipe_layout, published_layout
from meshwright.planner.repair import contradiction, error_messages
from meshwright.planner.rivals import with_fastest_degrees
from meshwright.planner.scaling import divisible_batches, halved_batches, lr_of_shifted_batch, suggestions
from meshwright.planner.search import (
    LAYOUT_NAMES,
    SEARCHED_NAMES,
    Candidate,
    always_broken,
    any_fits,
    any_legal,
    as_overrides,
    best,
    changed_values,
    has_headroom,
)
from meshwright.planner.sharded_state import sharded_state, with_sharded_state
from meshwright.recipes import overrides as override
from meshwright.recipes.capabilities import ENGINE_STRATEGY, adapted
from meshwright.recipes.case import Case
from meshwright.recipes.types import Recipe, field_value, keys_by_flat_name, recipe_fields

ARITHMETIC = {*LAYOUT_NAMES, "global_batch_size"}
"""Fields whose rules concern divisibility: if only these block every layout, the GPU count is wrong."""
OF_ONE_VALUE = "ranges."  # rules on a value that is wrong in every layout, also the batch
SUGGEST_BELOW = 0.95  # of the kept layout's step time
STEPS = "train.steps"
NO_OFFLOAD = "layout.offload=none"
StepsOfPlan = Callable[[Plan], int | None]
"""Returns how many steps a plan trains; None if it has as many."""


class _Found(NamedTuple):
    """The best layout of a search, and the same with what makes it fit or faster."""

    best: Candidate
    chosen: Candidate


def recommend(
    question: Question, overrides: Sequence[str] = (), recipe: Recipe | None = None, steps: StepsOfPlan | None = None
) -> Plan:
    """Return the plan for a question, or for a recipe with its contract.

    Layout overrides stay fixed and the rest is sized around them. `steps` returns how many steps a plan of this batch
    and speed trains, None for its own; with train.steps among the overrides, only its repair is counted.
    """
    baseline = baseline_for(question, overrides, recipe)
    found = _search(baseline)
    counts = steps is not None and found is not None and STEPS not in baseline.reasons
    count = steps(_planned(baseline, found, overrides, advised=False)) if steps and counts else None
    if count is not None:  # the search is not repeated: neither rules nor costs of a layout depend on the steps
        overrides = (*overrides, f"train.steps={count}")
        baseline = baseline_for(question, overrides, recipe)
    plan = _with_sharded_state(baseline, _planned(baseline, found, overrides))
    other = replanned(plan, question, overrides, recipe, steps)
    if plan.repair is None or other is None:
        return plan
    left = {f.rule for f in other.findings if f.severity == "warning"}
    repair = msgspec.structs.replace(
        plan.repair,
        removes=tuple(f.rule for f in plan.findings if f.severity != "advice" and f.rule not in left),
        leaves=tuple(sorted(left)),
    )
    return with_replanned(msgspec.structs.replace(plan, repair=repair), other)


def planned(baseline: Baseline, overrides: Sequence[str]) -> Plan | None:
    """Return the layout that is recommended for a baseline, estimated and checked; None if no layout is legal."""
    found = _search(baseline)
    return None if found is None else _planned(baseline, found, overrides)


def plan_without_advice(question: Question, overrides: Sequence[str] = ()) -> Plan:
    """Return the layout that is recommended for a question, as in `recommend`, without suggestions, options and fixes.

    A repair is looked for only where it may lead to a layout that fits.
    """
    baseline = baseline_for(question, overrides)
    found, case = _search(baseline), baseline.case
    repairs = found is None or (not found.chosen.fits and (may_fit(case) or may_fit(case, offloads=True)))
    return _planned(baseline, found, overrides, advised=False, fixes=repairs)


def fits_without_offload(question: Question, overrides: Sequence[str] = ()) -> bool:
    """Return whether a layout fits that keeps everything on the GPUs."""
    baseline = baseline_for(question, (*overrides, NO_OFFLOAD))
    case, pinned = baseline.case, baseline.pinned
    return any_fits(case, pinned) or fits_with_levers(case, pinned, offloads=False)


def replanned(
    plan: Plan, question: Question, overrides: Sequence[str], recipe: Recipe | None, steps: StepsOfPlan | None = None
) -> Plan | None:
    """Return the plan that the repair's overrides give when typed: the rest is sized anew; None if it cannot run.

    `steps` are those of `recommend`: another batch or speed takes another number of steps.
    """
    if plan.repair is None:
        return None
    try:
        typed = override.merged(overrides, plan.repair.overrides)
        baseline = baseline_for(question, typed, recipe)
        found = _search(baseline)
        other = _planned(baseline, found, typed, advised=False)
        count = None if steps is None else steps(other)
        if count is not None:
            typed = override.merged(typed, (f"{STEPS}={count}",))
            baseline = baseline_for(question, typed, recipe)
            other = _planned(baseline, found, typed, advised=False)
    except InputError:
        return None
    if not other.ok:
        return None
    reasons = dict.fromkeys(recipe_fields(), "the repair")
    return msgspec.structs.replace(other, changes=changes_between(baseline, other.recipe, other.case, reasons))


def with_replanned(plan: Plan, other: Plan) -> Plan:
    """Return the plan with the figures of its repair, planned as `other`, which its commands run.

    A repair that replaces a setting of the user is not run without being asked for.
    """
    if plan.repair is None:
        return plan
    price, runs = other.estimate, plan.ok and not plan.repair.undoes
    repair = msgspec.structs.replace(
        plan.repair, step_s=float(price.step_s), total_gib=float(price.memory.total), planned=runs
    )
    return msgspec.structs.replace(plan, repair=repair, repaired=other if runs else None)


def _search(baseline: Baseline) -> _Found | None:
    found = best(baseline.case, baseline.pinned)
    if found is None:
        return None
    return _Found(found, with_fastest_degrees(baseline, with_levers(baseline.case, baseline.pinned, found)))


def _planned(
    baseline: Baseline, found: _Found | None, overrides: Sequence[str], advised: bool = True, fixes: bool = True
) -> Plan:
    """Return the plan of a search; its repair has the figures of this plan with nothing else changed.

    Without `advised` it has layout, estimate and findings, but neither changes nor suggestions and options; without
    `fixes`, findings have none.
    """
    if found is None:
        plan = plan_with(baseline, _fallback_layout(baseline), advised=advised)
        conflict = _contradiction(baseline.question, overrides) if advised else None
        return msgspec.structs.replace(plan, contradiction=conflict)
    chosen = found.chosen
    if keeps_recipe_layout(baseline, chosen):
        return plan_with(baseline, {}, faster=chosen, advised=advised, fixes=fixes)
    batch = _batch_that_divides(baseline, chosen) if chosen.fits and advised else ()
    layout = {**chosen.layout, **baseline.pinned}
    plan = plan_with(baseline, layout, batch=batch, advised=advised, nothing_fits=not chosen.fits, fixes=fixes)
    if chosen.fits and advised:
        plan = _with_passed_over(with_fewer_nodes(baseline, plan), chosen)
    if not chosen.fits:
        plan, chosen = _repaired(baseline, plan, chosen)
    if found.best.fits or not advised:
        return plan
    return msgspec.structs.replace(plan, options=options_for(baseline, chosen, overrides))


def _with_sharded_state(baseline: Baseline, plan: Plan) -> Plan:
    """Return the plan with the suggestion of a sharded optimizer where its strategy shards nothing."""
    moved = with_sharded_state(baseline)
    if moved is None or not plan.ok:
        return plan
    sharded = _planned(moved, _search(moved), (), advised=False)
    return msgspec.structs.replace(plan, suggestions=(*sharded_state(plan, sharded), *plan.suggestions))


def _repaired(baseline: Baseline, plan: Plan, chosen: Candidate) -> tuple[Plan, Candidate]:
    """Return the plan with its repair if that is of layout kind, keeps what the user typed and leaves no error."""
    if plan.repair is None or plan.repair.contract:
        return plan, chosen
    change = override.requested(plan.recipe, plan.repair.overrides)
    values = {recipe_fields()[key].flat: value for key, value in change.items()}
    if values.keys() & _typed(baseline):
        return plan, chosen
    other = plan_with(baseline, {**chosen.layout, **baseline.pinned, **values})
    if not other.ok:
        return plan, chosen
    if (free := with_freed_memory(other.case, _typed(baseline))) != {}:  # the layout was chosen for less memory
        other = plan_with(baseline, {**chosen.layout, **baseline.pinned, **values, **free})
    layout = {name: getattr(other.case, name) for name in SEARCHED_NAMES}
    step_s, total = float(other.estimate.step_s), float(other.estimate.memory.total)
    return other, Candidate(layout, step_s, total, True, bool(has_headroom(total, other.case)))


def _contradiction(question: Question, overrides: Sequence[str]) -> Contradiction | None:
    """Return the overrides that cannot be combined: no layout has them all, but every smaller set has one."""

    def errors(chosen: Sequence[str]) -> list[str]:
        baseline = baseline_for(question, chosen)
        if any_legal(baseline.case, pinned=baseline.pinned):
            return []
        return error_messages(baseline.case.replace(**least_broken(baseline.case, baseline.pinned)))

    return contradiction(overrides, errors)


def plan_fixed(question: Question, recipe: Recipe | None, overrides: Sequence[str] = ()) -> Plan:
    """Return the plan of this recipe (or the question's) with overrides, without searching layouts.

    If it does not fit, its options say what would.
    """
    kept, auto = override.split_auto(overrides)
    baseline = baseline_for(question, kept, recipe)
    plan = plan_with(baseline, {}, chosen=False)
    if auto:
        size = with_fastest_micro_batch(plan.case).layout.micro_batch_size
        return plan_fixed(question, recipe, [*kept, f"{override.MICRO_BATCH}={size}"])
    if plan.estimate.fits or not plan.exists:
        return plan
    return msgspec.structs.replace(plan, options=options_of_fixed(baseline, overrides))


def _fallback_layout(baseline: Baseline) -> dict[str, Any]:
    """Return the layout to report if none is legal; raise if no layout divides the GPU count."""
    blocking = _blocking(baseline.case, ARITHMETIC - baseline.pinned.keys())
    found = best(baseline.case, baseline.pinned, blocking) if blocking else None
    if found is not None:
        return {**found.layout, **baseline.pinned}
    free = without_pins(baseline) if baseline.pinned else None
    if free is not None and any_legal(free, _blocking(free, ARITHMETIC)):
        return least_broken(baseline.case, baseline.pinned)  # report the user's values, do not replace them
    raise no_layout(baseline.case, blocking)


def _blocking(case: Case, arithmetic: Collection[str]) -> set[str]:
    """Return the error rules that every layout breaks, but for those of fields whose values follow from the GPUs."""
    broken = always_broken(case)
    return {id for id in broken if rules.RULES[id].field not in arithmetic or id.startswith(OF_ONE_VALUE)}


def plan_with(
    baseline: Baseline,
    layout: Mapping[str, Any],
    faster: Candidate | None = None,
    batch: Iterable[Suggestion] = (),
    chosen: bool = True,
    advised: bool = True,
    nothing_fits: bool = False,
    fixes: bool = True,
) -> Plan:
    """Return the plan with this layout, estimated and checked; an empty layout keeps the recipe's.

    Without `chosen` the layout is the user's: blocks are compiled as in any plan of a model, nothing else is set.
    Without `advised` it has neither changes nor suggestions, without `fixes` neither fixes nor a repair. `nothing_fits`
    says that the search found no layout.
    """
    recipe = with_layout(baseline.requested, layout)
    case = baseline.case.rebuild(recipe)
    executed = _newly_ignored(baseline, recipe, case) if chosen and layout else {}
    if executed:
        recipe = override.change(recipe, {key: value for key, (value, _why) in executed.items()})[0]
        case = baseline.case.rebuild(recipe)
    if quick := fast_values(baseline, case) if chosen else {}:
        recipe = with_layout(recipe, quick)
        case = baseline.case.rebuild(recipe)
    estimate = costs.estimate(case)
    reasons = {key: why for key, (_value, why) in executed.items()}
    changes = changes_between(baseline, recipe, case, reasons) if advised else ()
    if nothing_fits and not baseline.pinned and _same_search(baseline.case, case):
        note_no_layout_fix(case)
    findings, repair = tuple(rules.check(case, fixes=False)), None
    if fixes:
        question = baseline.question
        findings, repair = examine(case, _typed(baseline), stated=question.stated, options=question.options)
        findings = held_in_a_search(findings, case) if chosen else findings
    return Plan(
        question=baseline.question,
        base=baseline.base,
        recipe=recipe,
        match=_match(baseline, changes),
        case=case,
        estimate=estimate,
        changes=changes,
        findings=findings,
        repair=repair,
        suggestions=tuple(_suggestions(baseline, case, estimate, faster, batch)) if advised else (),
        published=published_layout(baseline, layout, case, float(estimate.step_s)) if advised else None,
        executed=(*baseline.executed, *executed, *_kernels_of_the_planner(baseline, recipe)),
    )


def _suggestions(
    baseline: Baseline, case: Case, estimate: costs.Estimate, faster: Candidate | None, batch: Iterable[Suggestion]
) -> Iterable[Suggestion]:
    yield from qlora_suggestion(baseline, case, estimate)
    yield from _faster_layout(case, estimate, faster)
    yield from faster_step(baseline, case, estimate)
    yield from batch
    made_for = baseline.base_cluster or baseline.question.cluster
    yield from suggestions(baseline.base, made_for.world, case, baseline.pinned, _typed(baseline))


def _same_search(case: Case, planned: Case) -> bool:
    """Return whether a search from the planned case tries what the search of the case tried."""
    kept = [name for name in keys_by_flat_name() if name not in LAYOUT_NAMES or name in ("strategy", "offload")]
    same = all(getattr(case, name, None) == getattr(planned, name, None) for name in kept)
    return same and without_offload(case, {}) == without_offload(planned, {})  # which loss is lean depends on degrees


def _newly_ignored(baseline: Baseline, recipe: Recipe, case: Case) -> dict[str, tuple[Any, str]]:
    """Return the fields that the engine ignores because of the chosen layout: by key, what runs instead and why.

    What the recipe or the user set for a layout without them is theirs; a chosen layout must not cause a warning.
    """
    keep = {keys_by_flat_name()[name] for name in _typed(baseline)}
    before = adapted(baseline.requested, baseline.case)
    return adapted(recipe, case, frozenset((*keep, *before)))


def _kernels_of_the_planner(baseline: Baseline, recipe: Recipe) -> tuple[str, ...]:
    """Return the keys of kernels that the planner chose."""
    keys = [keys_by_flat_name()[name] for name in FAST_FIELDS] if baseline.fast else []
    changed = [key for key in keys if field_value(recipe, key) != field_value(baseline.base, key)]
    return tuple(key for key in changed if key not in baseline.reasons)


def _typed(baseline: Baseline) -> set[str]:
    """Return the fields the user set, by flat name."""
    keys = (key for key, why in baseline.reasons.items() if why.startswith("requested"))
    return {*baseline.pinned, *(recipe_fields()[key].flat for key in keys)}


def with_layout(recipe: Recipe, layout: Mapping[str, Any]) -> Recipe:
    """Return the recipe with these layout values, by flat name."""
    keys = keys_by_flat_name()
    return override.change(recipe, {keys[name]: value for name, value in layout.items()})[0]


def _batch_that_divides(baseline: Baseline, found: Candidate) -> Iterable[Suggestion]:
    """Yield a batch near the recipe's whose best layout trains more samples per second than the layout found.

    Also one further away, with its learning rate, if that is much faster still.
    """
    train, world = baseline.requested.train, int(baseline.case.world)
    near = _faster_batch(baseline, found, divisible_batches(train.global_batch_size, world))
    far = _faster_batch(baseline, found, halved_batches(train.global_batch_size, world))
    shown = [near] if near is not None else []
    if far is not None and (near is None or far.per_sample < SUGGEST_BELOW * near.per_sample):
        shown.append(far)
    yield from (one.suggestion for one in shown)


class _FasterBatch(NamedTuple):
    """The suggestion of another batch, and the time of one of its samples."""

    suggestion: Suggestion
    per_sample: float


def _faster_batch(baseline: Baseline, found: Candidate, batches: Iterable[int]) -> _FasterBatch | None:
    """Return the fastest of some batches, if its gain over the layout found is worth a try."""
    train, scored = baseline.requested.train, []
    for batch in batches:
        one = best(_with_batch(baseline, batch).case, baseline.pinned, quick=True)
        if one is not None and one.has_headroom >= found.has_headroom and one.fits:
            scored.append((one.step_s / batch, batch))
    if not scored:
        return None
    per_sample, batch = min(scored)
    if 1 - per_sample * train.global_batch_size / found.step_s < 1 - SUGGEST_BELOW:  # no step time if it does not fit
        return None
    moved = _with_batch(baseline, batch)
    other = best(moved.case, baseline.pinned)  # all of the search, so that asking with this batch gives these figures
    if other is None:
        return None
    planned_s = _planned_step_s(moved, other) / batch
    gain = 1 - planned_s * train.global_batch_size / _planned_step_s(baseline, found)
    gained = f"estimated {gain:.0%} less time per token" if found.fits else "a layout fits with it"
    different = {name: other.layout[name] for name in SEARCHED_NAMES if other.layout[name] != found.layout[name]}
    overrides = [f"train.global_batch_size={batch}", *as_overrides(different)]
    rate = lr_of_shifted_batch(baseline.case, batch)
    if rate is not None and "lr" not in _typed(baseline):
        overrides.insert(1, f"optimizer.lr={rate:g}")
    why = (
        f"{gained}: {train.global_batch_size} divides into few layouts of "
        f"{int(baseline.case.world)} GPUs, {batch} into more"
    )
    return _FasterBatch(Suggestion("fit the batch to the GPUs", tuple(overrides), why), planned_s)


def with_fewer_nodes(baseline: Baseline, plan: Plan) -> Plan:
    """Return the plan with the suggestion of fewer nodes that are as fast or faster."""
    step_s = float(plan.estimate.step_s)
    found = fewer_nodes(baseline.case, step_s, baseline.pinned)
    if found is None:
        return plan
    smaller = found.case.cluster
    question = msgspec.structs.replace(baseline.question, cluster=smaller)
    moved = msgspec.structs.replace(baseline, question=question, case=found.case)
    other = plan_with(moved, dict(found.layout.layout), advised=False)
    other_s = float(other.estimate.step_s)
    if not is_worth(smaller.nodes, baseline.case.cluster.nodes, other_s / step_s):
        return plan
    text = why_fewer(baseline.case, smaller, step_s, other_s)
    hint = Suggestion(fewer_title(other_s / step_s), (), text, kind="layout")
    return msgspec.structs.replace(plan, suggestions=(hint, *plan.suggestions), fewer_nodes=other)


def _with_batch(baseline: Baseline, batch: int) -> Baseline:
    """Return the baseline with another global batch."""
    train = msgspec.structs.replace(baseline.requested.train, global_batch_size=batch)
    requested = msgspec.structs.replace(baseline.requested, train=train)
    return msgspec.structs.replace(baseline, requested=requested, case=baseline.case.rebuild(requested))


def _planned_step_s(baseline: Baseline, found: Candidate) -> float:
    """Return the step time of the plan with a layout: its loss and gathering are chosen after the search."""
    return float(plan_with(baseline, {**found.layout, **baseline.pinned}, advised=False).estimate.step_s)


def _with_passed_over(plan: Plan, chosen: Candidate) -> Plan:
    """Return the plan with the suggestion of the faster layout that may not fit, if one was passed over."""
    if chosen.faster is None:
        return plan
    gain = 1 - chosen.faster.step_s / chosen.step_s
    if round(gain, 2) <= 0:
        return plan
    why = f"estimated {gain:.0%} less step time at {chosen.faster.total_gib:.0f} GiB, which may not fit"
    different = as_overrides(changed_values(chosen.faster.layout, plan.case))
    hint = Suggestion("a faster layout", different, why, kind="layout")
    return msgspec.structs.replace(plan, suggestions=(*plan.suggestions, hint)) if different and gain > 0 else plan


def _faster_layout(case: Case, estimate: costs.Estimate, faster: Candidate | None) -> Iterable[Suggestion]:
    """Yield the faster layout of the search if the recipe's layout was kept and the gain is worth a try."""
    if faster is None or not faster.has_headroom or faster.step_s > SUGGEST_BELOW * float(estimate.step_s):
        return
    different = changed_values(faster.layout, case)
    gain = 1 - faster.step_s / float(estimate.step_s)
    why = f"estimated {gain:.0%} less step time at {faster.total_gib:.0f} GiB; the published layout was kept"
    yield Suggestion("a faster layout", as_overrides(different), why, kind="layout")


def changes_between(
    baseline: Baseline, recipe: Recipe, case: Case, reasons: Mapping[str, str] | None = None
) -> tuple[Change, ...]:
    """Return every field that differs from the base recipe, with its kind and reason."""
    found, known = [], {**(reasons or {}), **baseline.executed, **baseline.reasons}
    for key, info in recipe_fields().items():
        old, new = field_value(baseline.base, key), field_value(recipe, key)
        if old != new:
            why = known.get(key) or _why(info.flat, old, case, baseline.base)
            if key in baseline.adapted:
                why = why_adapted(case, info.flat, old, why)
            found.append(Change(key, old, new, info.kind, why))
    return tuple(found)


def _why(name: str, old: Any, case: Case, base: Recipe) -> str:
    if name == "strategy" and ENGINE_STRATEGY.get(case.engine) == case.strategy:
        return f"the {case.engine} equivalent of {old}"
    return why_changed(case, name, old, base.layout)


def _match(baseline: Baseline, changes: tuple[Change, ...]) -> Match:
    if baseline.source != "same_model":
        return baseline.source
    contract = [change for change in changes if change.kind == "contract"]
    return "exact" if baseline.on_reference_cluster and not contract else "resized"
