"""Checks a recipe against the ranks it will run on, before any process group exists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from meshwright import costs, rules
from meshwright.clusters import DEFAULT_GPU, Cluster, cluster, is_missing_file
from meshwright.engine.metrics.jsonl import log
from meshwright.engine.model_families import family_of
from meshwright.engine.rank_env import Process
from meshwright.engine.shared_gpu import CONTEXT_GIB, choose_backend, ranks_per_gpu
from meshwright.errors import InputError
from meshwright.host_memory import free_gib
from meshwright.models import is_path
from meshwright.recipes.case import Case
from meshwright.recipes.types import RANDOM_WEIGHTS, Layout, Recipe
from meshwright.rules import Finding, RefusedError
from meshwright.rules.data import MOCK

# warnings of a plan that a training run cannot start with
ESTIMATED_ONLY = ("precision.format-published", "engine.model-not-trained")


def validate(recipe: Recipe, config: Any, process: Process | None, world: int) -> Case:
    """Return the recipe as a case on the ranks it will have; raise RefusedError for blocking findings."""
    ranks = run_cluster(recipe, process, world)
    case = Case(recipe, family_of(recipe).spec_of(recipe, config), ranks, memory_of=costs.memory)
    if blocking := blocking_findings(case):
        raise RefusedError(blocking)
    refuse_compiled_scans(case, process, world)
    return case


def refuse_compiled_scans(case: Case, process: Process | None, world: int) -> None:
    """Refuse compiled scans over context-parallel ranks that share a GPU.

    On an H200 the ranks crashed in native code (benchmarks/results/gpu_ranks.json); eager ones are right.
    """
    if case.compile and case.cp > 1 and case.is_hybrid and shares_gpus(process, world):
        raise InputError(
            "compiled state-space and gated-delta layers with context parallelism crash where ranks share a GPU (gloo)",
            field="kernels.compile",
            value=True,
            fix=("kernels.compile=false",),
        )


def require_host_memory(case: Case, ranks: int) -> None:
    """Raise InputError if this machine has no GPU and less memory than the weights, gradients and optimizer take."""
    with suppress(InputError):
        cluster("auto")
        return
    needed, free = ranks * costs.memory(case).least_state, free_gib()
    if free is None or needed <= free:
        return
    raise InputError(
        f"this machine has no GPU, and {free:.0f} GiB of its memory are free: the weights, gradients and optimizer "
        f"state of {case.model.name} take {needed:.0f} GiB",
        field="host memory",
        fix=("--tiny", f"meshwright recommend {case.recipe.model} --goal {case.goal} --gpus 8xH100 plans it for GPUs"),
    )


def shares_gpus(process: Process | None, world: int) -> bool:
    """Return whether this run's collectives use gloo on GPUs."""
    on_cpu = process is not None and process.device.type == "cpu"
    with suppress(InputError):
        gpus = cluster("auto").gpus_per_node
        return not on_cpu and choose_backend(process or Process(local_world=world), "cuda", gpus) == "gloo"
    return False


def blocking_findings(case: Case) -> list[Finding]:
    """Return the findings that keep this engine from running the case."""
    return [one for one in rules.check(case) if one.severity == "error" or one.rule in ESTIMATED_ONLY]


def run_findings(case: Case, pinned: Mapping[str, Any], tiny: bool) -> tuple[Finding, ...]:
    """Return the warnings and advice for a run, from the same rules as `check` and `recommend`.

    On CPUs, only those that do not depend on hardware; with --tiny, only those about values that the user set.
    """
    found = rules.check(_with_random_weights(case))
    with suppress(InputError):
        cluster("auto")
        return tuple(found) if not tiny else _about(found, pinned)
    found = [one for one in found if rules.RULES[one.rule].subject in rules.HARDWARE_FREE]
    return tuple(found) if not tiny else _about(found, pinned)


def _with_random_weights(case: Case) -> Case:
    """Return the case of a user's config.json without weights as one that starts from random weights."""
    from meshwright.engine.hf_io.find import has_weights
    from meshwright.engine.initial_weights import model_folder

    recipe = case.recipe
    if recipe.checkpoint.pretrained or not is_path(recipe.model) or has_weights(model_folder(recipe)):
        return case
    return case.replace(pretrained=RANDOM_WEIGHTS)


def unnamed_data(recipe: Recipe, pinned: Mapping[str, Any]) -> tuple[Finding, ...]:
    """Return the warning for pretraining on mock data that the user did not name; fine-tuning has a rule of its own."""
    data = recipe.data
    named = {"data.dataset", "data.blend"} & set(pinned)
    if named or recipe.goal != "pretrain" or recipe.benchmark or data.dataset != MOCK or data.blend:
        return ()
    start = recipe.checkpoint.pretrained
    harm = f"the weights of {start} get worse" if start not in ("", RANDOM_WEIGHTS) else "the model learns nothing"
    message = f"no dataset is named: this run trains on mock data (random tokens), from which {harm}"
    return (Finding("data.mock-pretraining", "warning", "data.dataset", message, ("--dataset FILE_OR_FOLDER",)),)


def _about(findings: Sequence[Finding], pinned: Mapping[str, Any]) -> tuple[Finding, ...]:
    return tuple(one for one in findings if one.field in pinned)


def show_findings(findings: Sequence[Finding], process: Process | None) -> None:
    """Print the findings of a run before it starts, on rank 0."""
    if process is not None and process.rank != 0:
        return
    for one in findings:
        fix = f"  fix: {' '.join(one.fix)}" if one.fix else ""
        log(f"{one.severity}: {one.message} ({one.rule}){fix}")


def run_cluster(recipe: Recipe, process: Process | None, world: int) -> Cluster:
    """Return this run's ranks as a cluster of this machine's GPUs, or of the recipe's GPU type on a CPU machine.

    Ranks that share a GPU have their part of its memory, and those on CPUs their part of the machine's if it is more.
    """
    gpu, sharing, host_gib = DEFAULT_GPU, 1, free_gib() or 0.0
    if not is_missing_file(recipe.cluster):  # a plan that was moved names a file of another machine
        gpu = cluster(recipe.cluster).gpu.name
    local = process.local_world if process and process.world > 1 else world
    with suppress(InputError):
        here = cluster("auto")
        host_gib, gpu = 0.0, here.gpu.name
        sharing = ranks_per_gpu(process or Process(local_world=local), here.gpus_per_node)
    made = cluster(f"{world // local}x{local}x{gpu}")
    if sharing == 1 and host_gib / local <= made.gpu.memory_gib:
        return made
    memory_gib = made.gpu.memory_gib / sharing - CONTEXT_GIB if sharing > 1 else host_gib / local
    part = msgspec.structs.replace(made.gpu, memory_gib=memory_gib)
    return msgspec.structs.replace(made, gpu=part)


def data_ranks(layout: Layout, world: int) -> int:
    """Return the number of data-parallel ranks of a layout on `world` ranks."""
    return max(1, world // (layout.tp * layout.pp * layout.cp))
