"""Adapters: methods, targets and combinations."""

from __future__ import annotations

import numpy as np

from meshwright.recipes.case import Case, Column
from meshwright.recipes.types import Peft
from meshwright.rules.model_families import is_qwen3_next
from meshwright.rules.rule import Fix, rule
from meshwright.rules.search_values import NO_TP, one_of, without

LORA: Fix = {"method": ["lora"]}
DEFAULTS: Fix = {name: [getattr(Peft(), name)] for name in ("method", "rank", "alpha", "dropout", "targets")}


def _is_peft(c: Case) -> Column:
    return c.goal == "peft"


def _missing_targets(c: Case) -> tuple[str, ...]:
    """Return targets that the model does not have."""
    mamba = () if c.mamba_heads else ("mamba_in", "mamba_out")
    attention = () if c.heads else ("qkv", "proj")
    return (*mamba, *attention)


@rule(
    "peft.settings-unused",
    "advice",
    "method",
    message="peft settings are set, but goal={goal} trains all weights",
    symptom="no adapter is trained; the full model is",
    cause="adapters are used only with goal=peft",
    fixes=(DEFAULTS,),
)
def peft_settings_unused(c: Case) -> Column:
    changed = any(getattr(c, name) != getattr(Peft(), name) for name in DEFAULTS)
    return (c.goal != "peft") & changed


@rule(
    "peft.no-targets",
    "error",
    "targets",
    message="targets is empty: no linear layer gets an adapter",
    symptom="no trainable parameters; the optimizer gets an empty list",
    cause="only the listed linear layers get adapters",
    fixes=({"targets": [Peft().targets]},),
)
def no_targets(c: Case) -> Column:
    return _is_peft(c) & (len(c.targets) == 0)


@rule(
    "peft.targets-of-the-model",
    "error",
    "targets",
    message="targets={targets} names linear layers that this model does not have",
    symptom="target modules not found, or nothing is trained there",
    cause="Mamba projections exist only in Mamba layers, qkv and proj only in attention layers",
    fixes=(
        {"targets": without("targets", _missing_targets)},
        {"targets": lambda c: [tuple(t for t in Peft().targets if t not in _missing_targets(c))]},
    ),
)
def targets_missing(c: Case) -> Column:
    return _is_peft(c) & bool(set(_missing_targets(c)) & set(c.targets))


@rule(
    "peft.engine",
    "error",
    "method",
    engines=("kempnerforge",),
    message="{engine} has no adapters; it trains all weights",
    symptom="its configuration has no adapter section",
    cause="it is made for pretraining",
)
def engine_without_adapters(c: Case) -> Column:
    return _is_peft(c)


@rule(
    "peft.qwen3-next",
    "error",
    "method",
    engines=("megatron",),
    message="{engine} has no adapters for Qwen3-Next, although a recipe of that name exists",
    symptom="NotImplementedError from the recipe function",
    cause="its linear-attention layers have no adapter mapping",
)
def qwen3_next_adapters(c: Case) -> Column:
    return _is_peft(c) & is_qwen3_next(c)


@rule(
    "peft.experts-tensor-parallel",
    "error",
    "tp",
    engines=("automodel",),
    message="{engine} does not support adapters on MoE models with tp={tp}",
    symptom="ValueError: tensor parallelism of this model does not support PEFT",
    cause="its tensor-parallel plan covers only modules without adapters",
    fixes=(NO_TP,),
)
def adapted_experts_with_tp(c: Case) -> Column:
    return _is_peft(c) & c.is_moe & (c.tp > 1)


@rule(
    "peft.dora-experts",
    "error",
    "method",
    engines=("meshwright", "automodel"),
    message="dora supports plain linear layers, not grouped experts (targets={targets})",
    symptom="dora is only supported for nn.Linear",
    cause="the norm of a weight row is not defined for stacked expert weights",
    fixes=(LORA, {"targets": without("targets", lambda c: ("fc1", "fc2"))}),
)
def dora_on_experts(c: Case) -> Column:
    return _is_peft(c) & (c.method == "dora") & c.is_moe & bool({"fc1", "fc2"} & set(c.targets))


@rule(
    "peft.dropout",
    "error",
    "dropout",
    engines=("meshwright",),
    message="dropout={dropout} needs adapters on attention or dense layers, not {method} on targets={targets}",
    symptom="dropout masks differ between layouts, and between the forward pass and its recompute",
    cause="experts and Mamba layers see tokens out of order, and dora needs norms of full weights",
    fixes=(LORA, {"targets": without("targets", lambda c: _tokens_out_of_order(c))}, {"dropout": [0.0]}),
)
def dropout_on_unordered_tokens(c: Case) -> Column:
    unordered = bool(set(_tokens_out_of_order(c)) & set(c.targets))
    return _is_peft(c) & (c.dropout > 0) & ((c.method == "dora") | unordered)


