"""Check recipes and files of any framework."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from meshwright import clusters, costs, frameworks, planner
from meshwright.api import requests
from meshwright.api.argument_names import recipe_key
from meshwright.api.check_targets import is_config_folder, is_glob, is_model_with_configs
from meshwright.api.data_findings import check_data, data_findings, unreadable_rows
from meshwright.api.dataset_length import epochs_beside, epochs_of, few_updates
from meshwright.api.dropped_rows import dropped_rows
from meshwright.api.engine_configs import CONFIGS, exported_for
from meshwright.api.inputs import command_words
from meshwright.api.length_notes import length_notes
from meshwright.api.questions import load_calibration
from meshwright.api.recipe_cluster import cluster_for
from meshwright.api.resolve import model_named
from meshwright.api.sample_lengths import on_engine
from meshwright.api.suppression import suppressed
from meshwright.api.targets import file_of, job_for
from meshwright.api.verb_function import verb, with_gpu_count
from meshwright.choices import FRONT_ENDS
from meshwright.errors import InputError
from meshwright.frameworks import CheckResult, RecipeCheckResult
from meshwright.models import ModelSpec
from meshwright.parsing import one_of
from meshwright.recipes import overrides as override
from meshwright.recipes.case import Case, model_of
from meshwright.recipes.dataset_file import is_dataset_file
from meshwright.recipes.types import ENGINES, Recipe, recipe_fields
from meshwright.rules import Finding as RuleFinding

NO_CONFIG = "engine.no-config"


@verb(requests.Check, counts_gpus=False)
def check(asked: requests.Check) -> CheckResult:
    """Return the findings for a recipe by name or value, or for a file of any framework."""
    request = with_gpu_count(asked)
    result = _with_faster_layout(_check(request, own_count=request is not asked), request)
    return suppressed(_calibrated(result, load_calibration(request.calibration)), request)


OF_A_RECIPE = ("gpus", "engine", "goal", "model", "framework", "calibration")
"""Options of check that say how a recipe is trained, not what a dataset contains."""


def _with_faster_layout(result: CheckResult, request: requests.Check) -> CheckResult:
    """Return the result with a note if its repair is much slower than another layout, and the command for that."""
    repair, model, on = result.repair, result.model, result.cluster
    if repair is None or repair.contract or repair.step_s is None or model is None or on is None:
        return result
    fastest = planner.much_faster_step(planner.case_of(result.recipe, model, on, result.engine), repair.step_s)
    if fastest is None:
        return result
    command = _plan_command(result, request, on.argument)
    note = (
        f"the repair is the fastest of few changes, but takes {repair.step_s / fastest:.1f}× as long per step as the "
        f"fastest layout for this batch ({fastest:.2f} s): {command}"
    )
    return msgspec.structs.replace(result, notes=(*result.notes, note))


def _plan_command(result: CheckResult, request: requests.Check, gpus: str) -> str:
    """Return the command that plans another layout for what was checked, with the user's other options."""
    kept = [one for one in request.overrides if not (recipe_key(one) or "").startswith("layout.")]
    command = _front_end_command(result, gpus) if result.framework in FRONT_ENDS else ""
    if command:
        return " ".join([command, *map(shlex.quote, kept)])
    is_moved = result.framework == "meshwright" and result.engine != "meshwright"
    given = {
        "model": result.file or (request.target if isinstance(request.target, str) else result.recipe.name),
        "gpus": gpus,
        "engine": result.engine if is_moved else None,
        "train_model": request.model,
        "overrides": kept,
        **{name: getattr(request, name) for name in ("goal", "framework", "calibration")},
    }
    return shlex.join(["meshwright", "recommend", *command_words(requests.Recommend, given)])


def _front_end_command(result: CheckResult, gpus: str) -> str:
    """Return the command that plans the training of a file that only check reads; empty if other verbs read it too."""
    try:
        file_of(result.file, gpus=gpus)
    except frameworks.OtherTrainerError as error:
        return next(iter(error.fix), "")
    return ""


