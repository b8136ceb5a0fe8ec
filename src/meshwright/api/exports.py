"""Export recipes to other frameworks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from meshwright import clusters, frameworks, launch, planner, rules
from meshwright.api import requests
from meshwright.api.catalogues import recipe_text, save_files
from meshwright.api.checks import check_recipe
from meshwright.api.data_findings import listed_dataset
from meshwright.api.export_findings import (
    NO_OVERRIDE,
    WRITTEN,
    all_findings,
    in_users_file,
    is_about_tokenizer,
    is_open,
    unconverted_data,
    with_open_source,
)
from meshwright.api.export_fixes import can_export, counted_steps, export_fixes, no_version, require_numbers
from meshwright.api.export_notes import contract_notes, names_data_here, sizing_note, without_deepspeed, without_effect
from meshwright.api.exported_estimate import as_written
from meshwright.api.file_errors import as_checked
from meshwright.api.plan_responses import plan_response
from meshwright.api.planning import recommend
from meshwright.api.resolve import assumed_in
from meshwright.api.responses import Finding, Response, copied, finding_parts
from meshwright.api.targets import Job, job_for, without_folder
from meshwright.api.verb_function import verb
from meshwright.choices import FRAMEWORKS
from meshwright.display import Readable, Row, titled
from meshwright.errors import InputError
from meshwright.frameworks import DroppedSetting, ExportedConfig, ImportedFile, RecipeCheckResult, UnmappedField
from meshwright.frameworks.common import short_training_notes
from meshwright.launch import other_frameworks
from meshwright.launch.start_folder import config_note, start_folder, start_of, with_full_names
from meshwright.notes import no_notes
from meshwright.planner import is_override
from meshwright.recipes import overrides as override
from meshwright.recipes.types import ENGINES, Data, Recipe

OF_PROGRAM = ("optimizer.supported", "learning_rate.supported", "precision.format-supported")
"""Rules on what the training program and its config decide, whatever engine models their layout in the estimate."""
ROUNDS = 3  # of fixes that a framework refuses without others
IN_CHECKOUT = ("megatron-lm",)  # whose program is started in a checkout, not in the folder of the export


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
    checked = found.checked
    if not checked.ok:
        refused = (f"nothing was written to {request.out}: see the findings",) if request.out else ()
        notes = (*refused, *written.notes, *sizing_note(found.job, checked, found.written.framework, request.overrides))
        written = msgspec.structs.replace(written, notes=notes)
    elif request.out:
        notes = (*_moved(found, data, request.out), *written.notes)
        paths = save_files({**written.files, **data}, request.out)
        written = msgspec.structs.replace(written, notes=notes, paths=paths)
    return msgspec.structs.replace(found, written=written, refused=bool(request.out) and not checked.ok)


def _moved(found: Exported, data: Mapping[str, str], folder: str) -> Iterator[str]:
    """Yield notes on data that were converted, and on paths that are written in full: the program starts elsewhere."""
    recipe = found.checked.recipe
    if data:
        start = "" if found.written.framework in IN_CHECKOUT else f"; start it in {folder}"
        yield f"{', '.join(data)}: the rows of {recipe.data.dataset} as messages{start}"
    elif full := [key for key, name in data_names(recipe) if names_data_here(found.written, key, name)]:
        yield f"{' and '.join(full)}: the full path of this machine is written, for a start in any folder"


class _Target(msgspec.Struct, frozen=True, kw_only=True):
    """A job, the framework that it is exported to, and where the files go."""

    theirs: frameworks.Framework
    job: Job
    read: ImportedFile | None  # the file of another framework
    gpus: str | int | None
    overrides: tuple[str, ...]
    folder: str | None
    anywhere: bool  # the program starts in any folder

    @property
    def own(self) -> ImportedFile | None:
        """The file that was read, if it is this framework's own."""
        return self.read if self.read is not None and self.read.framework.name == self.theirs.name else None

    @property
    def has_program(self) -> bool:
        """Whether the file starts a program of the user."""
        return self.own is not None and bool(self.own.settings.parsed.program.argv)

    @property
    def version(self) -> str:
        """The version that a job has to run, which is that of its file; empty for any."""
        return self.own.settings.parsed.version if self.own is not None and self.anywhere else ""

    def recipe_on(self, engine: str) -> tuple[Recipe, tuple[str, ...]]:
        """Return the recipe for an engine, and the note on weights that the framework can load in place of the file's.

        Weights that the user names are kept.
        """
        recipe, read = self.job.on(engine), self.read
        if read is None:
            return recipe, ()
        recipe = recipe if self.own is not None else without_folder(recipe, read)
        if "checkpoint.pretrained" in override.requested(recipe, override.split_auto(self.overrides)[0]):
            return recipe, ()
        recipe, note = frameworks.loadable_weights(recipe, read.framework, self.theirs, read.given_model is not None)
        return recipe, (note,) if note else ()

    def check(self, recipe: Recipe, engine: str) -> RecipeCheckResult:
        """Return the findings for a recipe on an engine; a file's model may have a shape without a name."""
        shape = None if self.job.imported is None else self.job.model
        return check_recipe(recipe, self.gpus, engine, self.overrides, advice=False, model=shape)


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
    target = _target(request, folder, anywhere)
    dropped = () if target.own is not None else target.job.dropped(target.theirs)
    checked, replaced = _checked(target)
    named, converted = _readable_data(target, checked.recipe, elsewhere)
    written = _written(target, checked, named)
    if target.own is not None:
        written, dropped = _with_own_settings(target, target.own, checked, named, written)
        target.job.require_expanded(written)
    written = _commented(written, dropped)
    checked = _checked_as_written(target, checked, written)
    findings = _findings(target, checked, written, dropped, fix)
    findings += listed_dataset(checked.recipe) if target.read is None else ()
    if not folder and elsewhere is None and target.own is None:
        findings += unconverted_data(target.theirs, checked.recipe, findings, fix)
    checked = msgspec.structs.replace(checked, findings=findings)
    notes = _notes(target, checked, written, replaced)
    written = msgspec.structs.replace(written, notes=notes)
    return Exported(written, checked, target.job, dropped, named.data), converted