def _tokens_out_of_order(c: Case) -> tuple[str, ...]:
    """Return targets whose inputs are not in token order."""
    experts = ("fc1", "fc2") if c.is_moe else ()
    delta = ("qkv", "proj") if c.delta_v_heads else ()
    return (*experts, *delta, "mamba_in", "mamba_out")


@rule(
    "peft.dropout-recompute",
    "error",
    "dropout",
    engines=("meshwright",),
    message="adapter dropout={dropout} does not support selective recompute of modules with pp={pp}",
    symptom="recomputed modules drop other channels than the forward pass did",
    cause="a module keeps the dropout keys of the last micro batch only, and a pipeline has several in flight",
    fixes=(
        {"recompute": ["full"], "recompute_modules": [()]},
        {"recompute": ["none"], "recompute_modules": [()]},
        {"dropout": [0.0]},
    ),
)
def dropout_in_recomputed_modules(c: Case) -> Column:
    apart = c.is_moe | bool(set(c.recompute_modules) - {"ops"})
    return _is_peft(c) & (c.dropout > 0) & (c.pp > 1) & (c.recompute == "selective") & apart


@rule(
    "peft.qlora-tensor-parallel",
    "error",
    "tp",
    engines=("megatron", "torchtitan", "automodel", "kempnerforge", "fsdp1", "deepspeed"),
    message="base weights of {method} cannot be sharded by tp={tp}",
    symptom="shape or dtype error when the quantized weights are distributed",
    cause="packed 4-bit weights have neither rows nor columns to split, and 8-bit ones are not split with their scales",
    fixes=(NO_TP, LORA),
)
def qlora_with_tensor_parallel(c: Case) -> Column:
    return _is_peft(c) & one_of(c.method, ("qlora", "lora8bit")) & (c.tp > 1)


NF4_BLOCK = 64  # values that share a scale


@rule(
    "peft.qlora-blocks",
    "error",
    "tp",
    engines=("meshwright",),
    message="4-bit rows of {ffn} or {expert_width} values do not split into blocks of 64 at tp={tp}, etp={etp}",
    symptom="two ranks would have to share one scale",
    cause="64 values along a row share a scale; shards must end at block boundaries to match the unsharded codes",
    fixes=({"etp": [1]}, NO_TP, {**NO_TP, "etp": [1]}, LORA),
)
def qlora_blocks_split(c: Case) -> Column:
    split = _blocks(c.ffn) % c.tp + _blocks(c.expert_width) % c.etp
    return _is_peft(c) & (c.method == "qlora") & ("fc2" in c.targets) & (split > 0)


def _blocks(width: Column) -> Column:
    return width // np.gcd(width, NF4_BLOCK)


@rule(
    "peft.qlora-strategy",
    "error",
    "strategy",
    engines=("meshwright",),
    message="4-bit base weights need strategy=fsdp2 or no sharding, not {strategy}",
    symptom="codes are gathered as if they were weights",
    cause="Megatron-FSDP keeps the parameters of a unit in one buffer of one dtype",
    fixes=({"strategy": ["fsdp2"]}, LORA),
)
def qlora_with_megatron_fsdp(c: Case) -> Column:
    return _is_peft(c) & (c.method == "qlora") & (c.strategy == "megatron_fsdp")


@rule(
    "peft.qlora-fp8",
    "error",
    "matmul",
    message="{method} keeps base weights in few bits, which does not work with matmul={matmul}",
    symptom="two quantizers on the same linear layer",
    cause="the base weights are dequantized to bf16 for every matmul",
    fixes=({"matmul": ["same"], "fp8_gather": [False]}, LORA),
)
def qlora_with_fp8(c: Case) -> Column:
    return _is_peft(c) & one_of(c.method, ("qlora", "lora8bit")) & c.fp8


@rule(
    "peft.scale",
    "advice",
    "alpha",
    message="alpha / rank = {ratio:.2g} is an unusual adapter scale",
    symptom="slow learning if too small, unstable if too large",
    cause="the adapter output is multiplied by alpha / rank; 0.5 to 4 is usual",
    fixes=({"alpha": lambda c: [float(c.rank), 2.0 * c.rank]},),
    values={"ratio": lambda c: c.alpha / c.rank},
)
def unusual_adapter_scale(c: Case) -> Column:
    ratio = c.alpha / c.rank
    return _is_peft(c) & (c.method != "rslora") & ((ratio < 0.25) | (ratio > 4))
