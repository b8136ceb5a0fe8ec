"""Check recipes and files of any framework, and export recipes to other frameworks."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import ceil
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from meshwright import clusters, costs, file_access, frameworks, launch, planner
from meshwright.api import requests
from meshwright.api.argument_names import recipe_key
from meshwright.api.catalogues import recipe_text, save_files
from meshwright.api.check_targets import SkippedFile, is_config_folder, is_glob, is_model_with_configs
from meshwright.api.data_findings import check_data, data_findings
from meshwright.api.dataset_length import epochs_beside, epochs_of, length_notes
from meshwright.api.plan_responses import plan_response
from meshwright.api.planning import recommend
from meshwright.api.questions import load_calibration
from meshwright.api.resolve import assumed_in, model_named
from meshwright.api.responses import Error, Estimate, Finding, Part, Response, copied, estimate_part, finding_parts
from meshwright.api.suppression import suppressed
from meshwright.api.targets import Job, file_of, job_for, without_folder
from meshwright.api.verb_function import verb
from meshwright.choices import FRAMEWORKS, FRONT_ENDS
from meshwright.display import Readable, Row, titled
from meshwright.errors import InputError
from meshwright.frameworks import (
    CheckResult,
    DroppedSetting,
    ExportedConfig,
    ImportedFile,
    RecipeCheckResult,
    UnmappedField,
    UnresolvedValue,
)
from meshwright.frameworks.common import short_training_notes
from meshwright.launch import other_frameworks
from meshwright.models import ModelSpec
from meshwright.parsing import one_of
from meshwright.recipes import overrides as override
from meshwright.recipes.case import Case, model_of
from meshwright.recipes.dataset_file import is_dataset_file
from meshwright.recipes.types import ENGINES, Data, Recipe, field_value, recipe_fields
from meshwright.rules import Finding as RuleFinding

NO_OVERRIDE = "no override was found that resolves it"
LEAVES_OUT = ("max_samples", "val_size", "val_set_size", "split_dataset_ratio")
"""Keys of front ends that train on fewer rows than the dataset has."""
OF_A_RUN = ("data.dataset", "data.blend", "train.steps", "train.epochs")  # what each run sets, also with options


CONFIGS: Mapping[str, str] = {
    "megatron": "megatron-lm",
    "torchtitan": "torchtitan",
    "automodel": "automodel",
    "kempnerforge": "kempnerforge",
    "fsdp1": "accelerate",
    "deepspeed": "deepspeed",
}
"""Framework whose config drives an engine; ours has recipes."""
SECOND_CONFIGS: Mapping[str, str] = {"megatron": "megatron-bridge"}
"""Another framework of an engine, for what the first one cannot express: adapters, or models by their config."""
NO_CONFIG = "engine.no-config"
OF_PROGRAM = ("optimizer.supported", "learning_rate.supported", "precision.format-supported")
"""Rules on what the training program and its config decide, whatever engine models their layout in the estimate."""
REPAIR_ROUNDS = 4


def engine_of(name: str) -> str:
    """Return the engine that runs the files of a framework; our own for meshwright."""
    return ENGINES[0] if name == ENGINES[0] else frameworks.framework(name).engine


@verb(requests.Check)
def check(request: requests.Check) -> CheckResult:
    """Return the findings for a recipe by name or value, or for a file of any framework."""
    result = _with_faster_layout(_check(request), request.overrides)
    return suppressed(_calibrated(result, load_calibration(request.calibration)), request)


OF_A_RECIPE = ("gpus", "engine", "goal", "model", "framework", "calibration")
"""Options of check that say how a recipe is trained, not what a dataset contains."""


def _with_faster_layout(result: CheckResult, overrides: Sequence[str]) -> CheckResult:
    """Return the result with a note if its repair is much slower than another layout, and the command for that."""
    repair, model, on = result.repair, result.model, result.cluster
    if repair is None or repair.contract or repair.step_s is None or model is None or on is None:
        return result
    fastest = planner.much_faster_step(planner.case_of(result.recipe, model, on, result.engine), repair.step_s)
    if fastest is None:
        return result
    kept = [one for one in overrides if not (recipe_key(one) or "").startswith("layout.")]
    engine = ["--engine", result.engine] if result.framework == "meshwright" and result.engine != "meshwright" else []
    command = _front_end_command(result, on.argument) if result.framework in FRONT_ENDS else ""
    if not command:
        target = result.file or result.recipe.name
        command = shlex.join(["meshwright", "recommend", target, "--gpus", on.argument, *engine])
    command = " ".join([command, *map(shlex.quote, kept)])
    note = (
        f"the repair is the fastest of few changes, but takes {repair.step_s / fastest:.1f}× as long per step as the "
        f"fastest layout for this batch ({fastest:.2f} s): {command}"
    )
    return msgspec.structs.replace(result, notes=(*result.notes, note))


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


def _check(request: requests.Check) -> CheckResult:
    if is_dataset_file(request.target) and not (request.framework and str(request.target).lower().endswith(".json")):
        _require_recipe_for_options(request)
        return check_data(str(request.target), request.overrides)
    _refuse_several(request)
    content, theirs = file_of(request.target, request.framework, request.gpus, front_ends=True)
    if content is not None and theirs is not None:
        if request.engine is not None:
            fix = (f"meshwright estimate {content.path} --engine {request.engine}", "without --engine")
            raise InputError(f"the file is for {theirs.engine}", field="engine", value=request.engine, fix=fix)
        goal: Any = request.goal
        result = frameworks.check(
            theirs,
            content,
            gpus=frameworks.stated_gpus(theirs, content, None if request.gpus is None else str(request.gpus)),
            model=None if request.model is None else model_named(request.model)[0],
            overrides=request.overrides,
            advice=request.advice,
            goal=goal,
            batch_note=True,
            count=epochs_beside(content.folder),
        )
        typed = any(one.partition("=")[0].strip() == "data.dataset" for one in request.overrides)
        fewer = [key for key in LEAVES_OUT if key in content.settings]
        notes = tuple(length_notes(result.recipe, result.engine, fewer)) if typed and result.recipe is not None else ()
        return msgspec.structs.replace(result, notes=(*result.notes, *notes)) if notes else result
    options = {"framework": request.framework, "model": request.model}
    job = job_for(request.target, request.goal, request.gpus, request.overrides, request.engine, **options)
    engine = request.engine or job.engine
    result = _with_config(check_recipe(job.on(engine), request.gpus, engine, request.overrides, job.content))
    if job.plan is not None and job.plan.repair is not None and result.repair is not None:
        result = msgspec.structs.replace(result, repair=job.plan.repair)  # typed, it gives another recommended layout
    length = job.open_length(result.recipe)
    result = msgspec.structs.replace(
        result,
        findings=(*result.findings, *data_findings(result.recipe, thorough=True)),
        notes=(*result.notes, *([length] if length else [])),
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
    """Return the result with an error if the framework of the engine has no config for the job."""
    if result.engine not in CONFIGS:
        return result
    try:
        exported_for(result.engine, result.recipe, result.model, result.cluster)
    except InputError as error:
        fix = tuple(one for one in error.fix if "=" in one and not one.startswith("--"))
        other = "" if fix else "choose another engine: meshwright compare lists those that run it"
        message = f"no config of {CONFIGS[result.engine]} can express this job: {error.reason}"
        found = RuleFinding(NO_CONFIG, "error", error.field or "engine", message, fix, no_fix=other)
        return msgspec.structs.replace(result, findings=(found, *result.findings))
    return result


def exported_for(engine: str, recipe: Recipe, model: ModelSpec, on: clusters.Cluster) -> ExportedConfig:
    """Return the config that drives an engine; raise InputError of the first framework if none can express it."""
    try:
        return frameworks.export(frameworks.framework(CONFIGS[engine]), recipe, model, on)
    except InputError:
        if engine in SECOND_CONFIGS:
            with suppress(InputError):
                return frameworks.export(frameworks.framework(SECOND_CONFIGS[engine]), recipe, model, on)
        raise


def check_recipe(
    recipe: Recipe,
    gpus: str | int | None,
    engine: str,
    overrides: Sequence[str],
    content: frameworks.Content | None = None,
    advice: bool = True,
    model: ModelSpec | None = None,
) -> RecipeCheckResult:
    """Return the findings for one of our recipes, on its own cluster or another; `model` if its shape has no name."""
    engine = one_of("engine", engine, ENGINES)
    kept, auto = override.split_auto(overrides)
    changed = override.apply(planner.with_engine_strategy(recipe, engine), kept)
    cluster = clusters.cluster(str(gpus) if gpus is not None else changed.cluster)
    if auto:
        spec = model or model_of(changed)
        changed = planner.with_fastest_micro_batch(Case(changed, spec, cluster, engine=engine))  # type: ignore[arg-type]
    typed = {recipe_fields()[key].flat for key in override.requested(recipe, kept)}
    result = frameworks.check_native(changed, cluster, engine, content, advice, model, epochs_of(changed), typed)
    if result.ok or len(kept) < 2:
        return result

    def errors(chosen: Sequence[str]) -> list[str]:
        tried = override.apply(planner.with_engine_strategy(recipe, engine), list(chosen))
        return planner.error_messages(planner.case_of(tried, model or model_of(tried), cluster, engine))

    return msgspec.structs.replace(result, contradiction=planner.contradiction(kept, errors))


IN_CHECKOUT = ("megatron-lm",)  # whose program is started in a checkout, not in the folder of the export
DATA_SOURCES = ("data_path", "train_data_path", "data_args_path", "per_split_data_args_path")  # of Megatron-LM
WRITTEN = "--out FOLDER"  # fix of an export that converts data, which are written and not printed


class Exported(Readable, msgspec.Struct, frozen=True):
    """A recipe as another framework's files, and the findings for it there."""

    written: ExportedConfig
    checked: RecipeCheckResult
    job: Job
    not_imported: tuple[DroppedSetting, ...] = ()
    data: Data | None = None  # as the files name them: the converted ones
    refused: bool = False  # whether nothing was written into the folder that was named

    def summary(self) -> list[Row]:
        """Return the files with their text, and the fields that the framework has no key for."""
        texts = [
            row
            for name, text in self.written.files.items()
            for row in [("File", name), *(("", line) for line in text.splitlines())]
        ]
        lost = [f"{one.field}={one.value}: {one.reason}" for one in self.written.unmapped]
        found = [f"{one.severity}: {one.message}" for one in self.checked.findings]
        return [
            ("Export", f"{self.checked.recipe.name} for {self.written.framework} on {self.checked.cluster}"),
            *titled("Wrote", self.written.paths),
            *texts,
            *titled("Unmapped", lost),
            *titled("Findings", found),
            *titled("Notes", self.written.notes),
        ]


