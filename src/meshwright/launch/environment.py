"""What engines want in their environment, each with its reason. One table; nothing is set without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from meshwright.clusters import Cluster
from meshwright.launch.job import Variable
from meshwright.recipes.types import Recipe

UP_TO_HOPPER = ("ampere", "ada", "hopper")
FSDP = ("fsdp2", "megatron_fsdp")
EXPANDABLE = "expandable_segments:True"


class Wanted(NamedTuple):
    """A variable that an engine wants when a condition holds."""

    engine: str
    name: str
    value: str | None  # None: must not be set
    when: Callable[[Recipe, Cluster], bool]
    why: str


def _in_one_queue(recipe: Recipe, cluster: Cluster) -> bool:
    cut = recipe.layout.tp > 1 or recipe.layout.cp > 1
    plain = recipe.layout.strategy not in FSDP and not recipe.moe.ep_overlap
    return cut and plain and cluster.gpu.arch in UP_TO_HOPPER


TABLE = (
    Wanted(
        "megatron",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "1",
        _in_one_queue,
        "Megatron refuses tp or cp without it on Hopper and older: one queue keeps collectives ahead of matmuls",
    ),
    Wanted(
        "megatron",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        None,
        lambda recipe, cluster: recipe.layout.strategy in FSDP,
        "FSDP there refuses to start with 1",
    ),
    Wanted(
        "megatron",
        "PYTORCH_CUDA_ALLOC_CONF",
        EXPANDABLE,
        lambda recipe, cluster: cluster.gpu.arch != "cdna3",
        "less memory lost between blocks, at no cost in speed",
    ),
    Wanted(
        "megatron",
        "NCCL_GRAPH_REGISTER",
        "0",
        lambda recipe, cluster: recipe.kernels.cuda_graphs == "transformer_engine",
        "Transformer Engine's CUDA graphs need it with expandable segments",
    ),
    Wanted(
        "megatron",
        "NCCL_ALGO",
        "Ring",
        lambda recipe, cluster: recipe.kernels.deterministic,
        "deterministic training there needs one fixed algorithm",
    ),
)


def advised(recipe: Recipe, cluster: Cluster, engine: str) -> tuple[Variable, ...]:
    """The variables that an engine wants for this recipe on this cluster."""
    return tuple(
        Variable(wanted.name, wanted.value, wanted.why)
        for wanted in TABLE
        if wanted.engine == engine and wanted.when(recipe, cluster)
    )


def threads(cpus_per_rank: int) -> Variable:
    """OpenMP threads of a rank: its own cores, so that ranks of a node do not fight over all of them."""
    return Variable("OMP_NUM_THREADS", str(cpus_per_rank), "every rank computes on its own cores")
