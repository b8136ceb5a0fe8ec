"""The order of parallelism techniques on one page: each is applied to the model from outside, on top of the last."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from meshwright.engine import attention
from meshwright.engine.architecture import layer_list
from meshwright.engine.experts import expert_blocks, mask_routers
from meshwright.engine.hf_io import FolderWeights, build_name_map
from meshwright.engine.hooks import NO_HOOKS, Hooks
from meshwright.engine.kernels.compiler_fixes import correct_compiler
from meshwright.engine.kernels.gated_norms import fuse_gated_norms
from meshwright.engine.kernels.gelu import fuse_gelus
from meshwright.engine.kernels.norms import fuse_norms
from meshwright.engine.kernels.scan_choice import scan_kernel
from meshwright.engine.kernels.scan_patch import use_chunked_scans
from meshwright.engine.losses import TokenLoss
from meshwright.engine.mesh import Mesh
from meshwright.engine.model.adapters import add_adapters, check_targets, init_magnitudes
from meshwright.engine.model.behaviour import behaviour_of, block_order_of
from meshwright.engine.model.build import build_model, runs_own_layers
from meshwright.engine.model.init import record_initial
from meshwright.engine.model.module_names import is_attention
from meshwright.engine.model.stage import Stage
from meshwright.engine.parallelize import megatron, whole_model
from meshwright.engine.parallelize.custom_tp_plan import apply_custom_plan
from meshwright.engine.parallelize.document_isolation import isolate_documents, isolates_documents
from meshwright.engine.parallelize.expert_parallel import (
    balance_routers,
    masks_padding,
    shard_experts,
    split_expert_params,
)
from meshwright.engine.parallelize.fp8_gather import gather_in_fp8
from meshwright.engine.parallelize.fsdp import apply_fsdp, base_dtype, storage_dtype
from meshwright.engine.parallelize.init_weights import init_weights
from meshwright.engine.parallelize.lm_loss import apply_lm_loss
from meshwright.engine.parallelize.offload import offload_activations
from meshwright.engine.parallelize.pipeline import split_stages, stage_layers, stage_numbers
from meshwright.engine.parallelize.quantize import apply_fp8, select_gemm_kernels
from meshwright.engine.parallelize.recompute import apply_recompute, fully_recomputed, recompute_compiled
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
    config: Any,
    recipe: Recipe,
    mesh: Mesh,
    device: torch.device,
    weights: Path | None = None,
    hooks: Hooks = NO_HOOKS,
    padded_end: bool = False,
) -> list[Stage]:
    """Build this rank's pipeline stages, apply every technique of the layout, and load or initialize their weights.

    `padded_end` says that the last step is filled up with padding.
    """
    layout = recipe.layout
    if layout.strategy == "megatron_fsdp":
        megatron.require(device)
    if not runs_own_layers(config):
        return _whole_stages(config, recipe, mesh, device, weights, hooks)
    mtp = recipe.train.mtp_loss > 0
    models = [build_model(config, base_dtype(recipe), mtp) for _ in stage_numbers(layout, mesh.pp)]
    for model in models:
        apply_custom_plan(model, hooks.tp_plan)
    if recipe.goal == "peft":
        check_targets(models[0], recipe.peft, layout.tp)
    initial = record_initial(models[0], recipe.train.seed)
    checkpoint = FolderWeights(weights, build_name_map(config, mtp)) if weights is not None else None

    # Pipeline first: everything below skips the layers of other pipeline ranks.
    text = config.get_text_config()  # the language model's config inside a vision-language config
    stages = split_stages(models, layout, text.num_hidden_layers, mesh.pp)
    sequence, context = sequence_layout(recipe, mesh)
    for stage in stages:
        if stage.vision_modules is not None:
            freeze(stage, stage.vision_modules, recipe.train.freeze)
        # Adapters before tensor parallelism: they are sharded with the linear layers they adapt.
        if recipe.goal == "peft":
            initial |= add_adapters(stage, recipe.peft, storage_dtype(recipe.precision))
        normalize_modules(stage, recipe, mesh.device_type)
        # Tensor parallelism before everything that reads parameter shapes.
        apply_tp(stage, mesh, recipe, sequence, context, hooks.loss)
        # Context parallelism: attention modules get the group that shares the sequence.
        configure_attention(stage, recipe, context)
        # Expert parallelism shards experts over a second mesh of the same ranks.
        for layer in stage.layers.values():
            shard_experts(layer, mesh, recipe)
            balance_routers(layer, mesh, recipe, text)
            if masks_padding(recipe, padded_end):
                mask_routers(layer)
        # fp8 and tuned GEMMs patch linear layers; their shapes are final by now.
        apply_fp8(stage, recipe.precision, text.num_hidden_layers, mesh.device_type)
        select_gemm_kernels(stage, recipe, mesh)
        # Recompute and offload before compile: the compiler sees what is saved and what is recomputed.
        recompute_and_compile(stage, recipe)
        # FSDP outermost: it gathers a block's weights just before the (compiled) block runs.
        if layout.strategy == "megatron_fsdp":
            megatron.shard_and_init(stage, mesh, recipe, initial, device, checkpoint)
            continue  # it initializes the weights too
        apply_fsdp(stage, mesh, recipe)
        # Weights last: each rank allocates and fills only its own shards.
        offloaded = layout.offload in ("params", "optimizer")
        init_weights(stage, initial, recipe.train.seed, device, offloaded, checkpoint)
        init_magnitudes(stage)
        gather_in_fp8(stage, mesh, recipe)
    if checkpoint is not None:
        stages[0].loaded = checkpoint.report()
        checkpoint.files.close()
    return stages


def _whole_stages(
    config: Any, recipe: Recipe, mesh: Mesh, device: torch.device, weights: Path | None, hooks: Hooks
) -> list[Stage]:
    """Build a model that runs transformers' own forward pass, with the techniques that need nothing of its code."""
    whole_model.require_supported(recipe, config, hooks)
    recipe = whole_model.with_known_recompute(recipe)
    layout, kind = recipe.layout, behaviour_of(config).attention
    numbers = stage_numbers(layout, mesh.pp)
    models: list[Any] = [build_model(config, base_dtype(recipe), attention_kind=kind) for _ in numbers]
    if recipe.goal == "peft":
        check_targets(models[0], recipe.peft, tp=1)
    initial = record_initial(models[0], recipe.train.seed)
    checkpoint = FolderWeights(weights, build_name_map(config)) if weights is not None else None
    order = block_order_of(config) if layout.pp > 1 else None
    blocks = stage_layers(layout, len(models[0].get_submodule(layer_list(models[0]))))
    stages: list[Stage] = []
    for model, number in zip(models, numbers, strict=True):
        stage = whole_model.build_stage(model, recipe, hooks, blocks[number], order)
        stages.append(stage)
        if recipe.goal == "peft":
            initial |= add_adapters(stage, recipe.peft, storage_dtype(recipe.precision))
        recompute_and_compile(stage, recipe)
        whole_model.shard_stage(stage, mesh, recipe)
        offloaded = layout.offload in ("params", "optimizer")
        init_weights(stage, initial, recipe.train.seed, device, offloaded, checkpoint)
        init_magnitudes(stage)
    if checkpoint is not None:
        stages[0].loaded = checkpoint.report()
        checkpoint.files.close()
    return stages


