"""A run folder as the target of train or launch: the run continues, on any number of ranks."""

from __future__ import annotations

from collections.abc import Collection
from math import gcd
from pathlib import Path

from meshwright import clusters
from meshwright.display import plural
from meshwright.models import not_a_model
from meshwright.notes import note
from meshwright.recipes import overrides as override
from meshwright.recipes.run_folder import is_run_folder
from meshwright.recipes.types import Recipe

MICRO_BATCH, REPLICAS = "layout.micro_batch_size", "layout.dp_replicate"


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


def with_fitting_layout(recipe: Recipe, world: int, pinned: Collection[str]) -> Recipe:
    """Return a run's recipe with replicas and a micro batch that divide what its ranks have, unless typed.

    They were for the ranks that the run had. They do not change what is learned, so other ones continue the same
    training.
    """
    layout, batch = recipe.layout, recipe.train.global_batch_size
    ranks = max(1, world // (layout.tp * layout.pp * layout.cp))
    changes, effect = {}, "speed and memory, not what is learned"
    if REPLICAS not in pinned and ranks % layout.dp_replicate:
        changes[REPLICAS] = new = gcd(ranks, layout.dp_replicate)
        had = clusters.cluster(recipe.cluster).world
        again = f"; --nproc {had} trains on as many ranks as before" if had != world else ""
        why = f"for {plural(ranks, 'data-parallel rank')}"
        note(f"{REPLICAS} {layout.dp_replicate} → {new}: {why}; it changes {effect}{again}")
    old, samples = layout.micro_batch_size, batch // ranks
    if MICRO_BATCH not in pinned and batch % ranks == 0 and samples % old:
        changes[MICRO_BATCH] = new = max(size for size in range(1, min(old, samples) + 1) if samples % size == 0)
        why = f"global_batch_size={batch} gives each of {ranks} data-parallel ranks {samples}"
        note(f"{MICRO_BATCH} {old} → {new}: {why}; it changes {effect}")
    return override.change(recipe, changes)[0] if changes else recipe


def model_of_run(folder: str | Path, goal: str) -> str:
    """Return how a command trains the model of a run further, for another goal."""
    error = not_a_model(folder, "model")
    return f"{error.fix[0]} --goal {goal}" if error is not None and error.fix else ""
