"""What Megatron-Bridge runs for a plan, or why it cannot."""

from __future__ import annotations

import msgspec

from meshwright import rules
from meshwright.frameworks.megatron_bridge import bridge_recipes
from meshwright.frameworks.megatron_bridge.settings import difference, on_megatron
from meshwright.frameworks.megatron_bridge.write import on_top, run_words
from meshwright.frameworks.types import Program
from meshwright.planner import Plan, case_of, with_engine_strategy
from meshwright.recipes.types import Recipe

DERIVES = ("layout.strategy", "layout.pp_schedule", "layout.dp_shard", "kernels.loss")
"""What Megatron-Bridge works out by itself: there is no key to set."""


def why_not(plan: Plan) -> str | None:
    """Why Megatron-Bridge cannot run this plan as it is, or None when it can."""
    row = _row(plan)
    if row is None or row.raises or plan.recipe.model != plan.base.model:
        return "it has no recipe for this"
    if plan.question.engine not in ("meshwright", "megatron"):
        return f"the plan was made for the {plan.question.engine} engine"
    if plan.recipe.layout.strategy == "megatron_fsdp":
        return "it has no single key for layout.strategy"
    changed = {change.field for change in plan.changes} - set(DERIVES)
    lost = difference(_recipe(plan), plan.case.model, row).unmapped
    unmapped = [one.field for one in lost if one.field in changed]
    if unmapped:
        return f"it has no single key for {', '.join(unmapped)}"
    case = case_of(with_engine_strategy(plan.recipe, "megatron"), plan.case.model, plan.case.cluster, "megatron")
    broken = [r for r in rules.applicable(case, ("error",)) if bool(r.broken(case))]
    return rules.message(broken[0], case) + " there; ask with --engine megatron" if broken else None


def _row(plan: Plan) -> bridge_recipes.Upstream | None:
    return bridge_recipes.find(plan.base.name) or bridge_recipes.find(plan.base.name.lower())


def _recipe(plan: Plan) -> Recipe:
    return msgspec.structs.replace(on_megatron(plan.recipe), name=plan.base.name)


def program(plan: Plan) -> Program:
    """What Megatron-Bridge runs for the plan, in today's spelling."""
    row = _row(plan)
    if row is None:
        raise ValueError(f"Megatron-Bridge has no recipe {plan.base.name}")
    recipe = _recipe(plan)
    setting = on_top(recipe, plan.case.model, plan.question.cluster, row)
    return Program(tuple(run_words(recipe, row, setting.settings)))
