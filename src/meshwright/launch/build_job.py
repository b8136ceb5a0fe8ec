"""From what a user asks to a job, and from a job to what is written, submitted and watched."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from meshwright.clusters import Cluster
from meshwright.errors import InputError, unknown
from meshwright.frameworks import ExportedConfig, Program, RecipeCheckResult
from meshwright.launch.artifacts import Launch, write
from meshwright.launch.commands import PYTHON, on_hosts, on_torchrun
from meshwright.launch.environment import advised
from meshwright.launch.job import CONTAINER_KINDS, KINDS, Job, Way, find_way, refuse_unused
from meshwright.launch.kubernetes import on_kubernetes
from meshwright.launch.skypilot import on_skypilot
from meshwright.launch.slurm import on_slurm
from meshwright.launch.submit import refuse_submit, submit
from meshwright.launch.values import variables
from meshwright.launch.watch import Seen
from meshwright.parsing import one_of
from meshwright.recipes.types import Recipe
from meshwright.rules import Finding, RefusedError

MARGIN_S = 60  # SLURM tells a job up to a minute early or late; saving starts after the step that runs
WRITERS: Mapping[Way, Callable[[Job], Launch]] = {
    "torchrun": on_torchrun,
    "slurm": on_slurm,
    "hosts": on_hosts,
    "kubernetes": on_kubernetes,
    "skypilot": on_skypilot,
}
NOT_OPTIONS = (
    "program",
    "cluster",
    "finds_ranks",
    "files",
    "folder",
    "advised",
    "named",
    "grace_s",
)  # what is worked out, not asked for
SHIPPING: tuple[Way, ...] = ("kubernetes", "skypilot")  # machines that do not see this one's files


class LaunchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A training that the rules have seen, and the program that runs it."""

    recipe: Recipe
    cluster: Cluster
    engine: str
    program: Program
    files: Mapping[str, str] = {}  # what the program reads, by name
    findings: tuple[Finding, ...] = ()
    keeps: bool = True  # it saves and goes on, so that a requeue is no new start
    notes: tuple[str, ...] = ()  # what the user must know of it


class Started(msgspec.Struct, frozen=True):
    """What was made of it: files, commands, and the number of the job where it was submitted."""

    launch: Launch
    findings: tuple[Finding, ...] = ()
    paths: tuple[str, ...] = ()  # files that were written
    number: str | None = None  # of the submitted job
    seen: Seen | None = None  # its end, where it was watched


def exported(written: ExportedConfig, checked: RecipeCheckResult) -> LaunchRequest:
    """A recipe in another framework's words, with what the rules say of it there."""
    return LaunchRequest(
        recipe=checked.recipe,
        cluster=checked.cluster,
        engine=checked.engine,
        program=written.program,
        files=written.files,
        findings=checked.findings,
        notes=(
            *written.notes,
            *(f"not said there: {one.field}={one.value} ({one.reason})" for one in written.unmapped),
        ),
    )


def launch(
    asked: LaunchRequest,
    on: str,
    *,
    submits: bool = False,
    folder: str | None = None,
    overwrite: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Started:
    """Writes a training for a scheduler, and hands it over where that is asked for."""
    way = find_way(on)
    blocking = [finding for finding in asked.findings if finding.severity == "error"]
    if blocking:
        raise RefusedError(blocking, "nothing is written: it cannot start or does not fit", asked.findings)
    job = job_of(asked, way, submits, folder, options or {})
    if submits:
        refuse_submit(way, job.name)
    made = WRITERS[way](job)
    made = msgspec.structs.replace(made, notes=(*made.notes, *asked.notes))
    paths = write(made, folder, overwrite) if folder is not None else ()
    number = None
    if submits:
        if job.logs:  # SLURM ends a job without a word when the folder of its log is missing
            Path(job.logs).mkdir(parents=True, exist_ok=True)
        number = submit(made)
    return Started(made, asked.findings, paths, number)


def job_of(asked: LaunchRequest, way: Way, submits: bool, folder: str | None, options: Mapping[str, Any]) -> Job:
    """The job; options that were not given are not there."""
    given = _read(options)
    refuse_unused(way, given)
    if way == "slurm":
        given = _when_told(asked, given)
    if asked.files and way == "slurm" and folder is None:
        names = ", ".join(asked.files)
        raise InputError(f"the job reads {names}: say where it may lie", field="--write", fix=("--write jobs/my_run",))
    return Job(
        **{
            "name": _plain_name(asked.recipe.name),
            "python": _python(submits, given),
            "folder": str(Path(folder).resolve()) if asked.files and folder is not None and way not in SHIPPING else "",
            **given,
            "named": "name" in given,
            "grace_s": math.ceil(asked.recipe.checkpoint.grace_s),
            "program": asked.program,
            "cluster": asked.cluster,
            "finds_ranks": asked.engine == "meshwright",
            "files": asked.files,
            "advised": advised(asked.recipe, asked.cluster, asked.engine),
        }
    )


def _read(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as a job's fields; those that were not given are not there."""
    known = [name for name in Job.__struct_fields__ if name not in NOT_OPTIONS]
    for name in options:
        if name not in known:
            raise unknown("option", name, known)
    given = {name: value for name, value in options.items() if value is not None and value != ()}
    if "env" in given and not isinstance(given["env"], Mapping):
        given["env"] = variables("--env", given["env"])
    if isinstance(given.get("hosts"), str):
        given["hosts"] = tuple(one.strip() for one in given["hosts"].split(","))
    for name, words in (("kind", KINDS), ("container_kind", CONTAINER_KINDS)):
        if name in given:
            given[name] = one_of(f"--{name.replace('_', '-')}", given[name], words)
    return given


def _when_told(asked: LaunchRequest, given: Mapping[str, Any]) -> dict[str, Any]:
    """How long ahead of its end a run is told, so that its grace fits in; one that does not save is not requeued."""
    if not given.get("requeue", True):
        return dict(given)
    if not asked.keeps:
        reason = "a run without a folder saves nothing, so that a requeue would begin again"
        raise InputError(reason, field="--out", fix=("--out runs/my_run", "--no-requeue"))
    grace_s = math.ceil(asked.recipe.checkpoint.grace_s)
    ahead_s = given.get("signal_ahead_s", grace_s + MARGIN_S)
    if ahead_s < grace_s:
        reason = f"is less than the {grace_s} s that the run may take to save (checkpoint.grace_s)"
        fix = (f"--signal-ahead {grace_s + MARGIN_S}", f"checkpoint.grace_s={ahead_s}")
        raise InputError(reason, field="--signal-ahead", value=ahead_s, fix=fix)
    return {**given, "signal_ahead_s": ahead_s}


def _python(submits: bool, given: Mapping[str, Any]) -> str:
    """A job that is submitted from here runs with this interpreter, unless it is given another environment."""
    return sys.executable if submits and not given.get("setup") and not given.get("image") else PYTHON


def _plain_name(name: str) -> str:
    return "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in name).strip("._-")[:60] or "run"
