"""State or activations kept in host memory."""

from __future__ import annotations

from meshwright.recipes.case import Case, Column
from meshwright.rules.memory import offloads
from meshwright.rules.rule import Fix, rule
from meshwright.rules.search_values import NO_PP, not_, one_of

SUPPORTED: dict[str, tuple[str, ...]] = {
    "meshwright": ("none", "optimizer", "activations", "params"),
    "megatron": ("none", "optimizer", "activations"),
    "torchtitan": ("none", "params"),
    "automodel": ("none", "params"),
    "kempnerforge": ("none",),
    "fsdp1": ("none", "params"),
    "deepspeed": ("none", "optimizer", "params"),
}
NONE: Fix = {"offload": ["none"]}


@rule(
    "offload.supported",
    "error",
    "offload",
    message="{engine} cannot keep {offload} in host memory",
    symptom="an unknown option, or no such option",
    cause="engines differ in what they can move to the host",
    fixes=({"offload": offloads("params", "optimizer", "none")},),
)
def offload_is_offered(c: Case) -> Column:
    return not_(one_of(c.offload, SUPPORTED[c.engine]))


@rule(
    "offload.activations-pipeline",
    "warning",
    "offload",
    engines=("megatron",),
    message="activations in host memory with pp={pp} work by the fine-grained offloading of named modules only",
    symptom="CPU offloading is not supported with pipeline parallelism",
    cause="several micro batches are in flight, and whole-layer copies would mix them up",
    fixes=(NONE, NO_PP),
)
def offloaded_activations_refuse_pipelines(c: Case) -> Column:
    return (c.offload == "activations") & (c.pp > 1)


@rule(
    "offload.activations-recompute",
    "error",
    "offload",
    engines=("megatron", "meshwright"),
    message="activations are both kept in host memory and recomputed",
    symptom="CPU offloading cannot be combined with activation recompute",
    cause="an activation is stored somewhere or computed again, not both",
    fixes=(NONE, {"recompute": ["none"], "recompute_layers": [0]}),
)
def activations_are_saved_one_way(c: Case) -> Column:
    return (c.offload == "activations") & (c.recompute == "full")


@rule(
    "offload.params-strategy",
    "error",
    "offload",
    message="parameters can be kept in host memory by fsdp2 only, not by {strategy}",
    symptom="an unknown option of the strategy",
    cause="only sharded parameters are fetched layer by layer",
    fixes=({"strategy": ["fsdp2"]}, NONE),
)
def offloaded_params_are_sharded(c: Case) -> Column:
    return (c.offload == "params") & (c.strategy != "fsdp2")


@rule(
    "offload.optimizer-strategy",
    "error",
    "offload",
    engines=("megatron",),
    message="the optimizer can be kept in host memory with zero1 only, not with {strategy}",
    symptom="the CPU-offloaded optimizer needs the precision-aware, distributed optimizer",
    cause="the host updates the rank's own share of the state",
    fixes=({"strategy": ["zero1"]}, NONE),
)
def offloaded_optimizer_is_sharded(c: Case) -> Column:
    return (c.offload == "optimizer") & (c.strategy != "zero1")


@rule(
    "offload.optimizer-fp8",
    "error",
    "offload",
    engines=("megatron",),
    message="an optimizer in host memory cannot update parameters kept in {matmul}",
    symptom="optimizer CPU offload supports the delayed FP8 recipe only",
    cause="the host would have to scale and cast the parameters itself",
    fixes=({"fp8_gather": [False]}, NONE),
)
def host_updates_plain_parameters(c: Case) -> Column:
    return (c.offload == "optimizer") & c.fp8_gather & (c.matmul != "fp8_delayed")


@rule(
    "offload.params-slow",
    "advice",
    "offload",
    message="parameters in host memory are copied in for every layer of every micro batch ({accumulation} of them)",
    symptom="a step that takes several times as long; the GPU waits for the host link",
    cause="the host link is tens of times slower than GPU memory",
    fixes=(NONE,),
)
def parameters_stay_on_the_gpu(c: Case) -> Column:
    return (c.offload == "params") & (c.world > 1)
