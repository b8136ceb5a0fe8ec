"""Report a long training of transformers' Trainer that saves no checkpoint, few, or does not resume from them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshwright.costs import Estimate
from meshwright.display import duration, plural
from meshwright.errors import InputError
from meshwright.frameworks.common import KEEP_ALL
from meshwright.frameworks.framework import Content
from meshwright.frameworks.saving import RESUME_RULE, RULE, cost_of, job_hours, started_again
from meshwright.frameworks.to_recipe import ImportedRecipe
from meshwright.frameworks.trainer_fields import OFF, SAVES, is_trainer
from meshwright.frameworks.trainer_resume import RESUME, not_resumed
from meshwright.frameworks.types import ProgramArguments, SourcedValue
from meshwright.planner.saving import DISK_RULE, LATE_RULE, LATEST_KEPT, LONG_H, RARE_H, RARE_RULE, disk_message, hourly
from meshwright.recipes.case import Case
from meshwright.recipes.types import Recipe
from meshwright.rules.rule import Finding

if TYPE_CHECKING:
    from meshwright.frameworks.shell import LaunchCommand

INTERVAL, KEEP = "save_steps", "save_total_limit"


def trainer_saving_findings(
    imported: ImportedRecipe,
    recipe: Recipe,
    estimate: Estimate | None,
    content: Content,
    launch: LaunchCommand | None,
    case: Case | None = None,
) -> Iterator[Finding]:
    """Yield the findings on the checkpoints of a program that has the arguments of transformers' Trainer."""
    program = imported.parsed.program
    if not is_trainer(program.given) or recipe.benchmark:
        return
    yield from _interval(program, recipe, estimate, launch)
    if case is not None and recipe.checkpoint.save_every and (message := disk_message(case)):
        setting = program.given.get(KEEP) or program.given.get(INTERVAL)
        yield _finding(DISK_RULE, KEEP, message, _fix(program, {KEEP: LATEST_KEPT}), setting)
    again = "" if launch is None else started_again(recipe, estimate, launch)
    if launch is not None and again:
        yield from _not_resumed(content, launch, again)


def _interval(
    program: ProgramArguments, recipe: Recipe, estimate: Estimate | None, launch: LaunchCommand | None
) -> Iterator[Finding]:
    """Yield the finding for a program that never saves, only at its end, or rarely."""
    stated = next((program.given[name] for name in SAVES if name in program.given), None)
    interval, steps, every = program.given.get(INTERVAL), recipe.train.steps, recipe.checkpoint.save_every
    if (stated is not None and stated.unresolved) or (interval is not None and interval.unresolved):
        return
    if not every:
        if stated is not None and str(stated.value).lower() in OFF:
            yield from _never(program, stated, recipe, estimate, launch)
        return
    every = _of_the_training(interval, steps) or every
    if estimate is None:
        return
    step_s, limit = float(estimate.step_s), None if launch is None else job_hours(launch.job)
    late = not recipe.train.epochs and every >= steps
    hours = (steps if late else every) * step_s / 3600
    too_late = limit is not None and hours > limit
    if (hours < (LONG_H if late else RARE_H) and not too_late) or (not late and every == 1):
        return
    by_default = "" if interval is not None else " (the default)"
    value = f"{INTERVAL}={every:,}{by_default}"
    if late:
        last = "is the last step" if every == steps else "is beyond the last step"
        without = f"{plural(steps, 'step')}, about {duration(hours / 24)}, without a checkpoint before the end"
        message = f"{value} {last}: {without}{cost_of(hours, limit) if too_late else ''}"
    else:
        message = f"{value} is a checkpoint every {duration(hours / 24)}{cost_of(hours, limit)}"
    changes = {INTERVAL: hourly(step_s, steps if late else None, limit), **_kept(recipe)}
    yield _finding(LATE_RULE if late else RARE_RULE, INTERVAL, message, _fix(program, changes), interval or stated)


def _of_the_training(interval: SourcedValue | None, steps: int) -> int | None:
    """Return the steps of an interval below 1, which is a share of the training; None for another."""
    try:
        share = float(interval.value) if interval is not None else 1.0
    except (TypeError, ValueError):
        return None
    return max(1, round(share * steps)) if 0 < share < 1 else None


def _never(
    program: ProgramArguments,
    stated: SourcedValue,
    recipe: Recipe,
    estimate: Estimate | None,
    launch: LaunchCommand | None,
) -> Iterator[Finding]:
    steps = recipe.train.steps
    known = estimate is not None and not recipe.train.epochs
    hours = steps * float(estimate.step_s) / 3600 if estimate is not None and known else 0.0
    again = "" if launch is None else started_again(recipe, estimate, launch)
    if hours < LONG_H and not (again and not known):
        return
    long = f"{plural(steps, 'step')}, about {duration(hours / 24)}, without a checkpoint" if known else "no checkpoint"
    restarts = f"; {again}: every start begins at step 0" if again else ""
    every = 500 if estimate is None else hourly(float(estimate.step_s))
    changes = {SAVES[0]: "steps", INTERVAL: every, **_kept(recipe)}
    yield _finding(RULE, SAVES[0], f'{SAVES[0]}="{stated.value}": {long}{restarts}', _fix(program, changes), stated)


def _kept(recipe: Recipe) -> dict[str, object]:
    """Return the limit of kept checkpoints that more of them need, if the program has none."""
    return {KEEP: LATEST_KEPT} if recipe.checkpoint.keep >= KEEP_ALL else {}


def _fix(program: ProgramArguments, changes: dict[str, object]) -> tuple[str, ...]:
    try:
        return tuple(text for name, value in changes.items() for text in program.formatted(name, value))
    except InputError:  # a front end without the key
        return ()


def _finding(rule: str, field: str, message: str, fix: tuple[str, ...], setting: SourcedValue | None) -> Finding:
    file, line = ("", 0) if setting is None else (setting.file, setting.line)
    return Finding(rule, "warning", field, message, fix, file=file, line=line)


def _not_resumed(content: Content, launch: LaunchCommand, again: str) -> Iterator[Finding]:
    """Yield the finding for a program, if it is here, whose trainer.train() resumes from no checkpoint."""
    if (found := not_resumed(content, launch)) is not None:
        message = f"{found.why}: every start begins at step 0; {again}"
        yield Finding(RESUME_RULE, "warning", RESUME, message, found.fix, file=found.file, line=found.line)