def _calibrated(result: CheckResult, calibration: Any) -> CheckResult:
    """Return the result with the step time of the user's calibration, and whether that applies."""
    if calibration is None:
        return result
    if result.estimate is None or result.model is None or result.cluster is None:
        note = "the calibration is not used: without model and GPUs there is no estimate"
        return msgspec.structs.replace(result, notes=(*result.notes, note))
    case = planner.case_of(result.recipe, result.model, result.cluster, result.engine).replace(calibration=calibration)
    notes = planner.calibration_notes(calibration, result.cluster.gpu, result.engine)
    return msgspec.structs.replace(result, estimate=costs.estimate(case), notes=(*notes, *result.notes))


def _check(request: requests.Check, own_count: bool) -> CheckResult:
    if is_dataset_file(request.target) and not (request.framework and str(request.target).lower().endswith(".json")):
        _require_recipe_for_options(request)
        return check_data(str(request.target), request.overrides)
    _refuse_several(request)
    content, theirs = file_of(request.target, request.framework, request.gpus, front_ends=True)
    if content is not None and theirs is not None:
        if request.engine is not None:
            given = {name: getattr(request, name) for name in (*OF_A_RECIPE, "overrides")} | {"target": content.path}
            moved = shlex.join(["meshwright", "estimate", *command_words(requests.Estimate, given)])
            fix = (moved, "without --engine")
            raise InputError(f"the file is for {theirs.engine}", field="engine", value=request.engine, fix=fix)
        goal: Any = request.goal
        result = frameworks.check(
            theirs,
            content,
            gpus=frameworks.stated_gpus(theirs, content, None if request.gpus is None else str(request.gpus)),
            own_count=own_count,
            model=None if request.model is None else model_named(request.model)[0],
            overrides=request.overrides,
            advice=request.advice,
            goal=goal,
            batch_note=True,
            count=epochs_beside(content.folder, theirs.engine),
            options=_repeated(request),
        )
        typed = any(one.partition("=")[0].strip() == "data.dataset" for one in request.overrides)
        counted, file = typed and result.recipe is not None, frameworks.with_settings(theirs, content)
        notes = (
            length_notes(on_engine(result.recipe, result.engine), result.engine, file.settings, content.all_text)
            if counted
            else ()
        )
        rows = () if result.recipe is None else tuple(unreadable_rows(result.recipe, content.folder))
        return msgspec.structs.replace(result, findings=(*result.findings, *rows), notes=(*result.notes, *notes))
    options = {"framework": request.framework, "model": request.model}
    job = job_for(request.target, request.goal, request.gpus, request.overrides, request.engine, **options)
    engine = request.engine or job.engine
    words = () if job.plan is not None else job.words
    checked = check_recipe(
        job.on(engine), request.gpus, engine, request.overrides, job.content, words=words, options=_repeated(request)
    )
    result = _with_config(checked)
    if job.plan is not None and job.plan.repair is not None and result.repair is not None:
        result = msgspec.structs.replace(result, repair=job.plan.repair)  # typed, it gives another recommended layout
    length = job.open_length(result.recipe)
    batch = few_updates(result.recipe, result.cluster.world, result.engine)
    rows = data_findings(result.recipe, thorough=True)
    if not any(one.severity == "error" for one in rows):
        rows += dropped_rows(planner.case_of(result.recipe, result.model, result.cluster, result.engine))
    result = msgspec.structs.replace(
        result, findings=(*result.findings, *rows, *batch), notes=(*result.notes, *([length] if length else []))
    )
    return result if content is None else msgspec.structs.replace(result, file=content.path)


def _require_recipe_for_options(request: requests.Check) -> None:
    """Raise for options that a dataset does not use: they belong to a recipe that trains on it."""
    given = {name: value for name in OF_A_RECIPE if (value := getattr(request, name)) is not None}
    if not given:
        return
    name, value = next(iter(given.items()))
    options = " ".join(f"--{option} {shlex.quote(str(text))}" for option, text in given.items())
    recipe = f"meshwright check RECIPE {options} data.dataset={shlex.quote(str(request.target))}"
    reason = f"has no effect on a dataset: {request.target} is checked without a recipe"
    raise InputError(reason, field=f"--{name}", value=value, fix=(recipe, f"without --{name}"))


