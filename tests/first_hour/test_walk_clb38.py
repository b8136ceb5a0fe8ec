"""A SLURM cluster of 16 nodes and an MoE: the recompute of a plan, remedies that start, batches that divide."""

from __future__ import annotations

import meshwright as library
from meshwright import costs, rules
from meshwright.planner.search import has_headroom
from meshwright.planner.space import MODULE_SETS

MOE = "qwen3-30b-a3b"
NODES = "16x8xH100"


def test_no_single_override_of_recompute_beats_the_recommended_plan() -> None:
    case = library.recommend(MOE, gpus=NODES, goal="pretrain").case
    step_s = float(costs.step_time(case).step_s)
    for kind in ("none", "selective", "full"):
        for modules in ((), *MODULE_SETS) if kind == "selective" else ((),):
            other = case.replace(recompute=kind, recompute_modules=modules, recompute_layers=0)
            if bool(rules.legal(other)) and has_headroom(float(costs.memory(other).total), other):
                assert float(costs.step_time(other).step_s) > 0.97 * step_s, (kind, modules)


def test_the_reason_of_recompute_names_the_modules_that_were_compared() -> None:
    changes = {one.field: one.why for one in library.recommend(MOE, gpus=NODES, goal="pretrain").changes}
    assert "moe: -1% step time" in changes["layout.recompute_modules"]
    assert "leave too little" in changes["layout.recompute_modules"]
    fewer = {one.field: one.why for one in library.recommend(MOE, gpus="4x8xH100", goal="pretrain").changes}
    assert "selective of moe would need" in fewer["layout.recompute"]


def test_pinned_selective_recompute_is_as_fast_as_the_same_found_without_the_pin() -> None:
    free = library.recommend(MOE, gpus=NODES, goal="pretrain")
    pinned = library.recommend(MOE, gpus=NODES, goal="pretrain", overrides=["layout.recompute=selective"])
    assert free.case.recompute == pinned.case.recompute == "selective"
    assert float(pinned.estimate.step_s) <= 1.02 * float(free.estimate.step_s)
    typed = ["layout.recompute=selective", "layout.recompute_modules=moe"]
    own = library.recommend(MOE, gpus=NODES, goal="pretrain", overrides=typed)
    assert own.case.recompute_modules == ("moe",)
