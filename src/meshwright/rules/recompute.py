"""Activations computed again in the backward pass."""

from __future__ import annotations

import numpy as np

from meshwright.recipes.case import Case, Column
from meshwright.rules.rule import Fix, rule
from meshwright.rules.schedule import ZERO_BUBBLE
from meshwright.rules.search_values import not_, one_of, without

EXPERT_MODULES = ("moe", "moe_act", "shared_experts")
NO_RECOMPUTE: Fix = {"recompute": ["none"], "recompute_modules": [()], "recompute_layers": [0]}


def _missing_modules(c: Case) -> tuple[str, ...]:
    """Modules that the model does not have."""
    experts = () if c.is_moe else EXPERT_MODULES
    shared = () if c.has_shared_experts else ("shared_experts",)
    latent = () if c.is_mla else ("mla_up_proj",)
    return (*experts, *shared, *latent)


@rule(
    "recompute.modules-of-the-model",
    "error",
    "recompute_modules",
    message="recompute_modules={recompute_modules} names parts that this model does not have",
    symptom="mla_up_proj needs latent attention, moe modules need experts: refused when the configuration is checked",
    cause="only what the model computes can be computed again",
    fixes=({"recompute_modules": without("recompute_modules", _missing_modules)},),
)
def modules_exist(c: Case) -> Column:
    return (c.recompute == "selective") & bool(set(_missing_modules(c)) & set(c.recompute_modules))


@rule(
    "recompute.ops-supported",
    "error",
    "recompute_modules",
    engines=("megatron", "kempnerforge", "deepspeed"),
    message="{engine} recomputes modules, not single operations",
    symptom="an unknown module name in the list",
    cause="choosing by operation is a feature of torch's selective checkpointing",
    fixes=({"recompute_modules": without("recompute_modules", lambda c: ("ops",))},),
)
def operations_can_be_chosen(c: Case) -> Column:
    return (c.recompute == "selective") & ("ops" in c.recompute_modules)


@rule(
    "recompute.ops-zero-bubble",
    "error",
    "recompute",
    engines=("meshwright",),
    message="{pp_schedule} runs the backward pass in two parts, and recompute by operation allows one",
    symptom="RuntimeError: Trying to backward an extra time, in the first step",
    cause="what was kept of an operation is given away when it is asked for the first time",
    fixes=(
        {"recompute": ["full"], "recompute_modules": [()]},
        {"recompute": ["none"], "recompute_modules": [()]},
        {"pp_schedule": ["interleaved_1f1b"]},
    ),
)
def operations_are_asked_for_once(c: Case) -> Column:
    by_operation = (c.recompute == "selective") & (len(c.recompute_modules) == 0 or "ops" in c.recompute_modules)
    return (c.pp > 1) & one_of(c.pp_schedule, ZERO_BUBBLE) & by_operation


@rule(
    "recompute.modules-unused",
    "warning",
    "recompute_modules",
    message="recompute_modules is given, but recompute={recompute} does not read it",
    symptom="the memory saving that the list promises does not appear",
    cause="modules are chosen by selective recompute only",
    fixes=({"recompute_modules": [()]}, {"recompute": ["selective"]}),
)
def modules_are_read(c: Case) -> Column:
    return (len(c.recompute_modules) > 0) & (c.recompute != "selective")


@rule(
    "recompute.layers-with-selective",
    "error",
    "recompute_layers",
    engines=("megatron",),
    message="recompute_layers={recompute_layers} cannot be used with selective recompute",
    symptom="recompute_num_layers must not be set with selective granularity",
    cause="a number of layers belongs to full recompute",
    fixes=({"recompute_layers": [0]}, {"recompute": ["full"], "recompute_modules": [()]}),
)
def layer_count_needs_full(c: Case) -> Column:
    return (c.recompute_layers > 0) & (c.recompute == "selective")


@rule(
    "recompute.more-layers-than-stage",
    "advice",
    "recompute_layers",
    message="recompute_layers={recompute_layers} is more than the {own:.0f} layers of a stage",
    symptom="the same as recomputing all of them",
    cause="the number counts layers of one pipeline stage",
    fixes=({"recompute_layers": [0]},),
    values={"own": lambda c: np.ceil(c.layers / c.pp)},
)
def layer_count_fits_stage(c: Case) -> Column:
    return (c.recompute == "full") & (c.recompute_layers > np.ceil(c.layers / c.pp))


@rule(
    "recompute.expert-activation",
    "error",
    "recompute_modules",
    engines=("megatron",),
    message="recomputing the experts' activation needs the grouped kernel",
    symptom="moe_act recompute is only supported with grouped GEMM",
    cause="it is a feature of the fused experts",
    fixes=(
        {"grouped_gemm": [True]},
        {"recompute_modules": without("recompute_modules", lambda c: ("moe_act",))},
    ),
)
def expert_activation_needs_grouping(c: Case) -> Column:
    return c.is_moe & ("moe_act" in c.recompute_modules) & not_(c.grouped_gemm) & (c.recompute == "selective")


@rule(
    "recompute.sharded-selective",
    "error",
    "recompute",
    engines=("automodel",),
    message="the megatron_fsdp strategy refuses selective recompute here",
    symptom="ValueError: selective activation checkpointing is not supported by this strategy",
    cause="its wrapper knows whole modules only",
    fixes=({"strategy": ["fsdp2"]}, NO_RECOMPUTE),
)
def sharded_wrapper_knows_modules(c: Case) -> Column:
    return (c.strategy == "megatron_fsdp") & (c.recompute == "selective")


@rule(
    "recompute.sharded-full",
    "warning",
    "recompute",
    engines=("automodel",),
    message="the megatron_fsdp strategy skips full recompute on more than one GPU here",
    symptom="an error line in the log, and the memory of a run without recompute",
    cause="the option is read and not applied",
    fixes=({"strategy": ["fsdp2"]}, NO_RECOMPUTE),
)
def sharded_wrapper_recomputes(c: Case) -> Column:
    return (c.strategy == "megatron_fsdp") & (c.recompute == "full") & (c.world > 1)


@rule(
    "recompute.flash-attention",
    "advice",
    "recompute",
    engines=("megatron",),
    message="recomputing only core_attn saves next to nothing with {attention} attention",
    symptom="slower by the attention forward, at nearly the same memory",
    cause="flash kernels never store the scores that this recompute was made to drop",
    fixes=(NO_RECOMPUTE, {"recompute_modules": [("core_attn", "layernorm")]}),
)
def attention_is_not_recomputed_twice(c: Case) -> Column:
    only_attention = tuple(c.recompute_modules) in ((), ("core_attn",))
    return (c.recompute == "selective") & only_attention & one_of(c.attention, ("auto", "flash", "te", "cudnn"))
