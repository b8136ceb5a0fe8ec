"""From a recipe to a finished run: resolves the run spec, validates the recipe, starts the ranks."""

from __future__ import annotations

import os
import re
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright import costs
from meshwright.display import Readable, Row, titled
from meshwright.engine import processes
from meshwright.engine.checkpoint.folder import TINY_WEIGHTS
from meshwright.engine.data import byte_level
from meshwright.engine.faults import (
    LESS_GPU_MEMORY,
    RunError,
    RunInterruptedError,
    StoppedError,
    end_rank,
    explain_death,
    newest_checkpoint,
    quit_error,
    restart_command,
    stopped_early,
)
from meshwright.engine.metrics.jsonl import Lines
from meshwright.engine.metrics.status import Status
from meshwright.engine.metrics.trackers import require_trackers
from meshwright.engine.rank_env import DeviceType, Process, detect
from meshwright.engine.run_spec import RankSpec, RunSpec
from meshwright.engine.stop_request import StopSignal, stops_at_once
from meshwright.engine.validate import (
    data_ranks,
    require_host_memory,
    run_findings,
    show_findings,
    unnamed_data,
    validate,
)
from meshwright.engine.worker import RunMetrics, run_rank
from meshwright.errors import InputError
from meshwright.models import find
from meshwright.notes import note
from meshwright.recipes.case import Case
from meshwright.recipes.model_changes import beyond_positions, unknown_numerics
from meshwright.recipes.types import Recipe
from meshwright.rules import Finding, RefusedError

if TYPE_CHECKING:
    from meshwright.engine.model_families import ModelFamily

PRELOADED = ("meshwright.engine.trainer",)
RUNS = "runs"
FAILURE = "failure.jsonl"  # in the run folder: one line per failure


class TrainResult(Readable, msgspec.Struct, frozen=True):
    """A completed run: its recipe, estimate and metrics."""

    recipe: Recipe
    case: Case
    estimate: costs.Estimate
    outcome: RunMetrics | None  # None on ranks other than 0
    folder: str | None
    findings: tuple[Finding, ...] = ()

    def summary(self) -> list[Row]:
        """Return what was trained, its losses and speed, and where the results are."""
        done, rows = self.outcome, [("Run", f"{self.recipe.name} on {self.case.world} ranks")]
        if done is not None:
            steps = f"{done.first_step:,} to {done.first_step + len(done.losses) - 1:,}" if done.losses else "none"
            losses = f": loss {done.losses[0]:.4f} → {done.losses[-1]:.4f}" if done.losses else ""
            rows.append(("Steps", f"{steps}{losses}"))
            speed = f"{done.tokens_per_s_per_gpu:,.0f} tokens/s/rank, {done.step_s:.3g} s per step"
            rows.append(("Speed", f"{speed} on {done.device}"))
            places = {"Saved": done.checkpoint, "Model": done.model, "Stopped": done.stopped_early}
            rows += [(title, text) for title, text in places.items() if text]
        found = [f"{one.severity}: {one.message}" for one in self.findings]
        return [*rows, *titled("Folder", [self.folder] if self.folder else []), *titled("Findings", found)]


def train(recipe: Recipe, run: RunSpec, pinned: Mapping[str, Any] | None = None) -> TrainResult:
    """Train a recipe to its last step: in this process, on `nproc` ranks, or as one rank of torchrun or SLURM.

    `pinned` are values set by the user, which --tiny does not scale down.
    """
    require_trackers(run.trackers)
    process = detect()
    status = Status(not run.quiet and (process is None or process.rank == 0))
    with stops_at_once(exits=bool(run.command)), _stops_reported(run, run.out), status:
        status.show("importing torch", ticks=False)
        return _train(recipe, run, pinned, process, status)