def normalize_modules(stage: Stage, recipe: Recipe, device_type: str) -> None:
    """Apply what every layout needs: parameters that can be sharded, isolated documents, memory-saving operations."""
    kernel = scan_kernel(recipe.kernels, device_type, recipe.precision.compute)
    use_chunked_scans(stage, kernel, required=recipe.kernels.scan != "auto")
    fuse_gated_norms(stage)
    for layer in stage.layers.values():
        split_fused_params(layer)
        split_expert_params(layer)
        if recipe.data.packing:
            isolate_documents(layer)
    fuse_norms(stage)
    fuse_gelus(stage)


def sequence_layout(recipe: Recipe, mesh: Mesh) -> tuple[SequenceLayout, attention.ContextAxis | None]:
    """Return how the sequence is sharded over the tp and cp ranks, and the cp group of attention."""
    layout = recipe.layout
    if layout.cp == 1:
        return SequenceLayout(mesh.tp, layout.sp), None
    context = attention.context_axis(mesh.cp_groups, layout.cp_comm, layout.cp_inner, mesh.cp.group)
    shards = [attention.positions(recipe.data.seq_length, replace(context, rank=rank)) for rank in range(layout.cp)]
    return SequenceLayout(mesh.tp, layout.sp, mesh.cp, torch.cat(shards)), context


