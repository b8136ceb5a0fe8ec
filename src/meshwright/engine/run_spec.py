"""What the ranks of a run are told, and the trainer that each builds of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from meshwright.engine.metrics.jsonl import log, warn
from meshwright.errors import some
from meshwright.recipes.case import Case
from meshwright.recipes.types import Recipe

if TYPE_CHECKING:
    import torch

    from meshwright.engine.trainer import Trainer

SHOWN = 5  # names in a message


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
    checkpoints: bool = False  # whether the folder keeps them
    accept_changes: bool = False  # go on from a checkpoint of a training with another contract
    weights: str | None = None  # the folder that training starts from
    makes_weights: bool = False  # --tiny: that folder is written first, with random weights


def build(job: Job, device: torch.device) -> Trainer:
    """The trainer of this rank."""
    from meshwright.engine.mesh import build_mesh
    from meshwright.engine.model_families import kind_of

    kind = kind_of(job.recipe)
    config = kind.read_config(job.config)
    mesh = build_mesh(job.recipe.layout, device.type)
    weights = Path(job.weights) if job.weights is not None else None
    if weights is not None and job.makes_weights:
        _by_rank_0(lambda: kind.write_start(config, weights, job.recipe.train.seed))
    source = kind.open_source(job.recipe, config, False, weights)
    trainer = kind.trainer()(job.recipe, config, mesh, device, source, weights)
    if trainer.mesh.stage.rank == 0:  # each pipeline stage tells its own
        _say_what_was_read(trainer)
        _say_precision(trainer)
    return trainer


def _say_what_was_read(trainer: Trainer) -> None:
    """Tells what of the folder that training starts from does not fit the model."""
    loaded = getattr(trainer.stages[0], "loaded", None)
    if loaded is None:
        return
    told = {
        "have no weights there and start anew": [n for n in loaded.kept_initial if "lora_" not in n],
        "are there and not used": loaded.ignored,
        "differ in its config.json from the recipe's model": loaded.config_differs,
    }
    for what, names in told.items():
        if names:
            warn(f"{loaded.folder}: {some(names, SHOWN)} {what}")


def _say_precision(trainer: Trainer) -> None:
    """Tells what computes in 8 bits and what does not; nothing where no 8 bits are asked for."""
    from meshwright.engine.parallelize.quantize import describe

    for line in describe(trainer.stages):
        log(line)


def _by_rank_0(write: Callable[[], object]) -> None:
    """Something that one rank does while the others wait."""
    import torch.distributed as dist

    from meshwright.engine.object_collectives import rank, world

    if rank() == 0:
        write()
    if world() > 1:
        dist.barrier()
