"""A training run on one rank: builds everything, steps, reports, and says how it went."""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from meshwright import costs
from meshwright.engine import metrics
from meshwright.engine.faults import LossGuard, StoppedError, ran_out_of_grace
from meshwright.engine.profiling import window
from meshwright.engine.rank_env import Process
from meshwright.engine.run_spec import Job, build
from meshwright.engine.watchdog import Watchdog
from meshwright.recipes.types import Recipe

if TYPE_CHECKING:
    import torch

    from meshwright.engine.checkpoint import Checkpoints, StopRequest
    from meshwright.engine.trainer import StepResult, Trainer

MOST_SKIPPED = 10  # steps in a row that a loss which is not a number may cost
STOP_LAG = 2  # steps that a request to end may wait for the GPU, where nothing else makes the step wait for it


class RunMetrics(msgspec.Struct, frozen=True):
    """How a run went, as its rank 0 saw it."""

    losses: list[float]
    grad_norms: list[float]
    eval_losses: dict[int, float]
    step_s: float
    tokens_per_s_per_gpu: float
    tflops_per_gpu: float
    mfu: float | None
    memory_gib: dict[str, float]
    parts_s: dict[str, float]
    skipped: list[int]
    device: str
    first_step: int = 1  # the first that this run took; losses begin there
    checkpoint: str | None = None  # the last one written
    resumed_from: str | None = None
    model: str | None = None  # the Hugging Face folder written at the end


def run_rank(process: Process, job: Job) -> RunMetrics | None:
    """Trains on this rank; the outcome on rank 0."""
    import torch

    device = process.device
    _settle(job.recipe, device)
    job = _of_rank_0(process, job)
    with ExitStack() as left_in_turn:
        told = _listen(left_in_turn, process, job)
        dog = left_in_turn.enter_context(Watchdog(process, job.timeout_s))
        dog.phase(0, "build")
        trainer = build(job, device)
        left_in_turn.callback(trainer.close)
        run = _Run(process, job, trainer, dog, told)
        run.resume()
        profile = left_in_turn.enter_context(window(job.recipe.train.profile, Path(job.folder), process=process))
        for number in range(run.first, job.recipe.train.steps):
            run.step(number)
            profile.step()
        outcome = run.finish()
        if device.type == "cuda":
            torch.cuda.synchronize()
    return outcome if process.rank == 0 else None


def _of_rank_0(process: Process, job: Job) -> Job:
    """The job with the folder that rank 0 has: ranks of torchrun and SLURM each named one by their own clock."""
    from meshwright.engine.object_collectives import gathered

    if process.how not in ("torchrun", "slurm"):
        return job
    return msgspec.structs.replace(job, folder=gathered(job.folder)[0])


def _listen(block: ExitStack, process: Process, job: Job) -> StopRequest | None:
    """Listens for signals that ask to end, and keeps other runs out of the folder; where checkpoints are kept."""
    from meshwright.engine.checkpoint import Lock, StopRequest

    if not job.checkpoints:
        return None
    if process.rank == 0:
        block.callback(Lock(Path(job.folder)).release)
    grace_s = job.recipe.checkpoint.grace_s
    return block.enter_context(StopRequest(grace_s, lambda name: ran_out_of_grace(process, name, grace_s)))


def _settle(recipe: Recipe, device: torch.device) -> None:
    """Seeds and number formats of this process."""
    import torch

    torch.manual_seed(recipe.train.seed)
    # Nothing here changes a layer's output in place, which is what torch warns of.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    if recipe.kernels.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("highest" if recipe.precision.compute == "fp32" else "high")


