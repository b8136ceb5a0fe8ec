"""The suggestion to shard the optimizer state where a recipe or file keeps all of it on every data-parallel rank.

The search keeps a recipe's strategy, except in our engine, where it tries the others by itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from meshwright.planner.baseline import Baseline
from meshwright.planner.plan import Plan, Suggestion
from meshwright.planner.search import as_overrides
from meshwright.recipes import overrides as override
from meshwright.recipes.capabilities import ENGINE_STRATEGY

TITLE = "shard the optimizer state"
LEAST_FASTER = 0.03  # of the step time
LEAST_FREED = 0.1  # of the memory
SEARCHED = ("meshwright",)
"""Engines whose search tries sharded strategies for every recipe."""
NAMES = {"megatron": "Megatron's distributed optimizer", "deepspeed": "ZeRO stage 3"}
"""What the sharded strategy is called in an engine; elsewhere it is FSDP."""


def with_sharded_state(baseline: Baseline) -> Baseline | None:
    """Return the baseline with the engine's sharded strategy; None if it has one, or the user typed the strategy."""
    case, engine = baseline.case, baseline.question.engine
    if case.strategy != "ddp" or case.world == 1 or engine in SEARCHED or "strategy" in baseline.pinned:
        return None
    strategy = ENGINE_STRATEGY.get(engine, "fsdp2")
    requested, _ = override.change(baseline.requested, {"layout.strategy": strategy})
    return msgspec.structs.replace(
        baseline, requested=requested, case=case.rebuild(requested), pinned={**baseline.pinned, "strategy": strategy}
    )


def sharded_state(plan: Plan, sharded: Plan) -> Iterator[Suggestion]:
    """Yield the sharded strategy if its plan runs and is faster, or not slower in less memory."""
    before, after = float(plan.estimate.step_s), float(sharded.estimate.step_s)
    total, freed = float(plan.estimate.memory.total), float(sharded.estimate.memory.total)
    lean = freed < (1 - LEAST_FREED) * total and after <= (1 + LEAST_FASTER) * before
    if not sharded.ok or plan.case.dp == 1 or not (lean or after <= (1 - LEAST_FASTER) * before):
        return
    change = after / before - 1
    time = (
        f"estimated {abs(change):.0%} {'less' if change < 0 else 'more'} step time" if round(change, 2) else "as fast"
    )
    name = NAMES.get(plan.question.engine, "FSDP")
    figures = f"{time}, {freed:.0f} GiB per GPU instead of {total:.0f}"
    why = f"{name}, the layout sized anew: {figures}; the trained weights stay the same"
    yield Suggestion(TITLE, as_overrides({"strategy": sharded.case.strategy}), why, kind="layout")
