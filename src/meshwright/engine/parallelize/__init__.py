"""The order of techniques, on one page. Each works on what the one before it left; the model's own code knows none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from meshwright.engine import attention
from meshwright.engine.experts import expert_blocks
from meshwright.engine.hf_io import Weights, describe
from meshwright.engine.kernels.gated_norms import fuse_gated_norms
from meshwright.engine.kernels.gelu import fuse_gelus
from meshwright.engine.kernels.norms import fuse_norms
from meshwright.engine.kernels.scan_patch import use_chunked_scans
from meshwright.engine.mesh import Mesh
from meshwright.engine.model.adapters import add_adapters, init_magnitudes
from meshwright.engine.model.build import build_model
from meshwright.engine.model.init import record_initial
from meshwright.engine.model.module_names import is_attention
from meshwright.engine.model.stage import Stage
from meshwright.engine.parallelize import megatron
from meshwright.engine.parallelize.document_isolation import isolate_documents, isolates_documents
from meshwright.engine.parallelize.expert_parallel import balance_routers, shard_experts, split_expert_params
from meshwright.engine.parallelize.fp8_gather import gather_in_fp8
from meshwright.engine.parallelize.fsdp import apply_fsdp, base_dtype, storage_dtype
from meshwright.engine.parallelize.init_weights import init_weights
from meshwright.engine.parallelize.lm_loss import apply_lm_loss
from meshwright.engine.parallelize.offload import offload_activations
from meshwright.engine.parallelize.pipeline import split_stages, stage_numbers
from meshwright.engine.parallelize.quantize import apply_fp8, select_gemm_kernels
from meshwright.engine.parallelize.recompute import apply_recompute, recompute_compiled
from meshwright.engine.parallelize.tensor_parallel import (
    SequenceLayout,
    partial_grad_names,
    shard_embedding,
    shard_layer,
    split_fused_params,
)
from meshwright.engine.vision import freeze, is_vision_module
from meshwright.recipes.types import Layout, Recipe


def parallelize(
    config: Any, recipe: Recipe, mesh: Mesh, device: torch.device, weights: Path | None = None
) -> list[Stage]:
    """The stages of this rank: cut, wrapped and filled as the recipe's layout says, from a folder where it is given."""
    layout = recipe.layout
    if layout.strategy == "megatron_fsdp":
        megatron.require(device)
    mtp = recipe.train.mtp_loss > 0
    whole = [build_model(config, base_dtype(recipe), mtp) for _ in stage_numbers(layout, mesh.pp)]
    initial = record_initial(whole[0], recipe.train.seed)
    given = Weights(weights, describe(config, mtp)) if weights is not None else None

    # Pipeline first: nothing below is done to layers that other ranks hold.
    text = config.get_text_config()  # of a model that sees, the language model's part
    stages = split_stages(whole, layout, text.num_hidden_layers, mesh.pp)
    sequence = sequence_layout(recipe, mesh)
    for stage in stages:
        if stage.vision_modules is not None:
            freeze(stage, stage.vision_modules, recipe.train.freeze)
        # Adapters before anything is cut: they are cut with what they adapt.
        if recipe.goal == "peft":
            initial |= add_adapters(stage, recipe.peft, storage_dtype(recipe.precision))
        normalize_modules(stage, recipe)
        # Tensor parallelism before anything that looks at parameters: it decides their shapes.
        apply_tp(stage, mesh, recipe, sequence)
        # Context parallelism only tells attention with whom to share the sequence.
        configure_attention(stage, sequence, recipe)
        # Experts are cut anew, over the same ranks.
        for layer in stage.layers.values():
            shard_experts(layer, mesh, recipe)
            balance_routers(layer, mesh, recipe, text)
        # Eight bits only change how a linear layer computes.
        apply_fp8(stage, recipe.precision, text.num_hidden_layers, mesh.device_type)
        select_gemm_kernels(stage, recipe, mesh)
        # What is kept, computed again or moved away is settled before blocks are compiled.
        recompute_and_compile(stage, recipe)
        # Sharding outermost: it gathers a block's weights just before the block runs.
        if layout.strategy == "megatron_fsdp":
            megatron.shard_and_init(stage, mesh, recipe, initial, device, given)
            continue  # it made the weights too
        apply_fsdp(stage, mesh, recipe)
        # Only now do weights come into being, on each rank its own part.
        offloaded = layout.offload in ("params", "optimizer")
        init_weights(stage, initial, recipe.train.seed, device, offloaded, given)
        init_magnitudes(stage)
        gather_in_fp8(stage, mesh, recipe)
    if given is not None:
        stages[0].loaded = given.report()
        given.files.close()
    return stages


