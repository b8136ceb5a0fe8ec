"""Compiling the model before the first step, which a budget of training steps does not count."""

from __future__ import annotations

from meshwright import costs
from meshwright.display import duration
from meshwright.planner import Budget
from meshwright.recipes.case import Case

DAY_S = 86400.0
LEAST_S = 20.0  # compiling the kernels of one layer takes longer than this, on any GPU


def compile_note(case: Case, budget: Budget) -> str:
    """Return that compiling takes longer than it saves in a run of few steps; empty for longer ones."""
    if not bool(case.compile) or not budget.steps:
        return ""
    slower_s = float(costs.step_time(case.replace(compile=False)).step_s) - float(costs.step_time(case).step_s)
    saved_s = max(slower_s, 0.0) * budget.steps
    if saved_s >= LEAST_S:
        return ""
    saves = f"saves about {duration(saved_s / DAY_S)} of" if saved_s >= 1 else "saves nothing in"
    return (
        f"compiling before the first step is not in these figures and {saves} so short a run: kernels.compile=false "
        "starts at once"
    )
