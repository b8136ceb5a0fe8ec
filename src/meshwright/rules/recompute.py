"""Activation recompute (checkpointing)."""

from __future__ import annotations

import numpy as np

from meshwright.recipes.case import Case, Column
from meshwright.rules.rule import Fix, rule
from meshwright.rules.schedule import ZERO_BUBBLE
from meshwright.rules.search_values import not_, one_of, without

EXPERT_MODULES = ("moe", "moe_act", "shared_experts")
NO_RECOMPUTE: Fix = {"recompute": ["none"], "recompute_modules": [()], "recompute_layers": [0]}


def _missing_modules(c: Case) -> tuple[str, ...]:
    """Return recompute modules that the model does not have."""
    experts = () if c.is_moe else EXPERT_MODULES
    shared = () if c.has_shared_experts else ("shared_experts",)
    low_rank = c.is_mla or any(getattr(group.layer.mixer, "q_lora", None) for group in c.model.groups)
    latent = () if low_rank else ("mla_up_proj",)
    return (*experts, *shared, *latent)


@rule(
    "recompute.modules-of-the-model",
    "error",
    "recompute_modules",
    message="recompute_modules={recompute_modules} names modules that this model does not have",
    symptom="mla_up_proj needs latent attention, moe modules need experts: rejected by config validation",
    cause="only modules of the model can be recomputed",
    fixes=({"recompute_modules": without("recompute_modules", _missing_modules)},),
)
def recompute_modules_missing(c: Case) -> Column:
    return (c.recompute == "selective") & bool(set(_missing_modules(c)) & set(c.recompute_modules))


@rule(
    "recompute.ops-zero-bubble",
    "error",
    "recompute",
    engines=("meshwright",),
    message="{pp_schedule} splits the backward pass in two, but recompute by operation supports only one pass",
    symptom="RuntimeError: Trying to backward an extra time, in the first step",
    cause="the saved outputs of an operation are released at their first use",
    fixes=(
        {"recompute": ["full"], "recompute_modules": [()]},
        {"recompute": ["none"], "recompute_modules": [()]},
        {"pp_schedule": ["interleaved_1f1b"]},
    ),
)
def recompute_ops_with_split_backward(c: Case) -> Column:
    by_operation = (c.recompute == "selective") & (len(c.recompute_modules) == 0 or "ops" in c.recompute_modules)
    return (c.pp > 1) & one_of(c.pp_schedule, ZERO_BUBBLE) & by_operation


@rule(
    "recompute.compiled-core-attention",
    "error",
    "recompute_modules",
    engines=("meshwright",),
    message="compiled blocks cannot recompute core_attn with tp={tp}",
    symptom="AssertionError: expected all tensors_saved_with_vc_check to be Tensors, in the first step",
    cause="torch's compiler saves the device mesh of tensor-parallel weights for the backward pass",
    fixes=({"recompute_modules": without("recompute_modules", lambda c: ("core_attn",))}, {"compile": [False]}),
)
def compiled_core_attention(c: Case) -> Column:
    return c.compile & (c.tp > 1) & (c.recompute == "selective") & ("core_attn" in c.recompute_modules)


@rule(
    "recompute.modules-unused",
    "warning",
    "recompute_modules",
    message="recompute_modules is set, but recompute={recompute} ignores it",
    symptom="the expected memory saving does not appear",
    cause="only selective recompute reads recompute_modules",
    fixes=({"recompute_modules": [()]}, {"recompute": ["selective"]}),
)
def recompute_modules_unused(c: Case) -> Column:
    return (len(c.recompute_modules) > 0) & (c.recompute != "selective")


@rule(
    "recompute.layers-with-selective",
    "error",
    "recompute_layers",
    engines=("megatron",),
    message="recompute_layers={recompute_layers} does not work with selective recompute",
    symptom="recompute_num_layers must not be set with selective granularity",
    cause="recompute_layers applies to full recompute",
    fixes=({"recompute_layers": [0]}, {"recompute": ["full"], "recompute_modules": [()]}),
)
def recompute_layers_with_selective(c: Case) -> Column:
    return (c.recompute_layers > 0) & (c.recompute == "selective")


@rule(
    "recompute.more-layers-than-stage",
    "advice",
    "recompute_layers",
    message="recompute_layers={recompute_layers} is more than the {own:.0f} layers of a stage",
    symptom="the same as recomputing all layers",
    cause="recompute_layers counts layers of one pipeline stage",
    fixes=({"recompute_layers": [0]},),
    values={"own": lambda c: np.ceil(c.layers / c.pp)},
)
def recompute_layers_above_stage(c: Case) -> Column:
    return (c.recompute == "full") & (c.recompute_layers > np.ceil(c.layers / c.pp))


@rule(
    "recompute.expert-activation",
    "error",
    "recompute_modules",
    engines=("megatron",),
    message="recompute of moe_act needs grouped_gemm=true",
    symptom="moe_act recompute is only supported with grouped GEMM",
    cause="it is a feature of the grouped expert kernel",
    fixes=({"grouped_gemm": [True]}, {"recompute_modules": without("recompute_modules", lambda c: ("moe_act",))}),
)
def moe_act_without_grouped_gemm(c: Case) -> Column:
    return c.is_moe & ("moe_act" in c.recompute_modules) & not_(c.grouped_gemm) & (c.recompute == "selective")


@rule(
    "recompute.sharded-selective",
    "error",
    "recompute",
    engines=("automodel",),
    message="megatron_fsdp on {engine} does not support selective recompute",
    symptom="ValueError: selective activation checkpointing is not supported by this strategy",
    cause="its wrapper supports complete modules only",
    fixes=({"strategy": ["fsdp2"]}, NO_RECOMPUTE),
)
def megatron_fsdp_selective_recompute(c: Case) -> Column:
    return (c.strategy == "megatron_fsdp") & (c.recompute == "selective")


@rule(
    "recompute.sharded-full",
    "warning",
    "recompute",
    engines=("automodel",),
    message="megatron_fsdp on {engine} skips full recompute on more than one GPU",
    symptom="an error line in the log, and the memory of a run without recompute",
    cause="the option is read but not applied",
    fixes=({"strategy": ["fsdp2"]}, NO_RECOMPUTE),
)
def megatron_fsdp_full_recompute(c: Case) -> Column:
    return (c.strategy == "megatron_fsdp") & (c.recompute == "full") & (c.world > 1)


@rule(
    "recompute.flash-attention",
    "advice",
    "recompute",
    engines=("megatron",),
    message="recomputing only core_attn saves almost nothing with attention={attention}",
    symptom="slower by one attention forward, at almost the same memory",
    cause="flash kernels never store the scores that this recompute would drop",
    fixes=(NO_RECOMPUTE, {"recompute_modules": [("core_attn", "layernorm")]}),
)
def flash_attention_recomputed(c: Case) -> Column:
    only_attention = tuple(c.recompute_modules) in ((), ("core_attn",))
    return (c.recompute == "selective") & only_attention & one_of(c.attention, ("auto", "flash", "te", "cudnn"))
