"""The program of another framework's job as the job starts it: its folder, its checkout and its full paths."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import NamedTuple

import msgspec

from meshwright.api.exports import Exported
from meshwright.api.framework_launch import FrameworkLaunch
from meshwright.frameworks.file_import import ImportedFile
from meshwright.frameworks.shell.containers import container_of
from meshwright.frameworks.types import Program
from meshwright.launch import other_frameworks
from meshwright.launch.slurm import repeated_mount
from meshwright.launch.start_folder import config_note, is_own, start_folder


class StartedProgram(NamedTuple):
    """A program as the job starts it, the checkout it is started from if that is known, and notes."""

    program: Program
    framework_dir: str | None
    notes: tuple[str, ...]
    start: str = ""  # folder of the user's program, in which its own script starts it
    is_here: bool = False  # whether that folder is one of this machine
    where_submitted: bool = False  # it starts where sbatch is run


class Start(NamedTuple):
    """The folder in which a job starts the user's own program; empty if it is not known."""

    folder: str = ""
    is_here: bool = False  # whether its paths are those of this machine
    is_mounted: bool = False  # the container of the user's script has it


def started_program(launch: FrameworkLaunch, exported: Exported) -> StartedProgram:
    """Return the program with the arguments of the job: full paths, saving on a signal, its checkout."""
    program, files, source = exported.written.program, exported.written.files, exported.job.imported
    framework, framework_dir = launch.framework, launch.request.framework_dir
    if source is not None and _starts_own(launch, exported, source):
        return _started_own(launch, exported, source)
    notes: tuple[str, ...] = ()
    on_nodes = launch.local and not launch.request.image  # not in a container, which has paths of its own
    if launch.folder and source is not None and source.settings.parsed.program.argv:
        program = other_frameworks.with_full_arguments(program, source.content.folder, files)
    if launch.requeued:
        program = other_frameworks.saving_on_signal(program, framework, files)
        notes += other_frameworks.planned_exit_notes(program)
    if framework_dir is None and on_nodes and source is not None and source.framework.name == framework:
        place = other_frameworks.script_folder(source.content, program, files)
        if place is not None:
            framework_dir = str(place.value)
            notes += (f"--framework-dir {framework_dir}: {source.content.path} starts the program there",)
    if framework_dir is None:
        missing = other_frameworks.missing_checkout(program, framework, launch.scheduler, files)
        return StartedProgram(program, None, (*notes, *missing))
    program, found = other_frameworks.in_checkout(program, framework, framework_dir, files, local=on_nodes)
    return StartedProgram(program, framework_dir, (*notes, *found))


def _starts_own(launch: FrameworkLaunch, exported: Exported, source: ImportedFile) -> bool:
    """Return whether the file is one of the job's framework that starts the user's own program, or is that program."""
    starts = bool(source.settings.parsed.program.argv) or source.content.format == "python"
    written = exported.written
    return (
        starts
        and source.framework.name == launch.framework
        and is_own(launch.framework, written.program, written.files)
    )


def _started_own(launch: FrameworkLaunch, exported: Exported, source: ImportedFile) -> StartedProgram:
    """Return the user's own program, started in the folder in which the user's script starts it."""
    program, files, framework = exported.written.program, exported.written.files, launch.framework
    start, notes = _start(launch, exported, source), tuple[str, ...]()
    if launch.folder and source.settings.parsed.program.argv and (start.is_here or not start.folder):
        folder = Path(start.folder) if start.folder else None
        program = other_frameworks.with_full_arguments(program, source.content.folder, files, folder)
        if folder is not None:
            notes = config_note(source.settings.parsed.program, program, files, folder, launch.folder)
    if launch.requeued:
        program = other_frameworks.saving_on_signal(program, framework, files)
        notes += other_frameworks.planned_exit_notes(program)
    on_nodes = launch.local and not launch.request.image
    if not start.folder:
        where_submitted = on_nodes and launch.scheduler == "slurm"
        notes += (_unknown_start(launch, program, source),)
        return StartedProgram(program, None, notes, where_submitted=where_submitted)
    name = _name(program)
    if launch.request.framework_dir is None:
        there = f"{name} starts in {start.folder}, as {source.content.path} starts it: relative paths are there"
        notes += (f"{there}{_mounts_there(launch, source)}",)
    if name.startswith("/"):
        program = msgspec.structs.replace(program, checkout=start.folder)
    elif not start.is_mounted:
        local = on_nodes or start.is_here
        program, found = other_frameworks.in_checkout(program, framework, start.folder, files, local=local)
        notes += found
    return StartedProgram(program, start.folder, notes, start.folder, start.is_here)


def _start(launch: FrameworkLaunch, exported: Exported, source: ImportedFile) -> Start:
    """Return the folder in which the job starts the user's program: as typed, or that of the user's script."""
    given, image, script = launch.request.framework_dir, launch.request.image, source.content.script
    if given is not None:
        path = Path(given).expanduser()
        if launch.local and not image:
            path = path.resolve()
        return Start(str(path), launch.local and path.is_absolute() and path.is_dir())
    if not launch.folder:  # the command is typed there, or the machines have none of the user's folders
        return Start()
    container = container_of(script) if image and script is not None else None
    if container is not None and container.folder.startswith("/") and "$" not in container.folder:
        return Start(container.folder, is_mounted=True)
    if container is not None and container.kind != "apptainer":  # which starts in the folder of the host
        return Start()
    found = start_folder(launch.framework, source.content, exported.written.program, exported.written.files)
    if found is None or (image and not found.is_dir()):
        return Start()
    return Start(str(found), found.is_dir())


def _mounts_there(launch: FrameworkLaunch, source: ImportedFile) -> str:
    """Return how the job gets the folders that the container of the user's script has mounted; empty if it does."""
    script, request = source.content.script, launch.request
    container = container_of(script) if request.image and script is not None else None
    if container is None or not container.mounts or request.mounts:
        return ""
    words = [word for text in container.mounts for word in ("--mount", repeated_mount(text))]
    return f"; {shlex.join(words)} mounts what its container has"


def _name(program: Program) -> str:
    """Return the script or the module of a program."""
    return program.argv[1] if program.argv[0] == "-m" and len(program.argv) > 1 else program.argv[0]


def _unknown_start(launch: FrameworkLaunch, program: Program, source: ImportedFile) -> str:
    """Return the note on a program whose folder is not known: where it starts, and how to name its folder."""
    name, path = _name(program), source.content.path
    if launch.request.image or not launch.local:
        mounts = "--mount CLAIM:PATH" if launch.scheduler == "kubernetes" else "--mount SOURCE:PATH"
        where = "in the container" if launch.request.image else "on the machine"
        return (
            f"{name} does not start where {path} starts it: add --framework-dir PATH, that folder {where} "
            f"({mounts} mounts one); its relative paths are there"
        )
    submitted = other_frameworks.STARTED[launch.scheduler]
    if name == program.argv[0] and not name.startswith("/"):
        return f"{name} is a file of your program: add --framework-dir PATH, or {submitted}"
    folder = submitted.replace("that has it", f"from which {path} is started")
    return f"{name} finds its relative paths where it is started: {folder}, or add --framework-dir PATH"
