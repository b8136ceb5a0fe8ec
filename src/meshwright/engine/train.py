"""From a recipe to a run: the ranks it will have, the judgement of the rules, and the start."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from meshwright import costs, rules
from meshwright.clusters import Cluster, cluster
from meshwright.engine import processes
from meshwright.engine.faults import LESS_GPU_MEMORY, RunError, StoppedError
from meshwright.engine.metrics.jsonl import Lines
from meshwright.engine.rank_env import Process, detect
from meshwright.engine.run_spec import Job
from meshwright.engine.worker import RunMetrics, run_rank
from meshwright.errors import InputError, MeshwrightError
from meshwright.recipes.case import Case
from meshwright.recipes.types import Layout, Recipe
from meshwright.rules import Finding

if TYPE_CHECKING:
    from meshwright.engine.model_families import ModelFamily

PRELOADED = ("meshwright.engine.trainer",)
RUNS = "runs"
FAILURE = "failure.jsonl"  # in a run's folder: what it failed of, one line for every time
START = "start"  # in a run's folder: the random weights that --tiny fine-tunes from
ESTIMATED_ONLY = ("precision.format-published",)  # what a recipe may be estimated with, but not trained


class Settings(msgspec.Struct, frozen=True):
    """How a run is started and what it leaves behind."""

    nproc: int | None = None
    tiny: bool = False
    find_micro_batch: bool = False  # take the largest that fits, instead of the recipe's
    folder: str | None = None
    tensorboard: bool = False
    json: bool = False
    quiet: bool = False
    on_nan: Literal["stop", "skip"] = "stop"
    timeout_s: float = 600.0
    checkpoints: bool = True  # keep them in the folder, and go on from those that are there
    accept_changes: bool = False  # go on from a checkpoint of a training with another contract
    random_weights: bool = False  # start from chance whatever the recipe says: for throughput runs


class RefusedError(MeshwrightError):
    """The rules refuse the layout on these ranks (exit code 1)."""

    exit_code = 1

    def __init__(self, findings: list[Finding]) -> None:
        told = "\n  ".join(f"{finding.message} ({finding.rule})" for finding in findings)
        super().__init__(f"the rules refuse this layout:\n  {told}", fix=tuple(findings[0].fix))
        self.findings = findings


class TrainResult(msgspec.Struct, frozen=True):
    """A run that ended well: what was trained, and how it went."""

    recipe: Recipe
    case: Case
    estimate: costs.Estimate
    outcome: RunMetrics | None  # None on ranks other than 0
    folder: str | None


def train(recipe: Recipe, settings: Settings, pinned: Mapping[str, Any] | None = None) -> TrainResult:
    """Runs a recipe to its end: in this process, on ranks of its own, or as one rank of torchrun or SLURM.

    `pinned` are the values a user fixed, which --tiny leaves alone.
    """
    from meshwright.engine.initial_weights import config_in, is_named, weights_folder
    from meshwright.engine.model_families import kind_of

    kind = kind_of(recipe)
    made_up = settings.tiny and not is_named(recipe, pinned or {})  # weights of the tiny model's own
    weights = None if settings.random_weights or made_up else weights_folder(recipe)
    config = kind.config_for(recipe) if weights is None else config_in(weights, recipe, kind.config_for)
    process = detect()
    world = settings.nproc or (process.world if process else 1)
    if settings.tiny:
        from meshwright.engine.tiny import tiny_recipe

        recipe, config = tiny_recipe(recipe, config, world, pinned or {}, shrink=weights is None)
    if settings.find_micro_batch:
        recipe = with_largest_micro_batch(recipe, config, process, world, settings)
    case = validate(recipe, config, process, world)
    with tempfile.TemporaryDirectory(prefix="meshwright-") as scratch:
        folder = settings.folder or (scratch if settings.tiny else _folder(recipe, process))
        kept = settings.checkpoints and folder != scratch
        job = _job(recipe, config, case, folder, settings, kept)
        if weights is not None:
            job = msgspec.structs.replace(job, weights=str(weights))
        elif made_up and recipe.goal != "pretrain" and not settings.random_weights:
            job = msgspec.structs.replace(job, weights=str(Path(folder) / START), makes_weights=True)
        grace_s = recipe.checkpoint.grace_s if kept else None
        with _written_down(Path(folder) if kept else None):
            results = processes.start(run_rank, job, grace_s=grace_s, **_how(recipe, config, settings))
    outcome = next((result for result in results if result is not None), None)
    return TrainResult(recipe, case, costs.estimate(case), outcome, None if folder == scratch else folder)


@contextmanager
def _written_down(folder: Path | None) -> Iterator[None]:
    """Leaves the error of a run that fails in its folder, for those who look there later."""
    try:
        yield
    except RunError as error:
        if folder is not None and not isinstance(error, StoppedError):
            with suppress(OSError, InputError):
                lines = Lines(folder / FAILURE)
                lines.write({"error": str(error), "fix": [*error.fix], "at": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"})
                lines.close()
        raise


def _job(recipe: Recipe, config: Any, case: Case, folder: str, settings: Settings, checkpoints: bool = False) -> Job:
    return Job(
        recipe=recipe,
        config=config.to_dict(),
        case=case,
        folder=folder,
        tensorboard=settings.tensorboard,
        json=settings.json,
        quiet=settings.quiet,
        on_nan=settings.on_nan,
        timeout_s=settings.timeout_s,
        checkpoints=checkpoints,
        accept_changes=settings.accept_changes,
    )


def _how(recipe: Recipe, config: Any, settings: Settings) -> dict[str, Any]:
    from meshwright.engine.model_families import kind_of

    return {
        "nproc": settings.nproc,
        "device_type": "cpu" if settings.tiny else "auto",
        "preload": preloaded(kind_of(recipe), config),
    }


def preloaded(kind: ModelFamily, config: Any) -> tuple[str, ...]:
    """Modules that are imported once, before ranks are forked."""
    return (*PRELOADED, *kind.modules(config))


def with_largest_micro_batch(
    recipe: Recipe, config: Any, process: Process | None, world: int, settings: Settings
) -> Recipe:
    """The recipe with the largest micro batch that fits by estimate, confirmed by one step of it.

    Under torchrun and SLURM, where ranks cannot be started for a try, the estimate alone decides.
    """
    samples = recipe.train.global_batch_size // data_ranks(recipe.layout, world)
    for size in sorted((d for d in range(1, samples + 1) if samples % d == 0), reverse=True):
        tried = msgspec.structs.replace(recipe, layout=msgspec.structs.replace(recipe.layout, micro_batch_size=size))
        with suppress(RefusedError):
            case = validate(tried, config, process, world)
            if process is not None and process.world > 1:
                return tried
            if _one_step_fits(tried, config, case, settings):
                return tried
    raise InputError(
        "no micro batch fits, not even one sample",
        field="layout.micro_batch_size",
        value="auto",
        fix=("layout.recompute=full", "layout.tp=2 layout.sp=true", "a larger cluster"),
    )


def data_ranks(layout: Layout, world: int) -> int:
    """Data-parallel ranks of a layout in this world."""
    return max(1, world // (layout.tp * layout.pp * layout.cp))


def _one_step_fits(recipe: Recipe, config: Any, case: Case, settings: Settings) -> bool:
    one = msgspec.structs.replace(recipe, train=msgspec.structs.replace(recipe.train, steps=1, eval_every=0))
    quiet = msgspec.structs.replace(settings, quiet=True, tensorboard=False, nproc=settings.nproc or 1)
    with tempfile.TemporaryDirectory(prefix="meshwright-") as scratch:
        how = _how(recipe, config, quiet)
        try:
            processes.fork(how.pop("nproc"), run_rank, _job(one, config, case, scratch, quiet), **how)
        except RunError as error:
            if tuple(error.fix) != LESS_GPU_MEMORY:
                raise
            return False
    return True


def validate(recipe: Recipe, config: Any, process: Process | None, world: int) -> Case:
    """The recipe on the ranks it will have, or the findings that refuse it; no process group exists yet."""
    from meshwright.engine.model_families import kind_of

    ranks = run_cluster(recipe, process, world)
    case = Case(recipe, kind_of(recipe).spec_of(recipe, config), ranks, memory_of=lambda c: costs.memory(c))
    errors = [one for one in rules.judge(case) if one.severity == "error" or one.rule in ESTIMATED_ONLY]
    if errors:
        raise RefusedError(errors)
    return case


def run_cluster(recipe: Recipe, process: Process | None, world: int) -> Cluster:
    """This run's ranks as a cluster: this machine's GPUs, or the recipe's type of GPU where there is none."""
    gpu = cluster(recipe.cluster).gpu.name
    with suppress(InputError):
        gpu = cluster("auto").gpu.name
    local = process.local_world if process and process.world > 1 else world
    return cluster(f"{world // local}x{local}x{gpu}")


def _folder(recipe: Recipe, process: Process | None, env: Mapping[str, str] = os.environ) -> str:
    """A new folder; ranks that their scheduler starts again find the one they had."""
    which = f"{datetime.now():%Y%m%d-%H%M%S}"
    if process is not None and process.how == "slurm" and env.get("SLURM_JOB_ID"):
        which = f"{env['SLURM_JOB_ID']}-{env['SLURM_STEP_ID']}"
    elif process is not None and env.get("TORCHELASTIC_RUN_ID", "none") != "none":
        which = env["TORCHELASTIC_RUN_ID"]
    return str(Path(RUNS) / f"{recipe.name}-{re.sub(r'[^A-Za-z0-9._-]', '_', which)}")
