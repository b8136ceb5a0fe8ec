"""Activation recompute: what a layer saves for its backward pass and what it computes again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshwright.engine.experts.expert_params import expert_blocks
from meshwright.engine.model.module_names import is_attention
from meshwright.engine.parallelize.output_recompute import recompute_gathers, recompute_outputs
from meshwright.engine.parallelize.tensor_parallel import SequenceLayout
from meshwright.engine.patching import Patch, apply
from meshwright.recipes.types import Layout
from meshwright.rules.schedule import ZERO_BUBBLE

# Selective recompute by operation saves the outputs of attention and of every second weight GEMM and recomputes the
# rest. bmm is not listed: it computes the scores of eager attention, which are larger than their inputs.
ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "flex_attention",
)
GEMMS = ("mm", "addmm", "_grouped_mm", "_scaled_mm", "one_by_one", "adapted", "packed", "product", "product_add")
OPERATIONS = "ops"
NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "norm", "ln_1", "ln_2")
UP_PROJECTIONS = ("q_b_proj", "kv_b_proj")


def fully_recomputed(layers: dict[int, nn.Module], layout: Layout) -> list[int]:
    """Return the numbers of a stage's layers that are recomputed as a whole."""
    return list(layers)[: layout.recompute_layers or None] if layout.recompute == "full" else []


def apply_recompute(layers: dict[int, nn.Module], layout: Layout, compiled: bool, around: Collection[int] = ()) -> None:
    """Apply the recompute settings of a layout to the layers of a stage; parameter names do not change.

    Layers in `around` are left to `recompute_compiled`.
    """
    for number in fully_recomputed(layers, layout):
        if number not in around:
            _recompute_module(layers[number])
    if layout.recompute == "selective":
        for layer in layers.values():
            _selective(layer, layout.recompute_modules or (OPERATIONS,), compiled)
    if not compiled and layout.offload != "activations" and regathers_in_backward(layout):
        for layer in layers.values():
            recompute_gathers(layer, list(_gathering_modules(layer)))


def regathers_in_backward(layout: Layout) -> bool:
    """Return whether the backward pass gathers inputs of tensor-parallel modules again instead of saving them.

    Not with zero-bubble schedules: their separate weight-gradient pass would gather once more for every weight.
    """
    return layout.pp == 1 or layout.pp_schedule not in ZERO_BUBBLE


def _gathering_modules(layer: nn.Module) -> Iterator[nn.Module]:
    """Yield the tensor-parallel modules that gather their input, except inside fully recomputed modules."""
    if isinstance(layer, Recomputed):
        return
    sequence: SequenceLayout | None = layer.__dict__.get("tp_sequence")
    if sequence is not None and sequence.gathers:
        yield layer
    for child in layer.children():
        yield from _gathering_modules(child)


def recompute_compiled(layer: Any) -> None:
    """Checkpoint a compiled layer from outside its graph.

    For layers with graph breaks, whose checkpoint would run eagerly, and with fp8 GEMMs: custom autograd functions,
    inside which the compiler saves tensors that it should recompute.
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
            if compiled and name == "moe":  # it has graph breaks
                module.compile()
                recompute_compiled(module)
            else:
                _recompute_module(module)
    for name, set_flag in FLAGGED.items():
        if name in names:
            set_flag(layer)
    outputs = [module for name in names if name in OUTPUTS for module in OUTPUTS[name](layer)]
    if not compiled:
        recompute_outputs(layer, outputs)
        return
    for module in outputs:  # the compiler sees which operations save an output and recomputes it in the backward graph
        _recompute_module(module)


def _by_operation(layer: nn.Module) -> None:
    """Save the costly operations of a layer; expert blocks only recompute their activation.

    Experts are FSDP units of their own, and torch's selective checkpoint requires both forward passes to run the same
    operations. FSDP inside a checkpointed module breaks that: its weights may still be gathered the second time.
    """
    routed = {id(block.block) for block in expert_blocks(layer)}
    if not routed:
        _recompute_module(layer, by_operation=True)
        return
    for child in layer.children():
        if id(child) not in routed:
            _recompute_module(child, by_operation=True)
    _expert_activations(layer)


def _recompute_module(module: Any, by_operation: bool = False) -> None:
    apply(module, RecomputedOps if by_operation else Recomputed)


class Recomputed(Patch):
    """A module whose forward pass is run again in the backward pass; it saves only its inputs."""

    tag = "Recompute"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # Nothing random runs inside a layer, so no random state is saved.
        return checkpoint(super().forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


class RecomputedAround(Patch):
    """Marks a layer whose compiled call is recomputed from outside (`recompute_compiled`); its forward is unchanged."""

    tag = "Recompute"


class RecomputedOps(Recomputed):
    """A module that saves the outputs of costly operations and recomputes the others."""

    tag = "RecomputeOps"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inner = super(Recomputed, self).forward
        settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": _save_costly}
        return checkpoint(inner, *args, **settings, **kwargs)


def _save_costly() -> Any:
    gemms = {False: 0, True: 0}  # counted in the first forward pass and in the recompute

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = operation.overloadpacket.__name__ if isinstance(operation, torch._ops.OpOverload) else operation.name()
        gemms[context.is_recompute] += name in GEMMS
        saved = name in ATTENTION or (name in GEMMS and gemms[context.is_recompute] % 2 == 1)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

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


Modules = Callable[[nn.Module], Iterator[nn.Module]]

# Blocks that save only their input.
BLOCKS: dict[str, Modules] = {
    "mlp": _dense_blocks,
    "moe": lambda layer: (block.block for block in expert_blocks(layer)),
    "shared_experts": _shared,
}
# Modules whose output is not saved.
OUTPUTS: dict[str, Modules] = {"layernorm": lambda layer: _children(layer, NORMS), "mla_up_proj": _up_projections}
# Functions of the engine that check a flag on the module.
FLAGGED: dict[str, Callable[[nn.Module], None]] = {"core_attn": _attention_cores, "moe_act": _expert_activations}
