"""Overlap of communication and compute."""

from __future__ import annotations

from meshwright.recipes.case import Case, Column
from meshwright.rules.rule import rule
from meshwright.rules.search_values import not_, one_of


@rule(
    "overlap.gather-needs-sharding",
    "error",
    "overlap_param_gather",
    engines=("megatron",),
    message="overlap_param_gather=true needs a strategy that gathers parameters, not {strategy}",
    symptom="overlapping the parameter gather needs the distributed optimizer or FSDP",
    cause="with replicated parameters, nothing is gathered",
    fixes=({"strategy": ["zero1"]}, {"overlap_param_gather": [False]}),
)
def gather_overlap_without_sharding(c: Case) -> Column:
    return c.overlap_param_gather & (c.strategy == "ddp")


@rule(
    "overlap.gather-needs-reduction",
    "error",
    "overlap_param_gather",
    engines=("megatron",),
    message="overlap_param_gather=true needs overlap_grad_reduce=true",
    symptom="overlap-param-gather must be used together with overlap-grad-reduce",
    cause="both use the same buckets, and the gather follows the order of the reduction",
    fixes=({"overlap_param_gather": [False]}, {"overlap_grad_reduce": [True]}),
)
def gather_overlap_without_reduce_overlap(c: Case) -> Column:
    return c.overlap_param_gather & not_(c.overlap_grad_reduce) & (c.strategy != "ddp")


@rule(
    "overlap.tensor-needs-sequence-parallel",
    "warning",
    "tp_comm_overlap",
    engines=("megatron",),
    message="tp_comm_overlap=true needs sp=true (tp={tp})",
    symptom="silently disabled, or rejected",
    cause="only the all-gathers and reduce-scatters of sequence parallelism can be overlapped",
    fixes=({"sp": [True]}, {"tp_comm_overlap": [False]}),
)
def tp_overlap_without_sp(c: Case) -> Column:
    return c.tp_comm_overlap & (c.tp > 1) & not_(c.sp)


@rule(
    "overlap.async-tensor-parallel",
    "error",
    "tp_comm_overlap",
    engines=("automodel", "torchtitan"),
    message="async tensor parallelism (tp={tp}) needs {needs} on {engine}",
    symptom="ValueError: async tensor parallelism needs …",
    cause="the compiler finds the all-gathers of sequence parallelism and splits the matmuls around them",
    fixes=({"sp": [True]}, {"compile": [True]}, {"tp_comm_overlap": [False]}),
    values={"needs": lambda c: "sequence parallelism" if c.engine == "automodel" else "a compiled model"},
)
def async_tp_unmet(c: Case) -> Column:
    return c.tp_comm_overlap & (c.tp > 1) & not_(c.sp if c.engine == "automodel" else c.compile)


@rule(
    "overlap.expert-gradients-on-hopper",
    "advice",
    "overlap_grad_reduce",
    engines=("megatron",),
    message="overlap_grad_reduce=true for an MoE model on {gpu}; half of the published presets turn it off there",
    symptom="slower steps than without the overlap",
    cause="the reduction competes with the expert all-to-all for memory bandwidth and links",
    fixes=({"overlap_grad_reduce": [False], "overlap_param_gather": [False]},),
    pitfall="MoE overlap_grad_reduce on H100",
)
def moe_reduce_overlap_on_hopper(c: Case) -> Column:
    return c.is_moe & (c.ep > 1) & c.overlap_grad_reduce & (c.gpu_arch == "hopper") & (c.dp > 1)


@rule(
    "overlap.reduction-exposed",
    "advice",
    "overlap_grad_reduce",
    engines=("megatron",),
    message="overlap_grad_reduce=false: gradients of {dp} ranks are reduced after the backward pass",
    symptom="a gap at the end of every step that grows with the model",
    cause="dense layers leave the links idle during the backward pass",
    fixes=({"overlap_grad_reduce": [True]},),
)
def grad_reduce_exposed(c: Case) -> Column:
    bulky = not_(c.is_moe) & (c.goal == "pretrain") & (c.params_total > 5e8)
    return bulky & not_(c.overlap_grad_reduce) & (c.dp > 1) & one_of(c.strategy, ("zero1", "ddp"))