@verb(requests.Export)
def export(request: requests.Export) -> Exported:
    """Return a recipe as another framework's files, and the findings for it there."""
    found, data = export_into(request, request.out, WRITTEN)
    written = found.written
    if not found.checked.ok:
        refused = (f"nothing was written to {request.out}: see the findings",) if request.out else ()
        notes = (*refused, *written.notes, *_sizing(found, request.overrides))
        written = msgspec.structs.replace(written, notes=notes)
    elif request.out:
        notes = (*_moved(found, data, request.out), *written.notes)
        paths = save_files({**written.files, **data}, request.out)
        written = msgspec.structs.replace(written, notes=notes, paths=paths)
    return msgspec.structs.replace(found, written=written, refused=bool(request.out) and not found.checked.ok)


def _moved(found: Exported, data: Mapping[str, str], folder: str) -> Iterator[str]:
    """Yield notes on data that were converted, and on paths that are written in full: the program starts elsewhere."""
    recipe = found.checked.recipe
    if data:
        start = "" if found.written.framework in IN_CHECKOUT else f"; start it in {folder}"
        yield f"{', '.join(data)}: the rows of {recipe.data.dataset} as messages{start}"
    elif full := [key for key, name in _data_names(recipe) if name.startswith("/") and Path(name).exists()]:
        yield f"{' and '.join(full)}: the full path of this machine is written, for a start in any folder"