def apply_tp(
    stage: Stage,
    mesh: Mesh,
    recipe: Recipe,
    sequence: SequenceLayout,
    context: attention.ContextAxis | None,
    loss: TokenLoss | None = None,
) -> None:
    """Shard the layers, the embedding and the head over the tensor-parallel ranks."""
    for layer in stage.layers.values():
        shard_layer(layer, mesh, sequence)
    if stage.embedding is not None and mesh.tp.size > 1:
        shard_embedding(stage.embedding, mesh, recipe.layout.sp)
    if stage.last:
        apply_lm_loss(stage, mesh, recipe, loss)
    stage.sequence_rank = mesh.tp.rank if recipe.layout.sp else 0
    if context is not None:
        stage.local_positions = attention.positions(recipe.data.seq_length, context)
    stage.partial_grads = partial_grad_names(stage, sequence)


def configure_attention(stage: Stage, recipe: Recipe, context: attention.ContextAxis | None) -> None:
    """Set the kernel and the context-parallel group of every attention module of the language model."""
    for path, module in stage.named_modules():
        # The vision encoder keeps torch's own attention: every rank encodes whole images.
        if is_attention(module) and not is_vision_module(stage.vision_modules, path):
            module.context, module.kernel = context, recipe.kernels.attention
    stage.find_attention()


def recompute_and_compile(stage: Stage, recipe: Recipe) -> None:
    """Recompute inside compile, so that the compiler can fuse recomputed operations; around it where it cannot."""
    layout = recipe.layout
    around = layers_recomputed_around(recipe, stage)
    apply_recompute(stage.layers, layout, recipe.kernels.compile, around)
    if layout.recompute == "full":
        apply_recompute(stage.vision_blocks, msgspec.structs.replace(layout, recompute_layers=0), compiled=False)
    offload_activations(stage.layers, layout)
    if recipe.kernels.compile:
        correct_compiler()
        # Modules replace their parameters while they run and restore them, which a recomputed graph need not repeat.
        torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
        # Per block: all blocks share one graph, and compiling the full model takes minutes.
        for layer in stage.layers.values():
            layer.compile(fullgraph=is_single_graph(layer, layout))
        for number in around:
            recompute_compiled(stage.layers[number])


def layers_recomputed_around(recipe: Recipe, stage: Stage) -> list[int]:
    """Return the fully recomputed layers that are checkpointed outside their graphs: with fp8, tp or graph breaks.

    With tp a layer replaces its parameters by local shards while it runs, which a graph cannot recompute inside. A
    checkpoint with a graph break inside is not compiled at all.
    """
    layout = recipe.layout
    if not recipe.kernels.compile:
        return []
    unsupported = recipe.precision.matmul != "same" or layout.tp > 1
    return [
        number
        for number in fully_recomputed(stage.layers, layout)
        if unsupported or not is_single_graph(stage.layers[number], layout)
    ]


def is_single_graph(layer: nn.Module, layout: Layout) -> bool:
    """Return whether a layer has no graph breaks.

    Those of expert dispatch, context parallelism and documents, and of collectives through host memory.
    """
    sequences = (module.__dict__.get("tp_sequence") for module in layer.modules())
    through_host = any(sequence.tp.through_host for sequence in sequences if sequence is not None)
    return layout.cp == 1 and not list(expert_blocks(layer)) and not isolates_documents(layer) and not through_host
