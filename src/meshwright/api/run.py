"""Train, launch, and work on checkpoints. Torch is imported only when something runs."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, UnsetType

from meshwright import clusters, frameworks, rules
from meshwright.api import run_requests as requests
from meshwright.api.catalogues import recipe_text
from meshwright.api.checks import CONFIGS, Exported, check_recipe, export_into
from meshwright.api.continued_run import check_job_continues, continued, is_run, note_new_run, with_fitting_micro_batch
from meshwright.api.data_findings import data_findings
from meshwright.api.paths import check_folder, check_out, check_run_paths
from meshwright.api.requests import Export
from meshwright.api.resolve import assumed_in, recipe_from
from meshwright.api.responses import Estimate, Finding, Part, Response, copied, estimate_part, finding_parts
from meshwright.api.targets import Job, depends_on_gpus, file_of, job_for, ranks_cluster, recipe_for, stated_engine
from meshwright.api.verb_function import verb
from meshwright.clusters import Assumption
from meshwright.display import plural
from meshwright.errors import InputError, MeshwrightError
from meshwright.extras import ENGINE
from meshwright.file_access import missing_path
from meshwright.frameworks import CheckResult
from meshwright.frameworks.common import KEEP_ALL
from meshwright.models import find
from meshwright.notes import note
from meshwright.planner import case_of
from meshwright.planner.plan import OPEN_LENGTH
from meshwright.planner.storage import storage_of
from meshwright.recipes import overrides as override
from meshwright.recipes.engine_models import require_trained
from meshwright.recipes.format_override import format_override
from meshwright.recipes.run_folder import is_tiny_run
from meshwright.recipes.types import ENGINES, Kernels, Layout, Precision, Recipe, field_value, recipe_fields
from meshwright.stages import stage

if TYPE_CHECKING:
    from meshwright.engine.train import TrainResult
    from meshwright.launch.build_job import FileRepair, LaunchRequest, Started

BENCH_OVERRIDES = ("train.steps=50", "train.check_nan=false", "train.log_every=10", "train.eval_every=0")
AUTO = "micro_batch_size=auto"
COMPILE = "kernels.compile"
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


@verb(requests.Train, ENGINE)
def train(request: requests.Train) -> TrainResult:
    """Train a recipe on our engine; resume if the run folder contains checkpoints."""
    from meshwright.engine.hooks import Hooks

    return _run(request, request.dataset, {"hooks": Hooks(request.loss, request.tp_plan, request.model_class)})


@verb(requests.Bench, ENGINE)
def bench(request: requests.Bench) -> TrainResult:
    """Measure the throughput of a recipe on our engine: 50 steps on mock data."""
    return _run(request, "mock", {"checkpoints": False, "random_weights": True}, BENCH_OVERRIDES)


def _run(
    request: requests.Bench | requests.Train,
    dataset: str | None,
    settings: Mapping[str, Any],
    defaults: Sequence[str] = (),
) -> TrainResult:
    from meshwright.engine import train
    from meshwright.engine.hooks import with_loss
    from meshwright.engine.run_spec import RunSpec

    own: Mapping[str, Any] = {}
    if not request.tiny and isinstance(request.recipe, str) and is_tiny_run(request.recipe):
        own = _values_of_tiny_run(request.recipe)
        request = msgspec.structs.replace(request, tiny=True, out=request.out or continued(request.recipe))
    planned = [] if request.tiny else [text for text in request.overrides if not text.replace(" ", "").endswith(AUTO)]
    if planned and dataset:  # how many steps an epoch has follows from it
        planned.append(f"data.dataset={dataset}")
    options = {"framework": request.framework, "model": request.model}
    ranks = _ranks(request.nproc) if depends_on_gpus(request.recipe) else None
    on_cpu = ranks is not None and not _has_gpu()
    why = " (settings for this GPU; this machine has none, so the run is on its CPU)" if on_cpu else ""
    job = job_for(request.recipe, request.goal, ranks, planned, why_gpus=why, **options)
    found = job.runnable()
    if getattr(request, "model_class", None) is None:  # a user's own class is the user's to compare
        require_trained(find(found.model))
    if on_cpu and not request.tiny:  # the plan is for GPUs; CPU runs stay eager
        found = msgspec.structs.replace(found, kernels=msgspec.structs.replace(found.kernels, compile=False))
    automatic = [text for text in request.overrides if text.replace(" ", "").endswith(AUTO)]
    changes = [text for text in request.overrides if text not in automatic]
    changes += [f"data.dataset={dataset}"] if dataset else []
    set_first = override.requested(found, defaults)
    found = override.change(found, set_first)[0]
    pinned = {**own, **set_first, **override.requested(_as_started(found, request), changes)}
    if request.tiny and pinned.get(COMPILE) is True and not _has_gpu():  # of a plan's command, with --tiny added
        del pinned[COMPILE]
        note(f"{COMPILE}=true is for GPUs: --tiny runs eagerly on this CPU, where compiling would take minutes")
    if on_cpu and not request.tiny:
        found = _in_fast_precision(found, request.out, pinned)
    shared: dict[str, Any] = {
        name: getattr(request, name) for name in RunSpec.__struct_fields__ if hasattr(request, name)
    }
    ignore_nan = pinned.get("train.check_nan") is False and "train.check_nan" in override.requested(found, changes)
    chosen = "schedule.warmup_steps" in pinned or job.content is not None or isinstance(request.recipe, Recipe)
    decided: dict[str, Any] = {
        "find_micro_batch": bool(automatic),
        "ignore_nan": ignore_nan,
        "default_warmup": not chosen,
        "epoch_intervals": tuple(one for one in job.epoch_intervals if one not in pinned),
    }
    spec = RunSpec(**shared, **settings, **decided)
    recipe = with_loss(override.apply(found, changes), spec.hooks.loss, pinned)
    if not request.tiny:  # it has steps of its own
        _note_length(job, recipe)
    out = request.out or recipe.checkpoint.folder or None
    if not request.tiny and is_run(request.recipe):
        if out is None and spec.checkpoints:
            out = continued(str(request.recipe))
        if not automatic:
            recipe = with_fitting_micro_batch(recipe, clusters.cluster(_ranks(request.nproc)).world, pinned)
    spec = msgspec.structs.replace(spec, out=out)
    check_run_paths(recipe, out)
    if out is not None and spec.checkpoints and not request.tiny:  # --tiny has a batch of its own: checked there
        from meshwright.engine.checkpoint.contract import check_before_start

        check_before_start(recipe, Path(out).expanduser(), None, spec.accept_changes)
    return train.train(recipe, spec, pinned)


def _values_of_tiny_run(folder: str) -> dict[str, Any]:
    """Return the settings of a --tiny run, which were scaled down when it started; its weights are random again.

    A run from the user's own weights keeps their name.
    """
    recipe = recipe_from(folder)
    found = {key: field_value(recipe, key) for key in recipe_fields() if field_value(recipe, key) is not None}
    if not Path(recipe.checkpoint.pretrained).expanduser().is_dir() or not recipe.checkpoint.pretrained:
        found.pop("checkpoint.pretrained", None)
    return found


def _in_fast_precision(recipe: Recipe, out: str | None, pinned: Mapping[str, Any]) -> Recipe:
    """Return a recipe that was planned for GPUs in fp32, if this CPU is much slower in its format.

    A format that the user set stays; a run with checkpoints goes on in its own.
    """
    from meshwright.engine.cpu_speed import SLOW, slowdown
    from meshwright.engine.faults import newest_checkpoint

    compute, folder = recipe.precision.compute, out or recipe.checkpoint.folder
    if compute == "fp32" or "precision.compute" in pinned:
        return recipe
    if folder and newest_checkpoint(Path(folder).expanduser()) is not None:
        started = recipe_from(folder).precision.compute if is_run(folder) else compute
        return override.change(recipe, {"precision.compute": started})[0]
    if (ratio := slowdown(compute)) < SLOW:
        return recipe
    note(
        f"precision.compute=fp32: this CPU multiplies matrices {ratio:.0f} times slower in {compute} (measured); "
        f"precision.compute={compute} keeps it"
    )
    return override.change(recipe, {"precision.compute": "fp32"})[0]


def _note_length(job: Job, recipe: Recipe, overrides: Sequence[str] = ()) -> None:
    """Say that a recipe file does not say how long it trains."""
    text = job.open_length(recipe)
    if text and job.open_length(override.apply(recipe, overrides)):
        note(text)


def _note_length_of_plan(job: Job, recipe: Recipe, overrides: Sequence[str]) -> None:
    """Say how long the job of a model trains if only its recipe says it."""
    typed = override.requested(recipe, overrides)
    if job.plan is not None and recipe.train.steps and not {"train.steps", "train.epochs"} & typed.keys():
        recipe = override.apply(recipe, overrides)
        tokens = recipe.train.steps * recipe.train.global_batch_size * recipe.data.seq_length
        length = f"{plural(recipe.train.steps, 'step')}, {tokens / 1e9:,.1f} billion tokens"
        length = f"{recipe.train.epochs:g} epochs" if recipe.train.epochs else length
        note(f"the job trains {length}, as in {job.plan.base.name}: write train.steps=N for another length")


def _as_started(recipe: Recipe, request: requests.Bench | requests.Train) -> Recipe:
    """Return the recipe with the ranks, steps and micro batch of this run, from which other trainers' keys follow."""
    replace, world = msgspec.structs.replace, clusters.cluster(_ranks(request.nproc)).world
    recipe = replace(recipe, cluster=_ranks(request.nproc))
    if not request.tiny:
        return recipe
    from meshwright.engine.tiny import STEPS, scaled_layout

    layout = scaled_layout(recipe.layout, world)
    return replace(recipe, layout=layout, train=replace(recipe.train, steps=STEPS))