def export_into(
    request: requests.Export,
    folder: str | None,
    fix: str,
    *,
    anywhere: bool = False,
    elsewhere: Callable[[Mapping[str, str]], str] | None = None,
) -> tuple[Exported, Mapping[str, str]]:
    """Return the export for a folder, and the data in it that the framework cannot read as they are.

    Without a folder nothing is written: then data are not converted, and `fix` says how they are. Files for a program
    that starts `anywhere` name them by their full paths. `elsewhere` returns the folder that has the converted data on
    machines that do not see this one's; empty for the working folder of the program.
    """
    theirs = frameworks.framework(request.to)
    overrides = other_frameworks.full_paths(request.overrides) if folder else request.overrides
    request = msgspec.structs.replace(request, overrides=tuple(overrides))
    options = {"framework": request.framework, "model": request.model, "to": theirs.name}
    job = job_for(request.target, request.goal, request.gpus, request.overrides, theirs.engine, **options)
    shape = None if job.imported is None else job.model
    read = job.imported
    job.require_length()
    if read is not None and theirs.name == "deepspeed":  # the DeepSpeed config that a config of Accelerate names
        read = frameworks.referenced_file(read) or read
    job.require_weights()
    same = read is not None and read.framework.name == theirs.name
    keeps_deepspeed = job.engine == "deepspeed" and (same or theirs.name == "accelerate")
    engine = job.engine if keeps_deepspeed else theirs.engine
    dropped = () if same else job.dropped(theirs)
    recipe = job.on(engine) if same else without_folder(job.on(engine), read)
    if engine != theirs.engine:
        recipe = msgspec.structs.replace(recipe, engine=engine)
    recipe, replaced = _with_loadable_weights(recipe, read, theirs, request.overrides)
    recipe = other_frameworks.with_full_paths(recipe) if folder or anywhere else recipe
    checked = check_recipe(recipe, request.gpus, engine, request.overrides, advice=False, model=shape)
    _require_numbers(theirs, checked, read)
    converts = folder or elsewhere is not None
    named, converted = theirs.readable_data(checked.recipe) if converts else (checked.recipe, {})
    own_program = read is not None and same and bool(read.settings.parsed.program.argv)
    place = elsewhere(converted) if converted and elsewhere is not None else ""
    if folder and (anywhere or own_program or theirs.name in IN_CHECKOUT):
        place = str(Path(folder).resolve())
    if place and converted:
        here = [f"{key}={place.rstrip('/')}/{name}" for key, name in _data_names(named) if name in converted]
        named = override.apply(named, here)
    try:
        written = frameworks.export(theirs, named, checked.model, checked.cluster)
    except InputError as error:
        fixes = _export_fixes(theirs, checked, _counted_steps(checked, error.fix))
        if error.field == "train.global_batch_size" and checked.recipe.layout.pp > 1:  # others keep the pipeline
            others = (name for name in FRAMEWORKS if name != theirs.name and _can_export(name, checked, ()))
            fixes += [text for name in others if (text := f"--to {name}") not in fixes][:1]
        raise InputError(error.reason, error.field, error.value, fixes) from error
    version = read.settings.parsed.version if read is not None and same else ""
    if version and anywhere:  # a job runs one program: that of the file's own version
        if version not in written.versions:
            raise _no_version(job, theirs, version, checked)
        written = frameworks.in_version(theirs, written, version, named, checked.model, checked.cluster)
    if read is not None and same:
        patched = (
            None
            if version and anywhere
            else frameworks.patch(read, written, named, checked.model, checked.cluster, job=anywhere)
        )
        dropped = job.dropped(theirs, None if patched is None else patched.lost)
        written = written if patched is None else patched.written
        if folder and own_program and patched is not None and not anywhere:
            program, missing = other_frameworks.started_elsewhere(written.program, read.content.folder)
            script = {f"{checked.recipe.name}.sh": launch.start_script(program, checked.cluster, checked.recipe.name)}
            files = {**written.files, **script}
            written = msgspec.structs.replace(written, program=program, files=files, notes=(*written.notes, *missing))
        job.require_expanded(written)
    lost = frameworks.lost_lines(written.unmapped, dropped)
    first = frameworks.lost_lines((one for one in written.unmapped if one.field in written.first_file_lacks), ())
    commented = frameworks.with_comments(written.files, lost, written.program.modules, first)
    written = msgspec.structs.replace(written, files=commented)
    engine = frameworks.exported_engine(theirs, written, checked.model)
    if engine != checked.engine:  # the findings are those of the file that was written
        recipe = without_folder(job.on(engine), None if same else read)
        recipe, _ = _with_loadable_weights(recipe, read, theirs, request.overrides)
        of_program = [one for one in checked.findings if one.rule in OF_PROGRAM]
        checked = check_recipe(recipe, request.gpus, engine, request.overrides, advice=False, model=shape)
        of_layout = [one for one in checked.findings if one.rule not in OF_PROGRAM]
        checked = msgspec.structs.replace(checked, findings=(*of_program, *of_layout))
    checked = _as_sharded(theirs, written, checked, request.gpus)
    findings = tuple(_with_open_source(one, dropped) for one in _all_findings(theirs, written, checked, fix))
    if same:  # as check reports them in the framework's own file
        kept = (one for one in findings if frameworks.as_in_files(one).severity != "advice")
        findings = tuple(_in_users_file(one, read, written) for one in kept)
    checked = msgspec.structs.replace(checked, findings=findings)
    unused = _without_effect(checked, request.overrides)
    short = short_training_notes(checked.recipe, checked.model) if read is None else ()
    contract = _contract_notes(job, checked.recipe)
    written = msgspec.structs.replace(
        written,
        notes=(
            *checked.notes,
            *unused,
            *replaced,
            *_without_deepspeed(job, checked, theirs),
            *contract,
            *short,
            *written.notes,
        ),
    )
    return Exported(written, checked, job, () if read is None else dropped, named.data), converted


