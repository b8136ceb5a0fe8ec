"""What the checkpoints of a training take on disk, and how long one takes to write."""

from __future__ import annotations

import msgspec
from msgspec import structs

from meshwright.costs.parameters import adapter_params
from meshwright.costs.state import master_bytes, moment_bytes
from meshwright.costs.vectorize import BYTES, GIB
from meshwright.planner.goodput import SAVE_GB_S, SAVE_TOTAL_GB_S
from meshwright.recipes.case import Case

KEEPS_BEST = ("meshwright", "automodel")
"""Engines that keep the checkpoint with the lowest validation loss besides the latest ones."""
SAVES_BOTH = ("megatron", "deepspeed")
"""Engines whose checkpoints have the weights in the compute dtype besides the optimizer's master weights."""


class Storage(msgspec.Struct, frozen=True):
    """The files of one run: checkpoints with the optimizer's state, and the exported model."""

    checkpoint_gib: float  # one checkpoint: trained weights and the optimizer's state
    kept: int  # checkpoints that are on disk at the end
    checkpoints_gib: float  # all of them, and the one that is being written
    model_gib: float  # the exported model, or the adapters
    total_gib: float
    save_gb_s_per_gpu: float = SAVE_GB_S  # assumed; goodput.save_s of a size is the time that a checkpoint takes
    save_gb_s_total: float = SAVE_TOTAL_GB_S  # of the storage: of the cluster file, else assumed
    save_gb_s_assumed: bool = True  # whether the cluster file does not say how fast the storage is


def storage_of(case: Case, steps: int | None = None) -> Storage:
    """Return the storage of a case, which does not depend on its layout or its number of GPUs.

    `steps` are those of a token budget, if they are not the recipe's.
    """
    recipe, checkpoint = case.recipe, case.recipe.checkpoint
    trained = _trained_params(case)
    low = BYTES[case.compute] if case.engine in SAVES_BOTH and master_bytes(case) > BYTES[case.compute] else 0
    one = trained * (low + master_bytes(case) + moment_bytes(case)) / GIB
    steps = steps or recipe.train.steps
    milestones = steps // checkpoint.milestone_every if checkpoint.milestone_every else 0
    best = int(checkpoint.keep_best and recipe.train.eval_every > 0 and case.engine in KEEPS_BEST)
    saves = steps // checkpoint.save_every + 1 if checkpoint.save_every else 1
    kept = min(checkpoint.keep + best + milestones, saves + best)
    bytes_each = master_bytes(case) if case.goal == "peft" else BYTES[case.compute]  # adapters as they are trained
    model = 0.0 if checkpoint.export == "none" else trained * bytes_each / GIB
    all_kept = (kept + 1) * one
    storage = case.cluster.storage_gb_s
    found = Storage(one, kept, all_kept, model, all_kept + model)
    return found if storage is None else structs.replace(found, save_gb_s_total=storage, save_gb_s_assumed=False)


def _trained_params(case: Case) -> float:
    """Return the parameters that are trained and saved: all, or those of the adapters."""
    if case.goal != "peft":
        return float(case.params_total)
    each = [(adapter_params(case, one.layer), one.count) for one in case.model.groups]
    return float(sum(count * (one.replicated + one.routed) for one, count in each))