def normalize_modules(stage: Stage, recipe: Recipe) -> None:
    """What is done to a stage in every layout: storage that can be cut, documents kept apart, lean operations."""
    use_chunked_scans(stage)
    fuse_gated_norms(stage)
    for layer in stage.layers.values():
        split_fused_params(layer)
        split_expert_params(layer)
        if recipe.data.packing:
            isolate_documents(layer)
    fuse_norms(stage)
    fuse_gelus(stage)


def sequence_layout(recipe: Recipe, mesh: Mesh) -> tuple[SequenceLayout, attention.ContextAxis | None]:
    """How the sequence lies over the tp and cp ranks, and with whom attention exchanges keys and values."""
    layout = recipe.layout
    if layout.cp == 1:
        return SequenceLayout(mesh.tp, layout.sp), None
    context = attention.context_axis(mesh.cp_groups, layout.cp_comm, layout.cp_inner, mesh.cp.group)
    parts = [attention.positions(recipe.data.seq_length, replace(context, rank=rank)) for rank in range(layout.cp)]
    return SequenceLayout(mesh.tp, layout.sp, mesh.cp, torch.cat(parts)), context


def apply_tp(stage: Stage, mesh: Mesh, recipe: Recipe, spread: tuple[SequenceLayout, Any]) -> None:
    """Cuts the layers, the embedding and the head over the tensor-parallel ranks."""
    sequence, _ = spread
    for layer in stage.layers.values():
        shard_layer(layer, mesh, sequence)
    if stage.embedding is not None and mesh.tp.size > 1:
        shard_embedding(stage.embedding, mesh, recipe.layout.sp)
    if stage.last:
        apply_lm_loss(stage, mesh, recipe)
    stage.sequence_rank = mesh.tp.rank if recipe.layout.sp else 0
    if mesh.cp.size > 1:
        stage.places = attention.positions(recipe.data.seq_length, spread[1])
    stage.partial = partial_grad_names(stage, sequence)


def configure_attention(stage: Stage, spread: tuple[SequenceLayout, Any], recipe: Recipe) -> None:
    """Tells every attention module which kernel to use and with whom it shares the sequence."""
    for path, module in stage.named_modules():
        if is_attention(module) and not is_vision_module(
            stage.vision_modules, path
        ):  # an image is seen whole, by torch's own choice
            module.context, module.kernel = spread[1], recipe.kernels.attention


def recompute_and_compile(stage: Stage, recipe: Recipe) -> None:
    """Recompute inside compile: the compiler then sees what is computed again and fuses it. In 8 bits around it."""
    layout = recipe.layout
    around = layers_recomputed_around(recipe, stage)
    if not around:
        apply_recompute(stage.layers, layout, recipe.kernels.compile)
    if layout.recompute == "full":
        apply_recompute(stage.seeing_blocks, msgspec.structs.replace(layout, recompute_layers=0), compiled=False)
    offload_activations(stage.layers, layout)
    if recipe.kernels.compile:
        # One block at a time: all blocks share one graph, and a whole model takes minutes to compile.
        for layer in stage.layers.values():
            layer.compile(fullgraph=is_single_graph(layer, layout))
        for number in around:
            recompute_compiled(stage.layers[number])


def layers_recomputed_around(recipe: Recipe, stage: Stage) -> list[int]:
    """Layers that are run again from outside their compiled graph, where all of a layer is: those in 8 bits or with tp.

    With tp a layer swaps its weights for this rank's parts while it runs, which no graph may run again inside.
    """
    layout = recipe.layout
    special = recipe.precision.matmul != "same" or layout.tp > 1
    whole = layout.recompute == "full" and recipe.kernels.compile and special
    return list(stage.layers)[: layout.recompute_layers or None] if whole else []


def is_single_graph(layer: nn.Module, layout: Layout) -> bool:
    """Whether nothing in a layer runs outside its graph: tokens travel to experts, keys and values to other ranks."""
    return layout.cp == 1 and not list(expert_blocks(layer)) and not isolates_documents(layer)
