"""The order of techniques for diffusion models: the engine's, less pipelines and experts."""

from __future__ import annotations

from pathlib import Path

import torch

from meshwright.engine import attention
from meshwright.engine.diffusion.attention import patch_attention
from meshwright.engine.diffusion.build import build_denoiser, record_initial
from meshwright.engine.diffusion.config import DenoiserConfig
from meshwright.engine.diffusion.denoiser import Denoiser
from meshwright.engine.diffusion.hf_io import load_weights
from meshwright.engine.diffusion.tensor import Spread, cut_block, partial_names, prepare_block
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
    """The model of this rank: cut, wrapped and filled as the recipe's layout says, from a folder where it is given."""
    layout, precision = recipe.layout, recipe.precision
    model = build_denoiser(config, storage_dtype(precision), DTYPES[precision.compute])
    initial = record_initial(model)
    model.spread = Spread(mesh.tp, layout.sp)
    context = None
    if layout.cp > 1:
        context = attention.context_axis(mesh.cp_groups, layout.cp_comm, layout.cp_inner, mesh.cp.group)
    patch_attention(model, model.spread, context, recipe.kernels.attention)
    for block in model.layers.values():
        prepare_block(block)
        cut_block(block, model.spread, mesh.state)
    model.partial_grads = partial_names(model, model.spread)
    apply_recompute(model.layers, layout, recipe.kernels.compile)
    offload_activations(model.layers, layout)
    if recipe.kernels.compile:
        for block in model.layers.values():
            block.compile(fullgraph=layout.cp == 1)
    _share(model, mesh, recipe)
    _fill(model, initial, recipe, device)
    if weights is not None:
        load_weights(model, weights)
    return model


def _share(model: Denoiser, mesh: Mesh, recipe: Recipe) -> None:
    """Shards every block by itself, and what is around the blocks together."""
    if not needs_fsdp(mesh, recipe):
        return
    settings = fsdp_settings(recipe, mesh)
    for block in model.layers.values():
        shard_module(block, mesh.fsdp, settings)
    shard_module(model, mesh.fsdp, {**settings, "reshard_after_forward": False})


def _fill(model: Denoiser, initial: dict[str, InitSpec], recipe: Recipe, device: torch.device) -> None:
    """Weights come into being, on each rank its own part."""
    offloaded = recipe.layout.offload in ("params", "optimizer")
    model.to_empty(device="cpu" if offloaded else device)
    for name, parameter in model.named_parameters():
        fill_initial(parameter, name, initial[recorded_name(name, initial)], recipe.train.seed)
    fill_buffers(model, initial, recipe.train.seed, device)