def _target(request: requests.Export, folder: str | None, anywhere: bool) -> _Target:
    """Return what is exported; raise InputError if its length or its initial weights are open."""
    theirs = frameworks.framework(request.to)
    overrides = tuple(other_frameworks.full_paths(request.overrides) if folder else request.overrides)
    options = {"framework": request.framework, "model": request.model, "to": theirs.name}
    job = job_for(request.target, request.goal, request.gpus, overrides, theirs.engine, **options)
    covered = frameworks.covers_goal(theirs, job.recipe)  # else that is the error: no setting adds it
    if covered:
        job.require_length()
    read = job.imported
    if read is not None and theirs.name == "deepspeed":  # the DeepSpeed config that a config of Accelerate names
        read = frameworks.referenced_file(read) or read
    if covered:
        job.require_weights()
    return _Target(
        theirs=theirs, job=job, read=read, gpus=request.gpus, overrides=overrides, folder=folder, anywhere=anywhere
    )


def _checked(target: _Target) -> tuple[RecipeCheckResult, tuple[str, ...]]:
    """Return the recipe for the framework as it was checked, and the note on its weights."""
    theirs, job = target.theirs, target.job
    keeps_deepspeed = job.engine == "deepspeed" and (target.own is not None or theirs.name == "accelerate")
    engine = job.engine if keeps_deepspeed else theirs.engine
    recipe, replaced = target.recipe_on(engine)
    if engine != theirs.engine:
        recipe = msgspec.structs.replace(recipe, engine=engine)
    if (target.folder or target.anywhere) and start_of(target.own) is None:  # else relative paths stay
        recipe = other_frameworks.with_full_paths(recipe)
    checked = target.check(recipe, engine)
    require_numbers(theirs, checked, target.read)
    return checked, replaced


def _readable_data(
    target: _Target, recipe: Recipe, elsewhere: Callable[[Mapping[str, str]], str] | None
) -> tuple[Recipe, Mapping[str, str]]:
    """Return the recipe with data that the framework reads, and those converted for it; by full paths if needed."""
    if not target.folder and elsewhere is None:
        return recipe, {}
    named, converted = target.theirs.readable_data(recipe)
    if not converted:
        return named, {}
    place = elsewhere(converted) if elsewhere is not None else ""
    if target.folder and (target.anywhere or target.has_program or target.theirs.name in IN_CHECKOUT):
        place = str(Path(target.folder).resolve())
    if place:
        here = [f"{key}={place.rstrip('/')}/{name}" for key, name in data_names(named) if name in converted]
        named = override.apply(named, here)
    return named, converted


def _written(target: _Target, checked: RecipeCheckResult, named: Recipe) -> ExportedConfig:
    """Return the recipe as the framework's files, in the version that a job runs."""
    theirs, version = target.theirs, target.version
    try:
        written = frameworks.export(theirs, named, checked.model, checked.cluster)
    except InputError as error:
        if (of_file := as_checked(target.read, error)) is not None:
            raise of_file from error
        fixes = export_fixes(theirs, checked, counted_steps(checked, error.fix))
        if error.field == "train.global_batch_size" and checked.recipe.layout.pp > 1:  # others keep the pipeline
            others = (name for name in FRAMEWORKS if name != theirs.name and can_export(name, checked, ()))
            fixes += [text for name in others if (text := f"--to {name}") not in fixes][:1]
        raise InputError(error.reason, error.field, error.value, fixes) from error
    if not version:
        return written
    if version not in written.versions:
        raise no_version(target.job, theirs, version, checked)
    return frameworks.in_version(theirs, written, version, named, checked.model, checked.cluster)


def _with_own_settings(
    target: _Target, own: ImportedFile, checked: RecipeCheckResult, named: Recipe, written: ExportedConfig
) -> tuple[ExportedConfig, tuple[DroppedSetting, ...]]:
    """Return the export with the other settings of the framework's own file, and those that it loses."""
    model, on, job = checked.model, checked.cluster, target.job
    patched = None if target.version else frameworks.patch(own, written, named, model, on, job=target.anywhere)
    if patched is None:
        return written, job.dropped(target.theirs)
    dropped, written = job.dropped(target.theirs, patched.lost), patched.written
    if not target.folder or not target.has_program or target.anywhere:
        return written, dropped
    return _with_start_script(own, written, on, checked.recipe.name, target.folder), dropped


