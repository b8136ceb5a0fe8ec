"""Fixes of an export that fails: overrides, or other frameworks."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import suppress
from math import ceil

from meshwright import frameworks
from meshwright.api.argument_names import recipe_key
from meshwright.api.dataset_length import epochs_of
from meshwright.api.export_findings import all_findings, is_open
from meshwright.api.targets import Job
from meshwright.choices import FRAMEWORKS
from meshwright.errors import InputError
from meshwright.frameworks import ImportedFile, RecipeCheckResult
from meshwright.recipes import overrides as override
from meshwright.recipes.types import recipe_fields
from meshwright.rules import Finding as RuleFinding

REPAIR_ROUNDS = 4


def counted_steps(checked: RecipeCheckResult, fixes: Sequence[str]) -> list[str]:
    """Return the fixes with the number of steps that the recipe's epochs have, where its data can be counted."""
    epochs = epochs_of(checked.recipe)
    if epochs is None:
        return list(fixes)
    steps = max(1, ceil(epochs.samples / checked.recipe.train.global_batch_size))
    return [fix.replace("train.steps=N", f"train.steps={steps}") for fix in fixes]


def require_numbers(theirs: frameworks.Framework, checked: RecipeCheckResult, read: ImportedFile | None) -> None:
    """Raise InputError if a number that the user states is lost; a default of the file's framework is only listed."""
    for one in frameworks.lost_numbers(theirs, checked.recipe):
        if read is None or one.field in read.settings.mapped.source_keys:
            others = [name for name in ("megatron-lm", "megatron-bridge") if can_export(name, checked, ())]
            fixes = [f"--to {name}" for name in others if name != theirs.name]
            own = "; --model FOLDER, with the config.json of this model, keeps it" if read is not None else ""
            raise InputError(f"{one.reason}{own}", one.field, one.value, fixes)


def other_fixes(errors: Sequence[RuleFinding]) -> list[str]:
    """Return the fixes of errors that no layout resolves, such as another optimizer."""
    fixes = [one.fix[0].split() for one in errors if one.fix and not is_open(one)]
    whole = [words for words in fixes if not any((recipe_key(one) or "layout.").startswith("layout.") for one in words)]
    return list(dict.fromkeys(word for words in whole for word in words if "=" in word))


def export_fixes(theirs: frameworks.Framework, checked: RecipeCheckResult, tried: Sequence[str]) -> list[str]:
    """Return what makes an export possible, without errors if that can be: overrides, or other frameworks."""
    to = theirs.name
    found = [fix for one in checked.findings if one.severity == "error" for fix in one.fix]
    changes = [fix for fix in (*tried, " ".join(dict.fromkeys(found))) if fix and not fix.startswith("--")]
    works = [fix for fix in changes if can_export(to, checked, fix.split())]
    for fix in reversed(works):  # the last one has all of them
        complete = _without_errors(theirs, checked, fix.split())
        if complete:
            return [complete]
    others = [name for name in FRAMEWORKS if name != to and not works and can_export(name, checked, ())]
    return works or [f"--to {name}" for name in others[:3]]


def _without_errors(theirs: frameworks.Framework, checked: RecipeCheckResult, changes: Sequence[str]) -> str:
    """Return the changes with the fixes of the errors that remain after them; empty if some remain."""
    chosen = {text.partition("=")[0]: text for text in changes}
    for _ in range(REPAIR_ROUNDS):
        with suppress(InputError):
            recipe = override.apply(checked.recipe, tuple(chosen.values()))
            typed = [recipe_fields()[key].flat for key in chosen]  # later fixes keep the earlier ones
            on = (checked.cluster, checked.engine)
            result = frameworks.check_native(recipe, *on, None, False, checked.model, typed=typed)
            written = frameworks.export(theirs, recipe, checked.model, checked.cluster)
            ours = [one for one in result.findings if one.severity == "error"]  # they may resolve the framework's too
            errors = ours or [one for one in all_findings(theirs, written, result) if one.severity == "error"]
            if not errors:
                return " ".join(chosen.values())
            more = {text.partition("=")[0]: text for one in errors for text in one.fix}
            if more.keys() - chosen.keys():
                chosen |= more
                continue
        return ""
    return ""


def can_export(to: str, checked: RecipeCheckResult, changes: Sequence[str]) -> bool:
    try:
        recipe = override.apply(checked.recipe, changes)
        frameworks.export(frameworks.framework(to), recipe, checked.model, checked.cluster)
    except InputError:
        return False
    return True


def no_version(job: Job, theirs: frameworks.Framework, version: str, checked: RecipeCheckResult) -> InputError:
    """Return the error for a job of a version that the export has no program for: the two commands with another."""
    first = f"{theirs.name}_job"
    words = ("meshwright", "export", *job.words, "--to", theirs.name, "--gpus", str(checked.cluster), "--out", first)
    reason = f"is for {theirs.title} {version}, which has no preset of {checked.model.name}"
    fix = (f"{shlex.join(words)}, then launch {first}/config.toml (another version of {theirs.title})",)
    return InputError(reason, field="file", value=job.words[0], fix=fix)
