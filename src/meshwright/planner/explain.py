"""Explain each layout value by comparing it with its neighbors, using the same rules and estimate."""

from __future__ import annotations

from typing import Any

from meshwright import costs, rules
from meshwright.costs.memory_constants import RESERVE
from meshwright.display import plural
from meshwright.planner.plan import Plan, Reason
from meshwright.planner.search import has_headroom
from meshwright.recipes.capabilities import can_express
from meshwright.recipes.case import Case
from meshwright.recipes.stage_layers import balanced_stages
from meshwright.recipes.types import Layout, recipe_fields
from meshwright.rules.search_values import divisors

DEGREES = ("tp", "pp", "cp", "ep", "micro_batch_size")
DERIVED_FIELDS = {
    "sp": "follows tp: with tp > 1 it shards norms and residuals over the same ranks at no extra communication",
    "pp_schedule": "follows pp and vp",
    "dp_shard": "the ranks that tp × pp × cp leave",
    "embedding_as_layer": "follows pp",
    "head_as_layer": "follows pp",
    "recompute_modules": "follows recompute",
    "recompute_layers": "follows recompute",
}


def field_description(name: str) -> str:
    """Return the documentation of a layout field."""
    return recipe_fields()[f"layout.{name}"].text


def with_value(case: Case, name: str, value: Any, modules: tuple[str, ...] = ()) -> Case:
    """Return the case with one layout value changed, and the fields that follow from it.

    `modules` are those that another kind of recompute recomputes.
    """
    changed: dict[str, Any] = {name: value, "dp_shard": -1}
    if name == "tp":
        changed["sp"] = value > 1 and case.strategy != "megatron_fsdp"
    if name == "vp":
        changed["pp_schedule"] = "1f1b" if value == 1 else "interleaved_1f1b"
    if name == "pp":
        even = case.layers % value == 0
        stages = () if even else balanced_stages(case.layers, value)
        changed |= {"stage_layers": stages, "vp": 1, "pp_schedule": "1f1b"}
        changed |= {"embedding_as_layer": False, "head_as_layer": False}
    if name == "recompute":
        changed |= {"recompute_modules": modules, "recompute_layers": 0}
    return case.replace(**changed)


def compare_value(case: Case, name: str, value: Any, modules: tuple[str, ...] = ()) -> str:
    """Describe the effect of another value of a layout field: a broken rule, memory or step time."""
    other = with_value(case, name, value, modules)
    if name == "recompute" and modules:
        value = f"{value} of {' and '.join(modules)}"
    elif name == "recompute_modules":
        value = " and ".join(value) or "those of the engine"
    if error := _new_error(case, other):
        return f"{value} is invalid: {error}"
    current, changed = costs.estimate(case), costs.estimate(other)
    if not bool(changed.fits):
        usable = case.capacity_gib * (1 - RESERVE)
        return f"{value} would need {float(changed.memory.total):.0f} GiB of {usable:.0f} usable"
    slower = float(changed.step_s) / float(current.step_s) - 1
    memory = float(changed.memory.total) - float(current.memory.total)
    total = float(changed.memory.total)
    tight = slower < 0 and not bool(has_headroom(total, case))
    why_not = f"; {total:.0f} of {case.capacity_gib:.0f} GiB leave too little for an error of the estimate"
    return f"{value}: {slower:+.0%} step time, {memory:+.0f} GiB" + (why_not if tight else "")


def _new_error(case: Case, other: Case) -> str:
    """Return the message of the first error that another value causes, memory aside; empty if it causes none."""
    checked = (one for one in rules.applicable(other, ("error",)) if one.subject != "memory")
    broken = next((one for one in checked if bool(one.broken(other)) and not bool(one.broken(case))), None)
    return "" if broken is None else rules.message(broken, other)


NO_EFFECT = "+0% step time, +0 GiB"


def why_adapted(case: Case, name: str, old: Any, message: str) -> str:
    """Return why a field of the recipe could not stay: a rule's message in the layout of the plan.

    If another layout than the recipe's no longer breaks the rule, the reason is the effect of the value; `message` is
    what the rule said of the recipe's layout.
    """
    effect = compare_value(case, name, old)
    if error := _new_error(case, with_value(case, name, old)):
        return error
    return f"{message}, in the recipe's layout" if NO_EFFECT in effect else f"on this cluster, all else equal, {effect}"


