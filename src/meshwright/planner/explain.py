"""Why a number is what it is: the same estimate and rules, asked about the value next to it."""

from __future__ import annotations

from typing import Any

from meshwright import costs, rules
from meshwright.costs.memory_constants import RESERVE
from meshwright.planner.plan import Plan, Reason
from meshwright.planner.space import balanced_stages
from meshwright.recipes.case import Case
from meshwright.recipes.types import recipe_fields
from meshwright.rules.search_values import divisors

DEGREES = ("tp", "pp", "cp", "ep", "micro_batch_size")
DERIVED_FIELDS = {
    "sp": "follows tp: with tp above 1 it cuts norms and residuals over the same ranks at no extra traffic",
    "pp_schedule": "follows pp and vp",
    "dp_shard": "filled with whatever tp × pp × cp leave",
    "stage_layers": "follows pp: the layers do not divide evenly; the stages of embedding and head never get the more",
    "embedding_as_layer": "follows pp",
    "head_as_layer": "follows pp",
    "recompute_modules": "follows recompute",
    "recompute_layers": "follows recompute",
}


def pluralize(number: int, thing: str) -> str:
    """A number of things, one of them without its s."""
    return f"{number} {thing}" + ("" if number == 1 else "s")


def field_description(name: str) -> str:
    """What a layout field is, in the words of its own documentation."""
    return recipe_fields()[f"layout.{name}"].text


def with_value(case: Case, name: str, value: Any) -> Case:
    """The case with one layout number changed and those that follow it brought along."""
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
        changed |= {"recompute_modules": (), "recompute_layers": 0}
    return case.replace(**changed)


def compare_value(case: Case, name: str, value: Any) -> str:
    """What would happen with another value of one layout field, measured by rules and estimate."""
    other = with_value(case, name, value)
    ruled = [r for r in rules.applicable(other, ("error",)) if r.subject != "memory"]
    errors = [r for r in ruled if bool(r.broken(other)) and not bool(r.broken(case))]
    if errors:
        return f"{value} is refused: {rules.message(errors[0], other)}"
    here, there = costs.estimate(case), costs.estimate(other)
    if not bool(there.fits):
        usable = case.capacity_gib * (1 - RESERVE)
        return f"{value} would need {float(there.memory.total):.0f} GiB, {usable:.0f} are usable"
    slower = float(there.step_s) / float(here.step_s) - 1
    memory = float(there.memory.total) - float(here.memory.total)
    return f"{value} would take {slower:+.0%} step time and {memory:+.0f} GiB"


def why_changed(case: Case, name: str, old: Any) -> str:
    """The reason a layout field left the recipe's value."""
    if name in DERIVED_FIELDS:
        return DERIVED_FIELDS[name]
    return "here " + compare_value(case, name, old)


def reasons(plan: Plan) -> tuple[Reason, ...]:
    """For every number of the layout: what it is and what its neighbours would do."""
    case, layout = plan.case, plan.recipe.layout
    found = [Reason("strategy", layout.strategy, _strategy(case))]
    found += [Reason(name, getattr(layout, name), _degree(case, name)) for name in _explained_degrees(case)]
    found.append(Reason("recompute", layout.recompute, _recompute(case)))
    found.append(
        Reason(
            "dp",
            int(case.dp),
            f"{pluralize(case.world, 'GPU')} / {int(case.model_ranks)} per model copy; "
            + ("one rank holds the whole state" if case.shard == 1 else f"{int(case.shard)} ranks share one state")
            + (f", {layout.dp_replicate} copies of it" if layout.dp_replicate > 1 else ""),
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
    """The next smaller and larger value that can be had: divisors of the GPUs, experts or batch."""
    value = int(getattr(case, name))
    whole: int = {"ep": case.experts, "micro_batch_size": case.global_batch_size}.get(name) or case.world
    allowed = [d for d in divisors(whole) if name != "pp" or d <= case.layers]
    smaller, larger = [d for d in allowed if d < value], [d for d in allowed if d > value]
    return smaller[-1:] + larger[:1]


def _degree(case: Case, name: str) -> str:
    said = [compare_value(case, name, value) for value in neighbors(case, name)]
    return f"{field_description(name)}. " + ("; ".join(said) or "there is no other")


def _recompute(case: Case) -> str:
    others = [v for v in ("none", "selective", "full") if v != case.recompute]
    return f"{field_description('recompute')}. " + "; ".join(compare_value(case, "recompute", v) for v in others)


def _strategy(case: Case) -> str:
    kinds = {
        "fsdp2": "weights, gradients and optimizer state are all cut over the data-parallel ranks",
        "zero1": "only optimizer state is cut over the data-parallel ranks (Megatron's distributed optimizer)",
        "megatron_fsdp": "Megatron's fully sharded data parallelism: all state is cut over the data-parallel ranks",
        "ddp": "every data-parallel rank holds the whole state",
    }
    return kinds[str(case.strategy)]
