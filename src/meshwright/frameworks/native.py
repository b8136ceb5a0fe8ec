"""Check native recipes and recipe files; findings carry the file's lines."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from meshwright import costs, rules
from meshwright.clusters import Cluster
from meshwright.frameworks.framework import Content
from meshwright.frameworks.result import RecipeCheckResult, host_memory_notes
from meshwright.models import ModelSpec
from meshwright.planner import Repair, case_of, examine, fitting_batch, node_note, options_for_recipe
from meshwright.planner.budget import Epochs
from meshwright.planner.saving import KEY as SAVE_EVERY
from meshwright.recipes.case import Case, model_of
from meshwright.recipes.files import HEAD
from meshwright.recipes.types import SECTIONS, Recipe
from meshwright.rules import Finding
from meshwright.version import VERSION

if TYPE_CHECKING:
    from meshwright.frameworks.shell import LaunchCommand

NAME = "meshwright"


def is_native(content: Content) -> bool:
    """Return whether a file is a native recipe: it names a base, or a model and a goal."""
    return "base" in content.settings or {"model", "goal"} <= content.settings.keys()


def looks_native(content: Content) -> bool:
    """Return whether most top-level keys of a file that no framework claims are those of a native recipe."""
    keys = content.top_level_keys()
    return bool(keys) and 2 * len(keys & {*HEAD, *SECTIONS, "base"}) > len(keys)


def train_command(content: Content) -> LaunchCommand | None:
    """Return the `meshwright train` command that a script starts, if the first training it starts is ours."""
    launch = next(iter(content.launches), None)
    is_ours = launch is not None and launch.is_module and launch.program.value == NAME and bool(launch.args)
    return launch if is_ours and launch is not None and launch.args[0].value == "train" else None


def check_native(
    recipe: Recipe,
    on: Cluster,
    engine: str,
    content: Content | None = None,
    advice: bool = True,
    model: ModelSpec | None = None,
    epochs: Epochs | None = None,
    typed: Collection[str] = (),
    words: tuple[str, ...] = (),
    options: tuple[str, ...] = (),
) -> RecipeCheckResult:
    """Return the findings for a recipe, with the lines of its file if it has one; `model` if its shape has no name.

    `epochs` are its samples, if they were counted; `typed` are fields the user set, by flat name; `words` name the
    recipe on the command line, with the user's overrides; printed commands repeat those and the user's `options`.
    """
    model = model or model_of(recipe)
    case = case_of(recipe, model, on, engine)
    case = case if epochs is None else epochs.counted(case)
    severities = rules.SEVERITIES if advice else rules.SEVERITIES[:2]
    states_interval = content is not None and SAVE_EVERY in content.settings
    found, repair = examine(case, typed, severities, states_interval=states_interval, options=options)
    estimate = costs.estimate(case)
    only_memory = all(f.rule.startswith("memory.") for f in found if f.severity == "error")
    needs_options = advice and only_memory and not bool(estimate.fits)
    named = (*words, *(("--engine", engine) if words and engine != recipe.engine else ()))
    lines = {key: setting.line for key, setting in content.settings.items()} if content else {}
    return RecipeCheckResult(
        framework=NAME,
        version=VERSION,
        engine=engine,  # type: ignore[arg-type]  # one of its choices, as validated
        file=content.path if content else "",
        recipe=recipe,
        model=model,
        cluster=on,
        findings=tuple(_with_location(f, content, lines) for f in found),
        estimate=estimate,
        repair=repair,
        notes=(*_batch_notes(case, found, estimate, repair, named), *host_memory_notes(estimate, on)),
        options=(options_for_recipe(recipe, model, on, engine, words, options) if needs_options else ()),
    )


# Errors of degrees that a number of GPUs and a batch do not divide into.
OF_COUNTS = {
    "batch.divides",
    "batch.smaller-than-data-parallel",
    "schedule.micro-batch-groups",
    "schedule.micro-batches",
    "topology.world",
}


def _batch_notes(
    case: Case, found: Collection[Finding], estimate: costs.Estimate, repair: Repair | None, target: Sequence[str]
) -> tuple[str, ...]:
    """Return a faster batch near the recipe's if that divides into few layouts: of the repair, if there are errors."""
    return batch_notes(case, found, float(estimate.step_s), repair, shlex.join, target)


def batch_notes(
    case: Case,
    found: Collection[Finding],
    step_s: float,
    repair: Repair | None,
    written: Callable[[Sequence[str]], str],
    target: Sequence[str] = (),
) -> tuple[str, ...]:
    """Return the notes on a faster batch, with its overrides as `written`, and on fewer nodes.

    No batch is noted whose overrides cannot be written; `target` are the words that name the recipe in a command.
    """
    if int(case.global_batch_size) % int(case.world) == 0 or case.recipe.benchmark:
        return ()
    # Errors of a launcher or of a framework's own rules change no step time.
    wrong = {one.rule for one in found if one.severity == "error" and one.rule in rules.all_rules()}
    if wrong - OF_COUNTS and repair is None:
        return ()
    if wrong:
        step_s = (repair.step_s or 0.0) if repair is not None and not repair.contract else 0.0
    if not step_s:
        return ()
    other = fitting_batch(case, step_s)
    words = written(other.overrides) if other is not None else ""
    batch = (other.note(case, step_s, words),) if other is not None and words else ()
    return (*batch, *node_note(case, step_s, target))


def _with_location(finding: Finding, content: Content | None, lines: Mapping[str, int]) -> Finding:
    if content is None:
        return finding
    return msgspec.structs.replace(finding, file=content.path, line=lines.get(finding.field, 0))
