"""How much memory of this machine a dry run takes, checked before it starts; does not import torch."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from meshwright.clusters import Cluster
from meshwright.dryrun.types import GIB
from meshwright.errors import InputError
from meshwright.recipes.case import model_of
from meshwright.recipes.types import Recipe

MEMINFO = Path("/proc/meminfo")
CGROUPS = (  # folder, file of the limit, file of the usage, name of the reclaimable page cache
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
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


def free_gib() -> float | None:
    """Return the memory that processes can still take, within the machine and its container; None if unknown."""
    known = [one for one in (_machine_bytes(), *(_container_bytes(*group) for group in CGROUPS)) if one is not None]
    return min(known) / GIB if known else None


def _machine_bytes() -> int | None:
    with suppress(OSError, ValueError, IndexError):
        lines = MEMINFO.read_text().splitlines()
        return int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024
    with suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _container_bytes(folder: Path, limit: str, used: str, cached: str) -> int | None:
    with suppress(OSError, ValueError):  # there is no such limit, or it is 'max'
        in_use = int((folder / used).read_text())
        figures = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, int((folder / limit).read_text()) - in_use + int(figures.get(cached, 0)))
    return None


def cores() -> int:
    """Return the number of cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
