"""Activation recompute: what a layer keeps for its backward pass and what it computes again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from meshwright.engine.experts.expert_params import expert_blocks
from meshwright.engine.model.module_names import is_attention
from meshwright.engine.parallelize.output_recompute import recompute_gathers, recompute_outputs
from meshwright.engine.parallelize.tensor_parallel import SequenceLayout
from meshwright.engine.patching import Patch, apply
from meshwright.recipes.types import Layout
from meshwright.rules.schedule import ZERO_BUBBLE

# With selective recompute by operation, what attention gives and every second product of weights are kept, and
# everything else is computed again. bmm is none of them: it makes the scores of eager attention.
ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)
PRODUCTS = ("mm", "addmm", "_grouped_mm", "_scaled_mm", "one_by_one", "adapted", "packed", "product", "product_add")
OPERATIONS = "ops"
NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "norm", "ln_1", "ln_2")
UP_PROJECTIONS = ("q_b_proj", "kv_b_proj")


def apply_recompute(layers: dict[int, nn.Module], layout: Layout, compiled: bool) -> None:
    """Makes the layers of a stage compute again what the layout says; a layer's names stay as they are."""
    if layout.recompute == "full":
        chosen = list(layers.values())[: layout.recompute_layers or None]
        for layer in chosen:
            _again(layer)
    elif layout.recompute == "selective":
        for layer in layers.values():
            _selective(layer, layout.recompute_modules or (OPERATIONS,), compiled)
    if not compiled and layout.offload != "activations" and regathers_in_backward(layout):
        for layer in layers.values():
            recompute_gathers(layer, list(_gathering(layer)))


def regathers_in_backward(layout: Layout) -> bool:
    """Whether the backward pass gathers once more what entered regions, so that each rank keeps its own part alone.

    A backward pass in two halves would ask again in the second, once for every weight.
    """
    return layout.pp == 1 or layout.pp_schedule not in ZERO_BUBBLE


def _gathering(layer: nn.Module) -> Iterator[nn.Module]:
    """Regions of a layer that gather what enters them, but for those in modules that are run again as a whole."""
    if isinstance(layer, Recomputed):
        return
    sequence: SequenceLayout | None = layer.__dict__.get("region_sequence")
    if sequence is not None and sequence.gathers:
        yield layer
    for child in layer.children():
        yield from _gathering(child)


def recompute_compiled(layer: Any) -> None:
    """Runs a compiled layer again as a whole in the backward pass.

    For layers with products in 8 bits: their gradients are functions of autograd's own, inside which the compiler would
    keep what it is told to compute again.
    """
    apply(layer, RecomputedAround)
    compiled = layer._compiled_call_impl
    settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    layer._compiled_call_impl = partial(checkpoint, compiled, **settings)


def _selective(layer: nn.Module, names: tuple[str, ...], compiled: bool) -> None:
    if OPERATIONS in names:
        _by_operation(layer)
        return
    for name in names:
        for module in BLOCKS[name](layer) if name in BLOCKS else ():
            _again(module)
    for name, mark in MARKED.items():
        if name in names:
            mark(layer)
    outputs = [module for name in names if name in OUTPUTS for module in OUTPUTS[name](layer)]
    if not compiled:
        recompute_outputs(layer, outputs)
        return
    for module in outputs:  # the compiler sees who keeps an output, and computes it again in the backward graph
        _again(module)


def _by_operation(layer: nn.Module) -> None:
    """Keeps costly operations of a layer; experts are wrapped by themselves and only drop their activations.

    torch counts every operation of a region that is run again, those of a wrapper inside it too, and a wrapper need
    not gather twice.
    """
    routed = {id(block.block) for block in expert_blocks(layer)}
    if not routed:
        _again(layer, by_operation=True)
        return
    for child in layer.children():
        if id(child) not in routed:
            _again(child, by_operation=True)
    _expert_activations(layer)


def _again(module: Any, by_operation: bool = False) -> None:
    """The module's forward is run again in the backward pass, but for costly operations where only those are kept."""
    apply(module, RecomputedOps if by_operation else Recomputed)


class Recomputed(Patch):
    """A module whose forward pass is run again in the backward pass; it saves only its inputs."""

    tag = "Recompute"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # Nothing random runs inside a layer, so no random state is saved.
        return checkpoint(super().forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


class RecomputedAround(Patch):
    """Marks a layer whose compiled call is recomputed from outside (`recompute_around`); its forward is unchanged."""

    tag = "Recompute"


class RecomputedOps(Recomputed):
    """A module that saves the outputs of costly operations and recomputes the others."""

    tag = "RecomputeOps"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inner = super(Recomputed, self).forward
        settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": _keep_costly}
        return checkpoint(inner, *args, **settings, **kwargs)


def _keep_costly() -> Any:
    products = {False: 0, True: 0}  # seen in the first forward and in the second

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = operation.overloadpacket.__name__ if isinstance(operation, torch._ops.OpOverload) else ""
        products[context.is_recompute] += name in PRODUCTS
        kept = name in ATTENTION or (name in PRODUCTS and products[context.is_recompute] % 2 == 1)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


def _children(layer: nn.Module, names: tuple[str, ...]) -> Iterator[nn.Module]:
    for name in names:
        child = getattr(layer, name, None)
        if isinstance(child, nn.Module):
            yield child


def _dense_blocks(layer: nn.Module) -> Iterator[nn.Module]:
    routed = {id(block.block) for block in expert_blocks(layer)}
    for name in ("mlp", "mixer"):
        child = getattr(layer, name, None)
        if isinstance(child, nn.Module) and id(child) not in routed and hasattr(child, "down_proj"):
            yield child


def _attention_cores(layer: nn.Module) -> None:
    for module in layer.modules():
        if is_attention(module):
            module.recompute_core = True  # type: ignore[assignment]


def _expert_activations(layer: nn.Module) -> None:
    for block in expert_blocks(layer):
        block.experts.recompute_activation = True  # type: ignore[assignment]


def _shared(layer: nn.Module) -> Iterator[nn.Module]:
    for block in expert_blocks(layer):
        yield from _children(block.block, ("shared_experts", "shared_expert"))


def _up_projections(layer: nn.Module) -> Iterator[nn.Module]:
    for module in layer.modules():
        yield from _children(module, UP_PROJECTIONS)


Parts = Callable[[nn.Module], Iterator[nn.Module]]

# Blocks that keep their input alone.
BLOCKS: dict[str, Parts] = {
    "mlp": _dense_blocks,
    "moe": lambda layer: (block.block for block in expert_blocks(layer)),
    "shared_experts": _shared,
}
# Modules whose output nobody keeps.
OUTPUTS: dict[str, Parts] = {
    "layernorm": lambda layer: _children(layer, NORMS),
    "mla_up_proj": _up_projections,
}
# Parts of the engine's own functions, which look at a mark.
MARKED: dict[str, Callable[[nn.Module], None]] = {
    "core_attn": _attention_cores,
    "moe_act": _expert_activations,
}
