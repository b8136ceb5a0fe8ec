"""Launch a recipe as a job of a scheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, UnsetType

from meshwright import clusters
from meshwright.api import run_requests as requests
from meshwright.api.catalogues import recipe_text
from meshwright.api.checks import check_recipe
from meshwright.api.continued_run import check_job_continues, continued, is_run, note_new_run, with_fitting_layout
from meshwright.api.data_findings import data_findings
from meshwright.api.engine_configs import CONFIGS
from meshwright.api.job_notes import note_length, note_length_of_plan, print_notes, run_seconds
from meshwright.api.paths import check_out, check_run_paths
from meshwright.api.recipe_cluster import cluster_for
from meshwright.api.resolve import assumed_in
from meshwright.api.responses import Finding, Part, Response, copied, finding_parts
from meshwright.api.targets import file_of, job_for, recipe_for, stated_engine
from meshwright.api.verb_function import verb
from meshwright.clusters import Assumption
from meshwright.errors import InputError
from meshwright.models import find
from meshwright.notes import note
from meshwright.recipes import overrides as override
from meshwright.recipes.engine_models import require_trained
from meshwright.recipes.format_override import format_override
from meshwright.recipes.types import ENGINES, Recipe

if TYPE_CHECKING:
    from meshwright.launch import native_job
    from meshwright.launch.build_job import LaunchRequest, Started
    from meshwright.planner import Plan


OF_THE_VERB = frozenset(
    (
        *(
            "recipe",
            "scheduler",
            "gpus",
            "goal",
            "to",
            "dataset",
            "accept_changes",
            "model",
            "framework",
            "tiny",
            "out",
            "write",
            "overwrite",
            "submit",
        ),
        *("watch", "overrides", "notes", "framework_dir", "save_minutes"),
    )
)
"""Fields of a launch request that are not options of the job."""
DEFAULTS = {"requeue": True, "cpu": False}


class _Source(msgspec.Struct, frozen=True, kw_only=True):
    """What the job of our engine trains: its recipe, and how the command names it."""

    target: str  # recipe name or file
    recipe: Recipe
    model: str | None
    changes: Sequence[str]  # overrides
    out: str | None  # the run folder
    name: str | None = None  # of the job; None: as its scheduler names it
    has_own_file: bool = False  # the job has a recipe file of its own


@verb(requests.Launch, name="launch_job")
def launch(request: requests.Launch) -> Started:
    """Return a recipe as a job for a scheduler, checked before anything is written; submitted if requested."""
    from meshwright.api.exported_jobs import exported_job
    from meshwright.launch import build_job

    request = _with_framework(request)
    _refuse_options(request)
    every = {name: getattr(request, name) for name in request.__struct_fields__ if name not in OF_THE_VERB}
    options = {name: value for name, value in every.items() if value not in (None, (), DEFAULTS.get(name))}
    if request.to is not None:
        job = exported_job(request)
    else:
        source = _source(request)
        if source.name is not None:
            options.setdefault("name", source.name)
        job = _native_job(request, source, options)
    return build_job.launch(
        job,
        request.scheduler,
        submits=request.submit,
        folder=request.write,
        overwrite=request.overwrite,
        options=options,
    )


def _refuse_options(request: requests.Launch) -> None:
    """Raise InputError for an option that the engine of the job does not have, or that contradicts another one."""
    from meshwright.launch import other_frameworks

    of_our_engine = f"is an option of our engine, and the job runs with {request.to}"
    without_changes = ("without --accept-changes",)
    if request.to is not None:
        if request.out:
            raise other_frameworks.refused_out(request.to, request.out, request.write)
        if request.tiny:
            fix = (f"--to {ENGINES[0]}", "remove --tiny")
            raise InputError(of_our_engine, field="--tiny", value="true", fix=fix)
        if request.accept_changes:
            reason = f"{of_our_engine}, which does not compare its runs"
            raise InputError(reason, field="--accept-changes", value="true", fix=without_changes)
        return
    if request.accept_changes and request.tiny:
        reason = "is for a run that continues, and a tiny trial starts anew"
        raise InputError(reason, field="--accept-changes", value="true", fix=without_changes)
    for option, value in (("--framework-dir", request.framework_dir), ("--save-minutes", request.save_minutes)):
        if value is not None:
            reason = "is for the job of another framework"
            raise InputError(reason, field=option, value=value, fix=("--to megatron-lm", f"without {option}"))
    if request.out:
        check_out(request.out)


def _source(request: requests.Launch) -> _Source:
    """Return what a job trains; the recipe of a run, or of another file than a recipe, gets a file of its own."""
    from meshwright.launch import native_job

    target, known = request.recipe, native_job.known(request.overrides)
    options = {"framework": request.framework, "model": request.model}
    job = job_for(target, request.goal, request.gpus, known, **options)
    recipe, out = job.runnable(), request.out
    job.require_length()
    if not request.tiny:
        note_length(job, recipe, known)
        note_length_of_plan(job, recipe, known)
    if job.plan is not None:
        return _source_of_plan(request, job.plan)
    if job.imported is None and not job.own and not is_run(target):
        return _Source(target=str(target), recipe=recipe, model=request.model, changes=request.overrides, out=out)
    if is_run(target) and not request.tiny:
        recipe, out = _continuing(request, str(target), recipe)
    return _Source(
        target=f"{recipe.name}.toml",
        recipe=recipe,
        model=None,
        changes=request.overrides,
        out=out,
        name=native_job.default_name(recipe.name, request.scheduler),
        has_own_file=True,
    )


def _source_of_plan(request: requests.Launch, plan: Plan) -> _Source:
    """Return what the job of a model trains: the recipe that the plan is based on, with its changes as overrides."""
    from meshwright.launch import native_job

    typed = override.requested(plan.base, request.overrides)
    planned = [format_override(one.field, one.new) for one in plan.changes if one.field not in typed]
    return _Source(
        target=plan.base.name,
        recipe=msgspec.structs.replace(recipe_for(plan.base.name), model=plan.recipe.model),
        model=plan.recipe.model,
        changes=[*request.overrides, *planned],
        out=request.out,
        name=native_job.default_name(plan.recipe.name, request.scheduler),
    )


def _native_job(request: requests.Launch, source: _Source, options: Mapping[str, Any]) -> LaunchRequest:
    """Return the job that runs `meshwright train`."""
    from meshwright.launch import native_job

    training, recipe = _training(request, source, options)

    def checked() -> native_job.Checked:
        found = check_recipe(recipe, request.gpus, ENGINES[0], training.known_overrides)
        print_notes(found)
        findings = (*found.findings, *data_findings(found.recipe))
        return native_job.Checked(found.recipe, found.cluster, findings, run_seconds(found))

    return native_job.request_for(training, request.scheduler, recipe, request.gpus, checked)


def _training(
    request: requests.Launch, source: _Source, options: Mapping[str, Any]
) -> tuple[native_job.Training, Recipe]:
    """Return the arguments of `meshwright train` and its recipe; in a file of the job, paths are written in full."""
    from meshwright.launch import native_job

    require_trained(find(source.model or source.recipe.model))
    again = native_job.Restarts(source.out, [])
    if not request.tiny:
        typed = override.apply(source.recipe, native_job.known(source.changes))
        again = native_job.restarts(typed, source.out, source.changes, request.scheduler, options)
    training = native_job.Training(
        target=source.target,
        dataset=request.dataset,
        model=source.model,
        tiny=request.tiny,
        out=again.out,
        overrides=[*source.changes, *again.overrides],
        notes=again.notes,
        accept_changes=request.accept_changes,
    )
    if not source.has_own_file:
        return training, source.recipe
    training, recipe = native_job.with_full_paths(training, source.recipe, request.scheduler)
    return msgspec.structs.replace(training, text=recipe_text(recipe)), recipe


def _continuing(request: requests.Launch, target: str, recipe: Recipe) -> tuple[Recipe, str | None]:
    """Return the recipe and the folder with which a job continues a run; machines elsewhere start a new one."""
    from meshwright.launch import build_job, native_job
    from meshwright.launch.job import find_scheduler

    changes = native_job.known(request.overrides)
    changes += [f"data.dataset={request.dataset}"] if request.dataset else []
    typed, pinned = override.apply(recipe, changes), override.requested(recipe, changes)
    world = clusters.cluster(cluster_for(recipe, request.gpus)).world
    if len(native_job.known(request.overrides)) == len(request.overrides):  # else the run finds its micro batch
        fitting = with_fitting_layout(typed, world, pinned).layout
        fields = ("layout.micro_batch_size", "layout.dp_replicate")
        recipe = override.change(recipe, {one: getattr(fitting, one.partition(".")[2]) for one in fields})[0]
    out, scheduler = request.out or typed.checkpoint.folder or None, find_scheduler(request.scheduler)
    if scheduler in build_job.REMOTE_FILES:
        if out is None:
            note_new_run(target, scheduler)
        return recipe, out
    out = out or continued(target)
    if not request.image:  # a container may have other paths
        check_run_paths(typed, out)
    check_job_continues(typed, out, request.accept_changes)
    return recipe, out


def _with_framework(request: requests.Launch) -> requests.Launch:
    """Return the request with the framework that runs it: as named, or that of the file or of the recipe's engine.

    None is our engine, which also runs every trial of a recipe.
    """
    if request.to is not None:
        return msgspec.structs.replace(request, to=None) if request.to == ENGINES[0] else request
    content, theirs = file_of(request.recipe, request.framework)
    if content is not None and theirs is not None:
        note(f"{content.path} is for {theirs.title}, which the job runs; --to {ENGINES[0]} runs it with our engine")
        return msgspec.structs.replace(request, to=theirs.name)
    engine = ENGINES[0] if request.tiny else stated_engine(request.recipe)
    if engine == ENGINES[0]:
        return request
    to: Any = CONFIGS[engine]
    note(f"{request.recipe} is for {engine}: the job runs {to} (--to)")
    return msgspec.structs.replace(request, to=to)


def watch(started: Started, on_state: Callable[[str], None], on_log: Callable[[str], None]) -> Started:
    """Follow a submitted job to its end; `on_state` gets its states, `on_log` the lines of its log."""
    from meshwright.launch import watch as watching

    return msgspec.structs.replace(started, final_state=watching.watch(str(started.number), on_state, on_log))


class Submitted(Part, frozen=True, kw_only=True):
    """A submitted job, and its end if it was watched."""

    id: str
    state: str | UnsetType = UNSET
    restarts: int | UnsetType = UNSET


class LaunchResponse(Response, frozen=True, kw_only=True):
    """A job: its files, commands and findings."""

    scheduler: str
    files: Mapping[str, str]
    commands: Sequence[str]
    hosts: Sequence[str]
    notes: Sequence[str]
    written: Sequence[str]
    submitted: Submitted | None
    findings: Sequence[Finding]
    assumed: Sequence[Assumption] = ()


def launch_response(started: Started, request: requests.Launch | None = None) -> LaunchResponse:
    """Return the response of launch."""
    job, state = started.launch, started.final_state
    ended: dict[str, Any] = {} if state is None else {"state": state.state, "restarts": state.restarts}
    return copied(
        LaunchResponse,
        job,
        hosts=job.places,
        written=started.paths,
        submitted=None if started.number is None else Submitted(id=started.number, **ended),
        findings=finding_parts(started.findings),
        assumed=() if request is None or request.tiny or request.cpu else assumed_in(request.gpus),
    )