def _has_gpu() -> bool:
    """Return whether this machine has a GPU, without torch."""
    try:
        clusters.cluster("auto")
    except InputError:
        return False
    return True


def _ranks(nproc: int | None) -> str:
    """Return the ranks that a run will have as a cluster."""
    from meshwright.engine.rank_env import detect

    process = detect()
    world = nproc or (process.world if process else 1)
    return ranks_cluster(world, process.local_world if process and process.world > 1 else world)


@verb(requests.Launch, name="launch_job")
def launch(request: requests.Launch) -> Started:
    """Return a recipe as a job for a scheduler, checked before anything is written; submitted if requested."""
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
        return build_job.launch(_exported_job(request, dataset), request.scheduler, **files)
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
        _note_length(job, found, native_job.known(changes))
        _note_length_of_plan(job, found, native_job.known(changes))
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
        run_s = 0.0 if request.tiny else _run_seconds(checked)
        _print_notes(checked)
        return checked.recipe, checked.cluster, (*checked.findings, *data_findings(checked.recipe))

    launched = native_job.request_for(training, request.scheduler, found, request.gpus, validated)
    return build_job.launch(msgspec.structs.replace(launched, run_s=run_s), request.scheduler, **files)


def _run_seconds(checked: CheckResult) -> float:
    """Return the estimated time of all steps; 0 for epochs, whose steps follow from the data."""
    recipe, estimate = checked.recipe, checked.estimate
    known = estimate is not None and checked.exists and not recipe.train.epochs
    return recipe.train.steps * float(estimate.step_s) if known and estimate is not None else 0.0


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