def _train(
    recipe: Recipe, run: RunSpec, pinned: Mapping[str, Any] | None, process: Process | None, status: Status
) -> TrainResult:
    from meshwright.engine.initial_weights import config_in, is_named, weights_folder
    from meshwright.engine.model.behaviour import with_isolated_documents
    from meshwright.engine.model_families import family_of, missing_tokenizer

    family = family_of(recipe)
    random_tiny = run.tiny and not is_named(recipe, pinned or {})
    weights = None if run.random_weights or random_tiny else weights_folder(recipe, notes=True)
    config = family.config_for(recipe) if weights is None else config_in(weights, recipe, family.config_for)
    if not run.tiny and not run.random_weights:
        _note(unknown_numerics(recipe, family.spec_of(recipe, config)), beyond_positions(recipe, find(recipe.model)))
    world = run.nproc or (process.world if process else 1)
    if run.tiny:
        recipe, config = _tiny(recipe, config, run, world, pinned or {}, shrink=weights is None)
    if weights is None and run.checkpoints and (started := run.out or recipe.checkpoint.folder):
        config = _as_started(config, recipe, Path(started).expanduser())
    recipe = with_isolated_documents(recipe, config, pinned or {})
    if run.find_micro_batch:
        recipe = with_largest_micro_batch(recipe, config, process, world, run)
    recipe = _with_validations(recipe, run, process)
    case = validate(recipe, config, process, world)
    if process is None or process.world == 1:  # ranks that started earlier have taken memory
        require_host_memory(case, world)
    total, epochs = None, recipe.train.epochs
    if epochs:
        status.show(f"counting the samples of {recipe.data.dataset}")
        start = byte_level.cached_byte_tokenizer() if random_tiny and recipe.goal != "pretrain" else weights
        recipe, total = _with_counted_steps(recipe, config, run, family, start, process)
        recipe = _with_validations(recipe, run, process)
        case = validate(recipe, config, process, world)
    counted_case = case if total is None else case.replace(epochs=epochs).with_samples(total)
    findings = () if run.random_weights else run_findings(counted_case, pinned or {}, run.tiny)
    if not run.random_weights and not random_tiny:  # bench and --tiny say that their data is mock
        findings += unnamed_data(recipe, pinned or {})
    status.clear()
    if run.checkpoints and (run.out or recipe.checkpoint.folder or not run.tiny):
        _note(missing_tokenizer(recipe, weights, config))
    show_findings(findings, process)
    with tempfile.TemporaryDirectory(prefix="meshwright-") as scratch:
        folder = run.out or recipe.checkpoint.folder or (scratch if run.tiny else _default_folder(recipe, process))
        if not run.out and not recipe.checkpoint.folder and not run.tiny and (process is None or process.rank == 0):
            _ignore_runs()
        if folder == scratch:
            run = msgspec.structs.replace(run, checkpoints=False)
        spec = RankSpec(recipe, config.to_dict(), case, folder, run, total_samples=total)
        if weights is not None:
            spec = msgspec.structs.replace(spec, weights=str(weights))
        elif random_tiny and recipe.goal != "pretrain" and not run.random_weights:
            spec = with_tiny_weights(spec)
        status.clear()
        outcome = _run_ranks(spec, preloaded(family, config))
    kept = None if folder == scratch else folder
    return TrainResult(recipe, case, costs.estimate(case), outcome, kept, findings)


def _tiny(
    recipe: Recipe, config: Any, run: RunSpec, world: int, pinned: Mapping[str, Any], shrink: bool
) -> tuple[Recipe, Any]:
    """Return the recipe and the model's config at laptop size; `shrink`: the model too, whose weights are random."""
    from meshwright.engine.tiny import tiny_recipe, with_data_vocab

    published = getattr(config, "vocab_size", 0)
    recipe, config = tiny_recipe(recipe, config, world, pinned, shrink=shrink)
    if run.out is not None and run.checkpoints:
        from meshwright.engine.checkpoint.contract import check_before_start

        compared = {key for key in pinned if not key.startswith("architecture.")}
        compared.add("train.global_batch_size")  # the ranks decide the batch of a tiny run
        check_before_start(recipe, Path(run.out).expanduser(), compared, run.accept_changes)
    return with_data_vocab(recipe, config, published) if shrink else (recipe, config)


