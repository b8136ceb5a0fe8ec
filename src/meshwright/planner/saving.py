"""Report a training of a recipe whose checkpoints are too far apart, only at its end, or more than disks hold."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from meshwright import costs
from meshwright.display import duration, plural
from meshwright.planner.storage import storage_of
from meshwright.recipes.case import Case
from meshwright.rules.rule import Finding
from meshwright.rules.search_values import divisors, nearest_first

LONG_H = 6.0  # hours whose loss hurts; benchmarks and tests are shorter
SAVE_H = 1.0  # hours between the checkpoints of the suggested fix
RARE_H = 12.0  # hours between checkpoints, all of which a failure may cost
LATE_RULE, RARE_RULE, DISK_RULE = "saving.only-at-the-end", "saving.rarely", "saving.fills-disk"
FULL_TIB = 150  # of kept checkpoints: more than most projects may store
FEW_KEPT = 20  # milestones of a training that the fix keeps
LATEST_KEPT = 3  # checkpoints that the fix keeps where a framework keeps the latest ones
KEY = "checkpoint.save_every"


def hourly(step_s: float, steps: int | None = None, limit_h: float | None = None) -> int:
    """Return the steps of the interval that a fix suggests: about an hour, or half of a shorter job.

    At most `steps`, those of the training; at least one, however long it takes.
    """
    hours = SAVE_H if limit_h is None else min(SAVE_H, limit_h / 2)
    wanted = max(1, round(hours * 3600 / step_s))
    return wanted if steps is None else max(1, min(wanted, steps))


def milestones_of(steps: int, every: int) -> int:
    """Return the steps between kept checkpoints of which a training has few: a multiple of the interval."""
    return every * max(1, ceil(steps / FEW_KEPT / every))


def fitting_interval(retained: int, every: int) -> int:
    """Return the interval nearest to so many steps that divides the one of kept checkpoints, if one is half to twice.

    Megatron-LM keeps a checkpoint only if its step is a multiple of both.
    """
    near = [steps for steps in divisors(retained) if every <= 2 * steps <= 4 * every]
    return next(iter(nearest_first(near, every)), every)


def disk_message(case: Case) -> str:
    """Return that the kept checkpoints of a case are more than most may store; empty if they are not."""
    storage = storage_of(case)
    tib = storage.checkpoints_gib / 1024
    if tib <= FULL_TIB or case.recipe.train.epochs or case.recipe.benchmark:
        return ""
    return (
        f"{storage.kept:,} checkpoints of {storage.checkpoint_gib:,.0f} GiB are kept: {tib:,.0f} TiB at the end, "
        f"more than {FULL_TIB} TiB"
    )


def disk_findings(case: Case) -> Iterator[Finding]:
    """Yield the finding for a recipe whose kept checkpoints fill the disk."""
    checkpoint, message = case.recipe.checkpoint, disk_message(case)
    if not message:
        return
    fix = [f"checkpoint.keep={LATEST_KEPT}"] if checkpoint.keep > FEW_KEPT else []
    if checkpoint.milestone_every:
        every = milestones_of(case.recipe.train.steps, checkpoint.milestone_every)
        fix += [f"checkpoint.milestone_every={every}"] if every != checkpoint.milestone_every else []
    field = fix[0].partition("=")[0] if fix else "checkpoint.keep"
    yield Finding(DISK_RULE, "warning", field, message, tuple(fix))


def saving_findings(case: Case, own: bool) -> Iterator[Finding]:
    """Yield the finding for an interval longer than a training of many hours, or for the user's own of many hours."""
    every, train = case.recipe.checkpoint.save_every, case.recipe.train
    if case.recipe.benchmark:
        return
    yield from disk_findings(case)
    step_s = float(case.cached(costs.estimate).step_s)
    late = not train.epochs and (every == 0 or every > train.steps)
    hours = (train.steps if late else every) * step_s / 3600
    if hours < (LONG_H if late else RARE_H) or not (late or own) or (not late and every == 1):
        return
    if late:
        where = "saves only at the end" if every == 0 else "is beyond the last step"
        message = f"{where}: {plural(train.steps, 'step')}, about {duration(hours / 24)}, without a checkpoint before"
    else:
        message = f"is a checkpoint every {duration(hours / 24)}: a failure costs up to as many"
    fix = (f"{KEY}={hourly(step_s, train.steps if late else None)}",)
    yield Finding(LATE_RULE if late else RARE_RULE, "warning", KEY, f"{KEY}={every} {message}", fix)
