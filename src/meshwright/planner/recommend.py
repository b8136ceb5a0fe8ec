"""From a question to a plan: find the recipe, size it to the cluster, price it, judge it, say what changed and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from meshwright import costs, rules
from meshwright.clusters import Cluster, cluster
from meshwright.errors import InputError
from meshwright.models import ModelSpec
from meshwright.planner.explain import why_changed
from meshwright.planner.match import StartKind, starting_recipe
from meshwright.planner.plan import Change, Match, Plan, Question
from meshwright.planner.scaling import offers
from meshwright.planner.search import KEEP_WITHIN, LAYOUT_NAMES, any_legal, best
from meshwright.recipes import overrides as override
from meshwright.recipes.case import Case, model_of
from meshwright.recipes.types import Recipe, Strategy, recipe_fields

ENGINE_STRATEGY: dict[str, Strategy] = {"megatron": "zero1"}
"""What an engine has in the place of fsdp2."""
COUNTS_OFFERED = 3


class Start(msgspec.Struct, frozen=True):
    """Where sizing begins: the recipe found, what was asked of it, and what the user fixed."""

    question: Question
    base: Recipe
    kind: StartKind
    asked: Recipe
    case: Case
    pinned: dict[str, Any]  # layout values by flat name
    by_user: frozenset[str]  # keys


def recommend(question: Question, overrides: Sequence[str] = ()) -> Plan:
    """The plan for a question; layout overrides are kept as given and the rest is sized around them."""
    start = layout_search(question, overrides)
    return plan_with(start, sized_layout(start.case, start.pinned))


def exactly(question: Question, recipe: Recipe | None, overrides: Sequence[str] = ()) -> Plan:
    """The plan of exactly this recipe (or of the question's own) with overrides, its layout not searched."""
    start = layout_search(question, overrides, recipe)
    return plan_with(start, {})


def layout_search(question: Question, overrides: Sequence[str] = (), recipe: Recipe | None = None) -> Start:
    """The starting point for a question: its recipe (or the given one) bound to the cluster, overrides applied."""
    kind: StartKind = "own"
    base = recipe
    if base is None:
        base, kind = starting_recipe(question)
    asked, log = override.apply_with_log(bound(base, question), list(overrides))
    model = model_of(asked) if any(c.key.startswith("architecture.") for c in log) else question.model
    pinned = {recipe_fields()[c.key].flat: c.new for c in log if c.key.startswith("layout.")}
    case = case_of(asked, model, question.cluster, question.engine)
    return Start(question, base, kind, asked, case, pinned, frozenset(c.key for c in log))


def plan_with(start: Start, layout: dict[str, Any]) -> Plan:
    """The plan that runs this layout, priced and judged."""
    recipe = with_layout(start.asked, layout)
    case = case_of(recipe, start.case.model, start.question.cluster, start.question.engine)
    changes = changes_between(start.base, recipe, case, start.by_user)
    return Plan(
        question=start.question,
        base=start.base,
        recipe=recipe,
        match=_match(start, changes),
        case=case,
        estimate=costs.estimate(case),
        changes=changes,
        findings=tuple(rules.judge(case)),
        offers=offers(start.base, _dp_of(start.base), case),
    )


def case_of(recipe: Recipe, model: ModelSpec, on: Cluster, engine: Any = "meshwright") -> Case:
    """A case whose memory can be asked for, so that memory rules speak too."""
    return Case(recipe, model, on, engine, memory_of=costs.memory)


def on_engine(recipe: Recipe, engine: str) -> Recipe:
    """The recipe with its default sharding in the engine's own kind."""
    if recipe.layout.strategy != "fsdp2" or engine not in ENGINE_STRATEGY:
        return recipe
    return msgspec.structs.replace(
        recipe, layout=msgspec.structs.replace(recipe.layout, strategy=ENGINE_STRATEGY[engine])
    )


def bound(base: Recipe, question: Question) -> Recipe:
    """The recipe for the question's model, cluster, sequence length and engine, layout otherwise untouched."""
    made = on_engine(base, question.engine)
    return msgspec.structs.replace(
        made,
        model=question.model_ref,
        cluster=str(question.cluster),
        data=msgspec.structs.replace(base.data, seq_length=question.seq_length or base.data.seq_length),
        layout=msgspec.structs.replace(made.layout, dp_shard=-1),
    )


def sized_layout(case: Case, pinned: dict[str, Any]) -> dict[str, Any]:
    """Layout values by flat name: the recipe's own when they stand the comparison, else the best that fit."""
    own = {name: getattr(case, name) for name in LAYOUT_NAMES}
    found = best(case, pinned)
    if found is None:
        if pinned or any_legal(case):  # the user's own numbers are judged, not replaced
            return own
        raise _no_layout(case)
    if bool(rules.legal(case)):
        price = costs.estimate(case)
        if bool(price.fits) and float(price.step_s) <= KEEP_WITHIN * found.step_s:
            return own
    return found.layout


def with_layout(recipe: Recipe, layout: dict[str, Any]) -> Recipe:
    """The recipe with these layout values."""
    return msgspec.structs.replace(recipe, layout=msgspec.structs.replace(recipe.layout, **layout))


def _no_layout(case: Case) -> InputError:
    near = [str(n) for n in nearest_counts(case)]
    gpu, world = case.cluster.gpu.name, case.cluster.world
    blocking = sorted(rules.illegal_by_rule(case))
    return InputError(
        f"no layout divides {world} GPUs for this recipe (global batch {case.global_batch_size}, {case.heads} heads, "
        f"{case.layers} layers; refused by {', '.join(blocking) or 'all splits'}); counts that work: {', '.join(near)}",
        field="gpus",
        value=str(case.cluster),
        fix=tuple(f"--gpus {n}x{gpu}" for n in near),
    )


def nearest_counts(case: Case, most: int = COUNTS_OFFERED) -> list[int]:
    """GPU counts near the asked one for which some layout is legal."""
    world, found = case.cluster.world, []
    for away in range(1, 4 * world + 8):
        for count in (world - away, world + away):
            if count >= 1 and any_legal(_on(case, count)):
                found.append(count)
        if len(found) >= most:
            break
    return sorted(found[:most])


def _on(case: Case, count: int) -> Case:
    return Case(case.recipe, case.model, cluster(f"{count}x{case.cluster.gpu.name}"), case.engine)


def smallest_fit(plan: Plan, most: int = 16384) -> int | None:
    """The smallest count, doubling from the asked one, on which this training fits."""
    count = plan.case.cluster.world
    while (count := count * 2) <= most:
        found = best(_on(plan.case, count), {})
        if found is not None and found.fits:
            return count
    return None


def changes_between(base: Recipe, recipe: Recipe, case: Case, by_user: frozenset[str]) -> tuple[Change, ...]:
    """Every field that differs from the starting recipe, with its kind and reason."""
    found = []
    for key, info in recipe_fields().items():
        section, name = key.split(".")
        old, new = getattr(getattr(base, section), name), getattr(getattr(recipe, section), name)
        if old != new:
            found.append(Change(key, old, new, info.kind, _why(key, old, case, by_user)))
    return tuple(found)


def _why(key: str, old: Any, case: Case, by_user: frozenset[str]) -> str:
    info = recipe_fields()[key]
    if key in by_user or key == "data.seq_length":
        return "asked for" + ("; a new experiment" if info.kind == "contract" else "")
    if key == "layout.strategy":
        return f"what the {case.engine} engine makes of {old}"
    return why_changed(case, info.flat, old)


def _match(start: Start, changes: tuple[Change, ...]) -> Match:
    if start.kind != "own":
        return start.kind
    made_for, on = cluster(start.base.cluster), start.question.cluster
    same_gpus = (made_for.world, made_for.gpu.name) == (on.world, on.gpu.name)
    return "exact" if same_gpus and not changes else "resized"


def _dp_of(base: Recipe) -> int:
    return int(Case(base, model_of(base), cluster(base.cluster)).dp)
