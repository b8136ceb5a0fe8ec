"""The Megatron-Bridge program for a plan, or why there is none."""

from __future__ import annotations

import msgspec

from meshwright import rules
from meshwright.errors import InputError
from meshwright.frameworks.megatron_bridge import bridge_recipes
from meshwright.frameworks.megatron_bridge.settings import difference, with_distributed_optimizer
from meshwright.frameworks.types import Program
from meshwright.models import same_model
from meshwright.planner import Plan, case_of, with_engine_strategy
from meshwright.recipes.case import Case
from meshwright.recipes.format_override import format_override
from meshwright.recipes.overrides import change, with_minimum
from meshwright.recipes.types import Recipe, field_value

DERIVED_FIELDS = ("layout.strategy", "layout.pp_schedule", "layout.dp_shard", "layout.defer_grad_sync", "kernels.loss")
"""Fields that Megatron-Bridge derives; there is no key to set."""


def unsupported_reason(plan: Plan) -> str | None:
    """Return why Megatron-Bridge cannot run this plan, or None."""
    if plan.question.engine not in ("meshwright", "megatron"):
        return f"the plan is for the {plan.question.engine} engine"
    if plan.recipe.layout.strategy == "megatron_fsdp":
        return "it has no single key for layout.strategy"
    row = own_row(plan)
    refused = _refused_export(plan) if row is None else _without_key(plan, row)
    if refused is not None:
        return refused
    case = case_there(plan)
    broken = [r for r in rules.applicable(case, ("error",)) if bool(r.broken(case))]
    return rules.message(broken[0], case) + " there; ask with --engine megatron" if broken else None


def case_there(plan: Plan) -> Case:
    """Return a plan's layout as Megatron-Bridge runs it."""
    recipe = with_engine_strategy(_published_kernels(plan), "megatron")
    return case_of(recipe, plan.case.model, plan.case.cluster, "megatron")


def own_row(plan: Plan) -> bridge_recipes.BridgeRecipe | None:
    """Return its recipe of the plan's model and goal; None if the plan is exported as a Python file."""
    row = bridge_recipes.find(plan.base.name) or bridge_recipes.find(plan.base.name.lower())
    is_own = row is not None and not row.raises and same_model(plan.recipe.model, plan.base.model)
    return row if is_own else None


def _without_key(plan: Plan, row: bridge_recipes.BridgeRecipe) -> str | None:
    """Return why a command line cannot express the changes of a plan to a Megatron-Bridge recipe, or None."""
    changed = {one.field for one in plan.changes} - {*DERIVED_FIELDS, *plan.executed}
    lost = difference(_recipe(plan), plan.case.model, row).unmapped
    unmapped = [one.field for one in lost if one.field in changed]
    return f"it has no single key for {', '.join(unmapped)}" if unmapped else None


def _refused_export(plan: Plan) -> str | None:
    """Return why export writes no Python file for a plan, or None."""
    from meshwright.frameworks.megatron_bridge.definition import FRAMEWORK
    from meshwright.frameworks.megatron_bridge.write import write

    try:
        write(FRAMEWORK, _recipe(plan), plan.case.model, plan.question.cluster)
    except InputError as error:
        return error.reason
    return None


def export_changes(plan: Plan) -> list[str]:
    """Return the overrides with which export writes a plan: without those that only our engine needs."""
    skipped = {*plan.executed, "layout.strategy"} if plan.question.engine == "meshwright" else set()
    kept = with_minimum({one.field: one.new for one in plan.changes if one.field not in skipped}, plan.recipe)
    return [format_override(key, value) for key, value in kept.items()]


def _recipe(plan: Plan) -> Recipe:
    return msgspec.structs.replace(with_distributed_optimizer(_published_kernels(plan)), name=plan.base.name)


def _published_kernels(plan: Plan) -> Recipe:
    """Return the plan's recipe with the published values of fields that only the plan's engine ignores."""
    return change(plan.recipe, {key: field_value(plan.base, key) for key in plan.executed})[0]


def program(plan: Plan) -> Program:
    """Return the Megatron-Bridge program for a plan."""
    from meshwright.frameworks.megatron_bridge.write import program_of, recipe_overrides, runner_argv

    row = own_row(plan)
    if row is None:
        raise ValueError(f"Megatron-Bridge has no recipe {plan.base.name}")
    recipe = _recipe(plan)
    changes = recipe_overrides(recipe, plan.case.model, plan.question.cluster, row)
    return program_of(runner_argv(recipe, row, changes.settings), recipe, plan.case.model)