def _repeated(request: requests.Check) -> tuple[str, ...]:
    """Return the user's options that every printed command repeats."""
    return tuple(command_words(requests.Check, {"calibration": request.calibration}))


def _refuse_several(request: requests.Check) -> None:
    """Raise for several targets: the command checks them one by one."""
    target = request.target
    if request.more or is_glob(target) or is_config_folder(target):
        command = shlex.join(["meshwright", "check", str(target), *request.more])
        one = "in Python, one call checks one recipe or file"
        raise InputError(one, "target", target, [command, "call check once for each file"])
    if is_model_with_configs(target):
        one = "a model folder that also has files which train; in Python, one call checks one of them"
        model = f"check({str(Path(str(target)) / 'config.json')!r})"
        raise InputError(one, "target", target, [f"meshwright check {target}", model, "call check once for each file"])
    cli_only = {"--format": request.format, "--write-baseline": request.write_baseline}
    for option, value in cli_only.items():
        if value is not None:
            raise InputError(f"{option} is an option of the command: meshwright check", option.strip("-"), value)


def _with_config(result: RecipeCheckResult) -> RecipeCheckResult:
    """Return the result with an error if the framework of the engine has no config for the job, or for its repair."""
    if result.engine not in CONFIGS:
        return result
    repair = result.repair.overrides if result.repair is not None else ()
    try:
        exported_for(result.engine, override.apply_fix(result.recipe, repair), result.model, result.cluster)
    except InputError as error:
        if error.field in {one.field for one in result.findings if one.severity == "error"}:
            return result  # reported, and no layout resolves it
        fix = tuple(one for one in error.fix if "=" in one and not one.startswith("--"))
        other = "" if fix else "choose another engine: meshwright compare lists those that run it"
        message = f"no config of {CONFIGS[result.engine]} can express this job: {error.reason}"
        found = RuleFinding(NO_CONFIG, "error", error.field or "engine", message, fix, no_fix=other)
        return msgspec.structs.replace(result, findings=(found, *result.findings))
    return result


def check_recipe(
    recipe: Recipe,
    gpus: str | int | None,
    engine: str,
    overrides: Sequence[str],
    content: frameworks.Content | None = None,
    advice: bool = True,
    model: ModelSpec | None = None,
    words: tuple[str, ...] = (),
    options: tuple[str, ...] = (),
) -> RecipeCheckResult:
    """Return the findings for one of our recipes, on its own cluster or another.

    `model` if its shape has no name; `words` name the recipe on the command line, if it has a name there. Printed
    commands repeat the user's `options`.
    """
    engine = one_of("engine", engine, ENGINES)
    kept, auto = override.split_auto(overrides)
    changed = override.apply(planner.with_engine_strategy(recipe, engine), kept)
    cluster = clusters.cluster(cluster_for(changed, gpus, content))
    if auto:
        spec = model or model_of(changed)
        changed = planner.with_fastest_micro_batch(Case(changed, spec, cluster, engine=engine))  # type: ignore[arg-type]
    typed = {recipe_fields()[key].flat for key in override.requested(recipe, kept)}
    epochs, words = epochs_of(changed), (*words, *kept)
    result = frameworks.check_native(changed, cluster, engine, content, advice, model, epochs, typed, words, options)
    if result.ok or len(kept) < 2:
        return result

    def errors(chosen: Sequence[str]) -> list[str]:
        tried = override.apply(planner.with_engine_strategy(recipe, engine), list(chosen))
        return planner.error_messages(planner.case_of(tried, model or model_of(tried), cluster, engine))

    return msgspec.structs.replace(result, contradiction=planner.contradiction(kept, errors))