def _as_sharded(
    theirs: frameworks.Framework, written: ExportedConfig, checked: RecipeCheckResult, gpus: str | int | None
) -> RecipeCheckResult:
    """Return the result with the findings and the estimate of the sharding that the written file has."""
    changes = frameworks.exported_sharding(theirs, written, checked.recipe, checked.model, checked.cluster)
    if not changes:
        return checked
    recipe = override.apply(checked.recipe, changes)
    found = check_recipe(recipe, gpus, checked.engine, (), advice=False, model=checked.model)
    return msgspec.structs.replace(checked, findings=found.findings, estimate=found.estimate)


def _in_users_file(finding: RuleFinding, read: ImportedFile | None, written: ExportedConfig) -> RuleFinding:
    """Return an error with its fix in the user's file: with an error, no file is written that it could be made in."""
    if finding.severity != "error" or read is None:
        return finding
    place = frameworks.in_export(next(iter(written.files)))
    return msgspec.structs.replace(finding, no_fix=finding.no_fix.replace(place, f"in {read.content.path}"))


def _with_open_source(finding: RuleFinding, dropped: Sequence[DroppedSetting]) -> RuleFinding:
    """Return a finding on missing data with the setting of the file that names them, if that could not be read."""
    lost = next((one for one in dropped if one.key in DATA_SOURCES), None)
    if lost is None or not finding.rule.endswith(".no-data"):
        return finding
    flag = lost.key.replace("_", "-")
    message = f"{lost.file}:{lost.line} --{flag} {lost.value}: {lost.reason}, so the job would have no data: name them"
    return msgspec.structs.replace(finding, message=message)


