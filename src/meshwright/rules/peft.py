"""Adapters: which ones, where, and with what."""

from __future__ import annotations

import numpy as np

from meshwright.recipes.case import Case, Column
from meshwright.recipes.types import Peft
from meshwright.rules.model_families import is_qwen3_next
from meshwright.rules.rule import Fix, rule
from meshwright.rules.search_values import NO_TP, not_, one_of, without

METHODS: dict[str, tuple[str, ...]] = {
    "megatron": ("lora", "dora"),
    "automodel": ("lora", "dora", "qlora"),
}
LORA: Fix = {"method": ["lora"]}
DEFAULTS: Fix = {name: [getattr(Peft(), name)] for name in ("method", "rank", "alpha", "dropout", "targets")}


def _adapts(c: Case) -> Column:
    return c.goal == "peft"


def _missing_targets(c: Case) -> tuple[str, ...]:
    """Linears that the model does not have."""
    mamba = () if c.mamba_heads else ("mamba_in", "mamba_out")
    attention = () if c.heads else ("qkv", "proj")
    return (*mamba, *attention)


@rule(
    "peft.settings-unused",
    "advice",
    "method",
    message="adapter settings are given, but the goal {goal} trains all weights",
    symptom="no adapter is trained; the whole model is",
    cause="adapters belong to the goal peft",
    fixes=(DEFAULTS,),
)
def adapter_settings_are_read(c: Case) -> Column:
    changed = any(getattr(c, name) != getattr(Peft(), name) for name in DEFAULTS)
    return (c.goal != "peft") & changed


@rule(
    "peft.no-targets",
    "error",
    "targets",
    message="no linear layer gets an adapter",
    symptom="no trainable parameters; the optimizer gets an empty list",
    cause="the list of targets is empty",
    fixes=({"targets": [Peft().targets]},),
)
def something_is_trained(c: Case) -> Column:
    return _adapts(c) & (len(c.targets) == 0)


@rule(
    "peft.targets-of-the-model",
    "error",
    "targets",
    message="targets={targets} name linears that this model does not have",
    symptom="target modules not found, or nothing there is trained",
    cause="state-space projections exist in state-space layers only",
    fixes=(
        {"targets": without("targets", _missing_targets)},
        {"targets": lambda c: [tuple(t for t in Peft().targets if t not in _missing_targets(c))]},
    ),
)
def targets_exist(c: Case) -> Column:
    return _adapts(c) & bool(set(_missing_targets(c)) & set(c.targets))


@rule(
    "peft.method-supported",
    "error",
    "method",
    engines=tuple(METHODS),
    message="{engine} has no {method} adapters",
    symptom="an unknown adapter scheme",
    cause="engines bring different adapters",
    fixes=(LORA,),
)
def method_is_offered(c: Case) -> Column:
    return _adapts(c) & not_(one_of(c.method, METHODS.get(c.engine, (c.method,))))


@rule(
    "peft.engine",
    "error",
    "method",
    engines=("kempnerforge",),
    message="{engine} trains all weights; it has no adapters",
    symptom="there is no adapter section in its configuration",
    cause="it is made for pretraining",
)
def engine_has_adapters(c: Case) -> Column:
    return _adapts(c)


@rule(
    "peft.qwen3-next",
    "error",
    "method",
    engines=("megatron",),
    message="adapters for Qwen3-Next are not implemented there, although a recipe of that name exists",
    symptom="NotImplementedError from the recipe function",
    cause="its linear-attention layers have no adapter mapping",
)
def qwen3_next_has_adapters(c: Case) -> Column:
    return _adapts(c) & is_qwen3_next(c)


@rule(
    "peft.experts-tensor-parallel",
    "error",
    "tp",
    engines=("automodel",),
    message="adapters on a mixture of experts refuse tp={tp} here",
    symptom="ValueError: tensor parallelism of this model does not support PEFT",
    cause="its tensor-parallel plan covers the plain modules only",
    fixes=(NO_TP,),
)
def adapted_experts_stay_whole(c: Case) -> Column:
    return _adapts(c) & c.is_moe & (c.tp > 1)


@rule(
    "peft.dora-experts",
    "error",
    "method",
    engines=("meshwright", "automodel"),
    message="dora works on plain linear layers, not on grouped experts (targets={targets})",
    symptom="dora is only supported for nn.Linear",
    cause="the norm of each weight row is not defined for a stack of experts",
    fixes=(LORA, {"targets": without("targets", lambda c: ("fc1", "fc2"))}),
)
def dora_spares_experts(c: Case) -> Column:
    return _adapts(c) & (c.method == "dora") & c.is_moe & bool({"fc1", "fc2"} & set(c.targets))