def why_changed(case: Case, name: str, old: Any, base: Layout) -> str:
    """Return why a field differs from its value in the recipe, whose layout is `base`."""
    chosen = name == "recompute_modules" and case.recompute == base.recompute  # not because recompute is another one
    if name in DERIVED_FIELDS and not chosen:
        return DERIVED_FIELDS[name]
    if name == "stage_layers":
        return _why_stages(case.stage_layers)
    said = base.recompute_modules if name == "recompute" else ()
    modules = said if can_express("recompute_modules", case.engine, said) else ()
    compared = compare_value(case, name, old, modules)
    return "on this cluster, all else equal, " + compared


def _why_stages(layers: tuple[int, ...]) -> str:
    """Return why the stages have these layers: the ends, with embedding and head, have fewer."""
    if not layers:
        return "follows pp: the layers divide evenly"
    ends = {"first": layers[0], "last": layers[-1]}
    fewer = [name for name, count in ends.items() if count < max(layers)]
    which = f"; the {' and '.join(fewer)} stage get{'s' * (len(fewer) == 1)} fewer layers" if fewer else ""
    return f"follows pp: the layers do not divide evenly{which}"


def reasons(plan: Plan) -> tuple[Reason, ...]:
    """Explain every layout value: what it means and the effect of its neighboring values."""
    case, layout = plan.case, plan.recipe.layout
    is_whole = layout.strategy == "ddp"
    found = [Reason("strategy", layout.strategy, _strategy(case))]
    found += [Reason(name, getattr(layout, name), _degree(case, name)) for name in _explained_degrees(case)]
    found.append(Reason("recompute", layout.recompute, _recompute(case)))
    found.append(
        Reason(
            "dp",
            int(case.dp),
            f"{plural(case.world, 'GPU')} / {int(case.model_ranks)} per model replica; "
            + (
                "no state is sharded"
                if case.shard == 1 or is_whole
                else f"the state is sharded over {int(case.shard)} ranks"
            )
            + (f", {layout.dp_replicate} replicas" if layout.dp_replicate > 1 else ""),
        )
    )
    found.append(
        Reason(
            "gradient_accumulation",
            int(case.accumulation),
            f"global batch {case.global_batch_size} / (micro batch {layout.micro_batch_size} × dp {int(case.dp)})",
        )
    )
    return tuple(found)


def _explained_degrees(case: Case) -> list[str]:
    return [name for name in DEGREES if name != "ep" or case.is_moe]


def neighbors(case: Case, name: str) -> list[int]:
    """Return the next smaller and larger possible value: divisors of the GPUs, experts or batch."""
    value = int(getattr(case, name))
    total: int = {"ep": case.experts, "micro_batch_size": case.global_batch_size}.get(name) or case.world
    allowed = [d for d in divisors(total) if name != "pp" or d <= case.layers]
    smaller, larger = [d for d in allowed if d < value], [d for d in allowed if d > value]
    return smaller[-1:] + larger[:1]


def _degree(case: Case, name: str) -> str:
    effects = [compare_value(case, name, value) for value in neighbors(case, name)]
    return f"{field_description(name)}. " + ("; ".join(effects) or "no other value is possible")


def _recompute(case: Case) -> str:
    others = [v for v in ("none", "selective", "full") if v != case.recompute]
    return f"{field_description('recompute')}. " + "; ".join(compare_value(case, "recompute", v) for v in others)


def _strategy(case: Case) -> str:
    texts = {
        "fsdp2": "shards weights, gradients and optimizer state over the data-parallel ranks",
        "zero1": "shards only the optimizer state over the data-parallel ranks (Megatron's distributed optimizer)",
        "megatron_fsdp": "Megatron-FSDP: shards all state over the data-parallel ranks",
        "ddp": "every data-parallel rank holds the full state",
    }
    return texts[str(case.strategy)]
