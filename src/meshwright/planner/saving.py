"""Report a long training of a recipe whose checkpoints are too far apart, or only at its end."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright import costs
from meshwright.display import plural
from meshwright.recipes.case import Case
from meshwright.rules.rule import Finding

LONG_H = 6.0  # hours whose loss hurts; benchmarks and tests are shorter
SAVE_H = 1.0  # hours between the checkpoints of the suggested fix
RARE_H = 12.0  # hours between checkpoints, all of which a failure may cost
LATE_RULE, RARE_RULE = "saving.only-at-the-end", "saving.rarely"
KEY = "checkpoint.save_every"


def hourly(step_s: float, steps: int | None = None) -> int:
    """Return the steps of the interval that a fix suggests, at most those of the training."""
    wanted = max(1, round(SAVE_H * 3600 / step_s))
    return wanted if steps is None else max(1, min(wanted, steps))


def saving_findings(case: Case, own: bool) -> Iterator[Finding]:
    """Yield the finding for an interval longer than a training of many hours, or for the user's own of many hours."""
    every, train = case.recipe.checkpoint.save_every, case.recipe.train
    if case.recipe.benchmark:
        return
    step_s = float(case.cached(costs.estimate).step_s)
    late = not train.epochs and (every == 0 or every > train.steps)
    hours = (train.steps if late else every) * step_s / 3600
    if hours < (LONG_H if late else RARE_H) or not (late or own):
        return
    if late:
        where = "saves only at the end" if every == 0 else "is beyond the last step"
        message = f"{where}: {plural(train.steps, 'step')}, about {hours:,.0f} hours, without a checkpoint before"
    else:
        message = f"is a checkpoint every {hours:,.0f} hours: a failure costs up to as many"
    fix = (f"{KEY}={hourly(step_s, train.steps if late else None)}",)
    yield Finding(LATE_RULE if late else RARE_RULE, "warning", KEY, f"{KEY}={every} {message}", fix)
