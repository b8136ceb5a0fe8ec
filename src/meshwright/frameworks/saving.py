"""Report a long training that writes no checkpoint, none before its end, or few."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from meshwright.costs import Estimate
from meshwright.display import duration, plural
from meshwright.errors import InputError
from meshwright.frameworks.common import FOLDERS, INITIAL_WEIGHTS, KEEP_ALL, state_left_out, value_or_default
from meshwright.frameworks.framework import Framework
from meshwright.frameworks.open_length import open_length
from meshwright.frameworks.to_recipe import ImportedRecipe
from meshwright.frameworks.types import Settings, SourcedValue, as_int
from meshwright.planner.saving import (
    DISK_RULE,
    LATE_RULE,
    LATEST_KEPT,
    LONG_H,
    RARE_H,
    RARE_RULE,
    SAVE_H,
    disk_message,
    fitting_interval,
    hourly,
    milestones_of,
)
from meshwright.recipes.case import Case
from meshwright.recipes.key_maps import config_keys
from meshwright.recipes.types import Recipe
from meshwright.rules.rule import Finding

if TYPE_CHECKING:
    from meshwright.frameworks.shell import LaunchCommand

RULE, FOLDER_RULE = "saving.never", "saving.new-folder"
AT_START = re.compile(
    r"(\$\(|`)\s*(date|uuidgen|mktemp)\b.*|\$\{?(RANDOM|SRANDOM|EPOCHSECONDS|EPOCHREALTIME|BASHPID)\b.*|\$\$.*"
)
"""What the shell expands to another text at every start."""
RESUME_RULE = "saving.not-resumed"
TIME_LIMIT = re.compile(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d+){0,2})")
MUCH_LONGER = 2.0  # times the limit of a job: a training of so many hours surely takes several
LOAD_IS_NEEDED = ("megatron-lm", "megatron-deepspeed")
"""Frameworks that begin at step 0 without their key of the folder to load; others find their last checkpoint."""
BEFORE_THE_LIMIT = ("exit_signal_handler", "exit_duration_in_mins")  # Megatron: save and end on a signal, or in time
LONG_STEPS = 1000  # if the time of a step is unknown
SWITCHES: Mapping[str, tuple[str, str]] = {
    "megatron-lm": ("save", "--save checkpoints --save-interval {every} --save-retain-interval {retained}"),
    "torchtitan": ("checkpoint.enable", ""),
    "automodel": ("checkpoint.enabled", ""),
    "megatron-bridge": ("checkpoint.save", ""),
}
"""By framework: the key that turns checkpoints on, and the fix if that is not the key with true."""

PATHS = ("save", "checkpoint.save")
"""Switches that are the path of the checkpoints: one known only when it runs is still set."""


def saving_findings(
    imported: ImportedRecipe,
    recipe: Recipe,
    estimate: Estimate | None,
    buildable: bool,
    case: Case | None = None,
    launch: LaunchCommand | None = None,
) -> Iterator[Finding]:
    """Yield the finding for a training of many hours without a checkpoint, if its speed or length is known.

    The speed of a layout that cannot be built says nothing about an interval. `case` is there if the model is known.
    """
    yield from _fills_disk(imported, case)
    if not recipe.train.epochs:  # whose steps are not known here
        yield from _never(imported, recipe, estimate)
        yield from _only_at_the_end(imported, recipe, estimate)
    if buildable:
        yield from _rarely(imported, recipe, estimate, launch)
    if not recipe.benchmark:
        yield from _new_folder(imported)


def job_hours(job: Mapping[str, SourcedValue]) -> float | None:
    """Return the time limit of a SLURM job in hours; None if it has none, or one that is known only at run time."""
    found = TIME_LIMIT.fullmatch(str(job["time"].value)) if "time" in job and not job["time"].unresolved else None
    if found is None:
        return None
    days, parts = found["days"], [int(one) for one in found["parts"].split(":")]
    if days is None and len(parts) < 3:  # minutes, or minutes and seconds
        parts = [0, *parts]
    hours = sum(part / 60**power for power, part in enumerate(parts))
    return 24 * int(days or 0) + hours or None


def resume_findings(
    imported: ImportedRecipe, recipe: Recipe, estimate: Estimate | None, launch: LaunchCommand | None
) -> Iterator[Finding]:
    """Yield the finding for a job that is started again, by requeue or after its time limit, and does not resume."""
    framework, settings = imported.framework, imported.parsed.settings
    save_key, load_key, _ = FOLDERS.get(framework.key_map, ("", "", ""))
    save, load = settings.get(save_key), settings.get(load_key)
    if launch is None or not load_key or save is None or recipe.benchmark:
        return
    if load is not None and (load.unresolved or save.unresolved or load.value == save.value):
        return
    if load is None and (framework.name not in LOAD_IS_NEEDED):
        return
    again = started_again(recipe, estimate, launch)
    if not again:
        return
    shown, folder = framework.display_key(save_key), str(save.value)
    fixes = [framework.format_setting(load_key, folder)]
    left_out = _left_out(framework, settings)
    reset = " ".join(framework.format_setting(key, value) for key, value in left_out.items())
    if load is None:
        state = f"{shown} is set, but {framework.display_key(load_key)} is not: every start begins at step 0"
    else:
        loads = f"{framework.display_key(load_key)} {load.value}"
        weights = INITIAL_WEIGHTS.get(framework.name, "") if reset else ""
        copied = "" if weights else f" (copy its checkpoint to {folder})"
        begins = f"at step 0 with its weights ({reset})" if reset else "from there"
        state = f"{loads} is not the folder of {shown}: every start begins {begins}{copied}"
        if weights and weights not in settings:
            fixes.append(framework.format_setting(weights, str(load.value)))
    fixes += [framework.format_setting(key, not value) for key, value in left_out.items()]
    line = (load or save).line
    yield Finding(RESUME_RULE, "warning", load_key, f"{state}; {again}", tuple(fixes), file=save.file, line=line)


def _left_out(framework: Framework, settings: Settings) -> dict[str, bool]:
    """Return the settings with which a start loads the weights alone; none if it loads the state of the training."""
    weights_only = FOLDERS[framework.key_map][2]
    if weights_only not in settings or settings[weights_only].value is not True:
        return {}
    return {weights_only: True, **{key: one.value for key, one in state_left_out(framework.key_map, settings).items()}}


def started_again(recipe: Recipe, estimate: Estimate | None, launch: LaunchCommand) -> str:
    """Return why a job is started more than once; empty if nothing says so."""
    if "requeue" in launch.job:
        return "the job has --requeue"
    limit = job_hours(launch.job)
    if limit is None or estimate is None or recipe.train.epochs:
        return ""
    hours = recipe.train.steps * float(estimate.step_s) / 3600
    if hours < MUCH_LONGER * limit:
        return ""
    return f"the training takes about {duration(hours / 24)}, a job ends after {limit:g} hours"


def cost_of(hours: float, limit: float | None) -> str:
    """Return what an interval between checkpoints costs; one longer than the time limit of its job is never over."""
    if limit is not None and hours > limit:
        return f", longer than the job's time limit of {limit:g} hours: the job never saves one"
    return ": a failure costs up to as many"


def _new_folder(imported: ImportedRecipe) -> Iterator[Finding]:
    """Yield the finding for a folder of checkpoints whose name is another one when the job starts again."""
    framework, parsed = imported.framework, imported.parsed
    key = FOLDERS.get(framework.key_map, ("",))[0]
    setting = parsed.settings.get(key) or parsed.program.given.get("output_dir")
    text = "" if setting is None else str(setting.value)
    found = AT_START.search(text)
    if setting is None or found is None:
        return
    is_argument = key not in parsed.settings
    shown = "--output_dir" if is_argument else framework.display_key(key)
    fixed = text[: found.start()].rstrip("/_-.") or "checkpoints"
    yield Finding(
        FOLDER_RULE,
        "warning",
        "output_dir" if is_argument else key,
        f"{shown} {text} is another folder at a later start: a requeued run finds no checkpoint there and starts anew",
        (f"--output_dir {fixed}" if is_argument else framework.format_setting(key, fixed),),
        file=setting.file,
        line=setting.line,
    )


def _only_at_the_end(imported: ImportedRecipe, recipe: Recipe, estimate: Estimate | None) -> Iterator[Finding]:
    """Yield the finding for an interval, set by the file, that is longer than the training."""
    key = imported.mapped.source_keys.get("checkpoint.save_every", "")
    setting, every = imported.parsed.settings.get(key), recipe.checkpoint.save_every
    steps = recipe.train.steps
    if setting is None or setting.unresolved or recipe.benchmark or not _saves(imported):
        return
    every = every or as_int(setting) or 0  # an interval longer than the run may be mapped to 0: only at the end
    if every <= steps:
        return
    hours = None if estimate is None else steps * float(estimate.step_s) / 3600
    if (steps < LONG_STEPS) if hours is None else hours < SAVE_H:
        return
    wanted = max(1, steps // 10) if estimate is None else hourly(float(estimate.step_s), steps)
    long = plural(steps, "step") if hours is None else f"{plural(steps, 'step')}, about {duration(hours / 24)},"
    yield Finding(
        LATE_RULE,
        "warning",
        key,
        f"{imported.framework.display_key(key)} {every:,} is beyond the last step: "
        f"{long} without a checkpoint before the end",
        _interval_fix(imported, recipe, every, wanted),
        file=setting.file,
        line=setting.line,
    )


def _rarely(
    imported: ImportedRecipe, recipe: Recipe, estimate: Estimate | None, launch: LaunchCommand | None
) -> Iterator[Finding]:
    """Yield the finding for an interval, set by the file, of many hours, or longer than the job may run."""
    key = imported.mapped.source_keys.get("checkpoint.save_every", "")
    setting, every = imported.parsed.settings.get(key), recipe.checkpoint.save_every
    if setting is None or setting.unresolved or estimate is None or recipe.benchmark or not _saves(imported):
        return
    hours = every * float(estimate.step_s) / 3600
    limit = None if launch is None or _saves_in_time(imported) else job_hours(launch.job)
    too_late = limit is not None and hours > limit
    if (every > recipe.train.steps and not recipe.train.epochs) or (hours < RARE_H and not too_late) or every == 1:
        return
    yield Finding(
        RARE_RULE,
        "warning",
        key,
        f"{imported.framework.display_key(key)} {every:,} is a checkpoint every {duration(hours / 24)}"
        f"{cost_of(hours, limit)}",
        _interval_fix(imported, recipe, every, hourly(float(estimate.step_s), limit_h=limit)),
        file=setting.file,
        line=setting.line,
    )


def _saves_in_time(imported: ImportedRecipe) -> bool:
    """Return whether a run saves before the time limit of its job, whatever its interval is."""
    settings = imported.parsed.settings
    return any(name in settings for one in BEFORE_THE_LIMIT for name in (one, f"train.{one}"))


def _key_of(imported: ImportedRecipe, field: str) -> str:
    """Return the framework's key of one of our fields; empty if it has none."""
    framework = imported.framework
    key = next((key for key, one in config_keys(framework.key_map).items() if one.field == field), "")
    try:
        return key if key and framework.format_setting(key, 1) else ""
    except InputError:  # a fork with fewer flags than the key map
        return ""


