"""One rank of a training run: builds the trainer, resumes, steps, evaluates, saves and reports."""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from meshwright import costs
from meshwright.engine import metrics, shared_gpu
from meshwright.engine.build_trainer import build_trainer
from meshwright.engine.evaluation import Validation
from meshwright.engine.faults import (
    StoppedError,
    end_rank,
    newest_checkpoint,
    quit_error,
    ran_out_of_grace,
    restart_command,
    signal_label,
    stopped_early,
)
from meshwright.engine.loss_guard import LossGuard, suspects
from meshwright.engine.metrics.jsonl import log, warn
from meshwright.engine.profiling import window
from meshwright.engine.rank_env import Process
from meshwright.engine.run_spec import RankSpec
from meshwright.engine.watchdog import Watchdog
from meshwright.recipes.types import Recipe

if TYPE_CHECKING:
    import torch

    from meshwright.engine.checkpoint.manager import Checkpoints
    from meshwright.engine.stop_request import StopRequest
    from meshwright.engine.trainer import StepResult, Trainer

MOST_SKIPPED = 10  # consecutive steps that --on-nan skip may skip
SIGNAL_NAMES = {"SIGINT": "Ctrl-C"}
STOPPING = {
    "building": "stopping before the first step",
    "training": "saving a checkpoint after this step, then stopping",
    "finishing": "the last step is saved; finishing",
}
STOP_LAG = 2  # steps after which a stop vote is read, so that reading it does not make the CPU wait for the GPU


class RunMetrics(msgspec.Struct, frozen=True):
    """The results of a run, as rank 0 measured them."""

    losses: list[float]
    grad_norms: list[float]
    eval_losses: dict[int, float]
    validation: list[metrics.ValidationRecord]
    best_step: int | None  # with the lowest validation loss
    best_checkpoint: str | None
    stopped_early: str | None  # why, if train.early_stop_patience ended the run
    step_s: float
    tokens_per_s_per_gpu: float
    tflops_per_gpu: float
    mfu: float | None
    memory_gib: dict[str, float]
    parts_s: dict[str, float]
    skipped: list[int]
    device: str
    first_step: int = 1  # the step of losses[0]; above 1 after a resume
    checkpoint: str | None = None  # the last one saved
    resumed_from: str | None = None
    model: str | None = None  # the Hugging Face folder written at the end
    samples_per_epoch: int | None = None  # different samples of the data, if known
    epochs: float | None = None  # passes over the data until the last step


def run_rank(process: Process, spec: RankSpec) -> RunMetrics | None:
    """Train on this rank; return the metrics on rank 0."""
    import torch

    from meshwright.engine.model.build import building

    device = process.device
    set_determinism(spec.recipe, device)
    spec = _with_shared_folder(process, spec)
    with ExitStack() as cleanup:
        stop_request = _open_stop_request(cleanup, process, spec)
        dog = cleanup.enter_context(Watchdog(process, spec.run.timeout_s))
        dog.phase(0, "build")
        status = metrics.Status(process.rank == 0 and not spec.run.quiet)
        cleanup.callback(status.clear)
        if process.rank == 0:
            _warn_of_slow_device(process, spec)
        cleanup.enter_context(building(spec.run.hooks.model_class))
        trainer = build_trainer(spec, device, status.show)
        cleanup.callback(trainer.close)
        run = _Run(process, spec, trainer, dog, stop_request)
        cleanup.callback(run.close)
        run.resume()
        if run.first < spec.recipe.train.steps:
            status.show(f"step {run.first + 1}{' (compiles the model)' * spec.recipe.kernels.compile}")
        run.on_first_step = status.clear
        if stop_request is not None:
            stop_request.phase = "training"
        profile = cleanup.enter_context(window(spec.recipe.train.profile, Path(spec.folder), process=process))
        for number in range(run.first, spec.recipe.train.steps):
            if run.stops_early():
                break
            run.step(number)
            profile.step()
        outcome = run.finish()
        if device.type == "cuda":
            torch.cuda.synchronize()
    return outcome if process.rank == 0 else None