@rule(
    "peft.dropout",
    "error",
    "dropout",
    engines=("meshwright",),
    message="adapters with dropout={dropout} are for attention and dense layers, not for {method} on targets={targets}",
    symptom="other masks in every layout, and other ones in recomputed layers than in the forward pass",
    cause="tokens reach experts and state-space layers out of order, and dora takes norms of whole weights",
    fixes=(
        LORA,
        {"targets": without("targets", lambda c: _tokens_out_of_order(c))},
        {"dropout": [0.0]},
    ),
)
def dropout_knows_its_tokens(c: Case) -> Column:
    unordered = bool(set(_tokens_out_of_order(c)) & set(c.targets))
    return _adapts(c) & (c.dropout > 0) & ((c.method == "dora") | unordered)


def _tokens_out_of_order(c: Case) -> tuple[str, ...]:
    """Targets whose linears do not know which token is which."""
    experts = ("fc1", "fc2") if c.is_moe else ()
    delta = ("qkv", "proj") if c.delta_v_heads else ()
    return (*experts, *delta, "mamba_in", "mamba_out")


@rule(
    "peft.dropout-recompute",
    "error",
    "dropout",
    engines=("meshwright",),
    message="dropout={dropout} in adapters of parts that are recomputed by themselves does not go with pp={pp}",
    symptom="recomputed parts drop other channels than the forward pass did",
    cause="a part of a layer has the keys of the last micro batch, and a pipeline runs several before it comes back",
    fixes=(
        {"recompute": ["full"], "recompute_modules": [()]},
        {"recompute": ["none"], "recompute_modules": [()]},
        {"dropout": [0.0]},
    ),
)
def dropped_parts_are_recomputed_with_their_layer(c: Case) -> Column:
    apart = c.is_moe | bool(set(c.recompute_modules) - {"ops"})
    return _adapts(c) & (c.dropout > 0) & (c.pp > 1) & (c.recompute == "selective") & apart


@rule(
    "peft.qlora-tensor-parallel",
    "error",
    "tp",
    engines=("megatron", "torchtitan", "automodel", "kempnerforge", "fsdp1", "deepspeed"),
    message="4-bit base weights cannot be cut by tp={tp}",
    symptom="a shape or type error when the quantised weights are distributed",
    cause="packed 4-bit weights have neither rows nor columns to cut",
    fixes=(NO_TP, LORA),
)
def quantised_weights_stay_whole(c: Case) -> Column:
    return _adapts(c) & (c.method == "qlora") & (c.tp > 1)


NF4_BLOCK = 64  # numbers that share a scale


@rule(
    "peft.qlora-blocks",
    "error",
    "tp",
    engines=("meshwright",),
    message="rows of {ffn} or {expert_width} 4-bit weights cannot be cut by tp={tp}, etp={etp} between blocks of 64",
    symptom="a scale that two ranks would have to share",
    cause="64 numbers along a row share a scale; a cut falls between blocks, so that codes are those of the whole",
    fixes=({"etp": [1]}, NO_TP, {**NO_TP, "etp": [1]}, LORA),
)
def quantised_rows_are_cut_between_blocks(c: Case) -> Column:
    split = _blocks(c.ffn) % c.tp + _blocks(c.expert_width) % c.etp
    return _adapts(c) & (c.method == "qlora") & ("fc2" in c.targets) & (split > 0)


def _blocks(width: Column) -> Column:
    return width // np.gcd(width, NF4_BLOCK)


@rule(
    "peft.qlora-strategy",
    "error",
    "strategy",
    engines=("meshwright",),
    message="4-bit base weights are sharded by fsdp2 or not at all, not by {strategy}",
    symptom="codes that are gathered as if they were weights",
    cause="Megatron-FSDP keeps the parameters of a unit in one buffer of one format",
    fixes=({"strategy": ["fsdp2"]}, LORA),
)
def quantised_weights_are_sharded_apart(c: Case) -> Column:
    return _adapts(c) & (c.method == "qlora") & (c.strategy == "megatron_fsdp")


@rule(
    "peft.qlora-fp8",
    "error",
    "matmul",
    message="qlora keeps base weights in 4 bits, which {matmul} layers would have to be too",
    symptom="two quantisers want the same linear layer",
    cause="the base weights are unpacked to bf16 for every product",
    fixes=({"matmul": ["same"], "fp8_gather": [False]}, LORA),
)
def quantised_once(c: Case) -> Column:
    return _adapts(c) & (c.method == "qlora") & c.fp8


@rule(
    "peft.scale",
    "advice",
    "alpha",
    message="alpha / rank = {ratio:.2g} scales the adapters unusually",
    symptom="slow learning when small, unstable when large",
    cause="the adapter's output is multiplied by alpha / rank; usual is 0.5 to 4",
    fixes=({"alpha": lambda c: [float(c.rank), 2.0 * c.rank]},),
    values={"ratio": lambda c: c.alpha / c.rank},
)
def scale_is_usual(c: Case) -> Column:
    ratio = c.alpha / c.rank
    return _adapts(c) & (c.method != "rslora") & ((ratio < 0.25) | (ratio > 4))
