"""The job of another framework: exported, run from its checkout, and saved before a requeue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from meshwright import frameworks, rules
from meshwright.api import run_requests as requests
from meshwright.api.checks import check_recipe
from meshwright.api.data_findings import DATA_MISSING, data_findings
from meshwright.api.exports import Exported
from meshwright.api.file_errors import unread
from meshwright.api.framework_launch import FrameworkLaunch
from meshwright.api.job_notes import (
    comments,
    container_not_kept,
    not_kept,
    note_length_of_plan,
    print_notes,
    run_seconds,
    sbatch_not_kept,
    storage_note,
    without_arguments_of,
)
from meshwright.api.started_programs import StartedProgram, started_program
from meshwright.errors import MeshwrightError
from meshwright.frameworks.export_recipe import ARGUMENTS_FILE
from meshwright.frameworks.launch_checks import imported_launch
from meshwright.frameworks.trainer_files import started_program as started_file
from meshwright.frameworks.trainer_resume import RESUME, not_resumed
from meshwright.launch import build_job, config_paths, container_paths, other_frameworks, user_setup
from meshwright.launch.build_job import FileRepair, LaunchRequest
from meshwright.launch.job import RESUMES, find_scheduler
from meshwright.recipes.types import Recipe

SAVE_EVERY = "checkpoint.save_every"


class SavingExport(NamedTuple):
    """An export with the job's save interval, the data converted for it, and notes."""

    exported: Exported
    data: Mapping[str, str]
    changed: tuple[str, ...] = ()  # the warning that the interval is not that of the user's file
    notes: tuple[str, ...] = ()


class ConvertedRows(NamedTuple):
    """Converted data: files of the job, files that the user copies, and notes."""

    files: Mapping[str, str] = {}
    beside: Mapping[str, str] = {}
    notes: tuple[str, ...] = ()


def exported_job(request: requests.Launch) -> LaunchRequest:
    """Return the job of another framework: exported, run from its checkout, and saved before a requeue."""
    dataset = [f"data.dataset={request.dataset}"] if request.dataset else []
    changes = other_frameworks.full_paths([*request.overrides, *dataset])
    launch = FrameworkLaunch(request, find_scheduler(request.scheduler), tuple(changes))
    exported, data = launch.export(changes)
    note_length_of_plan(exported.job, exported.checked.recipe, changes)
    if not exported.checked.ok:  # else they are notes of the job
        print_notes(exported.checked)
    step_s = float(exported.checked.estimate.step_s)
    exported, data, changed, save_notes = _with_save_interval(launch, exported, data, step_s)
    started = started_program(launch, exported)
    exported = without_arguments_of(started.program, exported)
    storage = storage_note(exported)
    job = build_job.exported(exported.written, exported.checked)
    recipe = job.recipe
    if launch.requeued:
        recipe = other_frameworks.with_time_to_save(recipe, launch.framework, step_s, changes)
    restart, restart_notes = _restart(launch, exported)
    if launch.local and (started.is_here or not started.start):
        recipe = other_frameworks.with_full_paths(recipe, _path(started.start))
    about_data = _about_data(recipe, started) if dataset else ()
    rows = _converted_rows(launch, data, recipe.data.dataset)
    if data and not launch.local:
        recipe = msgspec.structs.replace(recipe, data=exported.data or recipe.data)
    if (read := exported.job.imported) is not None and read.framework.name == launch.framework:
        parsed = read.settings.parsed
        recipe = other_frameworks.with_output_folder(recipe, parsed.settings, parsed.program.given)
    setup = user_setup.user_setup(exported.job.imported, started.program, launch.scheduler, request.image or "")
    notes = (*save_notes, *restart_notes, *started.notes, *storage, *about_data, *rows.notes)
    located = _located(launch, exported, started, job.files, (*notes, *job.notes))
    job = msgspec.structs.replace(job, files=located.files)
    return msgspec.structs.replace(
        job,
        recipe=recipe,
        program=located.program,
        reads=located.reads,
        no_save=other_frameworks.why_no_save(located.program, launch.framework, exported.written.files),
        repair=_repair_of_file(launch, exported),
        run_s=run_seconds(exported.checked),
        comments=(*(f"# {one}" for one in changed), *comments(exported, job.files)),
        kept_setup=setup.commands,
        files={**job.files, **rows.files},
        beside=rows.beside,
        findings=(*unread(exported.job), *job.findings, *_advice(exported, request.gpus)),
        notes=(
            *notes,
            *located.notes,
            *job.notes,
            *not_kept(exported),
            *sbatch_not_kept(exported, request, launch.scheduler),
            *container_not_kept(exported, request, launch.scheduler),
            *setup.notes,
        ),
        python_path=other_frameworks.CHECKOUTS[launch.framework].python_path,
        start=started.start,
        where_submitted=started.where_submitted,
        restart=restart,
    )


