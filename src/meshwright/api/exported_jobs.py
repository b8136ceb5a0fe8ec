"""The job of another framework: exported, run from its checkout, and saved before a requeue."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright import frameworks, rules
from meshwright.api import run_requests as requests
from meshwright.api.checks import check_recipe
from meshwright.api.data_findings import data_findings
from meshwright.api.exports import Exported, export_into
from meshwright.api.job_notes import (
    comments,
    container_not_kept,
    not_kept,
    note_length_of_plan,
    print_notes,
    run_seconds,
    sbatch_not_kept,
    storage_note,
)
from meshwright.api.requests import Export
from meshwright.errors import MeshwrightError

if TYPE_CHECKING:
    from meshwright.launch.build_job import FileRepair, LaunchRequest


def exported_job(request: requests.Launch, dataset: str | None) -> LaunchRequest:
    """Return the job of another framework: exported, run from its checkout, and saved before a requeue."""
    from meshwright.launch import build_job, config_paths, container_paths, other_frameworks, user_setup
    from meshwright.launch.job import find_scheduler

    framework, scheduler = str(request.to), find_scheduler(request.scheduler)
    changes = other_frameworks.full_paths([*request.overrides, *([f"data.dataset={dataset}"] if dataset else [])])
    which: dict[str, Any] = {name: getattr(request, name) for name in ("gpus", "goal", "model", "framework")}
    local = scheduler not in build_job.REMOTE_FILES
    folder = request.write if local else None

    def folder_of_rows(rows: Mapping[str, str]) -> str:
        return container_paths.place_of_rows(rows, request.mounts, scheduler)

    def export_with(texts: Sequence[str]) -> tuple[Exported, Mapping[str, str]]:
        wanted = Export(request.recipe, framework, overrides=tuple(texts), **which)
        elsewhere = folder_of_rows if request.write and not local else None
        return export_into(wanted, folder, "--write FOLDER", anywhere=True, elsewhere=elsewhere)

    exported, data = export_with(changes)
    note_length_of_plan(exported.job, exported.checked.recipe, changes)
    if not exported.checked.ok:  # else they are notes of the job
        print_notes(exported.checked)
    requeued = scheduler == "slurm" and request.requeue
    notes: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    step_s = float(exported.checked.estimate.step_s)
    if requeued or request.save_minutes is not None:
        recipe = exported.checked.recipe
        imported = exported.job.imported
        read = imported is not None
        program_given = None if imported is None else imported.settings.parsed.program
        own = program_given is not None and other_frameworks.saves_by_itself(program_given, request.save_minutes)
        every = None if own else other_frameworks.save_every(recipe, step_s, request.save_minutes, changes)
        more = list(changes)
        if every is not None:
            every, kept = other_frameworks.retention(framework, recipe, every, changes) if read else (every, [])
            more = [one for one in changes if not one.startswith("checkpoint.save_every=")]
            more += [f"checkpoint.save_every={every}", *kept]
        if requeued:
            more += other_frameworks.resuming(recipe, changes)
        if more != changes:
            exported, data = export_with(more)
        new = exported.checked.recipe
        stated = read or exported.job.content is not None  # by a file, which a job may not change without a word
        changed = other_frameworks.changed_interval(new, recipe.checkpoint.save_every) if stated else ()
        notes = (*changed, other_frameworks.requeue_note(framework, new, step_s, own))
    program = exported.written.program
    source = exported.job.imported
    if local and folder and source is not None and source.settings.parsed.program.argv:
        program = other_frameworks.with_full_arguments(program, source.content.folder)
    if requeued:
        program = other_frameworks.saving_on_signal(program, framework, exported.written.files)
        notes += other_frameworks.planned_exit_notes(program)
    if request.framework_dir is None and local and not request.image and source is not None:
        place = other_frameworks.script_folder(source.content, program, exported.written.files)
        if place is not None and source.framework.name == framework:
            request = msgspec.structs.replace(request, framework_dir=str(place.value))
            notes += (f"--framework-dir {place.value}: {source.content.path} starts the program there (cd)",)
    if request.framework_dir is None:
        notes += other_frameworks.missing_checkout(program, framework, scheduler, exported.written.files)
    else:
        program, found = other_frameworks.in_checkout(
            program, framework, request.framework_dir, exported.written.files, local=local and not request.image
        )
        notes += found
    notes += storage_note(exported)
    job = build_job.exported(exported.written, exported.checked)
    recipe = other_frameworks.with_time_to_save(job.recipe, framework, step_s, changes) if requeued else job.recipe
    if dataset:
        notes += tuple(one.message for one in data_findings(recipe))
    if data:
        notes += (f"{', '.join(data)}: the rows of {recipe.data.dataset} as messages, which {framework} reads",)
    beside: Mapping[str, str] = {}
    if data and not local:
        recipe = msgspec.structs.replace(recipe, data=exported.data or recipe.data)
        if there := folder_of_rows(data):
            beside, data = data, {}
            notes += (container_paths.copy_note(beside, str(request.write), there, request.mounts),)
    setup = user_setup.user_setup(source, program, scheduler, request.image or "")
    reads: Mapping[str, str] = {}
    if local and folder and source is not None and source.framework.name == framework:
        bases = [Path(source.content.folder or "."), *([Path(request.framework_dir)] if request.framework_dir else [])]
        full = str(Path(folder).resolve())
        found_paths = config_paths.located(
            job.files, program, source.framework.key_map, bases, full, (*notes, *job.notes)
        )
        job = msgspec.structs.replace(job, files=found_paths.files)
        program, reads, notes = found_paths.program, found_paths.reads, (*notes, *found_paths.notes)
    return msgspec.structs.replace(
        job,
        recipe=recipe,
        program=program,
        reads=reads,
        no_save=other_frameworks.why_no_save(program, framework, exported.written.files),
        repair=_repair_of_file(exported, lambda texts: export_with([*changes, *texts])[0]),
        run_s=run_seconds(exported.checked),
        comments=(*(f"# {one}" for one in changed), *comments(exported, job.files)),
        kept_setup=setup.commands,
        files={**job.files, **data},
        beside=beside,
        findings=(*job.findings, *_advice(exported, request.gpus)),
        notes=(
            *notes,
            *job.notes,
            *not_kept(exported),
            *sbatch_not_kept(exported, request, scheduler),
            *container_not_kept(exported, request, scheduler),
            *setup.notes,
        ),
        python_path=other_frameworks.CHECKOUTS[framework].python_path,
    )


def _repair_of_file(exported: Exported, export_with: Callable[[Sequence[str]], Exported]) -> FileRepair | None:
    """Return the repair that check prints for the job's file, also as overrides if those leave no error.

    None for a job without errors, or of another framework than its file.
    """
    from meshwright.launch.build_job import FileRepair

    read, checked = exported.job.imported, exported.checked
    if checked.ok or read is None or read.framework.name != exported.written.framework:
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
        works = bool(typed) and export_with(typed).checked.ok
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
