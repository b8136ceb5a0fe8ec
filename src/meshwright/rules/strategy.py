"""How data-parallel ranks share state, and what each way refuses."""

from __future__ import annotations

from typing import NamedTuple

from meshwright.recipes.case import Case, Column
from meshwright.rules.model_families import is_qwen35
from meshwright.rules.rule import Fix, rule
from meshwright.rules.search_values import NO_CP, NO_EP, NO_PP, NO_TP, larger, not_, one_of, smaller

SUPPORTED: dict[str, tuple[str, ...]] = {
    "meshwright": ("fsdp2", "ddp", "megatron_fsdp"),
    "megatron": ("zero1", "ddp", "megatron_fsdp", "fsdp2"),
    "torchtitan": ("fsdp2", "ddp"),
    "automodel": ("fsdp2", "megatron_fsdp", "ddp"),
    "kempnerforge": ("fsdp2",),
    "fsdp1": ("fsdp2", "ddp"),
    "deepspeed": ("zero1", "fsdp2", "ddp"),  # fsdp2 stands for ZeRO-3
}


class UnsupportedField(NamedTuple):
    """A strategy, the field it cannot combine with, where, and what to do about the field instead."""

    strategy: str
    field: str
    engines: tuple[str, ...]
    without: Fix
    other: str  # a strategy that can
    cause: str


TORCH_DDP = ("meshwright", "automodel", "torchtitan")
MFSDP = ("meshwright", "automodel")  # Megatron's own engine runs it with experts and sequence parallelism
REPLICATED = "every rank holds and updates the whole model; no other axis has a place in it"
NOT_THERE = "this sharding works on whole models over the data-parallel ranks"
UNSUPPORTED_FIELDS = (
    UnsupportedField("ddp", "tp", TORCH_DDP, NO_TP, "fsdp2", REPLICATED),
    UnsupportedField("ddp", "pp", TORCH_DDP, NO_PP, "fsdp2", REPLICATED),
    UnsupportedField("ddp", "cp", TORCH_DDP, NO_CP, "fsdp2", REPLICATED),
    UnsupportedField("ddp", "ep", TORCH_DDP, NO_EP, "fsdp2", REPLICATED),
    UnsupportedField("ddp", "dp_replicate", TORCH_DDP, {"dp_replicate": [1]}, "fsdp2", REPLICATED),
    UnsupportedField("megatron_fsdp", "pp", (*MFSDP, "megatron"), NO_PP, "fsdp2", NOT_THERE),
    UnsupportedField("megatron_fsdp", "ep", MFSDP, NO_EP, "fsdp2", NOT_THERE),
    UnsupportedField("megatron_fsdp", "sp", MFSDP, {"sp": [False], "tp_comm_overlap": [False]}, "fsdp2", NOT_THERE),
    UnsupportedField("megatron_fsdp", "dp_replicate", ("automodel",), {"dp_replicate": [1]}, "fsdp2", NOT_THERE),
    UnsupportedField("fsdp2", "pp", ("megatron",), NO_PP, "zero1", "torch FSDP2 inside Megatron wraps whole models"),
    UnsupportedField("fsdp2", "ep", ("megatron",), NO_EP, "zero1", "torch FSDP2 inside Megatron wraps whole models"),
)


def _refuse(refusal: UnsupportedField) -> None:
    def combined(c: Case) -> Column:
        value = getattr(c, refusal.field)
        used = value if refusal.field == "sp" else value > 1  # sp is on or off, the others are degrees
        return (c.strategy == refusal.strategy) & used

    rule(
        f"strategy.{refusal.strategy}-{refusal.field}".replace("_", "-"),
        "error",
        "strategy",
        engines=refusal.engines,
        message=f"the {refusal.strategy} strategy of {{engine}} cannot run with {refusal.field}={{{refusal.field}}}",
        symptom=f"ValueError: {refusal.strategy} does not support {refusal.field}",
        cause=refusal.cause,
        fixes=({"strategy": [refusal.other]}, refusal.without, {"strategy": [refusal.other], **refusal.without}),
    )(combined)


for _refusal in UNSUPPORTED_FIELDS:
    _refuse(_refusal)


class UnsupportedValue(NamedTuple):
    """A value that our engine's megatron_fsdp cannot combine with, what to say instead of it, and why."""

    name: str
    field: str
    value: object
    without: Fix
    cause: str