def _with_counted_steps(
    recipe: Recipe, config: Any, run: RunSpec, family: ModelFamily, start: Path | None, process: Process | None
) -> tuple[Recipe, int | None]:
    """Return the recipe with the steps of its epochs, and the samples; `start`: folder with the tokenizer."""
    from meshwright.engine.epochs import with_epoch_intervals, with_short_warmup, with_steps

    shown = process is None or process.rank == 0
    counted, total = with_steps(recipe, lambda: family.open_source(recipe, config, False, start), shown)
    counted = with_epoch_intervals(counted, recipe.train.epochs, run.epoch_intervals, shown)
    return with_short_warmup(counted, shown) if run.default_warmup else counted, total


def _with_validations(recipe: Recipe, run: RunSpec, process: Process | None) -> Recipe:
    """Return the recipe with validations of the data that the user named for them, once its steps are known."""
    from meshwright.engine.epochs import with_validations

    return with_validations(recipe, process is None or process.rank == 0) if run.default_validations else recipe


def _run_ranks(spec: RankSpec, preload: Sequence[str]) -> RunMetrics | None:
    """Run all ranks to the end; None on ranks other than 0."""
    run, folder = spec.run, spec.folder
    with _failure_recorded(Path(folder) if run.checkpoints else None), _stops_reported(run, folder):
        results = processes.start(
            run_rank,
            spec,
            nproc=run.nproc,
            device_type=_device_type(run),
            backend=run.backend,
            preload=preload,
            grace_s=spec.recipe.checkpoint.grace_s if run.checkpoints else None,
        )
    return next((result for result in results if result is not None), None)


def _note(*texts: str) -> None:
    for text in filter(None, texts):
        note(text)


def _as_started(config: Any, recipe: Recipe, folder: Path) -> Any:
    """Return the config with the numbers of the run's own checkpoints, if it resumes; the table may be newer."""
    from meshwright.engine.checkpoint.contract import saved_config
    from meshwright.engine.model.config import with_saved_numbers

    saved = saved_config(recipe, folder)
    if not saved or not hasattr(config, "get_text_config"):
        return config
    config, differing = with_saved_numbers(config, saved)
    if differing:
        listed = ", ".join(f"{name} {old}, published {new}" for name, (old, new) in differing.items())
        note(f"{folder}: the run goes on with the model that it was started with: {listed}")
    return config


def with_tiny_weights(spec: RankSpec) -> RankSpec:
    """Return the spec with random initial weights, which rank 0 writes to the run folder first."""
    weights = str(Path(spec.folder) / TINY_WEIGHTS)
    return msgspec.structs.replace(spec, weights=weights, write_random_weights=True)


@contextmanager
def _stops_reported(run: RunSpec, folder: str | None) -> Iterator[None]:
    """Turn a signal that ended the run without saving into the error that says so; ranks of a launcher exit here."""
    try:
        yield
    except KeyboardInterrupt as stop:
        error = _stopped(run, folder, stop.name if isinstance(stop, StopSignal) else signal.SIGINT.name)
    except RunInterruptedError as stop:
        if stop.fix:  # it already says what was saved
            raise
        error = (
            quit_error(newest_checkpoint(Path(folder)), _restart(run, folder)) if folder and run.checkpoints else stop
        )
    else:
        return
    process = detect()
    if process is not None and process.how in ("torchrun", "slurm"):
        end_rank(error, process)
    raise error from None


def _stopped(run: RunSpec, folder: str | None, name: str) -> RunError:
    """Return the error of a run that was stopped before it had anything to save, or that keeps no checkpoints."""
    if run.checkpoints and not (run.tiny and run.out is None):
        return stopped_early(name, newest_checkpoint(Path(folder)) if folder else None, _restart(run, folder))
    if name != signal.SIGINT.name:
        return explain_death(0, 1, -signal.Signals[name])
    if run.random_weights:
        return RunInterruptedError("interrupted (Ctrl-C); a throughput run saves nothing")
    fix = (f"{' '.join(_restart(run, None))} --out FOLDER",) if run.command else ("out=FOLDER",)
    return RunInterruptedError("interrupted (Ctrl-C); nothing was saved: --tiny saves only with --out", fix=fix)


