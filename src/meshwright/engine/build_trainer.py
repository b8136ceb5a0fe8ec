"""Builds the trainer of one rank from its spec, and reports what was loaded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.engine.data.finite import known_size
from meshwright.engine.epochs import MOST_SAMPLES, EndedSource, repeat_warning
from meshwright.engine.faults import newest_checkpoint
from meshwright.engine.metrics.jsonl import log, warn
from meshwright.errors import InputError, some
from meshwright.recipes.run_folder import recipe_of_run

if TYPE_CHECKING:
    import torch

    from meshwright.engine.data.sample_types import Source
    from meshwright.engine.run_spec import RankSpec
    from meshwright.engine.trainer import Trainer

SHOWN = 5  # names in a message


def build_trainer(
    spec: RankSpec, device: torch.device, on_phase: Callable[[str], None] = lambda text: None, held_out: bool = False
) -> Trainer:
    """Build this rank's trainer: mesh, data, model and optimizer; `on_phase` is called with what it does next.

    With `held_out`, for an evaluation, the data is the held-out data.
    """
    from meshwright.engine.mesh import build_mesh
    from meshwright.engine.model_families import family_of

    family = family_of(spec.recipe)
    config = family.read_config(spec.config)
    mesh = build_mesh(spec.recipe.layout, device.type)
    weights = Path(spec.weights) if spec.weights is not None else None
    if weights is not None and spec.write_random_weights:
        on_phase("writing random initial weights")
        _on_rank_0(lambda: family.write_random(config, weights, spec.recipe.train.seed))
    on_phase(f"preparing the data: {' + '.join(spec.recipe.data.blend) or spec.recipe.data.dataset}")
    source = family.open_source(spec.recipe, config, held_out, weights)
    size = _samples_per_epoch(spec, source) if not held_out else None
    if spec.total_samples is not None and not held_out:
        source = EndedSource(source, spec.total_samples, spec.recipe.train.per_token_loss)
    on_phase(f"loading the weights: {weights}" if weights is not None else f"building the model: {spec.recipe.model}")
    trainer = family.trainer()(spec.recipe, config, mesh, device, source, weights, spec.run.hooks)
    trainer.samples_per_epoch = size
    if trainer.mesh.stage.rank == 0:  # each pipeline stage reports its own parameters
        _report_loaded(trainer)
        _report_precision(trainer)
    return trainer


def _samples_per_epoch(spec: RankSpec, source: Source) -> int | None:
    """Return the different samples of the data, with a warning if the run repeats them often; None if it has no end."""
    from meshwright.engine.object_collectives import rank

    if spec.recipe.data.streaming:  # counting them would read the data
        return None
    size = known_size(source, MOST_SAMPLES)
    if rank() == 0 and spec.total_samples is None and not _resumes_unchanged(spec):
        text = repeat_warning(spec.recipe, size, int(spec.case.dp))
        if text:
            warn(text)
    return size


def _resumes_unchanged(spec: RankSpec) -> bool:
    """Return whether a run resumes with the steps that it had: they may be those of the user's epochs."""
    folder = Path(spec.folder)
    if not spec.run.checkpoints or newest_checkpoint(folder) is None:
        return False
    with suppress(InputError):
        return recipe_of_run(folder).train.steps == spec.recipe.train.steps
    return False


def _report_loaded(trainer: Trainer) -> None:
    """Warn about weights in the initial folder that do not match the model."""
    loaded = getattr(trainer.stages[0], "loaded", None)
    if loaded is None:
        return
    mismatches = {
        "are missing there and keep their random initialization": [n for n in loaded.kept_initial if "lora_" not in n],
        "are present there but not used": loaded.ignored,
        "differ between its config.json and the recipe's model": loaded.config_differs,
    }
    for what, names in mismatches.items():
        if names:
            warn(f"{loaded.folder}: {some(names, SHOWN)} {what}")


def _report_precision(trainer: Trainer) -> None:
    """Log which linear layers compute in 8 bits; nothing for recipes without fp8."""
    from meshwright.engine.parallelize.quantize import describe

    for line in describe(trainer.stages):
        log(line)


def _on_rank_0(write: Callable[[], object]) -> None:
    """Run `write` on rank 0 while the other ranks wait."""
    import torch.distributed as dist

    from meshwright.engine.object_collectives import rank, world

    if rank() == 0:
        write()
    if world() > 1:
        dist.barrier()
