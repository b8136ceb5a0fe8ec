"""Notes of an export: overrides without effect, what changes for the framework, and the plan of a layout that runs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from meshwright import frameworks
from meshwright.api.argument_names import recipe_key
from meshwright.api.data_findings import DATA_ROWS
from meshwright.api.export_findings import WRITTEN, is_about_weights, is_open
from meshwright.api.export_fixes import other_fixes
from meshwright.api.targets import Job
from meshwright.frameworks import RecipeCheckResult
from meshwright.launch import other_frameworks
from meshwright.planner import is_override
from meshwright.recipes import overrides as override
from meshwright.recipes.types import Recipe, field_value, recipe_fields
from meshwright.rules import Finding

OF_A_RUN = ("data.dataset", "data.blend", "train.steps", "train.epochs")  # what each run sets, also with options


def without_effect(checked: RecipeCheckResult, overrides: Sequence[str]) -> list[str]:
    """Return the typed fields that this training does not read: an export has no key for them."""
    typed = override.requested(checked.recipe, override.split_auto(overrides)[0])
    reasons = {key: frameworks.no_effect(key, checked.recipe, checked.model) for key in typed}
    return [f"{key}={typed[key]} has no effect: {reason}" for key, reason in reasons.items() if reason]


def without_deepspeed(job: Job, checked: RecipeCheckResult, theirs: frameworks.Framework) -> list[str]:
    """Return what the sharding of a DeepSpeed job becomes in a framework that does not use DeepSpeed."""
    if job.imported is None or job.engine != "deepspeed" or checked.engine == "deepspeed":
        return []
    strategy = checked.recipe.layout.strategy
    return [f"ZeRO of {job.imported.content.path} becomes layout.strategy={strategy}: {theirs.title} has no DeepSpeed"]


def names_data_here(written: frameworks.ExportedConfig, key: str, name: str) -> bool:
    """Return whether an export names data of this machine by their full path: not those that only the code names."""
    is_here = name.startswith("/") and Path(name).exists() and key not in {one.field for one in written.unmapped}
    return is_here and any(name in text for text in (*written.files.values(), *written.program.argv))


def contract_notes(job: Job, recipe: Recipe) -> list[str]:
    """Return the overrides that change what is trained: each is a new experiment."""
    if job.plan is not None or job.imported is not None:
        return []
    fields = [key for key, info in recipe_fields().items() if info.kind == "contract" and key not in OF_A_RUN]
    named = other_frameworks.with_full_paths(job.recipe)  # the same file by its full path is no change
    keys = [key for key in fields if field_value(named, key) != field_value(recipe, key)]
    pairs = [(key, field_value(job.recipe, key), field_value(recipe, key)) for key in keys]
    return [f"changed: {key} {old} → {new} (contract): a new experiment" for key, old, new in pairs if old != new]


def _is_of_no_layout(error: Finding) -> bool:
    """Return whether an error stays with every layout: of the weights, the rows, or a value that the user names."""
    return error.fix == (WRITTEN,) or error.rule == DATA_ROWS or is_about_weights(error) or is_open(error)


def sizing_note(job: Job, checked: RecipeCheckResult, to: str, overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the command that plans a layout for what was requested; none if no command can name the model.

    It has the words and overrides that the user typed, except those of the layout that does not run. The engine is the
    framework's: Accelerate's mesh with model axes is checked as AutoModel's, which has layouts that it does not.
    """
    engine: str = frameworks.framework(to).engine
    engine = checked.engine if checked.engine == "deepspeed" else engine
    errors = [one for one in checked.findings if one.severity == "error"]
    if job.no_model or all(_is_of_no_layout(one) for one in errors):
        return ()
    recipe = checked.recipe
    goal = ("--goal", recipe.goal) if job.plan is not None else ()
    own = [one for one in job.words[1:] if is_override(one)]  # as the import resolved them
    named = [*(one for one in job.words if one not in own), *goal]
    named += ["--gpus", checked.cluster.argument, "--engine", engine]
    settings = override.merged(override.merged(overrides, own), other_fixes(errors))
    words = [*named, *(one for one in settings if not (recipe_key(one) or "").startswith("layout."))]
    if job.imported is not None and job.imported.framework.name == to:  # a recipe loses what has no field
        command = shlex.join(("meshwright", "recommend", *words))
        return (f"for a layout that runs: {command}, then its Run line, which keeps the file's other settings",)
    command = shlex.join(("meshwright", "recommend", *words, "--save", "sized.toml"))
    return (f"for a layout that runs: {command}, then export sized.toml",)
