"""Environment variables that engines require, each with its reason, in one table."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from meshwright.clusters import AMD_ARCHS, Cluster
from meshwright.engine.allocator_settings import EXPANDABLE
from meshwright.launch.job import Variable
from meshwright.recipes.types import Recipe

UP_TO_HOPPER = ("volta", "turing", "ampere", "ada", "hopper")
FSDP = ("fsdp2", "megatron_fsdp")


class Requirement(NamedTuple):
    """A variable that an engine requires under a condition."""

    engine: str
    name: str
    value: str | None  # None: must not be set
    when: Callable[[Recipe, Cluster], bool]
    why: str


def _needs_single_queue(recipe: Recipe, cluster: Cluster) -> bool:
    cut = recipe.layout.tp > 1 or recipe.layout.cp > 1
    plain = recipe.layout.strategy not in FSDP and not recipe.moe.ep_overlap
    return cut and plain and cluster.gpu.arch in UP_TO_HOPPER


TABLE = (
    Requirement(
        "megatron",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "1",
        _needs_single_queue,
        "Megatron refuses tp or cp without it on Hopper and older: one queue keeps collectives ahead of matmuls",
    ),
    Requirement(
        "megatron",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        None,
        lambda recipe, cluster: recipe.layout.strategy in FSDP,
        "Megatron's FSDP refuses to start if it is set to 1",
    ),
    Requirement(
        "megatron",
        "PYTORCH_CUDA_ALLOC_CONF",
        EXPANDABLE,
        lambda recipe, cluster: cluster.gpu.arch not in AMD_ARCHS,
        "less memory lost to fragmentation, at no cost in speed",
    ),
    Requirement(
        "megatron",
        "NCCL_GRAPH_REGISTER",
        "0",
        lambda recipe, cluster: recipe.kernels.cuda_graphs == "transformer_engine",
        "Transformer Engine's CUDA graphs need it with expandable segments",
    ),
    Requirement(
        "megatron",
        "NCCL_ALGO",
        "Ring",
        lambda recipe, cluster: recipe.kernels.deterministic,
        "deterministic training in Megatron needs a fixed algorithm",
    ),
)


def advised(recipe: Recipe, cluster: Cluster, engine: str) -> tuple[Variable, ...]:
    """Return the variables that an engine requires for this recipe on this cluster."""
    return tuple(
        Variable(requirement.name, requirement.value, requirement.why)
        for requirement in TABLE
        if requirement.engine == engine and requirement.when(recipe, cluster)
    )


def threads(cpus_per_rank: int) -> Variable:
    """Return the OpenMP thread count of a rank: its own cores, so that ranks of a node do not compete."""
    return Variable("OMP_NUM_THREADS", str(cpus_per_rank), "one thread per core of the rank")
