"""Sequence parallelism: norms and residuals sharded over the tensor-parallel ranks."""

from __future__ import annotations

from meshwright.recipes.case import Case, Column
from meshwright.rules.rule import rule
from meshwright.rules.search_values import NO_TP, not_

OFF = {"sp": [False], "tp_comm_overlap": [False]}


@rule(
    "sequence_parallel.needs-tensor-parallel",
    "warning",
    "sp",
    message="sp=true has no effect at tp=1",
    symptom="disabled with a log line, or rejected when the model's configuration is built",
    cause="sequence parallelism shards over the tensor-parallel ranks",
    fixes=(OFF,),
)
def sp_without_tp(c: Case) -> Column:
    return c.sp & (c.tp == 1)


@rule(
    "sequence_parallel.off",
    "advice",
    "sp",
    engines=("meshwright", "megatron", "torchtitan", "automodel"),
    message="tp={tp} without sequence parallelism keeps full norm and residual activations on every rank",
    symptom="higher activation memory than needed, at the same communication volume",
    cause="sequence parallelism replaces each all-reduce with a reduce-scatter and an all-gather of the same size",
    fixes=({"sp": [True]},),
)
def tp_without_sp(c: Case) -> Column:
    return (c.tp > 1) & not_(c.sp) & not_(_covered_by_error_rule(c)) & not_(c.is_diffusion)


def _covered_by_error_rule(c: Case) -> Column:
    """Return where an error rule already requires or rejects sequence parallelism."""
    if c.engine == "megatron":
        return c.is_moe
    rejected = c.strategy == "megatron_fsdp"
    if c.engine == "meshwright":
        return c.is_moe | rejected
    rejecting_model = (c.engine == "automodel") & (c.is_moe | (c.mamba_heads > 0))
    return rejecting_model | rejected


@rule(
    "sequence_parallel.required-by-moe",
    "error",
    "sp",
    engines=("megatron", "meshwright"),
    message="MoE layers with tp={tp} need sp=true to train",
    symptom="ValueError in the MoE layer's first forward; the message mentions performance",
    cause="without it, every tensor-parallel rank would send the same tokens to the experts",
    fixes=({"sp": [True]}, NO_TP),
)
def moe_without_sp(c: Case) -> Column:
    return c.is_moe & (c.tp > 1) & not_(c.sp)


@rule(
    "sequence_parallel.unsupported-by-moe",
    "error",
    "sp",
    engines=("automodel",),
    message="{engine} does not support sequence parallelism in MoE models (tp={tp})",
    symptom="ValueError: the tensor-parallel plan of this model does not support sequence parallelism",
    cause="its expert dispatch expects full sequences on every tensor-parallel rank",
    fixes=(OFF, NO_TP),
)
def moe_with_sp(c: Case) -> Column:
    return c.is_moe & (c.tp > 1) & c.sp


@rule(
    "sequence_parallel.state-space",
    "error",
    "sp",
    engines=("automodel",),
    message="{engine} does not support sequence parallelism in Mamba layers (tp={tp})",
    symptom="assertion that sequence parallelism is off in the model's tensor-parallel plan",
    cause="the scan of a Mamba layer runs over the full sequence",
    fixes=(OFF, NO_TP),
)
def mamba_with_sp(c: Case) -> Column:
    return (c.mamba_heads > 0) & (c.tp > 1) & c.sp
