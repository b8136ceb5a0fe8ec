"""A run folder as the target of train or launch: the run continues, on any number of ranks."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from meshwright.models import not_a_model
from meshwright.notes import note
from meshwright.recipes import overrides as override
from meshwright.recipes.run_folder import is_run_folder
from meshwright.recipes.types import Recipe

MICRO_BATCH = "layout.micro_batch_size"


def is_run(target: str | Recipe) -> bool:
    """Return whether a target is the folder of a run."""
    return isinstance(target, str) and is_run_folder(target)


def continued(target: str) -> str:
    """Return the folder of the run that continues, and say so."""
    note(f"{target} is a run: it continues with its settings; --out FOLDER starts another run with them")
    return target


def note_new_run(target: str, scheduler: str) -> None:
    """Say that a job on machines without the run's folder starts a new run."""
    why = f"its checkpoints are on this machine, and the machines of {scheduler} do not have them"
    note(
        f"{target} is a run, but the job starts a new one with its settings: {why}; "
        "to continue it, copy the folder to storage of the job and name it there with --out"
    )


def check_job_continues(recipe: Recipe, out: str, accepts: bool = False) -> None:
    """Raise InputError if a job could not resume from the checkpoints of its run folder, before it waits in a queue."""
    from meshwright.engine.checkpoint.contract import check_before_start

    check_before_start(recipe, Path(out).expanduser(), None, accepts)


def with_fitting_micro_batch(recipe: Recipe, world: int, pinned: Collection[str]) -> Recipe:
    """Return a run's recipe with a micro batch that divides the samples of a rank, unless the user typed one.

    The micro batch was for the ranks that the run had. It does not change what is learned, so fewer samples at a time
    continue the same training.
    """
    layout, batch = recipe.layout, recipe.train.global_batch_size
    ranks = max(1, world // (layout.tp * layout.pp * layout.cp))
    old = layout.micro_batch_size
    if MICRO_BATCH in pinned or batch % ranks or batch // ranks % old == 0:
        return recipe
    samples = batch // ranks
    new = max(size for size in range(1, min(old, samples) + 1) if samples % size == 0)
    why = f"global_batch_size={batch} gives each of {ranks} data-parallel ranks {samples}"
    note(f"{MICRO_BATCH} {old} → {new}: {why}; it changes speed and memory, not what is learned")
    return override.change(recipe, {MICRO_BATCH: new})[0]


def model_of_run(folder: str | Path, goal: str) -> str:
    """Return how a command trains the model of a run further, for another goal."""
    error = not_a_model(folder, "model")
    return f"{error.fix[0]} --goal {goal}" if error is not None and error.fix else ""
