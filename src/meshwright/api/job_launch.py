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
from meshwright.api.continued_run import check_job_continues, continued, is_run, note_new_run, with_fitting_micro_batch
from meshwright.api.data_findings import data_findings
from meshwright.api.engine_configs import CONFIGS
from meshwright.api.job_notes import note_length, note_length_of_plan, print_notes, run_seconds
from meshwright.api.paths import check_out, check_run_paths
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
    from meshwright.launch.build_job import Started


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


@verb(requests.Launch, name="launch_job")
def launch(request: requests.Launch) -> Started:
    """Return a recipe as a job for a scheduler, checked before anything is written; submitted if requested."""
    from meshwright.api.exported_jobs import exported_job
    from meshwright.launch import build_job, native_job, other_frameworks

    request = _with_framework(request)
    options = {name: getattr(request, name) for name in request.__struct_fields__ if name not in OF_THE_VERB}
    given = {name: value for name, value in options.items() if value not in (None, (), DEFAULTS.get(name))}
    files: dict[str, Any] = {
        "submits": request.submit,
        "folder": request.write,
        "overwrite": request.overwrite,
        "options": given,
    }
    dataset, model = request.dataset, request.model
    if request.to is not None:
        if request.out:
            raise other_frameworks.refused_out(request.to, request.out, request.write)
        if request.tiny:
            reason = f"is an option of our engine, and the job runs with {request.to}"
            raise InputError(reason, field="--tiny", value="true", fix=(f"--to {ENGINES[0]}", "remove --tiny"))
        if request.accept_changes:
            reason = f"is an option of our engine, and the job runs with {request.to}, which does not compare its runs"
            fix = ("without --accept-changes",)
            raise InputError(reason, field="--accept-changes", value="true", fix=fix)
        return build_job.launch(exported_job(request), request.scheduler, **files)
    if request.accept_changes and request.tiny:
        reason = "is for a run that continues, and a tiny trial starts anew"
        raise InputError(reason, field="--accept-changes", value="true", fix=("without --accept-changes",))
    for option, value in (("--framework-dir", request.framework_dir), ("--save-minutes", request.save_minutes)):
        if value is not None:
            reason = "is for the job of another framework"
            raise InputError(reason, field=option, value=value, fix=("--to megatron-lm", f"without {option}"))
    if request.out:
        check_out(request.out)
    target, changes, out = request.recipe, list(request.overrides), request.out
    options = {"framework": request.framework, "model": model}
    job = job_for(target, request.goal, request.gpus, native_job.known(changes), **options)
    found, text = job.runnable(), None
    job.require_length()
    if not request.tiny:
        note_length(job, found, native_job.known(changes))
        note_length_of_plan(job, found, native_job.known(changes))
    if job.plan is not None:
        plan = job.plan
        target, model = plan.base.name, plan.recipe.model
        given.setdefault("name", native_job.default_name(plan.recipe.name, request.scheduler))
        set_here = override.requested(plan.base, changes)
        changes += [format_override(one.field, one.new) for one in plan.changes if one.field not in set_here]
        found = msgspec.structs.replace(recipe_for(target), model=model)
    elif job.imported is not None or job.own or is_run(target):
        if is_run(target) and not request.tiny:
            found, out = _continuing(request, str(target), found)
        target, model, text = f"{found.name}.toml", None, ""
        given.setdefault("name", native_job.default_name(found.name, request.scheduler))
    require_trained(find(model or found.model))
    again = native_job.Restarts(out, [])
    if not request.tiny:
        typed = override.apply(found, native_job.known(changes))
        again = native_job.restarts(typed, out, changes, request.scheduler, given)
    training = native_job.Training(
        str(target), dataset, model, request.tiny, again.out, [*changes, *again.overrides], text, again.notes,
        request.accept_changes,
    )  # fmt: skip
    if text is not None:  # the job runs in the folder of this file
        training, found = native_job.with_full_paths(training, found, request.scheduler)
        training = msgspec.structs.replace(training, text=recipe_text(found))

    run_s = 0.0

    def validated() -> native_job.Checked:
        nonlocal run_s
        checked = check_recipe(found, request.gpus, ENGINES[0], training.known_overrides)
        run_s = 0.0 if request.tiny else run_seconds(checked)
        print_notes(checked)
        return checked.recipe, checked.cluster, (*checked.findings, *data_findings(checked.recipe))

    launched = native_job.request_for(training, request.scheduler, found, request.gpus, validated)
    return build_job.launch(msgspec.structs.replace(launched, run_s=run_s), request.scheduler, **files)


def _continuing(request: requests.Launch, target: str, recipe: Recipe) -> tuple[Recipe, str | None]:
    """Return the recipe and the folder with which a job continues a run; machines elsewhere start a new one."""
    from meshwright.launch import build_job, native_job
    from meshwright.launch.job import find_scheduler

    changes = native_job.known(request.overrides)
    changes += [f"data.dataset={request.dataset}"] if request.dataset else []
    typed, pinned = override.apply(recipe, changes), override.requested(recipe, changes)
    world = clusters.cluster(str(request.gpus or recipe.cluster)).world
    if len(native_job.known(request.overrides)) == len(request.overrides):  # else the run finds its micro batch
        fitting = with_fitting_micro_batch(typed, world, pinned).layout.micro_batch_size
        recipe = override.change(recipe, {"layout.micro_batch_size": fitting})[0]
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
