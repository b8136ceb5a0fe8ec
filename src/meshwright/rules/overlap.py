"""Communication behind computation."""

from __future__ import annotations

from meshwright.recipes.case import Case, Column
from meshwright.rules.rule import rule
from meshwright.rules.search_values import not_, one_of


@rule(
    "overlap.gather-needs-sharding",
    "error",
    "overlap_param_gather",
    engines=("megatron",),
    message="overlap_param_gather needs a strategy that gathers parameters, not {strategy}",
    symptom="overlapping the parameter gather needs the distributed optimizer or FSDP",
    cause="with replicated parameters nothing is gathered",
    fixes=({"overlap_param_gather": [False]}, {"strategy": ["zero1"]}),
)
def gather_exists(c: Case) -> Column:
    return c.overlap_param_gather & (c.strategy == "ddp")


@rule(
    "overlap.gather-needs-reduction",
    "error",
    "overlap_param_gather",
    engines=("megatron",),
    message="overlap_param_gather is on and overlap_grad_reduce is off",
    symptom="overlap-param-gather must be used together with overlap-grad-reduce",
    cause="both use the same buckets, and the gather follows the order of the reduction",
    fixes=({"overlap_param_gather": [False]}, {"overlap_grad_reduce": [True]}),
)
def gather_follows_reduction(c: Case) -> Column:
    return c.overlap_param_gather & not_(c.overlap_grad_reduce) & (c.strategy != "ddp")


@rule(
    "overlap.tensor-needs-sequence-parallel",
    "warning",
    "tp_comm_overlap",
    engines=("megatron", "meshwright"),
    message="tp_comm_overlap without sequence parallelism (tp={tp})",
    symptom="switches itself off without a word, or is refused",
    cause="the gathers and scatters that can be overlapped are those of sequence parallelism",
    fixes=({"sp": [True]}, {"tp_comm_overlap": [False]}),
)
def tensor_overlap_needs_sp(c: Case) -> Column:
    return c.tp_comm_overlap & (c.tp > 1) & not_(c.sp)


@rule(
    "overlap.async-tensor-parallel",
    "error",
    "tp_comm_overlap",
    engines=("automodel", "torchtitan"),
    message="asynchronous tensor parallelism (tp={tp}) needs {needs} on {engine}",
    symptom="ValueError: async tensor parallelism needs …",
    cause="the compiler finds the gathers of sequence parallelism and splits the matrix products around them",
    fixes=({"sp": [True]}, {"compile": [True]}, {"tp_comm_overlap": [False]}),
    values={"needs": lambda c: "sequence parallelism" if c.engine == "automodel" else "a compiled model"},
)
def async_tensor_parallel_has_its_needs(c: Case) -> Column:
    return c.tp_comm_overlap & (c.tp > 1) & not_(c.sp if c.engine == "automodel" else c.compile)


@rule(
    "overlap.expert-gradients-on-hopper",
    "advice",
    "overlap_grad_reduce",
    engines=("megatron",),
    message="overlap_grad_reduce for experts on {gpu}; half of the published presets turn it off there",
    symptom="slower steps than without the overlap",
    cause="the reduction takes memory bandwidth and links away from the expert all-to-all",
    fixes=({"overlap_grad_reduce": [False], "overlap_param_gather": [False]},),
    pitfall="MoE overlap_grad_reduce on H100",
)
def expert_gradients_wait(c: Case) -> Column:
    return c.is_moe & (c.ep > 1) & c.overlap_grad_reduce & (c.gpu_arch == "hopper") & (c.dp > 1)


@rule(
    "overlap.reduction-exposed",
    "advice",
    "overlap_grad_reduce",
    engines=("megatron",),
    message="gradients of {dp} ranks are reduced after the backward pass instead of during it",
    symptom="a gap at the end of every step that grows with the model",
    cause="dense layers leave the links idle during the backward pass",
    fixes=({"overlap_grad_reduce": [True]},),
)
def reduction_is_hidden(c: Case) -> Column:
    bulky = not_(c.is_moe) & (c.goal == "pretrain") & (c.params_total > 5e8)
    return bulky & not_(c.overlap_grad_reduce) & (c.dp > 1) & one_of(c.strategy, ("zero1", "ddp"))
