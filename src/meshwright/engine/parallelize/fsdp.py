"""Data parallelism: how ranks that see different samples share the weights, gradients and optimizer state.

fsdp2 shards them over the dp_shard × cp ranks and copies that dp_replicate times (HSDP). ddp is the same machinery
with shards of one rank: every rank keeps a full copy and gradients are summed. Gradients are summed, never averaged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from meshwright.engine.experts.expert_params import expert_blocks
from meshwright.engine.mesh import Mesh
from meshwright.engine.model.stage import Stage
from meshwright.recipes.types import Precision, Recipe

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def storage_dtype(precision: Precision) -> torch.dtype:
    """The format in which weights are kept and updated."""
    return DTYPES[precision.master]


def base_dtype(recipe: Recipe) -> torch.dtype:
    """The format in which the model's own weights are kept: frozen ones in that of their computation."""
    return DTYPES[recipe.precision.compute] if recipe.goal == "peft" else storage_dtype(recipe.precision)


def needs_fsdp(mesh: Mesh, recipe: Recipe) -> bool:
    """One rank that computes in the format it stores needs no machinery at all; adapters cast themselves."""
    casts = storage_dtype(recipe.precision) != DTYPES[recipe.precision.compute]
    itself = recipe.goal == "peft" and recipe.layout.offload not in ("params", "optimizer")
    return mesh.stage.size > 1 or (casts and not itself)


def apply_fsdp(stage: Stage, mesh: Mesh, recipe: Recipe) -> None:
    """Wraps every layer of a stage, its experts apart, and the ends; does nothing where one rank needs nothing."""
    if not needs_fsdp(mesh, recipe):
        return
    settings = fsdp_settings(recipe, mesh)
    dense, expert = mesh.fsdp, mesh.expert_fsdp
    for layer in stage.layers.values():
        for block in expert_blocks(layer):
            shard_module(block.experts, expert, settings)
        shard_module(layer, dense, settings)
    if stage.mtp is not None:
        shard_module(stage.mtp, dense, settings)
    if stage.embedding is not None and not _tied(stage):
        shard_module(stage.embedding, dense, settings)
    if stage.last and not _tied(stage):
        # The last to be used forward is the first to be used backward: gathered again at once if it were freed.
        shard_module([stage.norm, stage.lm_head], dense, {**settings, "reshard_after_forward": False})
    shard_module(stage, dense, settings)


def fsdp_settings(recipe: Recipe, mesh: Mesh) -> dict[str, Any]:
    """What every wrapper of a stage is told: number formats, when gathered weights are freed, where state waits."""
    layout, precision = recipe.layout, recipe.precision
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[precision.compute],
        reduce_dtype=DTYPES[precision.reduce] if precision.compute != "fp32" else torch.float32,
        cast_forward_inputs=False,  # positions and loss weights keep their formats
    )
    # A pipeline would gather again for every micro batch.
    free = layout.reshard_after_forward and layout.pp == 1 and layout.strategy != "ddp"
    settings: dict[str, Any] = {"mp_policy": policy, "reshard_after_forward": free}
    if layout.offload in ("params", "optimizer"):
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    return settings


def shard_module(module: Any, mesh: DeviceMesh, settings: dict[str, Any]) -> None:
    """Shards a module over a mesh; its gradients are summed, never averaged."""
    fully_shard(module, mesh=mesh, **settings)
    for one in module if isinstance(module, list) else [module]:
        if isinstance(one, FSDPModule):
            one.set_gradient_divide_factor(1.0)
            one.set_force_sum_reduction_for_comms(True)


def _tied(stage: Stage) -> bool:
    return stage.first and stage.last and stage.lm_head.weight is stage.embedding.weight