def _no_version(job: Job, theirs: frameworks.Framework, version: str, checked: RecipeCheckResult) -> InputError:
    """Return the error for a job of a version that the export has no program for: the two commands with another."""
    first = f"{theirs.name}_job"
    words = ("meshwright", "export", *job.words, "--to", theirs.name, "--gpus", str(checked.cluster), "--out", first)
    reason = f"is for {theirs.title} {version}, which has no preset of {checked.model.name}"
    fix = (f"{shlex.join(words)}, then launch {first}/config.toml (another version of {theirs.title})",)
    return InputError(reason, field="file", value=job.words[0], fix=fix)


def _counted_steps(checked: RecipeCheckResult, fixes: Sequence[str]) -> list[str]:
    """Return the fixes with the number of steps that the recipe's epochs have, where its data can be counted."""
    epochs = epochs_of(checked.recipe)
    if epochs is None:
        return list(fixes)
    steps = max(1, ceil(epochs.samples / checked.recipe.train.global_batch_size))
    return [fix.replace("train.steps=N", f"train.steps={steps}") for fix in fixes]


def _data_names(recipe: Recipe) -> list[tuple[str, str]]:
    return [("data.dataset", recipe.data.dataset), ("data.validation", recipe.data.validation)]


def _with_loadable_weights(
    recipe: Recipe, read: ImportedFile | None, theirs: frameworks.Framework, overrides: Sequence[str]
) -> tuple[Recipe, tuple[str, ...]]:
    """Return a file's recipe with weights that another framework can load, and the note on it; the user's are kept."""
    if read is None or "checkpoint.pretrained" in override.requested(recipe, override.split_auto(overrides)[0]):
        return recipe, ()
    changed, note = frameworks.loadable_weights(recipe, read.framework, theirs, read.given_model is not None)
    return changed, (note,) if note else ()


def _require_numbers(theirs: frameworks.Framework, checked: RecipeCheckResult, read: ImportedFile | None) -> None:
    """Raise InputError if a number that the user states is lost; a default of the file's framework is only listed."""
    for one in frameworks.lost_numbers(theirs, checked.recipe):
        if read is None or one.field in read.settings.mapped.source_keys:
            others = [name for name in ("megatron-lm", "megatron-bridge") if _can_export(name, checked, ())]
            fixes = [f"--to {name}" for name in others if name != theirs.name]
            own = "; --model FOLDER, with the config.json of this model, keeps it" if read is not None else ""
            raise InputError(f"{one.reason}{own}", one.field, one.value, fixes)