def _with_save_interval(
    launch: FrameworkLaunch, exported: Exported, data: Mapping[str, str], step_s: float
) -> SavingExport:
    """Return the export with the interval at which a job saves that is requeued, or whose --save-minutes are set."""
    minutes, recipe, read = launch.request.save_minutes, exported.checked.recipe, exported.job.imported
    if not launch.requeued and minutes is None:
        return SavingExport(exported, data)
    own = read is not None and other_frameworks.saves_by_itself(read.settings.parsed.program, minutes)
    every = None if own else other_frameworks.save_every(recipe, step_s, minutes, launch.changes)
    changes = list(launch.changes)
    if every is not None:
        is_theirs = read is not None
        every, kept = other_frameworks.retention(launch.framework, recipe, every, launch.changes, is_theirs)
        changes = [one for one in changes if not one.startswith(f"{SAVE_EVERY}=")]
        changes += [f"{SAVE_EVERY}={every}", *kept]
    if launch.requeued:
        changes += other_frameworks.resuming(recipe, launch.changes)
    if changes != [*launch.changes]:
        exported, data = launch.export(changes)
    saving = exported.checked.recipe
    if left := next((one for one in exported.written.unmapped if one.field == SAVE_EVERY), None):
        note = other_frameworks.requeue_note(launch.framework, recipe, step_s)
        return SavingExport(exported, data, (), (f"warning: your program sets its interval; {left.reason}", note))
    stated = read is not None or exported.job.content is not None  # a job may not change a file without a word
    changed = other_frameworks.changed_interval(saving, recipe) if stated else ()
    note = other_frameworks.requeue_note(launch.framework, saving, step_s, own)
    return SavingExport(exported, data, changed, (*changed, note))


def _restart(launch: FrameworkLaunch, exported: Exported) -> tuple[str, tuple[str, ...]]:
    """Return what the user's own program does when its job is started again, and a warning if it does not resume."""
    source, program = exported.job.imported, exported.written.program
    is_own = source is not None and source.framework.name == launch.framework and launch.framework in ARGUMENTS_FILE
    if source is None or not is_own or program.argv[0] in exported.written.files:
        return RESUMES, ()
    content = source.content
    is_code = content.format == "python"
    command = None if is_code else imported_launch(content, source.settings.parsed)
    if not is_code and (command is None or started_file(content, command.program) is None):
        return f"resumes if your program does ({RESUME})", ()
    found = not_resumed(content, command)
    if found is None:
        return RESUMES, ()
    fix = " and ".join(found.fix)
    requeued = ", also one that is requeued (--no-requeue ends the job instead)" if launch.requeued else ""
    return "begins at step 0", (f"warning: {found.why}: every start begins at step 0{requeued}; write {fix}",)


def _about_data(recipe: Recipe, started: StartedProgram) -> tuple[str, ...]:
    """Return what is wrong with the data that the user named; other paths are checked where the program starts."""
    found = data_findings(recipe)
    others = [one for one in found if started.start and one.rule == DATA_MISSING and one.field != "data.dataset"]
    return tuple(one.message for one in found if one not in others)


def _converted_rows(launch: FrameworkLaunch, data: Mapping[str, str], dataset: str) -> ConvertedRows:
    """Return where the job reads the converted rows of a dataset: beside its files, or where the user copies them."""
    if not data:
        return ConvertedRows()
    note = f"{', '.join(data)}: the rows of {dataset} as messages, which {launch.framework} reads"
    place = "" if launch.local else launch.place_of_rows(data)
    if not place:
        return ConvertedRows(files=data, notes=(note,))
    copy = container_paths.copy_note(data, str(launch.request.write), place, launch.request.mounts)
    return ConvertedRows(beside=data, notes=(note, copy))


def _located(
    launch: FrameworkLaunch, exported: Exported, started: StartedProgram, files: Mapping[str, str], notes: Sequence[str]
) -> config_paths.Located:
    """Return the job's files and program with full paths; those of an export to another framework have them."""
    source = exported.job.imported
    if not launch.folder or source is None or source.framework.name != launch.framework:
        return config_paths.Located(files, started.program, {}, ())
    start = _path(started.start)
    if start is not None and not started.is_here:  # nothing is known about its files
        return config_paths.Located(files, started.program, {}, ())
    bases = [start or Path(), Path(source.content.folder or "."), *filter(None, [_path(started.framework_dir)])]
    folder = "the folder where sbatch is run" if started.where_submitted else str(Path(launch.folder).resolve())
    folder = started.start or folder
    return config_paths.located(files, started.program, source.framework.key_map, bases, folder, notes)


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None


def _repair_of_file(launch: FrameworkLaunch, exported: Exported) -> FileRepair | None:
    """Return the repair that check prints for the job's file, also as overrides if those leave no error.

    None for a job without errors, or of another framework than its file.
    """
    read, checked = exported.job.imported, exported.checked
    if (checked.ok and not unread(exported.job)) or read is None or read.framework.name != exported.written.framework:
        return None
    found, file = read.checked, read.content.path
    errors = [one for one in found.findings if one.severity == "error"]
    fixes = found.repair.overrides if found.repair is not None else tuple(text for one in errors for text in one.fix)
    texts = tuple(dict.fromkeys(fixes))
    if not texts:
        return None
    joined = rules.Finding("repair", "error", "", "", texts, file=file)
    typed = frameworks.in_our_keys(read.framework, read.content, joined, read.model, checked.cluster).fix
    try:
        other = launch.export([*launch.changes, *typed])[0] if typed else None
        works = other is not None and other.checked.ok and not unread(other.job)
    except MeshwrightError:
        works = False
    return FileRepair(overrides=typed if works else (), in_file=f"in {file}: {'  '.join(texts)}")


def _advice(exported: Exported, gpus: str | int | None) -> tuple[rules.Finding, ...]:
    """Return the advice on a recipe of ours that another framework trains, as our engine's job has it."""
    checked = exported.checked
    if exported.job.imported is not None:  # the user's own file, which check comments on
        return ()
    found = check_recipe(checked.recipe, gpus, checked.engine, (), model=checked.model).findings
    return tuple(one for one in found if one.severity == "advice")