def _restart(run: RunSpec, folder: str | None) -> tuple[str, ...]:
    process = detect()
    return restart_command(run.command, folder, process.how if process is not None else "alone")


@contextmanager
def _failure_recorded(folder: Path | None) -> Iterator[None]:
    """Append the error of a failed run to `failure.jsonl` in its folder, where the doctor finds it."""
    try:
        yield
    except RunError as error:
        if folder is not None and not isinstance(error, StoppedError | RunInterruptedError):
            with suppress(OSError, InputError):
                lines = Lines(folder / FAILURE)
                lines.write(
                    {"error": error.message, "fix": [*error.fix], "at": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"}
                )
                lines.close()
        raise


def _device_type(run: RunSpec) -> DeviceType:
    return "cpu" if run.tiny else "auto"


def preloaded(family: ModelFamily, config: Any) -> tuple[str, ...]:
    """Return the modules to import once, before the ranks are forked."""
    return (*PRELOADED, *family.modules(config))


def with_largest_micro_batch(recipe: Recipe, config: Any, process: Process | None, world: int, run: RunSpec) -> Recipe:
    """Return the recipe with the largest micro batch that fits by estimate, confirmed by one training step.

    Under torchrun and SLURM, where no ranks can be started for a trial, the estimate alone decides.
    """
    samples = recipe.train.global_batch_size // data_ranks(recipe.layout, world)
    for size in sorted((d for d in range(1, samples + 1) if samples % d == 0), reverse=True):
        layout = msgspec.structs.replace(recipe.layout, micro_batch_size=size)
        candidate = msgspec.structs.replace(recipe, layout=layout)
        with suppress(RefusedError):
            case = validate(candidate, config, process, world)
            if process is not None and process.world > 1:
                return candidate
            if _one_step_fits(candidate, config, case, run):
                return candidate
    raise InputError(
        "no micro batch fits, not even one sample",
        field="layout.micro_batch_size",
        value="auto",
        fix=("layout.recompute=full", "layout.tp=2 layout.sp=true", "a larger cluster"),
    )


def _one_step_fits(recipe: Recipe, config: Any, case: Case, run: RunSpec) -> bool:
    from meshwright.engine.model_families import family_of

    one = msgspec.structs.replace(recipe, train=msgspec.structs.replace(recipe.train, steps=1, eval_every=0))
    trial = msgspec.structs.replace(run, quiet=True, tensorboard=False, wandb=False, mlflow=False, checkpoints=False)
    with tempfile.TemporaryDirectory(prefix="meshwright-") as scratch:
        try:
            processes.fork(
                run.nproc or 1,
                run_rank,
                RankSpec(one, config.to_dict(), case, scratch, trial),
                device_type=_device_type(run),
                backend=run.backend,
                preload=preloaded(family_of(recipe), config),
            )
        except RunError as error:
            if tuple(error.fix) != LESS_GPU_MEMORY:
                raise
            return False
    return True


def _ignore_runs() -> None:
    """Create the folder of runs with a .gitignore: checkpoints are not added to a repository by mistake."""
    with suppress(
        OSError
    ):  # exists: it may be shared or tracked on purpose; a folder that cannot be written fails later
        Path(RUNS).mkdir()
        (Path(RUNS) / ".gitignore").write_text("*\n")


def _default_folder(recipe: Recipe, process: Process | None, env: Mapping[str, str] = os.environ) -> str:
    """Return a new run folder; ranks that their scheduler restarts get the folder they had."""
    run_id = f"{datetime.now():%Y%m%d-%H%M%S}"
    if process is not None and process.how == "slurm" and env.get("SLURM_JOB_ID"):
        run_id = f"{env['SLURM_JOB_ID']}-{env['SLURM_STEP_ID']}"
    elif process is not None and env.get("TORCHELASTIC_RUN_ID", "none") != "none":
        run_id = env["TORCHELASTIC_RUN_ID"]
    return str(Path(RUNS) / f"{recipe.name}-{re.sub(r'[^A-Za-z0-9._-]', '_', run_id)}")