def _print_notes(checked: CheckResult) -> None:
    for text in checked.notes:
        note(text)


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


def _exported_job(request: requests.Launch, dataset: str | None) -> LaunchRequest:
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
    _note_length_of_plan(exported.job, exported.checked.recipe, changes)
    if not exported.checked.ok:  # else they are notes of the job
        _print_notes(exported.checked)
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
    notes += _storage_note(exported)
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
        run_s=_run_seconds(exported.checked),
        comments=(*(f"# {one}" for one in changed), *_comments(exported, job.files)),
        kept_setup=setup.commands,
        files={**job.files, **data},
        beside=beside,
        findings=(*job.findings, *_advice(exported, request.gpus)),
        notes=(
            *notes,
            *job.notes,
            *_not_kept(exported),
            *_sbatch_not_kept(exported, request, scheduler),
            *_container_not_kept(exported, request, scheduler),
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


def _storage_note(exported: Exported) -> tuple[str, ...]:
    """Return what the checkpoints of the job take on disk; none for a program that saves by itself."""
    checked = exported.checked
    if exported.written.framework in ("deepspeed", "accelerate"):
        return ()
    recipe = checked.recipe
    found = storage_of(case_of(recipe, checked.model, checked.cluster, checked.engine))
    if recipe.train.epochs or any(one.field == OPEN_LENGTH for one in exported.job.assumed(checked.engine)):
        most = recipe.checkpoint.keep
        are_kept = f"at most {most:,} kept" if most < KEEP_ALL else "all kept"
        why = "the samples of an epoch" if recipe.train.epochs else "the steps"
        one = f"{found.checkpoint_gib:,.1f} GiB per checkpoint, {are_kept}"
        return (f"storage: {one} (checkpoint.keep); no total: {why} are not known here",)
    gib = found.checkpoints_gib
    total = f"{gib / 1024:,.1f} TiB" if gib >= 1024 else f"{gib:,.1f} GiB"
    kept = f"{found.kept:,} checkpoint{'s' if found.kept != 1 else ''} of {found.checkpoint_gib:,.1f} GiB kept"
    return (f"storage: {kept}, {total} with the one being written (checkpoint.keep)",)


def _not_kept(exported: Exported) -> tuple[str, ...]:
    """Return the settings of another framework's file that the job does not have, and what was assumed."""
    assumed = tuple(f"assumed: {one.message}" for one in exported.job.assumed(exported.checked.engine))
    dropped = (f"not kept: {one.file}:{one.line} {one.key}={one.value}: {one.reason}" for one in exported.not_imported)
    return (*assumed, *dropped)


def _comments(exported: Exported, files: Mapping[str, str]) -> tuple[str, ...]:
    """Return the comments of the job's script: what it does not have, unless a config of the job says so itself."""
    lines = frameworks.lost_lines(exported.written.unmapped, exported.not_imported)
    return tuple(line for line in lines if not any(line in text for text in files.values()))


def _sbatch_not_kept(exported: Exported, request: requests.Launch, scheduler: str) -> tuple[str, ...]:
    """Return the #SBATCH options of the user's script that the new job does not have, and how to keep them."""
    from meshwright.launch.slurm import repeated_options

    source = exported.job.imported
    script = None if source is None else source.content.script
    if source is None or script is None or not script.sbatch:
        return ()
    options = {name: "" if one.value in (None, True) else str(one.value) for name, one in script.sbatch.items()}
    extra = {text.removeprefix("--").partition("=")[0] for text in request.sbatch}
    options = {name: value for name, value in options.items() if name not in extra}
    found = repeated_options(options, lambda name: getattr(request, name, None))
    if not found:
        return ()
    lost, words = [text for text, _ in found], [word for _, words in found for word in words]
    named = " ".join(text for text, one in found if one) if not all(one for _, one in found) else "them"
    named = "it" if len(lost) == 1 else named
    keep = f"; {shlex.join(words)} keeps {named}" if scheduler == "slurm" and words else ""
    per_task = next((text for text, _ in found if text.startswith("--cpus-per-task")), "")
    keep += f"; {per_task}: use --cpus-per-rank N, the cores of one GPU" if scheduler == "slurm" and per_task else ""
    return (f"not kept: #SBATCH {' '.join(lost)} of {source.content.path}{keep}",)


def _container_not_kept(exported: Exported, request: requests.Launch, scheduler: str) -> tuple[str, ...]:
    """Return the container in which srun starts the user's program if the new job has none, and how to keep it."""
    from meshwright.frameworks.shell.launcher import container_options
    from meshwright.launch.slurm import repeated_mount

    source = exported.job.imported
    script = None if source is None else source.content.script
    found = {} if script is None or request.image else container_options(script)
    if source is None or not found:
        return ()
    lost = " ".join(f"--{name}={value}" if value else f"--{name}" for name, value in found.items())
    image = found.get("container-image", "IMAGE")
    words = ["--image", "IMAGE" if "$" in image else image, "--container-kind", "pyxis"]
    for text in filter(None, found.get("container-mounts", "").split(",")):
        words += ["--mount", repeated_mount(text)]
    keep = f"; {shlex.join(words)} keeps the container" if scheduler == "slurm" else ""
    return (f"not kept: srun {lost} of {source.content.path}: the job runs without a container{keep}",)


def watch(started: Started, on_state: Callable[[str], None], on_log: Callable[[str], None]) -> Started:
    """Follow a submitted job to its end; `on_state` gets its states, `on_log` the lines of its log."""
    from meshwright.launch import watch as watching

    return msgspec.structs.replace(started, final_state=watching.watch(str(started.number), on_state, on_log))


class TokenizeResponse(Response, frozen=True, kw_only=True):
    """What was tokenized."""

    folder: str
    documents: int
    tokens: int
    shards: int
    dtype: str
    text_bytes: int
    seconds: float
    skipped: int
    skipped_lines: Sequence[str]
    empty: int


class GenerateResponse(Response, frozen=True, kw_only=True):
    """Generated text."""

    prompt: str
    text: str
    prompt_tokens: int
    new_tokens: int
    seconds: float
    chat: bool
    device: str


class EvaluateResponse(Response, frozen=True, kw_only=True):
    """The perplexity of a model on a dataset."""

    source: str
    step: int | None
    dataset: str
    part: str
    perplexity: float | None
    loss: float
    samples: int
    available: int | None
    tokens: int
    seq_length: int | None
    held_out: bool
    ranks: int
    base: str | None


class ConvertResponse(Response, frozen=True, kw_only=True):
    """The Hugging Face folder that was written."""

    source: str
    folder: str
    files: int
    bytes: int
    dtype: str


@verb(requests.Tokenize, ENGINE)
def tokenize(request: requests.Tokenize) -> TokenizeResponse:
    """Tokenize text, JSON lines or Parquet into shards that training reads from disk."""
    check_folder(request.tokenizer, "tokenizer")
    for name in request.inputs:
        if not Path(name).expanduser().exists():
            raise missing_path(name, "inputs")
    from meshwright.engine.data.tokenize import SHARD_TOKENS
    from meshwright.engine.data.tokenize import tokenize as write_shards

    done = write_shards(
        request.inputs,
        request.tokenizer,
        request.out,
        text_column=request.column,
        workers=request.workers,
        shard_tokens=request.shard_tokens or SHARD_TOKENS,
        bad_lines="skip" if request.skip_bad_lines else "refuse",
        format=request.format,  # type: ignore[arg-type]  # one of its choices, as validated
        documents=request.documents,  # type: ignore[arg-type]  # as above
    )
    return copied(TokenizeResponse, done)


@verb(requests.Generate, ENGINE)
def generate(request: requests.Generate) -> GenerateResponse:
    """Generate text from a prompt with a trained model."""
    check_folder(request.source, "source")
    from meshwright.engine.post_training.generate import GenerateOptions
    from meshwright.engine.post_training.generate import generate as sample

    asking = GenerateOptions(
        request.max_tokens, request.temperature, request.top_p, request.seed, request.chat, request.system
    )
    prompt = _prompt_text(request.prompt)
    done = sample(request.source, prompt, asking, request.checkpoint)
    if not done.text.strip():
        tokens = plural(done.new_tokens, "token")
        note(f"the model generated {tokens} without visible text (the end of the text, other special tokens or blanks)")
    return copied(GenerateResponse, done, prompt=prompt)


def _prompt_text(prompt: str | list[dict[str, Any]]) -> str:
    """Return a prompt as text: messages as JSON, as the command line takes them."""
    if not isinstance(prompt, list):
        return str(prompt)
    if not prompt or not all(isinstance(one, dict) and "role" in one for one in prompt):
        reason, fix = "a list must have messages with role and content", '[{"role": "user", "content": "Hi"}]'
        raise InputError(reason, field="prompt", value=str(prompt), fix=(fix,))
    return msgspec.json.encode(prompt).decode()


@verb(requests.Evaluate, ENGINE)
def evaluate(request: requests.Evaluate) -> EvaluateResponse:
    """Measure the perplexity of a trained model."""
    check_folder(request.source, "source")
    stage("evaluate: importing torch and transformers")
    from meshwright.engine.post_training.perplexity import evaluate as measure

    done = measure(
        request.source,
        dataset=request.dataset,
        samples=request.samples,
        nproc=request.nproc,
        answers=request.answers,
        overrides=request.overrides,
        which=request.checkpoint,
        base=request.base,
    )
    return copied(EvaluateResponse, done, source=request.source)


@verb(requests.Convert, ENGINE)
def convert(request: requests.Convert) -> ConvertResponse:
    """Write the model of a checkpoint as a Hugging Face folder."""
    check_folder(request.source, "source")
    stage("convert: importing torch and transformers")
    from meshwright.engine.post_training.convert import convert as write

    done = write(
        request.source,
        request.out,
        dtype=request.dtype,
        shard_gib=request.shard_gib,
        consolidated=request.consolidated,
        merge=request.merge,
        which=request.checkpoint,
        model=request.model,
    )
    return copied(ConvertResponse, done, source=request.source, folder=str(done.folder))


class ValidationPart(Part, frozen=True, kw_only=True):
    """The result of one validation."""

    step: int
    loss: float
    perplexity: float | None
    tokens: int
    samples: int
    seconds: float
    best: bool


class TrainResponse(Response, frozen=True, kw_only=True):
    """A run next to its estimate."""

    recipe: str
    model: str
    goal: str
    ranks: int
    device: str
    layout: Layout
    precision: Precision
    kernels: Kernels
    seq_length: int
    global_batch_size: int
    steps: int
    losses: Sequence[float]
    grad_norms: Sequence[float]
    eval_losses: Mapping[str, float]
    validation: Sequence[ValidationPart]
    best_step: int | None
    best_checkpoint: str | None
    stopped_early: str | None
    skipped: Sequence[int]
    step_s: float
    step_parts_s: Mapping[str, float]
    tokens_per_s_per_gpu: float
    tflops_per_gpu: float
    mfu: float | None
    mfu_convention: str
    memory_gib: Mapping[str, float]
    estimate: Estimate | None
    samples_per_epoch: int | None
    epochs: float | None
    findings: Sequence[Finding]
    folder: str | None
    first_step: int
    checkpoint: str | None
    resumed_from: str | None
    exported: str | None


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


def train_response(done: TrainResult, request: requests.Bench | requests.Train | None = None) -> TrainResponse:
    """Return the response of train and bench; rank 0 alone has one."""
    recipe, metrics = done.recipe, done.outcome
    if metrics is None:
        raise ValueError("only rank 0 has the metrics of a run")
    estimate = estimate_part(done.estimate)
    return copied(
        TrainResponse,
        metrics,
        recipe=recipe.name,
        model=recipe.model,
        goal=recipe.goal,
        ranks=done.case.world,
        layout=recipe.layout,
        precision=recipe.precision,
        kernels=recipe.kernels,
        seq_length=recipe.data.seq_length,
        global_batch_size=recipe.train.global_batch_size,
        steps=len(metrics.losses),
        eval_losses={str(step): loss for step, loss in metrics.eval_losses.items()},
        validation=[copied(ValidationPart, record) for record in metrics.validation],
        step_parts_s=metrics.parts_s,
        mfu_convention=estimate.mfu_convention,
        estimate=estimate if metrics.mfu is not None else None,  # on GPUs; the estimate is not for CPUs
        findings=finding_parts(done.findings),
        folder=done.folder,
        exported=metrics.model,
    )


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