def _warn_of_slow_device(process: Process, spec: RankSpec) -> None:
    """Warn of shared GPUs and missing kernels; on CPUs, of what is slow, and log the time of a step."""
    from meshwright.engine.cpu_speed import compile_warning, cores, slow_precision_warning, step_time_note
    from meshwright.engine.kernels.scan_choice import missing_note

    if process.device.type == "cuda":
        scan = missing_note(spec.recipe.kernels, process.device.type) if spec.case.is_hybrid else ""
        for text in filter(None, (shared_gpu.describe(process), scan)):
            warn(text)
        return
    if process.local_world > cores():
        warn(f"--nproc {process.local_world}: this machine has {cores()} cores, so that the ranks wait for each other")
    saved = newest_checkpoint(Path(spec.folder)) if spec.run.checkpoints else None
    for text in (slow_precision_warning(spec.recipe, saved is not None), compile_warning(spec.recipe)):
        if text:
            warn(text)
    if not spec.run.quiet and (text := step_time_note(spec.case, spec.recipe.train.steps - (saved or 0))):
        log(text)


def _with_shared_folder(process: Process, spec: RankSpec) -> RankSpec:
    """Return the spec with rank 0's run folder: each rank of torchrun and SLURM named one by its own clock."""
    from meshwright.engine.object_collectives import gathered

    if process.how not in ("torchrun", "slurm"):
        return spec
    return msgspec.structs.replace(spec, folder=gathered(spec.folder)[0])


def _open_stop_request(cleanup: ExitStack, process: Process, spec: RankSpec) -> StopRequest | None:
    """Install the handlers of stop signals and lock the run folder; None for runs without checkpoints."""
    from meshwright.engine.checkpoint.folder import Lock
    from meshwright.engine.stop_request import StopRequest

    if not spec.run.checkpoints:
        return None
    if process.rank == 0:
        cleanup.callback(Lock(Path(spec.folder)).release)
    folder, grace_s = Path(spec.folder), spec.recipe.checkpoint.grace_s
    restart = restart_command(spec.run.command, spec.folder, process.how)

    def too_late(name: str) -> None:
        if request.phase == "building":
            end_rank(stopped_early(name, newest_checkpoint(folder), restart), process)
        if request.phase == "finishing":
            reason = f"{signal_label(name)}; checkpoint saved at step {newest_checkpoint(folder)}, model not exported"
            end_rank(StoppedError(reason, fix=restart), process)
        ran_out_of_grace(process, name, grace_s)

    def on_request(name: str) -> None:
        if process.rank == 0:
            log(f"{SIGNAL_NAMES.get(name, name)}: {STOPPING[request.phase]}")
            if name == "SIGINT" and request.phase == "training":
                log("press Ctrl-C twice more to quit without saving")

    request = StopRequest(
        grace_s,
        too_late,
        alone=process.world == 1,
        on_request=on_request,
        on_quit=lambda: end_rank(quit_error(newest_checkpoint(folder), restart), process),
    )
    return cleanup.enter_context(request)


def set_determinism(recipe: Recipe, device: torch.device) -> None:
    """Set the seed, deterministic algorithms and matmul precision of this process."""
    import torch

    torch.manual_seed(recipe.train.seed)
    # Torch warns about in-place changes of a layer's output; this engine makes none.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    if recipe.kernels.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("highest" if recipe.precision.compute == "fp32" else "high")


