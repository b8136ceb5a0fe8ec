"""Data-parallel strategies, and what each one does not support."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from meshwright.recipes.capabilities import STRATEGY_LIMITS, StrategyLimit
from meshwright.recipes.case import Case, Column
from meshwright.rules.model_families import is_qwen35
from meshwright.rules.rule import Fix, rule
from meshwright.rules.search_values import NO_CP, NO_EP, NO_PP, NO_TP, larger, not_, one_of, smaller

WITHOUT: Mapping[str, Fix] = {
    "tp": NO_TP,
    "pp": NO_PP,
    "cp": NO_CP,
    "ep": NO_EP,
    "dp_replicate": {"dp_replicate": [1]},
    "sp": {"sp": [False], "tp_comm_overlap": [False]},
}
"""Values that remove what a strategy does not support, by field."""
OTHER_STRATEGY = {"ddp": "fsdp2", "megatron_fsdp": "fsdp2", "fsdp2": "zero1"}
"""A strategy that supports it."""


def _register_field(row: StrategyLimit) -> None:
    without, other = WITHOUT[row.field], OTHER_STRATEGY[row.strategy]

    def combined(c: Case) -> Column:
        value = getattr(c, row.field)
        used = value if row.field == "sp" else value > 1  # sp is on or off, the others are degrees
        return (c.strategy == row.strategy) & used

    rule(
        f"strategy.{row.strategy}-{row.field}".replace("_", "-"),
        "error",
        "strategy",
        engines=row.engines,
        message=f"the {row.strategy} strategy of {{engine}} does not support {row.field}={{{row.field}}}",
        symptom=f"ValueError: {row.strategy} does not support {row.field}",
        cause=row.cause,
        fixes=({"strategy": [other]}, without, {"strategy": [other], **without}),
    )(combined)


for _field in STRATEGY_LIMITS:
    _register_field(_field)


class UnsupportedValue(NamedTuple):
    """A value that megatron_fsdp does not support in our engine, the fix, and the reason."""

    name: str
    field: str
    value: object
    without: Fix
    cause: str


UNSUPPORTED_VALUES = (
    UnsupportedValue(
        "compile",
        "compile",
        True,
        {"compile": [False]},
        "a compiled block is one graph, which its hooks are not part of",
    ),
    UnsupportedValue(
        "muon", "optimizer_name", "muon", {"optimizer_name": ["adamw"]}, "it splits weights between arbitrary rows"
    ),
    UnsupportedValue(
        "adamw8bit",
        "optimizer_name",
        "adamw8bit",
        {"optimizer_name": ["adamw"]},
        "it splits weights between arbitrary values, also inside a block that shares a scale",
    ),
    UnsupportedValue("offload", "offload", "optimizer", {"offload": ["none"]}, "it keeps all state in GPU buffers"),
    UnsupportedValue(
        "peft", "goal", "peft", {}, "it initializes and shards a model in one pass; adapters need loaded weights"
    ),
)


def _register_value(row: UnsupportedValue) -> None:
    def combined(c: Case) -> Column:
        return (c.strategy == "megatron_fsdp") & (getattr(c, row.field) == row.value)

    without = ({**row.without}, {"strategy": ["fsdp2"], **row.without}) if row.without else ()
    rule(
        f"strategy.megatron-fsdp-{row.name}",
        "error",
        "strategy",
        engines=("meshwright",),
        message=f"the megatron_fsdp strategy does not support {row.field}={{{row.field}}}",
        symptom="error when training starts",
        cause=row.cause,
        fixes=({"strategy": ["fsdp2"]}, *without),
    )(combined)


for _value in UNSUPPORTED_VALUES:
    _register_value(_value)


@rule(
    "strategy.tied-fsdp2",
    "error",
    "strategy",
    engines=("megatron",),
    message="FSDP2 inside Megatron does not support a model that shares its embedding with its head",
    symptom="assertion that embeddings and output weights are untied",
    cause="the shared weight would have to be in two FSDP units",
    fixes=({"strategy": ["zero1", "megatron_fsdp"]},),
)
def tied_weights_with_fsdp2(c: Case) -> Column:
    return c.tied & (c.strategy == "fsdp2")


@rule(
    "strategy.deepspeed-pipeline",
    "error",
    "strategy",
    engines=("deepspeed",),
    message="DeepSpeed supports pp={pp} with ZeRO stage 1 at most, not {strategy}",
    symptom="assertion that ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism",
    cause="gradients of a pipeline stage are not sharded until the last micro batch",
    fixes=({"strategy": ["zero1"]}, NO_PP),
)
def deepspeed_pipeline_above_zero1(c: Case) -> Column:
    return (c.pp > 1) & not_(one_of(c.strategy, ("zero1", "ddp")))


@rule(
    "strategy.deepspeed-tensor-parallel",
    "warning",
    "tp",
    engines=("deepspeed",),
    message="tp={tp} with ZeRO stage 3 needs DeepSpeed 0.19.4 or newer",
    symptom="AssertionError: the compatibility between 'autotp' and 'zero_stage = 3' has not been validated",
    cause="both shard the same matrices; older versions combine tensor parallelism with stages 0 to 2 only",
    fixes=(NO_TP, {"reshard_after_forward": [False]}, {"strategy": ["zero1"]}),
)
def deepspeed_tensor_parallel_in_stage_3(c: Case) -> Column:
    return (c.tp > 1) & (c.strategy == "fsdp2") & c.reshard_after_forward


def _little(c: Case) -> list[int]:
    """Return tensor-parallel degrees that combine well with FSDP."""
    return [degree for degree in smaller("tp")(c) if degree <= 2]


@rule(
    "strategy.fsdp-with-tensor-parallel",
    "warning",
    "tp",
    message="tp={tp} combined with {strategy} on {gpu}",
    symptom="low throughput: tensor-parallel communication on top of the parameter all-gathers",
    cause="on Hopper, links are the bottleneck of FSDP with wide tensor parallelism; newer GPUs tolerate more",
    fixes=(
        {"tp": _little},
        NO_TP,
        {"tp": _little, "recompute": ["selective", "full"], "recompute_modules": [()]},
        {"tp": _little, "pp": larger("pp")},
    ),
    pitfall="FSDP + TP > 1 on H100",
)
def fsdp_with_wide_tensor_parallel(c: Case) -> Column:
    sharded = one_of(c.strategy, ("fsdp2", "megatron_fsdp")) & (c.dp > 1)
    return sharded & (c.tp > 2) & (c.gpu_arch == "hopper")


@rule(
    "strategy.qwen35-vl-experts",
    "warning",
    "strategy",
    message="Qwen3.5-VL MoE with {strategy} was tested on Blackwell only, not on {gpu}",
    symptom="may fail or run out of memory; no good run is reported",
    cause="the sharded path of this vision-language MoE was only validated there",
    fixes=({"strategy": ["zero1", "fsdp2"]},),
    pitfall="Qwen35-VL MoE FSDP",
)
def qwen35_vl_moe_untested(c: Case) -> Column:
    affected = is_qwen35(c) & c.has_vision & c.is_moe & (c.gpu_arch not in ("blackwell", "rubin"))
    return affected & (c.strategy == "megatron_fsdp")
