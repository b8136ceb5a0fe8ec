"""Builds a job from a launch request, then writes and submits it."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from meshwright.clusters import Cluster
from meshwright.display import Readable, Row, duration, titled
from meshwright.errors import InputError, unknown
from meshwright.frameworks import ExportedConfig, Program, RecipeCheckResult
from meshwright.launch.artifacts import Launch, write
from meshwright.launch.commands import PYTHON, on_hosts, on_torchrun
from meshwright.launch.container_paths import ELSEWHERE, container_notes, in_container, with_mounts
from meshwright.launch.environment import advised
from meshwright.launch.images import kind_for
from meshwright.launch.job import (
    CONTAINER_KINDS,
    KUBERNETES_KINDS,
    RESUMES,
    Job,
    Scheduler,
    find_scheduler,
    refuse_unused,
)
from meshwright.launch.kubernetes import FILES as POD_FILES
from meshwright.launch.kubernetes import on_kubernetes
from meshwright.launch.other_frameworks import CHECKOUTS, planned_exit
from meshwright.launch.skypilot import STARTED_FILES, on_skypilot
from meshwright.launch.slurm import on_slurm
from meshwright.launch.start_folder import with_full_names
from meshwright.launch.submit import refuse_submit, submit
from meshwright.launch.values import seconds, variables
from meshwright.launch.watch import JobState
from meshwright.parsing import one_of
from meshwright.recipes.types import Recipe
from meshwright.rules import Finding, RefusedError

FOLDER_FIX = "--write jobs/my_run"
MARGIN_S = 60  # SLURM signals a job up to a minute early or late; saving starts after the current step
WRITERS: Mapping[Scheduler, Callable[[Job], Launch]] = {
    "torchrun": on_torchrun,
    "slurm": on_slurm,
    "hosts": on_hosts,
    "kubernetes": on_kubernetes,
    "skypilot": on_skypilot,
}
# Fields of a job that are derived, not user options.
DERIVED = (
    "program",
    "cluster",
    "finds_ranks",
    "files",
    "folder",
    "python_path",
    "advised",
    "named",
    "grace_s",
    "binds",
    "makes",
    "offloads",
    "needs",
    "planned_exit_s",
    "start",
    "where_submitted",
    "reads",
    "comments",
    "kept_setup",
    "no_save",
    "restart",
)
REMOTE_FOLDERS: Mapping[Scheduler, str] = {"kubernetes": POD_FILES, "skypilot": STARTED_FILES}
"""Where the files of a job are if its program starts in another folder."""
REMOTE_FILES = tuple(REMOTE_FOLDERS)  # their machines do not see local files


class FileRepair(msgspec.Struct, frozen=True, kw_only=True):
    """What removes the errors of a framework's file at once."""

    overrides: tuple[str, ...]  # of the command; empty if only the file can be changed
    in_file: str  # which file, and its settings, as check prints them


class LaunchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A checked training and the program that runs it."""

    recipe: Recipe
    cluster: Cluster
    engine: str
    program: Program
    files: Mapping[str, str] = {}  # files the program reads, by name
    beside: Mapping[str, str] = {}  # files written next to those of the job, which the user copies elsewhere
    findings: tuple[Finding, ...] = ()
    repair: FileRepair | None = None  # of the file that the job runs, if it has errors
    saves: bool = True  # it saves checkpoints, so a requeue resumes
    no_save: str = ""  # why it does not save on SIGTERM; empty if it does
    restart: str = RESUMES  # what it does when the job is started again
    notes: tuple[str, ...] = ()  # notes for the user
    in_folder: bool = False  # it runs in the folder of the job, where its relative paths are
    start: str = ""  # folder in which it starts in place of that of the job
    where_submitted: bool = False  # it starts where sbatch is run, in place of that folder
    python_path: tuple[str, ...] = ()  # folders of the framework's checkout that have to be importable
    needs: str = "meshwright"  # what an image has to contain to run it
    run_s: float = 0.0  # estimated seconds of all steps; 0 if unknown
    reads: Mapping[str, str] = {}  # paths that its config names → the key
    comments: tuple[str, ...] = ()  # lines of the job's script: what the job does not have of the user's settings
    kept_setup: tuple[str, ...] = ()  # commands of the user's script that run before the training


class Started(Readable, msgspec.Struct, frozen=True):
    """The result of a launch: files, commands, and the job id if it was submitted."""

    launch: Launch
    findings: tuple[Finding, ...] = ()
    paths: tuple[str, ...] = ()  # written files
    number: str | None = None  # id of the submitted job
    final_state: JobState | None = None  # final state, if watched

    def summary(self) -> list[Row]:
        """Return the files, the commands, the findings and what became of the job."""
        files = [f"{name} ({len(text.splitlines())} lines)" for name, text in self.launch.files.items()]
        places = self.launch.places or ("",) * len(self.launch.commands)
        commands = zip(self.launch.commands, places, strict=True)
        state = "" if self.final_state is None else f": {self.final_state.state}"
        return [
            ("Launch", f"with {self.launch.scheduler}"),
            *titled("Files", self.paths or files),
            *titled("Run", [f"{place}: {text}" if place else text for text, place in commands]),
            *titled("Job", [f"{self.number}{state}"] if self.number else []),
            *titled("Findings", [f"{one.severity}: {one.message}" for one in self.findings]),
            *titled("Notes", self.launch.notes),
        ]


def exported(written: ExportedConfig, checked: RecipeCheckResult) -> LaunchRequest:
    """Return the request for a recipe exported to another framework, with its findings there."""
    return LaunchRequest(
        recipe=checked.recipe,
        cluster=checked.cluster,
        engine=checked.engine,
        program=written.program,
        files={name: text for name, text in written.files.items() if _is_read(name, written.program)},
        findings=checked.findings,
        in_folder=True,
        needs=CHECKOUTS[written.framework].title if written.framework in CHECKOUTS else written.framework,
        notes=(
            *(mock_data(checked.recipe) if _reads_data(written) else ()),
            *(
                note
                for note in written.notes
                if not note.startswith("--mock-data") and not _is_elsewhere(note, written)
            ),
            *(f"not exported: {one.field}={one.value} ({one.reason})" for one in written.unmapped),
        ),
    )


def _is_elsewhere(note: str, written: ExportedConfig) -> bool:
    """Return whether a note of an export is said already, or about a file that the job does not read."""
    unread = any(name in note for name in written.files if not _is_read(name, written.program))
    return unread or note.startswith("--mock-data")


def _is_read(name: str, program: Program) -> bool:
    """Return whether a program reads a file of its export; a script with the same settings as its arguments is not."""
    return not name.endswith((".sh", ".py")) or name in program.modules or any(name in word for word in program.argv)


def _reads_data(written: ExportedConfig) -> bool:
    """Return whether the exported config names the data; elsewhere it is an argument of the user's program."""
    unmapped = any(one.field == "data.dataset" for one in written.unmapped)
    return not unmapped and written.framework not in ("deepspeed", "accelerate")


def mock_data(recipe: Recipe) -> tuple[str, ...]:
    """Return a note for a job that trains on random tokens, which only a throughput run wants."""
    if recipe.benchmark or recipe.data.dataset != "mock" or recipe.data.blend:
        return ()
    return ("the job trains on random tokens (data.dataset=mock): add --dataset DATA to train on data",)


