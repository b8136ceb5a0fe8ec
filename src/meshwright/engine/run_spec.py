"""How a training run is started, and what each of its ranks receives. Imports no torch.

The requests of `train` and `bench` derive from the options here: descriptions and limits are those of the command line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from meshwright.choices import Backend
from meshwright.engine.hooks import NO_HOOKS, Hooks

if TYPE_CHECKING:
    from meshwright.recipes.case import Case
    from meshwright.recipes.types import Recipe

NanPolicy = Literal["stop", "skip"]
Nproc = Annotated[int, Meta(description="Number of ranks to start on this machine.", ge=1, extra={"metavar": "N"})]


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options that `train` and `bench` share."""

    nproc: Nproc | None = None  # None: the ranks of torchrun or SLURM, else one
    backend: Annotated[
        Backend,
        Meta(
            description="Backend of collectives. auto: nccl on GPUs, gloo on CPUs and where ranks outnumber the GPUs.",
            extra={"metavar": "NAME"},
        ),
    ] = "auto"
    tiny: Annotated[
        bool, Meta(description="Train a laptop-size model of the same structure on CPU, with the layout scaled to N.")
    ] = False
    out: Annotated[
        str | None,
        Meta(
            description="Run folder for metrics and checkpoints. Default: runs/RECIPE-DATE; none with --tiny.",
            extra={"metavar": "DIR"},
        ),
    ] = None
    tensorboard: Annotated[bool, Meta(description="Also write metrics for TensorBoard.")] = False
    wandb: Annotated[bool, Meta(description="Also send metrics to Weights & Biases (WANDB_PROJECT, …).")] = False
    mlflow: Annotated[bool, Meta(description="Also send metrics to MLflow (MLFLOW_TRACKING_URI, …).")] = False
    timeout_s: Annotated[
        float,
        Meta(
            description="End a rank that makes no progress for this many seconds.",
            ge=0,
            extra={"flag": "--timeout", "metavar": "SECONDS"},
        ),
    ] = 600.0
    json: bool = False
    quiet: bool = False
    command: tuple[str, ...] = ()  # the command line that started the run, for messages

    @property
    def trackers(self) -> tuple[str, ...]:
        """The experiment trackers to send metrics to."""
        return tuple(name for name in ("wandb", "mlflow") if getattr(self, name))


class TrainOptions(RunOptions, frozen=True, kw_only=True):
    """Options of `train`."""

    on_nan: Annotated[
        NanPolicy,
        Meta(
            description="On a step whose loss is NaN or infinite: stop or skip. Its samples are recorded either way.",
            extra={"metavar": "ACTION"},
        ),
    ] = "stop"
    accept_changes: Annotated[
        bool, Meta(description="Resume even though contract fields differ from the checkpoint.")
    ] = False


class RunSpec(TrainOptions, frozen=True, kw_only=True):
    """A run as the engine starts it: the user's options, and what the verb decides."""

    checkpoints: bool = True  # save to the run folder, and resume from what it contains
    random_weights: bool = False  # ignore pretrained weights: for throughput runs
    ignore_nan: bool = False  # the user set train.check_nan=false; a recipe that does only checks later
    find_micro_batch: bool = False  # use the largest micro batch that fits instead of the recipe's
    epoch_intervals: tuple[str, ...] = ()  # fields in steps that are those of an epoch, which are counted first
    default_warmup: bool = False  # the user did not set the warmup: epochs of few steps shorten it
    default_validations: bool = False  # the user named validation data, but not how often it is used
    hooks: Hooks = NO_HOOKS  # what a Python program brings


class RankSpec(msgspec.Struct, frozen=True):
    """What each rank of a run receives: the run spec with recipe, model config, folder and weights resolved."""

    recipe: Recipe
    config: dict[str, Any]  # the model's config.json
    case: Case  # the recipe on this run's ranks, which the estimate describes
    folder: str  # the run folder, or a temporary one
    run: RunSpec = RunSpec(checkpoints=False)
    weights: str | None = None  # Hugging Face folder with the initial weights
    total_samples: int | None = None  # of a run by epochs; later ones only fill up the last step
    write_random_weights: bool = False  # --tiny: first fill that folder with random weights
