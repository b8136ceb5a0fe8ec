"""Offloading of state or activations to host memory."""

from __future__ import annotations

from meshwright.recipes.case import Case, Column
from meshwright.rules.rule import Fix, rule
from meshwright.rules.search_values import NO_PP, not_

NONE: Fix = {"offload": ["none"]}


@rule(
    "offload.activations-pipeline",
    "warning",
    "offload",
    engines=("megatron",),
    message="offload=activations with pp={pp} works only as fine-grained offloading of named modules",
    symptom="CPU offloading is not supported with pipeline parallelism",
    cause="several micro batches are in flight, and copies of full layers would mix them up",
    fixes=(NONE, NO_PP),
)
def activation_offload_with_pipeline(c: Case) -> Column:
    return (c.offload == "activations") & (c.pp > 1)


@rule(
    "offload.activations-recompute",
    "error",
    "offload",
    engines=("megatron", "meshwright"),
    message="offload=activations and recompute=full are both set",
    symptom="CPU offloading cannot be combined with activation recompute",
    cause="an activation is either stored or recomputed, not both",
    fixes=(NONE, {"recompute": ["none"], "recompute_layers": [0]}),
)
def activations_offloaded_and_recomputed(c: Case) -> Column:
    return (c.offload == "activations") & (c.recompute == "full")


@rule(
    "offload.params-strategy",
    "error",
    "offload",
    message="offload=params needs strategy=fsdp2, not {strategy}",
    symptom="unknown option of the strategy",
    cause="only sharded parameters are fetched layer by layer",
    fixes=({"strategy": ["fsdp2"]}, NONE),
)
def param_offload_without_fsdp2(c: Case) -> Column:
    return (c.offload == "params") & (c.strategy != "fsdp2")


@rule(
    "offload.params-stage-3",
    "error",
    "offload",
    engines=("deepspeed",),
    message="offload=params needs reshard_after_forward=true: DeepSpeed offloads parameters with stage 3 only",
    symptom="none: offload_param is ignored, and the parameters stay in GPU memory",
    cause="only stage 3 shards the parameters",
    fixes=({"reshard_after_forward": [True]}, {"offload": ["optimizer"]}, NONE),
)
def param_offload_below_stage_3(c: Case) -> Column:
    return (c.offload == "params") & (c.strategy == "fsdp2") & not_(c.reshard_after_forward)


@rule(
    "offload.optimizer-strategy",
    "error",
    "offload",
    engines=("megatron",),
    message="offload=optimizer needs strategy=zero1, not {strategy}",
    symptom="the CPU-offloaded optimizer needs the precision-aware, distributed optimizer",
    cause="the host updates the rank's shard of the state",
    fixes=({"strategy": ["zero1"]}, NONE),
)
def optimizer_offload_without_zero1(c: Case) -> Column:
    return (c.offload == "optimizer") & (c.strategy != "zero1")


@rule(
    "offload.optimizer-fp8",
    "error",
    "offload",
    engines=("megatron",),
    message="offload=optimizer cannot update parameters stored in {matmul}",
    symptom="optimizer CPU offload supports the delayed FP8 recipe only",
    cause="the host would have to scale and cast the parameters itself",
    fixes=({"fp8_gather": [False]}, NONE),
)
def optimizer_offload_with_fp8_params(c: Case) -> Column:
    return (c.offload == "optimizer") & c.fp8_gather & (c.matmul != "fp8_delayed")


@rule(
    "offload.params-slow",
    "advice",
    "offload",
    message="offload=params copies every layer from the host for each of {accumulation} micro batches",
    symptom="the step takes several times as long; the GPU waits for the host link",
    cause="the host link is tens of times slower than GPU memory",
    fixes=(NONE,),
)
def param_offload_slow(c: Case) -> Column:
    return (c.offload == "params") & (c.world > 1)