def launch(
    request: LaunchRequest,
    scheduler_name: str,
    *,
    submits: bool = False,
    folder: str | None = None,
    overwrite: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Started:
    """Write a training for a scheduler, and submit it if requested."""
    scheduler = find_scheduler(scheduler_name)
    blocking = [finding for finding in request.findings if finding.severity == "error"]
    if blocking:
        reason = "nothing was written: the recipe cannot start or does not fit"
        without = _without_folder(request, scheduler, folder)
        missing = {FOLDER_FIX: without} if without else {}
        repair = request.repair
        fixes = () if repair is None else repair.overrides or (repair.in_file,)
        lines = (f"repair, as meshwright check prints it, {repair.in_file}",) if repair and repair.overrides else ()
        raise RefusedError(blocking, reason, request.findings, missing, fixes, lines)
    job = job_of(request, scheduler, submits, folder, options or {})
    if submits:
        refuse_submit(scheduler, job.name)
    result = WRITERS[scheduler](job)
    restarts = (*requeue_warning(request.run_s, job), *failure_note(job)) if scheduler == "slurm" else ()
    notes = (*result.notes, *container_notes(request.recipe, job, scheduler), *restarts, *request.notes)
    makes_logs = bool(job.logs) and (submits or folder is not None)
    if job.logs and not makes_logs:
        notes += (f"mkdir -p {job.logs} where sbatch runs: without the folder of its log SLURM ends a job silently",)
    result = msgspec.structs.replace(result, notes=notes, files={**result.files, **request.beside})
    paths = write(result, folder, overwrite) if folder is not None else ()
    if folder is not None:
        result = msgspec.structs.replace(result, commands=_from_here(result, folder))
    if job.logs and makes_logs:
        Path(job.logs).mkdir(parents=True, exist_ok=True)
    number = submit(result) if submits else None
    return Started(result, request.findings, paths, number)


SPARE_REQUEUES = 1.25  # of the estimate: preemptions and failures are requeues too
MANY_REQUEUES = 50  # of one job: each waits in the queue, loads the checkpoint and warms up again


def requeue_warning(run_s: float, job: Job) -> tuple[str, ...]:
    """Return a warning on a training that needs many runs of the job's time limit, or more than it may have."""
    limit_s = seconds(job.time) - job.signal_ahead_s if job.time and job.requeue else 0
    if run_s <= 0 or limit_s <= 0:
        return ()
    requeues = math.ceil(run_s / limit_s) - 1
    if requeues <= min(MANY_REQUEUES, job.max_requeues):
        return ()
    days = duration(run_s / 86400)
    text = f"warning: the training takes about {days}, which is {requeues:,} requeues of --time {job.time}"
    if requeues <= job.max_requeues:
        return (f"{text}; a longer --time has fewer",)
    allowed = math.ceil(SPARE_REQUEUES * requeues / 10) * 10
    return (f"{text}; the job gives up after {job.max_requeues:,}: --max-requeues {allowed} or a longer --time",)


def failure_note(job: Job) -> tuple[str, ...]:
    """Return what a user does about a requeued job that fails: it may fail again, so it is not requeued."""
    if not job.requeue:
        return ()
    again = f"sbatch --dependency=afternotok:JOB_ID --kill-on-invalid-dep=yes {job.name}.sbatch"
    return (
        "a job whose rank fails (CUDA error, NCCL timeout, out of memory) ends and is not requeued: sbatch it again, "
        f"with --exclude=NODE for a broken node, and it {job.restart}; {again} does it by itself",
    )


def _from_here(result: Launch, folder: str) -> tuple[str, ...]:
    """Return the commands as they work in the current folder, with the paths of the files that were written."""
    if result.scheduler == "skypilot" and len(result.files) > 1:  # it takes file mounts from the current folder
        return tuple(f"cd {shlex.quote(folder)} && {command}" for command in result.commands)
    if result.scheduler in ("torchrun", "hosts"):
        return result.commands
    return tuple(
        shlex.join(str(Path(folder) / word) if word in result.files else word for word in shlex.split(command))
        for command in result.commands
    )


def job_of(
    request: LaunchRequest, scheduler: Scheduler, submits: bool, folder: str | None, options: Mapping[str, Any]
) -> Job:
    """Return the job for a request; options that were not given are absent."""
    given = _parse_options(options)
    refuse_unused(scheduler, given)
    if scheduler == "slurm":
        given = _with_container_kind(_with_signal_time(request, given))
    if reason := _without_folder(request, scheduler, folder):
        raise InputError(reason, field="--write", fix=(FOLDER_FIX,))
    has_local_files = (request.files or request.in_folder) and folder is not None and scheduler not in REMOTE_FILES
    program = _with_variables(request.program, given.get("env", {}), scheduler)
    in_image = scheduler == "slurm" and bool(given.get("image"))
    if (in_image or scheduler in ELSEWHERE) and request.engine == "meshwright":
        program = in_container(program, with_out=in_image)
    if request.start and scheduler in REMOTE_FILES:
        program = with_full_names(program, request.files, REMOTE_FOLDERS[scheduler])
    if has_local_files and (request.start or request.where_submitted or scheduler != "slurm"):
        # A SLURM job changes to the folder of its files; a command runs in any folder.
        program = with_full_names(program, request.files, folder or "")
        if program.modules:
            paths = [str(Path(folder or "").resolve()), *filter(None, [program.env.get("PYTHONPATH")])]
            program = msgspec.structs.replace(program, env={**program.env, "PYTHONPATH": ":".join(paths)})
    job = Job(
        **{
            "name": plain_name(request.recipe.name),
            "python": _python(submits, {"setup": request.kept_setup, **given}),
            "folder": str(Path(folder or "").resolve()) if has_local_files else "",
            "start": request.start if has_local_files or scheduler in REMOTE_FILES else "",
            "where_submitted": request.where_submitted and has_local_files,
            **given,
            "named": "name" in given,
            "grace_s": math.ceil(request.recipe.checkpoint.grace_s),
            "program": program,
            "python_path": request.python_path,
            "cluster": request.cluster,
            "finds_ranks": request.engine == "meshwright",
            "offloads": request.recipe.layout.offload != "none",
            "files": request.files,
            "needs": request.needs,
            "reads": request.reads,
            "comments": request.comments,
            "kept_setup": request.kept_setup,
            "no_save": request.no_save if request.saves else "a run without --out saves no checkpoints",
            "restart": request.restart,
            "planned_exit_s": 60 * planned_exit(program).minutes,
            "advised": advised(request.recipe, request.cluster, request.engine),
        }
    )
    return with_mounts(request.recipe, job) if in_image else job


def _without_folder(request: LaunchRequest, scheduler: Scheduler, folder: str | None) -> str:
    """Return why a job needs --write; empty if it has a folder or needs none."""
    needed = request.files and scheduler == "slurm" and folder is None
    return f"the job reads {', '.join(request.files)} and needs a folder for it" if needed else ""


def _with_variables(program: Program, env: Mapping[str, str], scheduler: Scheduler) -> Program:
    """Return the program with the variables that --env sets; a machine elsewhere gets no others."""
    if program.expanded and scheduler in REMOTE_FILES:
        reason = f"is expanded by a shell, and a job of {scheduler} has none of yours: write its value in the script"
        raise InputError(reason, field="argument", value=program.expanded[0], fix=("--scheduler slurm",))
    missing = {name: what for name, what in program.variables.items() if name not in env}
    if missing and scheduler in REMOTE_FILES:
        name, what = next(iter(missing.items()))
        fix = (f"--env {name}=/path/in/the/container", "checkpoint.pretrained=/path/in/the/container")
        reason = f"the job needs {what}, and the container does not have this variable: set it"
        raise InputError(reason, field=f"--env {name}", fix=fix if "checkpoint" in what else fix[:1])
    argv = program.argv
    for name in program.variables:
        if name in env:
            argv = tuple(word.replace(f"${{{name}}}", env[name]) for word in argv)
    return msgspec.structs.replace(program, argv=argv, variables=missing)


def _parse_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Parse options into fields of a job; options that were not given are dropped."""
    known = [name for name in Job.__struct_fields__ if name not in DERIVED]
    for name in options:
        if name not in known:
            raise unknown("option", name, known)
    given = {name: value for name, value in options.items() if value is not None and value != ()}
    if "env" in given and not isinstance(given["env"], Mapping):
        given["env"] = variables("--env", given["env"])
    if isinstance(given.get("hosts"), str):
        given["hosts"] = tuple(one.strip() for one in given["hosts"].split(","))
    for name, choices in (("kind", KUBERNETES_KINDS), ("container_kind", CONTAINER_KINDS)):
        if name in given:
            given[name] = one_of(f"--{name.replace('_', '-')}", given[name], choices)
    return given


def _with_container_kind(given: Mapping[str, Any]) -> dict[str, Any]:
    """Set what starts the image of a SLURM job."""
    kind = kind_for(given.get("image", ""), given.get("container_kind"))
    return {**given, "container_kind": kind} if "image" in given else dict(given)


def _with_signal_time(request: LaunchRequest, given: Mapping[str, Any]) -> dict[str, Any]:
    """Set how long before its time limit a run is signaled to save; refuse to requeue a run that does not save."""
    if not given.get("requeue", True):
        return dict(given)
    if not request.saves:
        reason = "a run without --out saves no checkpoints, so a requeue would restart it from the beginning"
        raise InputError(reason, field="--out", fix=("--out runs/my_run", "--no-requeue"))
    grace_s = math.ceil(request.recipe.checkpoint.grace_s)
    ahead_s = given.get("signal_ahead_s", grace_s + MARGIN_S)
    if ahead_s < grace_s:
        reason = f"is less than the {grace_s} s that saving may take (checkpoint.grace_s)"
        fix = (f"--signal-ahead {grace_s + MARGIN_S}", f"checkpoint.grace_s={ahead_s}")
        raise InputError(reason, field="--signal-ahead", value=ahead_s, fix=fix)
    return {**given, "signal_ahead_s": ahead_s}


def _python(submits: bool, given: Mapping[str, Any]) -> str:
    """Return the interpreter: this one for a job submitted from here, unless it has another environment."""
    return sys.executable if submits and not given.get("setup") and not given.get("image") else PYTHON


def plain_name(name: str) -> str:
    """Return a name of a recipe as the name of a job."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in name).strip("._-")[:60] or "run"