def _interval_fix(imported: ImportedRecipe, recipe: Recipe, every: int, wanted: int) -> tuple[str, ...]:
    """Return the settings of a shorter interval; a run that keeps all its checkpoints keeps about as many as before."""
    checkpoint, write = recipe.checkpoint, imported.framework.format_setting
    key = imported.mapped.source_keys["checkpoint.save_every"]
    retain, keep = (_key_of(imported, field) for field in ("checkpoint.milestone_every", "checkpoint.keep"))
    keeps_all = checkpoint.keep >= KEEP_ALL
    if retain and (keeps_all or checkpoint.milestone_every):
        before = checkpoint.milestone_every or every
        fitting = fitting_interval(before, wanted)
        retained = before - before % fitting
        more = () if retained == checkpoint.milestone_every else (write(retain, retained),)
        return (write(key, fitting), *more)
    more = (write(keep, LATEST_KEPT),) if keeps_all and keep else ()
    return (write(key, wanted), *more)


def _fills_disk(imported: ImportedRecipe, case: Case | None) -> Iterator[Finding]:
    """Yield the finding for kept checkpoints that are more than most may store."""
    if case is None or case.recipe.data.is_mock or not case.recipe.checkpoint.save_every:
        return
    is_open = bool(open_length("", imported, case.recipe))
    message = disk_message(case) if _saves(imported) and not is_open else ""
    if not message:
        return
    retain, keep = (_key_of(imported, field) for field in ("checkpoint.milestone_every", "checkpoint.keep"))
    key, recipe = retain or keep, case.recipe
    value = milestones_of(recipe.train.steps, recipe.checkpoint.save_every) if retain else LATEST_KEPT
    fix = (imported.framework.format_setting(key, value),) if key else ()
    settings, files = imported.parsed.settings, imported.parsed.files
    setting = settings.get(key) or settings.get(imported.mapped.source_keys.get("checkpoint.save_every", ""))
    if setting is None:  # an interval that the file does not state
        return
    file, line = (setting.file, setting.line) if setting.file else (files[0] if files else "", 0)
    yield Finding(DISK_RULE, "warning", key or "checkpoint.keep", message, fix, file=file, line=line)