class _Run:
    """Steps a trainer with timing, watchdog, loss guard, checkpoints and reports (the step's StepCallbacks)."""

    def __init__(
        self, process: Process, spec: RankSpec, trainer: Trainer, dog: Watchdog, stop_request: StopRequest | None = None
    ) -> None:
        self.process, self.spec, self.trainer, self.dog = process, spec, trainer, dog
        self.stop_request = stop_request
        kept = spec.run.out is not None or not spec.run.tiny
        self.guard = LossGuard(
            spec.run.on_nan, MOST_SKIPPED, Path(spec.folder), trainer.device, suspects(spec.recipe), kept
        )
        self.checkpoints = self._checkpoints() if spec.run.checkpoints else None
        self.results: list[StepResult] = []
        self.validation = Validation(spec.recipe, trainer, process.rank == 0)
        self.first = self.number = self.completed = 0
        self.resumed_from: str | None = None
        self.stopping = False  # a stop was requested, and all ranks know it
        self._stops: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()
        self._opened: metrics.Reporter | None = None
        self.on_first_step: Callable[[], None] = lambda: None
        self._gradients_gib: float | None = None  # before the first update: they are freed after it
        self._memory: tuple[tuple[int, float | None], metrics.MemoryParts] | None = None  # and what was counted

    def _checkpoints(self) -> Checkpoints:
        from meshwright.engine.checkpoint.manager import Checkpoints

        spec = self.spec
        by_epochs = spec.total_samples is not None
        return Checkpoints(
            Path(spec.folder), self.process, self.trainer, spec.config, spec.run.accept_changes, by_epochs
        )

    def resume(self) -> None:
        """Resume from the newest valid checkpoint in the run folder, if there is one, and open the reports."""
        from meshwright.engine.object_collectives import gathered
        from meshwright.engine.run_template import keep_template

        if self.checkpoints is not None:
            self.dog.phase(0, "resume")
            state = self.checkpoints.resume()
            if state is not None:
                self.first = self.completed = state.step
                self.resumed_from = self.checkpoints.path(state.step)
                if self.process.rank == 0:
                    log(f"resuming after step {state.step}: {self.resumed_from}")
                self.guard.skipped_in_a_row = state.skipped_in_a_row
                saved = self.checkpoints
                self.validation.restore(state.validation, saved.data_changed(state), saved.has_same_data(state))
            if self.process.rank == 0:
                keep_template(self.spec.recipe, Path(self.spec.folder))
            if self.spec.recipe.checkpoint.save_every:
                self.checkpoints.saver.prepare()
            if any(gathered(self.wants_to_stop(), self.checkpoints.saver.group)):
                name = self.stop_request.name if self.stop_request is not None else ""
                fix = restart_command(self.spec.run.command, self.spec.folder, self.process.how)
                raise stopped_early(name, newest_checkpoint(Path(self.spec.folder)), fix)
        # A run whose state does not fit ends here, before its first step.
        self.trainer.optimizer.allocate_state()
        self._open_reports()
        if self.first and self.validation.due(self.first) and self._validate(self.first) and self.checkpoints:
            self.checkpoints.mark_best(self.first)  # a stop request had kept the checkpoint's validation from running

    def _open_reports(self) -> None:
        process, spec, device = self.process, self.spec, self.trainer.device
        # The estimate is for GPUs: it means nothing on a CPU, or where ranks share a GPU.
        on_gpu = device.type == "cuda" and not shared_gpu.describe(process)
        constants = metrics.constants(spec.case, costs.estimate(spec.case) if on_gpu else None, on_gpu)
        constants = msgspec.structs.replace(
            constants, samples_per_epoch=self.trainer.samples_per_epoch, total_samples=spec.total_samples
        )
        self.clock = metrics.Clock(device)
        self.meter = metrics.Meter(constants)
        every = spec.recipe.train.log_every
        header = {"settings": msgspec.to_builtins(spec.recipe), "gpus": str(spec.case.cluster)}
        if spec.run.tiny or spec.run.random_weights:
            header["tiny"] = True  # the doctor then expects no learning rate of a pretrained model
        if self.validation.name:
            header["validation"] = {"dataset": self.validation.name, "samples": self.validation.source.size}
        folder, first = Path(spec.folder), self.first + 1
        sinks = metrics.open_sinks(
            *(process, spec.recipe.name, constants, folder, first, spec.run.tensorboard, spec.run.trackers),
            *(every, spec.run.json, header),
        )
        if spec.run.quiet:
            sinks = sinks[:-1]
        self.reporter = self._opened = metrics.Reporter(self.meter, self.clock, sinks, self.memory)

    # The step calls these while it runs (see trainer.StepCallbacks).

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time a part of the step and report it to the watchdog."""
        self.dog.phase(self.number + 1, name)
        with self.clock.part(name):
            yield

    def allows(self, step: int, losses: torch.Tensor, norm: torch.Tensor, samples: list[int]) -> bool:
        """Whether loss and gradient norm are finite; with train.check_nan=false they are read some steps later."""
        if self.spec.run.ignore_nan:
            return True
        check = self.guard.allows if self.spec.recipe.train.check_nan else self.guard.allows_unread
        return check(step + 1, losses.sum(), norm, samples)

    def wants_to_stop(self) -> bool:
        """Whether this rank received a stop request."""
        return self.stop_request is not None and self.stop_request.requested

    def on_stop_vote(self, stops: torch.Tensor) -> None:
        """Read how many ranks want to stop; called before every update, so that all ranks stop in the same step.

        With train.check_nan the step has just synchronized with the GPU and the value is ready. Without it the value
        is copied asynchronously and read STOP_LAG steps later.
        """
        import torch

        if not self._gradients_gib:  # a validation before the first step has none
            self._gradients_gib = self._measured_memory().gradients
        if self.checkpoints is not None:
            self.checkpoints.saver.before_update()
        if self.stop_request is None:
            return
        if stops.device.type != "cuda" or self.spec.recipe.train.check_nan:
            self.stopping |= bool(stops)
            return
        vote = torch.empty((), pin_memory=True).copy_(stops, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        self._stops.append((vote, copied))
        if len(self._stops) > STOP_LAG:
            vote, copied = self._stops.popleft()
            copied.synchronize()
            self.stopping |= bool(vote)

    def step(self, number: int) -> None:
        """Take and report one step; evaluate and save when due."""
        train = self.spec.recipe.train
        self.number = number
        self.clock.start()
        figures = (number + 1) % train.log_every == 0 or number == 0
        result = self.trainer.step(number, self, figures)  # type: ignore[arg-type]  # StepCallbacks by its methods
        if not self.results:
            self.on_first_step()
        self.results.append(result)
        extra = {f"router_{name}": value for name, value in result.router.items()}
        if figures and train.mtp_loss > 0:
            extra["mtp_loss"] = result.mtp_loss
        if self.checkpoints is not None:
            self.checkpoints.saver.poll()
            extra |= self.checkpoints.saver.take_figures()
        self.reporter.end_step(
            number + 1,
            loss=result.losses.sum(),
            lr=result.lr,
            grad_norm=result.norm,
            tokens=result.tokens,
            computed=result.computed,
            skipped=result.skipped,
            extra=extra,
        )
        self.completed = number + 1
        best = not self.stopping and self.validation.due(number + 1) and self._validate(number + 1)
        checkpoint = self.spec.recipe.checkpoint
        due = bool(checkpoint.save_every) and (number + 1) % checkpoint.save_every == 0
        if self.stopping and number + 1 < train.steps:
            self._stop(number + 1)
        elif self.checkpoints is not None and (due or (best and checkpoint.keep_best)):
            self._save(number + 1)

    def _validate(self, step: int) -> bool:
        """Validate and report; return whether the loss is the lowest so far."""
        self.dog.phase(step, "validation")
        if self.checkpoints is not None:
            self.checkpoints.saver.before_update()  # some optimizers evaluate other weights than they train
        record = self.validation.run(step, self)  # type: ignore[arg-type]
        if record is not None:
            self.reporter.validation(record)
        return record is not None and record.best

    def stops_early(self) -> bool:
        """Whether train.early_stop_patience ends the run before its last step."""
        if not self.validation.exhausted:
            return False
        if self.process.rank == 0:
            log(self.validation.why_stopped())
        return True

    def _save(self, step: int, wait: bool = False, read_back: bool = True) -> None:
        if self.checkpoints is None or self.checkpoints.saver.last == step:
            return
        self.dog.phase(step, "save")
        self.checkpoints.skipped_in_a_row = self.guard.skipped_in_a_row
        self.checkpoints.validation = self.validation.state
        self.checkpoints.save(step, wait, read_back)

    def _stop(self, step: int) -> None:
        """Save and end the run after a stop request; skips the read-back, for which there may be no time."""
        assert self.checkpoints is not None
        saver = self.checkpoints.saver
        saver.settle()
        self._save(step, wait=True, read_back=False)
        self.reporter.close()
        name = self.stop_request.name if self.stop_request is not None else ""
        fix = restart_command(self.spec.run.command, self.spec.folder, self.process.how)
        stopped = StoppedError(f"{signal_label(name)}; checkpoint saved at step {step} in {self.spec.folder}", fix=fix)
        self._record_end(f"{stopped.reason}; {stopped.next_step}: {' | '.join(stopped.fix)}")
        raise stopped

    def _record_end(self, why: str) -> None:
        """Write why the run ended before its last step into the metrics file."""
        best = self.validation.state.best_step if self._best_checkpoint() else None
        metrics.write_end(
            self.process, Path(self.spec.folder), metrics.EndRecord(step=self.completed, why=why, best_step=best)
        )

    def close(self) -> None:
        """Close the reports, also after an error."""
        if self._opened is not None:
            self._opened.abort()

    def memory(self) -> dict[str, float]:
        """Return this rank's memory by part and its peak, in GiB; parts are counted again when they have changed."""
        counted = (len(self.trainer.optimizer.state), self._gradients_gib)
        if self._memory is None or self._memory[0] != counted:
            self._memory = (counted, self._measured_memory())
        parts = metrics.with_peak(self._memory[1], self.trainer.device)
        return {**parts.parts, "peak": parts.peak, "reserved": parts.reserved}

    def _measured_memory(self) -> metrics.MemoryParts:
        trainer = self.trainer
        parameters = [p for stage in trainer.stages for p in stage.parameters()]
        state = metrics.optimizer_tensors(trainer.optimizer.state)
        return metrics.memory_parts(
            parameters, [p.grad for p in parameters], state, trainer.device, self._gradients_gib or None
        )

    def finish(self) -> RunMetrics:
        """Save the last step, export the model, close the reports and return the run's metrics."""
        self.guard.read_all()
        if self.checkpoints is not None:
            self.checkpoints.saver.settle()
            self._save(self.completed, wait=True)
            if self.stop_request is not None:
                self.stop_request.phase = "finishing"
        model = self._export()
        memory = self.memory()
        self.reporter.close()
        why_stopped = self.validation.why_stopped() if self.completed < self.spec.recipe.train.steps else None
        if why_stopped is not None:
            self._record_end(why_stopped)
        last, steady = self.reporter.last, self.meter.steady  # None when a finished run is started again
        saved = self.checkpoints.path(self.checkpoints.saver.last) if self.checkpoints is not None else None
        return RunMetrics(
            losses=[result.loss for result in self.results],
            grad_norms=[result.grad_norm for result in self.results],
            eval_losses={record.step: record.loss for record in self.validation.state.records},
            validation=self.validation.state.records,
            best_step=self.validation.state.best_step,
            best_checkpoint=self._best_checkpoint(),
            stopped_early=why_stopped,
            step_s=steady.step_s if steady else 0.0,
            tokens_per_s_per_gpu=steady.tokens_per_s_per_gpu if steady else 0.0,
            tflops_per_gpu=steady.tflops_per_gpu if steady else 0.0,
            mfu=steady.mfu if steady else None,
            memory_gib=memory,
            parts_s=dict(last.parts_s) if last else {},
            skipped=[result.step + 1 for result in self.results if result.skipped],
            device=_device_name(self.trainer.device),
            first_step=self.first + 1,
            checkpoint=saved,
            resumed_from=self.resumed_from,
            model=model,
            samples_per_epoch=self.trainer.samples_per_epoch,
            epochs=self.meter.epoch(self.completed),
        )

    def _best_checkpoint(self) -> str | None:
        step = self.validation.state.best_step
        kept = self.checkpoints is not None and self.spec.recipe.checkpoint.keep_best and step is not None
        return self.checkpoints.path(step) if kept and self.checkpoints is not None else None

    def _export(self) -> str | None:
        """Write the trained model as a Hugging Face folder with a model card; None for runs without checkpoints."""
        from meshwright.engine.model_families import family_of
        from meshwright.engine.post_training.model_card import write_card
        from meshwright.engine.run_template import save_template

        recipe = self.spec.recipe
        if self.checkpoints is None or recipe.checkpoint.export == "none":
            return None
        self.dog.phase(recipe.train.steps, "export")
        folder = Path(self.spec.folder) / "model"
        self.trainer.optimizer.eval_mode()
        family_of(recipe).export(self.trainer, folder, recipe.checkpoint.export == "consolidated")
        self.trainer.optimizer.train_mode()
        if self.process.rank == 0:
            save_template(recipe, Path(self.spec.folder), folder)
            write_card(folder, recipe, self.spec.weights or "", Path(self.spec.folder))
        return str(folder)


def _device_name(device: torch.device) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
