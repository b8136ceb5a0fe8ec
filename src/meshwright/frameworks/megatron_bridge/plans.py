"""The Megatron-Bridge program for a plan, or why there is none."""

from __future__ import annotations

import msgspec

from meshwright import rules
from meshwright.frameworks.megatron_bridge import bridge_recipes
from meshwright.frameworks.megatron_bridge.settings import difference, with_distributed_optimizer
from meshwright.frameworks.megatron_bridge.write import program_of, recipe_overrides, runner_argv
from meshwright.frameworks.types import Program
from meshwright.models import same_model
from meshwright.planner import Plan, case_of, with_engine_strategy
from meshwright.recipes.overrides import change
from meshwright.recipes.types import Recipe, field_value

DERIVED_FIELDS = ("layout.strategy", "layout.pp_schedule", "layout.dp_shard", "layout.defer_grad_sync", "kernels.loss")
"""Fields that Megatron-Bridge derives; there is no key to set."""


def unsupported_reason(plan: Plan) -> str | None:
    """Return why Megatron-Bridge cannot run this plan, or None."""
    row = _row(plan)
    if row is None or row.raises or not same_model(plan.recipe.model, plan.base.model):
        return "it has no recipe for this model and goal"
    if plan.question.engine not in ("meshwright", "megatron"):
        return f"the plan is for the {plan.question.engine} engine"
    if plan.recipe.layout.strategy == "megatron_fsdp":
        return "it has no single key for layout.strategy"
    changed = {one.field for one in plan.changes} - {*DERIVED_FIELDS, *plan.executed}
    lost = difference(_recipe(plan), plan.case.model, row).unmapped
    unmapped = [one.field for one in lost if one.field in changed]
    if unmapped:
        return f"it has no single key for {', '.join(unmapped)}"
    case = case_of(
        with_engine_strategy(_published_kernels(plan), "megatron"), plan.case.model, plan.case.cluster, "megatron"
    )
    broken = [r for r in rules.applicable(case, ("error",)) if bool(r.broken(case))]
    return rules.message(broken[0], case) + " there; ask with --engine megatron" if broken else None


def _row(plan: Plan) -> bridge_recipes.BridgeRecipe | None:
    return bridge_recipes.find(plan.base.name) or bridge_recipes.find(plan.base.name.lower())


def _recipe(plan: Plan) -> Recipe:
    return msgspec.structs.replace(with_distributed_optimizer(_published_kernels(plan)), name=plan.base.name)


def _published_kernels(plan: Plan) -> Recipe:
    """Return the plan's recipe with the published values of fields that only the plan's engine ignores."""
    return change(plan.recipe, {key: field_value(plan.base, key) for key in plan.executed})[0]


def program(plan: Plan) -> Program:
    """Return the Megatron-Bridge program for a plan."""
    row = _row(plan)
    if row is None:
        raise ValueError(f"Megatron-Bridge has no recipe {plan.base.name}")
    recipe = _recipe(plan)
    changes = recipe_overrides(recipe, plan.case.model, plan.question.cluster, row)
    return program_of(runner_argv(recipe, row, changes.settings), recipe, plan.case.model)
