"""Train and bench on our engine. Torch is imported only when a run starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright import clusters
from meshwright.api import run_requests as requests
from meshwright.api.continued_run import continued, is_run, with_fitting_layout
from meshwright.api.dataset_length import few_updates
from meshwright.api.job_notes import note_length
from meshwright.api.paths import BLEND, DATASET, PRETRAINED, check_run_paths, with_stand_ins
from meshwright.api.resolve import recipe_from
from meshwright.api.responses import Estimate, Finding, Part, Response, copied, estimate_part, finding_parts
from meshwright.api.targets import depends_on_gpus, job_for, ranks_cluster
from meshwright.api.verb_function import verb
from meshwright.errors import InputError
from meshwright.extras import ENGINE
from meshwright.models import find
from meshwright.notes import note
from meshwright.recipes import files
from meshwright.recipes import overrides as override
from meshwright.recipes.engine_models import require_trained
from meshwright.recipes.run_folder import is_tiny_run
from meshwright.recipes.types import Kernels, Layout, Precision, Recipe, field_value, recipe_fields

if TYPE_CHECKING:
    from meshwright.engine.run_spec import RunSpec
    from meshwright.engine.train import TrainResult


BENCH_OVERRIDES = ("train.steps=50", "train.check_nan=false", "train.log_every=10", "train.eval_every=0")
AUTO = "micro_batch_size=auto"
COMPILE, EVAL_EVERY = "kernels.compile", "train.eval_every"


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
    """Start a run with the recipe and the user's options; `settings` and `defaults` are those of the verb."""
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
    own_file = isinstance(request.recipe, str) and files.is_file(request.recipe)
    gpus = _ranks(request.nproc) if own_file else ranks  # those of a file that names none
    job = job_for(request.recipe, request.goal, gpus, planned, why_gpus=why, **options)
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
    typed = override.requested(_as_started(found, request), changes)
    pinned = {**own, **set_first, **typed}
    if request.tiny:
        found = _with_stand_ins(found, pinned)
    if request.tiny and pinned.get(COMPILE) is True and not _has_gpu():  # of a plan's command, with --tiny added
        del pinned[COMPILE]
        note(f"{COMPILE}=true is for GPUs: --tiny runs eagerly on this CPU, where compiling would take minutes")
    if on_cpu and not request.tiny:
        found = _in_fast_precision(found, request.out, pinned)
    chosen = "schedule.warmup_steps" in pinned or job.content is not None or isinstance(request.recipe, Recipe)
    spec = RunSpec(
        **{name: getattr(request, name) for name in RunSpec.__struct_fields__ if hasattr(request, name)},
        **settings,
        find_micro_batch=bool(automatic),
        ignore_nan=typed.get("train.check_nan") is False,
        default_warmup=not chosen,
        default_validations=EVAL_EVERY not in pinned and job.imported is None and not is_run(request.recipe),
        epoch_intervals=tuple(one for one in job.epoch_intervals if one not in pinned),
    )
    recipe = with_loss(override.apply(found, changes), spec.hooks.loss, pinned)
    if not request.tiny:  # it has steps of its own
        note_length(job, recipe)
        _note_few_updates(request, recipe)
    recipe, spec = _in_run_folder(request, recipe, spec, pinned)
    return train.train(recipe, spec, pinned)


def _with_stand_ins(recipe: Recipe, pinned: Mapping[str, Any]) -> Recipe:
    """Return a --tiny recipe without the paths of another machine, such as those of a plan for a cluster; note them."""
    recipe, missing = with_stand_ins(recipe, pinned)
    used = {DATASET: "random tokens", "data.tokenizer": "the byte-level tokenizer", PRETRAINED: "random weights"}
    for field, name in missing.items():
        key = DATASET if field == BLEND else field
        instead = f"uses {used[key]}" if key in used else "runs without it"
        note(f"{field}: {name} is not on this machine: --tiny {instead}; {key}=PATH names another")
    return recipe


def _note_few_updates(request: requests.Bench | requests.Train, recipe: Recipe) -> None:
    """Note a smaller batch for a new fine-tuning of few updates, as recommend and check suggest it."""
    from meshwright.engine.faults import newest_checkpoint

    folder = request.out or recipe.checkpoint.folder
    resumes = is_run(request.recipe) or (folder and newest_checkpoint(Path(folder).expanduser()) is not None)
    if not resumes:
        for one in few_updates(recipe, clusters.cluster(_ranks(request.nproc)).world):
            note(f"{one.message}; more updates, each in less time: {' '.join(one.fix)} ({one.rule})")


def _in_run_folder(
    request: requests.Bench | requests.Train, recipe: Recipe, spec: RunSpec, pinned: Mapping[str, Any]
) -> tuple[Recipe, RunSpec]:
    """Return the recipe and the spec with the run folder, checked; a run that continues stays in its own."""
    out = request.out or recipe.checkpoint.folder or None
    if not request.tiny and is_run(request.recipe):
        if out is None and spec.checkpoints:
            out = continued(str(request.recipe))
        if not spec.find_micro_batch:
            recipe = with_fitting_layout(recipe, clusters.cluster(_ranks(request.nproc)).world, pinned)
    check_run_paths(recipe, out)
    if out is not None and spec.checkpoints and not request.tiny:  # --tiny has a batch of its own: checked there
        from meshwright.engine.checkpoint.contract import check_before_start

        check_before_start(recipe, Path(out).expanduser(), None, spec.accept_changes)
    return recipe, msgspec.structs.replace(spec, out=out)


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
