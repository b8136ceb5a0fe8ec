"""Data parallelism with FSDP2: weights, gradients and optimizer state are sharded over the data-parallel ranks.

fsdp2 shards over the dp_shard × cp ranks and replicates dp_replicate times (HSDP). ddp is FSDP2 with shard groups of
one rank: every rank has a full copy. Gradients are summed, never averaged: the loss is already normalized.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext

from meshwright.engine.experts.expert_params import expert_blocks
from meshwright.engine.mesh import Mesh
from meshwright.engine.model.stage import Stage
from meshwright.engine.patching import symbol
from meshwright.recipes.types import Precision, Recipe

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def storage_dtype(precision: Precision) -> torch.dtype:
    """Return the dtype in which weights are stored and updated."""
    return DTYPES[precision.master]


def base_dtype(recipe: Recipe) -> torch.dtype:
    """Return the dtype of the model's own weights: frozen ones are stored in the compute dtype."""
    return DTYPES[recipe.precision.compute] if recipe.goal == "peft" else storage_dtype(recipe.precision)


def needs_fsdp(mesh: Mesh, recipe: Recipe) -> bool:
    """Return whether FSDP is needed: not on one rank that computes in its storage dtype; adapters cast themselves."""
    casts = storage_dtype(recipe.precision) != DTYPES[recipe.precision.compute]
    adapters_cast = recipe.goal == "peft" and recipe.layout.offload not in ("params", "optimizer")
    return mesh.stage.size > 1 or (casts and not adapters_cast)


def apply_fsdp(stage: Stage, mesh: Mesh, recipe: Recipe) -> None:
    """Shard every layer of a stage as one FSDP unit, its experts as another, and the embedding and head."""
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
        # The backward pass starts with the head: freed after the forward pass, it would be gathered again at once.
        shard_module([stage.norm, stage.lm_head], dense, {**settings, "reshard_after_forward": False})
    shard_module(stage, dense, settings)
    if mesh.stage.size == 1:
        use_one_stream(stage)
        reduce_in_place(stage, storage_dtype(recipe.precision))


class OneStream(FSDPCommContext):
    """FSDP without streams of its own: everything is queued on the stream that computes."""

    def lazy_init(self, device: torch.device) -> None:
        """Replace the streams that FSDP has just made."""
        super().lazy_init(device)
        here = self.device_handle.current_stream()
        self.all_gather_copy_in_stream = self.all_gather_stream = here
        self.reduce_scatter_stream = self.all_reduce_stream = here


def use_one_stream(stage: Stage) -> None:
    """Let FSDP on one rank, which only casts, compute on the current stream.

    The allocator keeps memory per stream: gradients, which FSDP allocates on its reduce-scatter stream, would leave a
    hole in every forward pass. On an H200 that was 15 of 76 reserved GiB (benchmarks/results/gpu_fragmentation.json).
    """
    stage._get_fsdp_state()._comm_ctx = OneStream()  # type: ignore[operator]


class NoReduceScatter(DefaultReduceScatter):
    """The reduce-scatter of one rank: the buffer of the gradients to reduce is also that of the reduced ones."""

    def __init__(self, stored: torch.dtype) -> None:
        self._stored = stored
        self._input: torch.Tensor | None = None

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a new buffer for the input, then the same one for the output; bf16 is widened on the way in."""
        kept, self._input = self._input, None
        if dtype == torch.bfloat16:  # it would be cast to the stored dtype in yet another buffer
            dtype = self._stored
        if kept is not None and kept.shape == torch.Size(size) and kept.dtype == dtype:
            return kept
        self._input = torch.empty(*size, dtype=dtype, device=device)
        return self._input


def reduce_in_place(stage: Stage, stored: torch.dtype) -> None:
    """Let FSDP on one rank, which reduces nothing, keep gradients in one buffer; only safe on one stream.

    It would copy them from an input to an output, and divide them in a third buffer, even by 1. In a dry run of four
    layers of Llama 3 8B these buffers and their holes were 2.9 of 36.6 reserved GiB (simulated, not measured).
    """
    setattr(_fsdp_collectives, COPY_IN, copy_gradients_in)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(NoReduceScatter(stored))
            module.set_gradient_divide_factor(None)  # type: ignore[arg-type]  # torch's default, untyped


COPY_IN = "foreach_reduce_scatter_copy_in"
_copy_in_chunks = symbol(_fsdp_collectives.__name__, COPY_IN)


def copy_gradients_in(gradients: list[torch.Tensor], buffer: torch.Tensor, world_size: int) -> None:
    """Copy gradients one after the other into the buffer that is reduced; several ranks have interleaved chunks.

    torch's kernel that interleaves waits for the GPU: on one rank it took 76 of the 160 ms in which the host
    prepared a step of eight layers of DeepSeek-V2 Lite on an H200.
    """
    if world_size > 1:
        _copy_in_chunks(gradients, buffer, world_size)
        return
    parts = torch.split(buffer, [one.numel() for one in gradients])
    torch._foreach_copy_([part.view_as(one) for part, one in zip(parts, gradients, strict=True)], gradients)


def reduce_dtype(precision: Precision) -> torch.dtype:
    """Return the dtype in which FSDP2 sums gradients, over micro batches and over ranks."""
    return DTYPES[precision.reduce] if precision.compute != "fp32" else torch.float32


def fsdp_settings(recipe: Recipe, mesh: Mesh) -> dict[str, Any]:
    """Return the arguments of `fully_shard`: dtypes, when gathered weights are freed, and offload."""
    layout, precision = recipe.layout, recipe.precision
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[precision.compute],
        reduce_dtype=reduce_dtype(precision),
        cast_forward_inputs=False,  # positions and loss weights keep their dtypes
    )
    # A pipeline would gather again for every micro batch. Frozen weights of ddp are only copied, never changed, so that
    # a second copy of all layers would take their memory for nothing.
    copies = layout.strategy == "ddp" and recipe.goal != "peft"
    reshard = layout.reshard_after_forward and layout.pp == 1 and not copies
    settings: dict[str, Any] = {"mp_policy": policy, "reshard_after_forward": reshard}
    if layout.offload in ("params", "optimizer"):
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    return settings


def shard_module(module: Any, mesh: DeviceMesh, settings: dict[str, Any]) -> None:
    """Shard a module (or several as one unit) over a mesh and sum its gradients instead of averaging them."""
    fully_shard(module, mesh=mesh, **settings)
    for one in module if isinstance(module, list) else [module]:
        if isinstance(one, FSDPModule):
            one.set_gradient_divide_factor(1.0)
            one.set_force_sum_reduction_for_comms(True)


def _tied(stage: Stage) -> bool:
    return stage.first and stage.last and stage.lm_head.weight is stage.embedding.weight
