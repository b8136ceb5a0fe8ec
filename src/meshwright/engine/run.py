"""A training run on one rank: builds everything, steps, reports, and says how it went."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from meshwright import costs
from meshwright.engine import metrics
from meshwright.engine.faults import LossGuard
from meshwright.engine.launched import Process
from meshwright.engine.profiling import window
from meshwright.engine.watchdog import Watchdog
from meshwright.recipes.case import Case
from meshwright.recipes.types import Recipe

if TYPE_CHECKING:
    import torch

    from meshwright.engine.loop import StepResult, Trainer

MOST_SKIPPED = 10  # steps in a row that a loss which is not a number may cost


class Job(msgspec.Struct, frozen=True):
    """What every rank of a run is told."""

    recipe: Recipe
    config: dict[str, Any]  # the model's config.json
    case: Case  # the recipe on this run's ranks: what the estimate is of
    folder: str  # where metrics go
    tensorboard: bool = False
    json: bool = False
    quiet: bool = False
    on_nan: Literal["stop", "skip"] = "stop"
    timeout_s: float = 600.0


class Outcome(msgspec.Struct, frozen=True):
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


def work(process: Process, job: Job) -> Outcome | None:
    """Trains on this rank; the outcome on rank 0."""
    import torch

    device = process.device
    _settle(job.recipe, device)
    with Watchdog(process, job.timeout_s) as dog:
        dog.phase(0, "build")
        trainer = build(job, device)
        run = _Run(process, job, trainer, dog)
        with window(job.recipe.train.profile, Path(job.folder), process=process) as profile:
            for number in range(job.recipe.train.steps):
                run.step(number)
                profile.step()
        outcome = run.outcome()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return outcome if process.rank == 0 else None


def build(job: Job, device: torch.device) -> Trainer:
    """The trainer of this rank."""
    from meshwright.engine.data import open_source
    from meshwright.engine.loop import Trainer
    from meshwright.engine.mesh import build_mesh
    from meshwright.engine.model.build import transformers_config

    config = transformers_config(job.config)
    mesh = build_mesh(job.recipe.layout, device.type)
    return Trainer(job.recipe, config, mesh, device, open_source(job.recipe, config.vocab_size))


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

    def __init__(self, process: Process, job: Job, trainer: Trainer, dog: Watchdog) -> None:
        self.process, self.job, self.trainer, self.dog = process, job, trainer, dog
        device = trainer.device
        on_gpu = device.type == "cuda"  # the estimate is of GPUs: beside a CPU it would say nothing
        constants = metrics.constants(job.case, costs.estimate(job.case) if on_gpu else None, on_gpu)
        self.clock = metrics.Clock(device)
        self.meter = metrics.Meter(constants)
        every = job.recipe.train.log_every
        sinks = metrics.open_sinks(
            process, job.recipe.name, constants, Path(job.folder), 1, job.tensorboard, every, job.json
        )
        if job.quiet:
            sinks = sinks[:-1]
        self.reporter = metrics.Reporter(self.meter, self.clock, sinks, self.memory)
        self.guard = LossGuard(job.on_nan, MOST_SKIPPED, Path(job.folder), device)
        self.results: list[StepResult] = []
        self.evaluated: dict[int, float] = {}
        self.number = 0

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

    def step(self, number: int) -> None:
        """One step, reported; an evaluation where it is due."""
        train = self.job.recipe.train
        self.number = number
        self.clock.start()
        figures = (number + 1) % train.log_every == 0 or number == 0
        result = self.trainer.step(number, self, figures)  # type: ignore[arg-type]  # a Watch by its methods
        self.results.append(result)
        extra = {f"router_{name}": value for name, value in result.router.items()}
        if figures and train.mtp_loss > 0:
            extra["mtp_loss"] = result.mtp_loss
        self.reporter.end_step(
            number + 1,
            loss=result.losses.sum(),
            lr=result.lr,
            grad_norm=result.norm,
            tokens=result.tokens,
            skipped=result.skipped,
            extra=extra,
        )
        if train.eval_every and (number + 1) % train.eval_every == 0:
            self._evaluate(number + 1)

    def _evaluate(self, step: int) -> None:
        from meshwright.engine.data import open_source

        self.dog.phase(step, "evaluation")
        held_out = open_source(self.job.recipe, self.trainer.config.vocab_size, held_out=True)
        self.evaluated[step] = self.trainer.evaluate(held_out, self.job.recipe.train.eval_steps)

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

    def outcome(self) -> Outcome:
        """How the run went; closes what reports."""
        memory = self.memory()
        self.reporter.close()
        last, steady = self.reporter.last, self.meter.steady
        assert last is not None
        assert steady is not None
        return Outcome(
            losses=[result.loss for result in self.results],
            grad_norms=[result.grad_norm for result in self.results],
            eval_losses=self.evaluated,
            step_s=steady.step_s,
            tokens_per_s_per_gpu=steady.tokens_per_s_per_gpu,
            tflops_per_gpu=steady.tflops_per_gpu,
            mfu=steady.mfu,
            memory_gib=memory,
            parts_s=dict(last.parts_s),
            skipped=[result.step + 1 for result in self.results if result.skipped],
            device=_device_name(self.trainer.device),
        )


def _device_name(device: torch.device) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
