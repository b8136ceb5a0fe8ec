"""How a training run is started, and what each of its ranks receives. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    from meshwright.recipes.case import Case
    from meshwright.recipes.types import Recipe

NanPolicy = Literal["stop", "skip"]


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How a run is started and what it writes; the options of `train` and `bench` are these fields."""

    nproc: int | None = None  # ranks to start on this machine; None: those of torchrun or SLURM, else one
    tiny: bool = False  # a laptop-size model of the same structure, on CPU
    out: str | None = None  # run folder: metrics, checkpoints, exported model; None: runs/RECIPE-DATE
    tensorboard: bool = False
    json: bool = False
    quiet: bool = False
    on_nan: NanPolicy = "stop"
    timeout_s: float = 600.0  # a rank that makes no progress for this long is ended
    accept_changes: bool = False  # resume even though contract fields differ from the checkpoint
    checkpoints: bool = True  # save to the run folder, and resume from what it contains
    random_weights: bool = False  # ignore pretrained weights: for throughput runs
    find_micro_batch: bool = False  # use the largest micro batch that fits instead of the recipe's


class RankSpec(msgspec.Struct, frozen=True):
    """What each rank of a run receives: the run spec with recipe, model config, folder and weights resolved."""

    recipe: Recipe
    config: dict[str, Any]  # the model's config.json
    case: Case  # the recipe on this run's ranks, which the estimate describes
    folder: str  # the run folder, or a temporary one
    run: RunSpec = RunSpec(checkpoints=False)
    weights: str | None = None  # Hugging Face folder with the initial weights
    write_random_weights: bool = False  # --tiny: first fill that folder with random weights