def _saves(imported: ImportedRecipe) -> bool:
    """Return whether checkpoints are on; Megatron-Bridge's recipes save by default."""
    framework, settings = imported.framework, imported.parsed.settings
    key, _ = SWITCHES.get(framework.name, ("", ""))
    setting = settings.get(key)
    if setting is not None and setting.unresolved and key in PATHS:
        return True
    default = not key or (framework.name == "megatron-bridge" and setting is None)
    return default or bool(value_or_default(framework.key_map, settings, key))


def _never(imported: ImportedRecipe, recipe: Recipe, estimate: Estimate | None) -> Iterator[Finding]:
    framework, settings = imported.framework, imported.parsed.settings
    key, text = SWITCHES.get(framework.name, ("", ""))
    if not key or estimate is None or recipe.data.is_mock or recipe.benchmark:
        return
    setting = settings.get(key)
    if (setting is not None and setting.unresolved) or _saves(imported):
        return
    hours = recipe.train.steps * float(estimate.step_s) / 3600
    if hours < LONG_H:
        return
    every = hourly(float(estimate.step_s))
    retained = milestones_of(recipe.train.steps, every)
    fix = text.format(every=every, retained=retained) if text else _turned_on(imported, key)
    missing = f"{framework.display_key(key)} is not set" if setting is None else f"{framework.display_key(key)} is off"
    yield Finding(
        RULE,
        "warning",
        key,
        f"{missing}: {plural(recipe.train.steps, 'step')}, about {duration(hours / 24)}, without a checkpoint",
        (fix,),
        file=setting.file if setting else imported.parsed.files[0] if imported.parsed.files else "",
        line=setting.line if setting else 0,
    )


def _turned_on(imported: ImportedRecipe, key: str) -> str:
    value: object = "checkpoints" if imported.framework.name == "megatron-bridge" else True
    return imported.framework.format_setting(key, value)
