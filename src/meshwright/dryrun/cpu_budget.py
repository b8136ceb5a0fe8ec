"""How much memory of this machine a dry run takes, checked before it starts; does not import torch."""

from __future__ import annotations

import os

from meshwright.clusters import Cluster
from meshwright.errors import InputError
from meshwright.host_memory import free_gib
from meshwright.recipes.case import model_of
from meshwright.recipes.types import Recipe

# Measured: 0.43 GiB for a rank with the 32 layers of Llama-3-8B, 0.42 for one of DeepSeek-V3 on 1,024 GPUs.
IMPORTED_GIB = 0.45  # torch, transformers and the engine
LAYER_GIB = 0.001  # modules and parameters of a layer, without data
PASSES_GIB = 0.0002  # log of a layer's passes with a micro batch: about 330 allocations and frees


def require_memory(recipe: Recipe, cluster: Cluster, processes: int | None) -> None:
    """Raise InputError if this machine has too little memory for a dry run."""
    at_once = processes or parallel_traces(recipe)
    needed, free = at_once * gib_per_process(recipe, cluster), free_gib()
    if free is None or needed <= free:
        return
    fewer = int(free / needed * at_once)
    raise InputError(
        f"the dry run needs about {needed:.1f} GiB of this machine's memory ({at_once} × {needed / at_once:.1f}) "
        f"and {free:.1f} GiB are free",
        field="host memory",
        fix=((f"--processes {fewer}",) if fewer else (f"a machine with {needed / at_once:.1f} GiB free",)),
    )


def parallel_traces(recipe: Recipe) -> int:
    """Return how many ranks are traced at the same time: at most the cores and the pipeline ranks."""
    return max(1, min(cores(), recipe.layout.pp))


def gib_per_process(recipe: Recipe, cluster: Cluster) -> float:
    """Return the memory for tracing one rank, rounded up: its modules without data, and the log of its step."""
    layers = -(-model_of(recipe).num_layers // recipe.layout.pp)
    ranks = max(1, cluster.world // (recipe.layout.tp * recipe.layout.pp * recipe.layout.cp))
    micro_batches = max(1, recipe.train.global_batch_size // (ranks * recipe.layout.micro_batch_size))
    return IMPORTED_GIB + layers * (LAYER_GIB + micro_batches * PASSES_GIB)


def cores() -> int:
    """Return the number of cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