def _with_start_script(
    own: ImportedFile, written: ExportedConfig, on: clusters.Cluster, name: str, out: str
) -> ExportedConfig:
    """Return an export with the script that starts the user's program as its own script does: its setup, its folder."""
    from meshwright.launch import user_setup  # the interpreter of scripts, which few exports need

    content, files, notes = own.content, written.files, written.notes
    start = start_folder(own.framework.name, content, written.program, files)
    program, missing = other_frameworks.started_elsewhere(written.program, content.folder, files, start)
    if start is not None:
        notes += config_note(own.settings.parsed.program, program, files, start, out)
        notes += (f"{name}.sh starts the program in {start}, as {content.path} does: relative paths are there",)
        program = with_full_names(program, files, out)
    setup = user_setup.user_setup(own, program, None)
    script = launch.start_script(program, on, name, setup.commands, str(start or ""))
    files = {**files, f"{name}.sh": script}
    return msgspec.structs.replace(written, program=program, files=files, notes=(*notes, *missing, *setup.notes))


def _commented(written: ExportedConfig, dropped: Sequence[DroppedSetting]) -> ExportedConfig:
    """Return the export with comments in its files on the settings that they do not have."""
    lost = frameworks.lost_lines(written.unmapped, dropped)
    first = frameworks.lost_lines((one for one in written.unmapped if one.field in written.first_file_lacks), ())
    files = frameworks.with_comments(written.files, lost, written.program.modules, first)
    return msgspec.structs.replace(written, files=files)


def _checked_as_written(target: _Target, checked: RecipeCheckResult, written: ExportedConfig) -> RecipeCheckResult:
    """Return the result with the engine and the layout that the written file has."""
    engine = frameworks.exported_engine(target.theirs, written, checked.model)
    if engine != checked.engine:
        of_program = [one for one in checked.findings if one.rule in OF_PROGRAM]
        checked = target.check(target.recipe_on(engine)[0], engine)
        of_layout = [one for one in checked.findings if one.rule not in OF_PROGRAM]
        checked = msgspec.structs.replace(checked, findings=(*of_program, *of_layout))
    return as_written(target.theirs, written, checked, target.gpus)


def _findings(
    target: _Target, checked: RecipeCheckResult, written: ExportedConfig, dropped: Sequence[DroppedSetting], fix: str
) -> tuple[rules.Finding, ...]:
    """Return the findings of the export; in the framework's own file as check reports them there."""
    found = [with_open_source(one, dropped) for one in all_findings(target.theirs, written, checked, fix)]
    found = [_with_accepted_fix(target, one) for one in found]
    if target.own is None:
        about = tuple(frameworks.tokenizer_findings(target.theirs, checked.recipe, checked.model, written))
        return (*about, *(one for one in found if not about or not is_about_tokenizer(one)))
    kept = (one for one in found if frameworks.as_in_files(one).severity != "advice")
    return tuple(in_users_file(one, target.own, written) for one in kept)


def _with_accepted_fix(target: _Target, finding: rules.Finding) -> rules.Finding:
    """Return an error with a fix that the export accepts when it is typed: its own, or what makes that possible."""
    fix = finding.fix
    if finding.severity != "error" or is_open(finding) or not fix or not all(map(is_override, fix)):
        return finding
    refused = _refused(target, fix)
    for _ in range(ROUNDS):
        if refused is None:
            return msgspec.structs.replace(finding, fix=fix)
        more = next((one.split() for one in refused.fix if all(map(is_override, one.split()))), [])
        if not more:
            break
        fix = override.merged(fix, more)
        refused = _refused(target, fix)
    return msgspec.structs.replace(finding, fix=(), no_fix=finding.no_fix or NO_OVERRIDE)


def _refused(target: _Target, fix: Sequence[str]) -> InputError | None:
    """Return why the export with a fix is refused; None if its files can be written."""
    changed = msgspec.structs.replace(target, overrides=override.merged(target.overrides, fix))
    try:
        with no_notes():
            checked, _ = _checked(changed)
            _written(changed, checked, checked.recipe)
    except InputError as error:
        return error
    return None


def _notes(
    target: _Target, checked: RecipeCheckResult, written: ExportedConfig, replaced: Sequence[str]
) -> tuple[str, ...]:
    """Return the notes of the check, on what the export changes or loses, and of the written files."""
    return (
        *checked.notes,
        *without_effect(checked, target.overrides),
        *replaced,
        *without_deepspeed(target.job, checked, target.theirs),
        *contract_notes(target.job, checked.recipe),
        *(short_training_notes(checked.recipe, checked.model) if target.read is None else ()),
        *written.notes,
    )


def data_names(recipe: Recipe) -> list[tuple[str, str]]:
    return [("data.dataset", recipe.data.dataset), ("data.validation", recipe.data.validation)]


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
