"""Report a long training that writes no checkpoint, none before its end, or few."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from meshwright.costs import Estimate
from meshwright.display import plural
from meshwright.frameworks.common import FOLDERS, value_or_default
from meshwright.frameworks.to_recipe import ImportedRecipe
from meshwright.frameworks.types import as_int
from meshwright.planner.saving import LATE_RULE, LONG_H, RARE_H, RARE_RULE, SAVE_H, hourly
from meshwright.recipes.types import Recipe
from meshwright.rules.rule import Finding

RULE, FOLDER_RULE = "saving.never", "saving.new-folder"
AT_START = re.compile(
    r"(\$\(|`)\s*(date|uuidgen|mktemp)\b.*|\$\{?(RANDOM|SRANDOM|EPOCHSECONDS|EPOCHREALTIME|BASHPID)\b.*|\$\$.*"
)
"""What the shell expands to another text at every start."""
LONG_STEPS = 1000  # if the time of a step is unknown
SWITCHES: Mapping[str, tuple[str, str]] = {
    "megatron-lm": ("save", "--save checkpoints --save-interval {every}"),
    "torchtitan": ("checkpoint.enable", ""),
    "automodel": ("checkpoint.enabled", ""),
    "megatron-bridge": ("checkpoint.save", ""),
}
"""By framework: the key that turns checkpoints on, and the fix if that is not the key with true."""

PATHS = ("save", "checkpoint.save")
"""Switches that are the path of the checkpoints: one known only when it runs is still set."""


def saving_findings(
    imported: ImportedRecipe, recipe: Recipe, estimate: Estimate | None, buildable: bool
) -> Iterator[Finding]:
    """Yield the finding for a training of many hours without a checkpoint, if its speed or length is known.

    The speed of a layout that cannot be built says nothing about an interval.
    """
    if not recipe.train.epochs:  # whose steps are not known here
        yield from _never(imported, recipe, estimate)
        yield from _only_at_the_end(imported, recipe, estimate)
    if buildable:
        yield from _rarely(imported, recipe, estimate)
    if not recipe.benchmark:
        yield from _new_folder(imported)


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
    long = plural(steps, "step") if hours is None else f"{plural(steps, 'step')}, about {hours:,.0f} hours,"
    yield Finding(
        LATE_RULE,
        "warning",
        key,
        f"{imported.framework.display_key(key)} {every:,} is beyond the last step: "
        f"{long} without a checkpoint before the end",
        (imported.framework.format_setting(key, wanted),),
        file=setting.file,
        line=setting.line,
    )


def _rarely(imported: ImportedRecipe, recipe: Recipe, estimate: Estimate | None) -> Iterator[Finding]:
    """Yield the finding for an interval, set by the file, of many hours."""
    key = imported.mapped.source_keys.get("checkpoint.save_every", "")
    setting, every = imported.parsed.settings.get(key), recipe.checkpoint.save_every
    if setting is None or setting.unresolved or estimate is None or recipe.benchmark or not _saves(imported):
        return
    hours = every * float(estimate.step_s) / 3600
    if (every > recipe.train.steps and not recipe.train.epochs) or hours < RARE_H:
        return
    yield Finding(
        RARE_RULE,
        "warning",
        key,
        f"{imported.framework.display_key(key)} {every:,} is a checkpoint every {hours:,.0f} hours: "
        "a failure costs up to as many",
        (imported.framework.format_setting(key, hourly(float(estimate.step_s))),),
        file=setting.file,
        line=setting.line,
    )


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
    if not key or estimate is None or recipe.data.dataset == "mock" or recipe.benchmark:
        return
    setting = settings.get(key)
    if (setting is not None and setting.unresolved) or _saves(imported):
        return
    hours = recipe.train.steps * float(estimate.step_s) / 3600
    if hours < LONG_H:
        return
    every = hourly(float(estimate.step_s))
    fix = text.format(every=every) if text else _turned_on(imported, key)
    missing = f"{framework.display_key(key)} is not set" if setting is None else f"{framework.display_key(key)} is off"
    yield Finding(
        RULE,
        "warning",
        key,
        f"{missing}: {plural(recipe.train.steps, 'step')}, about {hours:,.0f} hours, without a checkpoint",
        (fix,),
        file=setting.file if setting else imported.parsed.files[0] if imported.parsed.files else "",
        line=setting.line if setting else 0,
    )


def _turned_on(imported: ImportedRecipe, key: str) -> str:
    value: object = "checkpoints" if imported.framework.name == "megatron-bridge" else True
    return imported.framework.format_setting(key, value)