UNSUPPORTED_VALUES = (
    UnsupportedValue(
        "compile", "compile", True, {"compile": [False]}, "a compiled block is one graph, its hooks are not part of it"
    ),
    UnsupportedValue(
        "muon", "optimizer_name", "muon", {"optimizer_name": ["adamw"]}, "it cuts weights between any two rows"
    ),
    UnsupportedValue(
        "offload", "offload", "optimizer", {"offload": ["none"]}, "it keeps all state in buffers on the GPU"
    ),
    UnsupportedValue(
        "peft", "goal", "peft", {}, "it fills and cuts a model at once; adapters start from weights that are there"
    ),
)


def _refuse_value(unfit: UnsupportedValue) -> None:
    def combined(c: Case) -> Column:
        return (c.strategy == "megatron_fsdp") & (getattr(c, unfit.field) == unfit.value)

    without = ({**unfit.without}, {"strategy": ["fsdp2"], **unfit.without}) if unfit.without else ()
    rule(
        f"strategy.megatron-fsdp-{unfit.name}",
        "error",
        "strategy",
        engines=("meshwright",),
        message=f"the megatron_fsdp strategy cannot run with {unfit.field}={{{unfit.field}}}",
        symptom="an error when training starts",
        cause=unfit.cause,
        fixes=({"strategy": ["fsdp2"]}, *without),
    )(combined)


for _unfit in UNSUPPORTED_VALUES:
    _refuse_value(_unfit)


@rule(
    "strategy.supported",
    "error",
    "strategy",
    message="{engine} has no {strategy} strategy; it has {supported}",
    symptom="an unknown strategy, or no option to ask for it",
    cause="engines share data-parallel state in different ways",
    fixes=({"strategy": ["fsdp2", "zero1"]},),
    values={"supported": lambda c: ", ".join(SUPPORTED[c.engine])},
)
def strategy_is_offered(c: Case) -> Column:
    return not_(one_of(c.strategy, SUPPORTED[c.engine]))


@rule(
    "strategy.tied-fsdp2",
    "error",
    "strategy",
    engines=("megatron",),
    message="torch FSDP2 inside Megatron cannot train a model that shares its embedding with its head",
    symptom="an assertion that embeddings and output weights are untied",
    cause="the shared weight would have to live in two FSDP units",
    fixes=({"strategy": ["zero1", "megatron_fsdp"]},),
)
def tied_weights_refuse_fsdp2(c: Case) -> Column:
    return c.tied & (c.strategy == "fsdp2")


@rule(
    "strategy.deepspeed-pipeline",
    "error",
    "strategy",
    engines=("deepspeed",),
    message="pp={pp} with {strategy}: DeepSpeed pipelines run with ZeRO stage 1 at most",
    symptom="an assertion that ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism",
    cause="gradients of a pipeline stage stay whole until the last micro batch",
    fixes=({"strategy": ["zero1"]}, NO_PP),
)
def deepspeed_pipelines_use_zero1(c: Case) -> Column:
    return (c.pp > 1) & not_(one_of(c.strategy, ("zero1", "ddp")))


def _little(c: Case) -> list[int]:
    """Tensor-parallel degrees that sharding bears well."""
    return [degree for degree in smaller("tp")(c) if degree <= 2]


@rule(
    "strategy.fsdp-with-tensor-parallel",
    "warning",
    "tp",
    message="tp={tp} together with {strategy} on {gpu}",
    symptom="low throughput: traffic inside every layer on top of the gathering of parameters",
    cause="on Hopper the links are the bottleneck of sharding plus wide tensor parallelism; newer GPUs bear more",
    fixes=(
        {"tp": _little},
        NO_TP,
        {"tp": _little, "recompute": ["selective", "full"], "recompute_modules": [()]},
        {"tp": _little, "pp": larger("pp")},
    ),
    pitfall="FSDP + TP > 1 on H100",
)
def sharding_prefers_little_tensor_parallel(c: Case) -> Column:
    sharded = one_of(c.strategy, ("fsdp2", "megatron_fsdp")) & (c.dp > 1)
    return sharded & (c.tp > 2) & (c.gpu_arch == "hopper")


@rule(
    "strategy.qwen35-vl-experts",
    "warning",
    "strategy",
    message="Qwen3.5-VL with experts under {strategy} has been tested on Blackwell only, not on {gpu}",
    symptom="may fail or run out of memory; nobody reports a good run",
    cause="the sharded path of this vision-language mixture was only validated there",
    fixes=({"strategy": ["zero1", "fsdp2"]},),
    pitfall="Qwen35-VL MoE FSDP",
)
def qwen35_vl_shards_on_blackwell(c: Case) -> Column:
    affected = is_qwen35(c) & c.has_vision & c.is_moe & (c.gpu_arch not in ("blackwell", "rubin"))
    return affected & (c.strategy == "megatron_fsdp")
