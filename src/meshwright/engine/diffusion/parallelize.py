"""Applies parallelism to diffusion models: the engine's order without pipelines and experts."""

from __future__ import annotations

from pathlib import Path

import torch

from meshwright.engine import attention
from meshwright.engine.diffusion.attention import patch_attention
from meshwright.engine.diffusion.build import build_denoiser, record_initial
from meshwright.engine.diffusion.config import DenoiserConfig
from meshwright.engine.diffusion.denoiser import Denoiser
from meshwright.engine.diffusion.hf_io import load_weights
from meshwright.engine.diffusion.tensor import (
    ActivationSharding,
    partial_grad_names,
    shard_block,
    split_output_projection,
)
from meshwright.engine.kernels.compiler_fixes import correct_compiler
from meshwright.engine.mesh import Mesh
from meshwright.engine.model.init import InitSpec, fill_initial
from meshwright.engine.parallelize.fsdp import DTYPES, fsdp_settings, needs_fsdp, shard_module, storage_dtype
from meshwright.engine.parallelize.init_weights import fill_buffers, recorded_name
from meshwright.engine.parallelize.offload import offload_activations
from meshwright.engine.parallelize.recompute import apply_recompute
from meshwright.recipes.types import Recipe


def parallelize(
    config: DenoiserConfig, recipe: Recipe, mesh: Mesh, device: torch.device, weights: Path | None = None
) -> Denoiser:
    """Build this rank's model: TP → recompute → compile → FSDP → weights, optionally loaded from a folder."""
    layout, precision = recipe.layout, recipe.precision
    model = build_denoiser(config, storage_dtype(precision), DTYPES[precision.compute])
    initial = record_initial(model)
    model.sharding = ActivationSharding(mesh.tp, layout.sp)
    context = None
    if layout.cp > 1:
        context = attention.context_axis(mesh.cp_groups, layout.cp_comm, layout.cp_inner, mesh.cp.group)
    patch_attention(model, model.sharding, context, recipe.kernels.attention)
    for block in model.layers.values():
        split_output_projection(block)
        shard_block(block, model.sharding, mesh.state)
    model.partial_grads = partial_grad_names(model, model.sharding)
    apply_recompute(model.layers, layout, recipe.kernels.compile)
    offload_activations(model.layers, layout)
    if recipe.kernels.compile:
        correct_compiler()
        for block in model.layers.values():
            block.compile(fullgraph=layout.cp == 1)
    _apply_fsdp(model, mesh, recipe)
    _init_weights(model, initial, recipe, device)
    if weights is not None:
        load_weights(model, weights)
    return model


def _apply_fsdp(model: Denoiser, mesh: Mesh, recipe: Recipe) -> None:
    """Shard every block separately, and the rest of the model as one unit."""
    if not needs_fsdp(mesh, recipe):
        return
    settings = fsdp_settings(recipe, mesh)
    for block in model.layers.values():
        shard_module(block, mesh.fsdp, settings)
    shard_module(model, mesh.fsdp, {**settings, "reshard_after_forward": False})


def _init_weights(model: Denoiser, initial: dict[str, InitSpec], recipe: Recipe, device: torch.device) -> None:
    """Allocate and initialize this rank's part of the weights."""
    offloaded = recipe.layout.offload in ("params", "optimizer")
    model.to_empty(device="cpu" if offloaded else device)
    for name, parameter in model.named_parameters():
        fill_initial(parameter, name, initial[recorded_name(name, initial)], recipe.train.seed)
    fill_buffers(model, initial, recipe.train.seed, device)