def _sizing(exported: Exported, overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the command that plans a layout for what was requested; none if no command can name the model.

    It has the words and overrides that the user typed, except those of the layout that does not run. The engine is the
    framework's: Accelerate's mesh with model axes is checked as AutoModel's, which has layouts that it does not.
    """
    job, checked = exported.job, exported.checked
    engine: str = frameworks.framework(exported.written.framework).engine
    engine = checked.engine if checked.engine == "deepspeed" else engine
    errors = [one for one in checked.findings if one.severity == "error"]
    if job.no_model or all(one.fix == (WRITTEN,) or _is_about_weights(one) or _is_open(one) for one in errors):
        return ()
    recipe = checked.recipe
    goal = ("--goal", recipe.goal) if job.plan is not None else ()
    own = [one for one in job.words[1:] if "=" in one and not one.startswith("-")]  # as the import resolved them
    named = [*(one for one in job.words if one not in own), *goal]
    named += ["--gpus", checked.cluster.argument, "--engine", engine]
    settings = override.merged(override.merged(overrides, own), _other_fixes(errors))
    words = [*named, *(one for one in settings if not (recipe_key(one) or "").startswith("layout."))]
    read = job.imported
    if read is not None and read.framework.name == exported.written.framework:  # a recipe loses what has no field
        command = shlex.join(("meshwright", "recommend", *words))
        return (f"for a layout that runs: {command}, then its Run line, which keeps the file's other settings",)
    command = shlex.join(("meshwright", "recommend", *words, "--save", "sized.toml"))
    return (f"for a layout that runs: {command}, then export sized.toml",)


def _other_fixes(errors: Sequence[RuleFinding]) -> list[str]:
    """Return the fixes of errors that no layout resolves, such as another optimizer."""
    fixes = [one.fix[0].split() for one in errors if one.fix and not _is_open(one)]
    whole = [words for words in fixes if not any((recipe_key(one) or "layout.").startswith("layout.") for one in words)]
    return list(dict.fromkeys(word for words in whole for word in words if "=" in word))


def _is_open(finding: RuleFinding) -> bool:
    """Return whether the fix of a finding has a value that only the user knows, such as PATH."""
    return bool(finding.fix) and any(word.partition("=")[2].isupper() for word in finding.fix[0].split())


def _is_about_weights(finding: RuleFinding) -> bool:
    """Return whether a finding is fixed by naming the initial weights, which no layout changes."""
    return bool(finding.fix) and all(text.startswith("checkpoint.") for text in finding.fix)


def framework_findings(
    theirs: frameworks.Framework, written: ExportedConfig, model: ModelSpec, on: clusters.Cluster
) -> list[RuleFinding]:
    """Return the findings of the framework's own rules for the file, as `check` reports them."""
    name, text = next(iter(written.files.items()))
    with suppress(InputError):  # a cluster of a file may have a GPU of its own
        content = frameworks.content_of(text, name, beside=written.files)
        result = frameworks.check(theirs, content, gpus=str(on), model=model)
        found = [one for one in result.findings if one.rule.startswith(f"{theirs.name}.")]
        return [frameworks.in_our_keys(theirs, content, one, model, on) for one in found]
    return []


def _all_findings(
    theirs: frameworks.Framework, written: ExportedConfig, checked: RecipeCheckResult, converting: str = WRITTEN
) -> tuple[RuleFinding, ...]:
    """Return our findings and the framework's; those that its rules report more precisely once, with a fix of both."""
    found = framework_findings(theirs, written, checked.model, checked.cluster)
    hidden = frameworks.superseded(theirs, found)
    ours = [one for one in checked.findings if one.rule not in hidden]
    return (*ours, *(_with_working_fix(theirs, checked, one, converting) for one in found))


def _with_working_fix(
    theirs: frameworks.Framework, checked: RecipeCheckResult, finding: RuleFinding, converting: str
) -> RuleFinding:
    """Return a finding with the first fix that removes it: our rule's, one override of its own, or all of them."""
    if finding.severity != "error" and len(finding.fix) < 2:
        return finding
    if any("meshwright export " in one for one in (*finding.fix, finding.no_fix)):  # of a file that is not written yet
        return msgspec.structs.replace(finding, fix=(converting,), no_fix="")
    same = frameworks.superseded(theirs, [finding])
    ours = [one.fix for one in checked.findings if one.rule in same and one.fix]
    for fix in (*ours, *((one,) for one in finding.fix), *((finding.fix,) if len(finding.fix) > 1 else ())):
        with suppress(InputError):
            changed = override.apply(checked.recipe, fix)
            written = frameworks.export(theirs, changed, checked.model, checked.cluster)
            after = framework_findings(theirs, written, checked.model, checked.cluster)
            if finding.rule not in {one.rule for one in after}:
                return msgspec.structs.replace(finding, fix=fix, no_fix="")
    return msgspec.structs.replace(finding, fix=(), no_fix=finding.no_fix or NO_OVERRIDE)


def _without_effect(checked: RecipeCheckResult, overrides: Sequence[str]) -> list[str]:
    """Return the typed fields that this training does not read: an export has no key for them."""
    typed = override.requested(checked.recipe, override.split_auto(overrides)[0])
    reasons = {key: frameworks.no_effect(key, checked.recipe, checked.model) for key in typed}
    return [f"{key}={typed[key]} has no effect: {reason}" for key, reason in reasons.items() if reason]


def _without_deepspeed(job: Job, checked: RecipeCheckResult, theirs: frameworks.Framework) -> list[str]:
    """Return what the sharding of a DeepSpeed job becomes in a framework that does not use DeepSpeed."""
    if job.imported is None or job.engine != "deepspeed" or checked.engine == "deepspeed":
        return []
    strategy = checked.recipe.layout.strategy
    return [f"ZeRO of {job.imported.content.path} becomes layout.strategy={strategy}: {theirs.title} has no DeepSpeed"]


def _contract_notes(job: Job, recipe: Recipe) -> list[str]:
    """Return the overrides that change what is trained: each is a new experiment."""
    if job.plan is not None or job.imported is not None:
        return []
    fields = [key for key, info in recipe_fields().items() if info.kind == "contract" and key not in OF_A_RUN]
    pairs = [(key, field_value(job.recipe, key), field_value(recipe, key)) for key in fields]
    return [f"changed: {key} {old} → {new} (contract): a new experiment" for key, old, new in pairs if old != new]


def _export_fixes(theirs: frameworks.Framework, checked: RecipeCheckResult, tried: Sequence[str]) -> list[str]:
    """Return what makes an export possible, without errors if that can be: overrides, or other frameworks."""
    to = theirs.name
    found = [fix for one in checked.findings if one.severity == "error" for fix in one.fix]
    changes = [fix for fix in (*tried, " ".join(dict.fromkeys(found))) if fix and not fix.startswith("--")]
    works = [fix for fix in changes if _can_export(to, checked, fix.split())]
    for fix in reversed(works):  # the last one has all of them
        complete = _without_errors(theirs, checked, fix.split())
        if complete:
            return [complete]
    others = [name for name in FRAMEWORKS if name != to and not works and _can_export(name, checked, ())]
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
            errors = ours or [one for one in _all_findings(theirs, written, result) if one.severity == "error"]
            if not errors:
                return " ".join(chosen.values())
            more = {text.partition("=")[0]: text for one in errors for text in one.fix}
            if more.keys() - chosen.keys():
                chosen |= more
                continue
        return ""
    return ""


def _can_export(to: str, checked: RecipeCheckResult, changes: Sequence[str]) -> bool:
    try:
        recipe = override.apply(checked.recipe, changes)
        frameworks.export(frameworks.framework(to), recipe, checked.model, checked.cluster)
    except InputError:
        return False
    return True


class FailedCheck(Part, frozen=True, kw_only=True):
    """A target that could not be read."""

    file: str
    error: Error


class IgnoredFinding(Finding, frozen=True, kw_only=True):
    """A finding that is accepted, and by what."""

    by: Literal["comment", "option", "baseline"]
    reason: str


class Findings(Response, frozen=True, kw_only=True):
    """What every response of check has."""

    framework: str
    ok: bool
    findings: Sequence[Finding]
    notes: Sequence[str]
    ignored: Sequence[IgnoredFinding] | UnsetType = UNSET  # accepted by a comment, an option or the baseline
    stale: Sequence[frameworks.BaselineEntry] | UnsetType = UNSET  # of the baseline, which are no longer found


class FileCheck(Part, frozen=True, kw_only=True):
    """The findings for one of several recipes or files."""

    framework: str
    version: str
    ok: bool
    file: str | None
    recipe: str
    model: str | None
    gpus: str | None
    engine: str
    findings: Sequence[Finding]
    unresolved: Sequence[UnresolvedValue]
    notes: Sequence[str]
    estimate: Estimate | None
    options: Sequence[planner.Option] = ()
    repair: planner.Repair | UnsetType = UNSET
    contradiction: planner.Contradiction | UnsetType = UNSET
    assumed: Sequence[clusters.Assumption] = ()
    ignored: Sequence[IgnoredFinding] | UnsetType = UNSET
    stale: Sequence[frameworks.BaselineEntry] | UnsetType = UNSET


class CheckResponse(Findings, frozen=True, kw_only=True):
    """The findings for a recipe or file; with several, those of all, and the response for each in `files`."""

    version: str | UnsetType = UNSET
    file: str | UnsetType | None = UNSET
    recipe: str | UnsetType = UNSET
    model: str | UnsetType | None = UNSET
    parameters: int | UnsetType = UNSET  # of the model that the figures are of
    active_parameters: int | UnsetType = UNSET
    gpus: str | UnsetType | None = UNSET
    engine: str | UnsetType = UNSET
    unresolved: Sequence[UnresolvedValue] | UnsetType = UNSET
    estimate: Estimate | UnsetType | None = UNSET
    options: Sequence[planner.Option] | UnsetType = UNSET
    repair: planner.Repair | UnsetType = UNSET
    contradiction: planner.Contradiction | UnsetType = UNSET
    assumed: Sequence[clusters.Assumption] | UnsetType = UNSET
    files: Sequence[FileCheck] | UnsetType = UNSET
    failed: Sequence[FailedCheck] | UnsetType = UNSET
    skipped: Sequence[SkippedFile] | UnsetType = UNSET
    corrected: frameworks.FixedText | UnsetType = UNSET


class ExportResponse(Response, frozen=True, kw_only=True):
    """Another framework's files and command, the fields it has no key for, and the findings there."""

    framework: str
    ok: bool
    gpus: str
    files: Mapping[str, str]
    command: str
    env: Mapping[str, str]
    unmapped: Sequence[UnmappedField]
    notes: Sequence[str]
    findings: Sequence[Finding]
    written: Sequence[str] = ()
    assumed: Sequence[clusters.Assumption] = ()
    not_imported: Sequence[DroppedSetting] = ()


def _typed_gpus(request: requests.Check | None, result: CheckResult) -> str | int | None:
    """Return the GPUs of a request; of a type alone, whose count the file states, the checked cluster."""
    given = None if request is None else request.gpus
    if given is None or not clusters.is_known(str(given).strip()):
        return given
    return None if result.cluster is None else str(result.cluster)


def check_response(result: CheckResult, request: requests.Check | None = None) -> CheckResponse:
    """Return the response of check."""
    return copied(
        CheckResponse,
        result,
        file=result.file or None,
        recipe=result.recipe.name,
        model=result.model.name if result.model else None,
        parameters=result.model.params.total if result.model else UNSET,
        active_parameters=result.model.params.active if result.model else UNSET,
        gpus=str(result.cluster) if result.cluster else None,
        findings=finding_parts(result.findings),
        estimate=estimate_part(result.estimate, result.exists) if result.estimate else None,
        repair=result.repair or UNSET,
        contradiction=result.contradiction or UNSET,
        assumed=assumed_in(_typed_gpus(request, result)),
        ignored=[_ignored_part(one) for one in result.ignored] or UNSET,
        stale=result.stale or UNSET,
        corrected=_corrected(result, str(request.target)) if request is not None and request.corrected else UNSET,
    )


def _corrected(result: CheckResult, path: str) -> frameworks.FixedText | UnsetType:
    """Return the file with its repair, or with the fix of every error; unset for a recipe without a file."""
    text = file_access.text_of(path) if file_access.exists(path) else None
    if text is None:
        return UNSET
    errors = [one for one in result.findings if one.severity == "error"] or result.findings
    fixes = result.repair.overrides if result.repair is not None else [fix for one in errors for fix in one.fix]
    return frameworks.fixed_text(text, path, fixes)


def _ignored_part(ignored: frameworks.IgnoredFinding) -> IgnoredFinding:
    part = finding_parts([ignored.finding])[0]
    return copied(IgnoredFinding, part, by=ignored.by, reason=ignored.reason)


def export_response(result: Exported, request: requests.Export | None = None) -> ExportResponse:
    """Return the response of export."""
    written, checked, job = result.written, result.checked, result.job
    findings = [*(() if job.imported is None else job.imported.rejected), *checked.findings]
    return copied(
        ExportResponse,
        written,
        ok=not any(one.severity == "error" for one in findings),
        gpus=str(checked.cluster),
        command=launch.command_of(written.program, checked.cluster),
        env=written.program.env,
        written=written.paths,
        findings=finding_parts(findings),
        assumed=(*(assumed_in(request.gpus) if request is not None else ()), *job.assumed(checked.engine)),
        not_imported=result.not_imported,
    )


@verb(requests.Write)
def write(request: requests.Write) -> ExportResponse:
    """Return the recommended recipe as a framework's files and the command that starts them."""
    return write_plan(recommend.handle(request), request.to, request.gpus)


def write_plan(plan: planner.Plan, to: str, gpus: str | int | None) -> ExportResponse:
    """Return a plan as a framework's files and the command that starts them."""
    if to != ENGINES[0]:
        return export_response(export(plan.recipe, to, gpus=gpus))
    response = plan_response(plan)
    return ExportResponse(
        framework=to,
        ok=plan.ok,
        gpus=response.question.gpus,
        files={f"{plan.recipe.name}.toml": recipe_text(plan.recipe)},
        command=response.commands.get(to, ""),
        env={},
        unmapped=[],
        notes=[],
        findings=response.findings,
        assumed=response.question.assumed,
    )
