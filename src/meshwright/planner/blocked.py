"""Typed layout values that no layout can have: the layout that breaks the fewest rules with them, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from meshwright import rules
from meshwright.planner.baseline import Baseline, with_engine_strategy
from meshwright.planner.search import LAYOUT_NAMES
from meshwright.planner.space import DEGREES, FULL_SPACE, SIMPLEST_OPTIONS, degrees, with_pins
from meshwright.recipes.capabilities import STRATEGY_LIMITS
from meshwright.recipes.case import Case
from meshwright.recipes.stage_layers import BALANCED
from meshwright.recipes.types import field_value, keys_by_flat_name

ONES = {"tp": 1, "pp": 1, "cp": 1, "ep": 1}
RECIPE_OPTIONS = ("recompute", "recompute_modules", "recompute_layers")
LIMITED = {f"strategy.{row.strategy}-{row.field}".replace("_", "-"): ("strategy", row.field) for row in STRATEGY_LIMITS}
"""Rules about two fields: a strategy and what it does not support."""
NOT_TYPED = 2  # weight of a rule about a field that the user did not type: its value could be another


def least_broken(case: Case, pinned: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layout with the typed values that breaks the fewest error rules.

    The rules that it breaks are the cause: they do not follow from the recipe's other values, which the search could
    change. Of equal layouts, the one with the fewest model-parallel ranks is returned.
    """
    typed = {name: value for name, value in pinned.items() if name in LAYOUT_NAMES}
    space = with_pins(FULL_SPACE, case, typed)
    schedule, chunks = space.schedules[0]
    own = {name: getattr(case, name) for name in RECIPE_OPTIONS if schedule == "1f1b"}
    options = {"pp_schedule": schedule, "vp": chunks[0], **own, **typed}
    if options["vp"] > 1:
        options.setdefault("stage_layers", ())
    free = {name: value for name, value in options.items() if name not in DEGREES}
    batches = [bare.replace(**free) for bare in degrees(case, space, typed)]
    found = []
    for batch in (*batches, _alone(case, options)):
        weights = _weights(batch, typed)
        if len(weights):
            row = int(np.lexsort((_size(batch), weights))[0])
            found.append((float(weights[row]), int(_size(batch)[row]), batch.rows(row)))
    best = min(found, key=lambda entry: entry[:2])[2]
    return {name: getattr(best, name) for name in LAYOUT_NAMES} | typed


def _alone(case: Case, options: Mapping[str, Any]) -> Case:
    """Return one row with the typed values and no other parallelism, for degrees that do not divide the GPUs."""
    values = {**SIMPLEST_OPTIONS, **ONES, **options}
    sp = options.get("sp", values["tp"] > 1 and case.strategy != "megatron_fsdp")
    stages = options.get("stage_layers", BALANCED if 1 < values["pp"] <= case.layers else ())
    columns = {name: np.array([values[name]]) for name in DEGREES}
    return case.replace(**{**values, **columns, "sp": np.array([sp]), "stage_layers": stages})


def without_pins(baseline: Baseline) -> Case:
    """Return the baseline's case with the recipe's values in place of the typed layout values."""
    own, keys = with_engine_strategy(baseline.base, baseline.question.engine), keys_by_flat_name()
    return baseline.case.replace(**{name: field_value(own, keys[name]) for name in baseline.pinned})


def _size(case: Case) -> Any:
    return case.tp * case.pp * case.cp * case.ep


def _weights(batch: Case, typed: Mapping[str, Any]) -> Any:
    """Return the error rules that each row breaks, counted by weight."""
    total = np.zeros(batch.tp.shape)
    for id, mask in rules.illegal_by_rule(batch).items():
        fields = LIMITED.get(id, (rules.RULES[id].field,))
        total += np.broadcast_to(mask, batch.tp.shape) * sum(1 if name in typed else NOT_TYPED for name in fields)
    return total