class _Run:
    """Steps a trainer under the eyes of the clock, the watchdog and the guard of the loss."""

    def __init__(
        self, process: Process, job: Job, trainer: Trainer, dog: Watchdog, told: StopRequest | None = None
    ) -> None:
        self.process, self.job, self.trainer, self.dog, self.told = process, job, trainer, dog, told
        self.guard = LossGuard(job.on_nan, MOST_SKIPPED, Path(job.folder), trainer.device)
        self.checkpoints = self._checkpoints() if job.checkpoints else None
        self.results: list[StepResult] = []
        self.evaluated: dict[int, float] = {}
        self.first = self.number = 0
        self.resumed_from: str | None = None
        self.stopping = False  # all ranks know of a request to end
        self._stops: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()

    def _checkpoints(self) -> Checkpoints:
        from meshwright.engine.checkpoint import Checkpoints

        job = self.job
        return Checkpoints(Path(job.folder), self.process, self.trainer, job.config, job.accept_changes)

    def resume(self) -> None:
        """Goes on from the newest good checkpoint of the run's folder, where there is one; opens what reports."""
        from meshwright.engine.object_collectives import gathered

        if self.checkpoints is not None:
            self.dog.phase(0, "resume")
            state = self.checkpoints.resume()
            if state is not None:
                self.first = state.step
                self.resumed_from = self.checkpoints.path(state.step)
                self.guard.skipped_in_a_row = state.skipped_in_a_row
            if self.job.recipe.checkpoint.save_every:
                self.checkpoints.saver.prepare()
            if any(gathered(self.wants_to_stop(), self.checkpoints.saver.group)):
                raise StoppedError("the run was asked to end before its first step")
        self._open_reports()

    def _open_reports(self) -> None:
        process, job, device = self.process, self.job, self.trainer.device
        on_gpu = device.type == "cuda"  # the estimate is of GPUs: beside a CPU it would say nothing
        constants = metrics.constants(job.case, costs.estimate(job.case) if on_gpu else None, on_gpu)
        self.clock = metrics.Clock(device)
        self.meter = metrics.Meter(constants)
        every = job.recipe.train.log_every
        told = {"settings": msgspec.to_builtins(job.recipe), "gpus": str(job.case.cluster)}
        folder, first = Path(job.folder), self.first + 1
        sinks = metrics.open_sinks(
            process, job.recipe.name, constants, folder, first, job.tensorboard, every, job.json, told
        )
        if job.quiet:
            sinks = sinks[:-1]
        self.reporter = metrics.Reporter(self.meter, self.clock, sinks, self.memory)

    # What the step asks for while it runs (see loop.Watch).

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Times a part of the step and tells the watchdog."""
        self.dog.phase(self.number + 1, name)
        with self.clock.part(name):
            yield

    def allows(self, step: int, losses: torch.Tensor, norm: torch.Tensor, samples: list[int]) -> bool:
        """Whether loss and gradients are numbers; not looked at where the recipe does not want to wait for it."""
        if not self.job.recipe.train.check_nan:
            return True
        return self.guard.allows(step + 1, losses.sum(), norm, samples)

    def wants_to_stop(self) -> bool:
        """Whether this rank was asked to end."""
        return self.told is not None and self.told.asked

    def hear(self, stops: torch.Tensor) -> None:
        """Learns whether any rank was asked to end, in the same step on all of them; comes before every update.

        Where the step has just waited for the GPU the answer is there. Where it never waits, it is read steps later.
        """
        import torch

        if self.checkpoints is not None:
            self.checkpoints.saver.before_update()
        if self.told is None:
            return
        if stops.device.type != "cuda" or self.job.recipe.train.check_nan:
            self.stopping |= bool(stops)
            return
        answer = torch.empty((), pin_memory=True).copy_(stops, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        self._stops.append((answer, copied))
        if len(self._stops) > STOP_LAG:
            answer, copied = self._stops.popleft()
            copied.synchronize()
            self.stopping |= bool(answer)

    def step(self, number: int) -> None:
        """One step, reported; an evaluation and a checkpoint where they are due."""
        train = self.job.recipe.train
        self.number = number
        self.clock.start()
        figures = (number + 1) % train.log_every == 0 or number == 0
        result = self.trainer.step(number, self, figures)  # type: ignore[arg-type]  # a Watch by its methods
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
        if train.eval_every and (number + 1) % train.eval_every == 0 and not self.stopping:
            self._evaluate(number + 1)
        every = self.job.recipe.checkpoint.save_every
        if self.stopping and number + 1 < train.steps:
            self._stop(number + 1)
        elif self.checkpoints is not None and every and (number + 1) % every == 0:
            self._save(number + 1)

    def _evaluate(self, step: int) -> None:
        from meshwright.engine.model_families import kind_of

        self.dog.phase(step, "evaluation")
        if self.checkpoints is not None:
            self.checkpoints.saver.before_update()  # some rules evaluate other weights than they train
        held_out = kind_of(self.job.recipe).open_source(
            self.job.recipe, self.trainer.config, True, self.trainer.weights
        )
        loss = self.trainer.evaluate(held_out, self.job.recipe.train.eval_steps, self)  # type: ignore[arg-type]  # a Watch
        if loss is not None:
            self.evaluated[step] = loss

    def _save(self, step: int, wait: bool = False, read_back: bool = True) -> None:
        if self.checkpoints is None or self.checkpoints.saver.last == step:
            return
        self.dog.phase(step, "save")
        self.checkpoints.skipped_in_a_row = self.guard.skipped_in_a_row
        self.checkpoints.save(step, wait, read_back)

    def _stop(self, step: int) -> None:
        """Saves and leaves, because the run was asked to end; there may be no time to read back what was written."""
        assert self.checkpoints is not None
        saver = self.checkpoints.saver
        saver.settle()
        self._save(step, wait=True, read_back=False)
        self.reporter.close()
        name = self.told.name if self.told is not None else ""
        raise StoppedError(f"the run was asked to end{f' ({name})' if name else ''} and has saved step {step}")

    def memory(self) -> dict[str, float]:
        """GiB of this rank by part, and their peak."""
        trainer = self.trainer
        parameters = [p for stage in trainer.stages for p in stage.parameters()]
        parts = metrics.memory_parts(
            parameters,
            [p.grad for p in parameters],
            metrics.optimizer_tensors(trainer.optimizer.state),
            trainer.device,
        )
        return {**parts.parts, "peak": parts.peak, "reserved": parts.reserved}

    def finish(self) -> RunMetrics:
        """Saves the last step; how the run went. Closes what reports."""
        if self.checkpoints is not None:
            self.checkpoints.saver.settle()
            self._save(self.job.recipe.train.steps, wait=True)
        model = self._export()
        memory = self.memory()
        self.reporter.close()
        last, steady = self.reporter.last, self.meter.steady  # none where a finished run is started once more
        saved = self.checkpoints.path(self.checkpoints.saver.last) if self.checkpoints is not None else None
        return RunMetrics(
            losses=[result.loss for result in self.results],
            grad_norms=[result.grad_norm for result in self.results],
            eval_losses=self.evaluated,
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
        )

    def _export(self) -> str | None:
        """Writes the trained model as a Hugging Face folder with its card, where the run's folder is kept."""
        from meshwright.engine.model_families import kind_of
        from meshwright.engine.post_training.model_card import write_card

        recipe = self.job.recipe
        if self.checkpoints is None or recipe.checkpoint.export == "none":
            return None
        self.dog.phase(recipe.train.steps, "export")
        folder = Path(self.job.folder) / "model"
        self.trainer.optimizer.eval_mode()
        kind_of(recipe).export(self.trainer, folder, recipe.checkpoint.export == "consolidated")
        self.trainer.optimizer.train_mode()
        if self.process.rank == 0:
            write_card(folder, recipe, self.job.weights or "", Path(self.job.folder))
        return str(folder)


def _device_name(device: torch.device) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
