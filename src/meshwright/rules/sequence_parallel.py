"""Sequence parallelism: norms and residuals cut over the tensor-parallel ranks."""

from __future__ import annotations

from meshwright.recipes.case import Case, Column
from meshwright.rules.rule import rule
from meshwright.rules.search_values import NO_TP, not_

OFF = {"sp": [False], "tp_comm_overlap": [False]}


@rule(
    "sequence_parallel.needs-tensor-parallel",
    "warning",
    "sp",
    message="sp is on, but tp=1 leaves nothing to cut over",
    symptom="switched off with a log line, or refused when the model's configuration is built",
    cause="sequence parallelism works over the tensor-parallel ranks",
    fixes=(OFF,),
)
def sp_needs_tp(c: Case) -> Column:
    return c.sp & (c.tp == 1)


@rule(
    "sequence_parallel.off",
    "advice",
    "sp",
    engines=("meshwright", "megatron", "torchtitan", "automodel"),
    message="tp={tp} without sequence parallelism keeps full activations of norms and residuals on every rank",
    symptom="higher activation memory than needed, at the same traffic",
    cause="sequence parallelism replaces each all-reduce by a reduce-scatter and an all-gather of the same size",
    fixes=({"sp": [True]},),
)
def sp_goes_with_tp(c: Case) -> Column:
    return (c.tp > 1) & not_(c.sp) & not_(_another_rule_speaks(c)) & not_(c.is_diffusion)


def _another_rule_speaks(c: Case) -> Column:
    """Where sequence parallelism is refused, or required by an error rule."""
    if c.engine == "megatron":
        return c.is_moe
    refused = c.strategy == "megatron_fsdp"
    if c.engine == "meshwright":
        return c.is_moe | refused
    refusing_model = (c.engine == "automodel") & (c.is_moe | (c.mamba_heads > 0))
    return refusing_model | refused


@rule(
    "sequence_parallel.experts-need-it",
    "error",
    "sp",
    engines=("megatron", "meshwright"),
    message="mixture-of-experts layers with tp={tp} need sequence parallelism to train",
    symptom="ValueError in the MoE layer's first forward; the message speaks of performance",
    cause="without it every tensor-parallel rank would send the same tokens to the experts",
    fixes=({"sp": [True]}, NO_TP),
)
def experts_need_sp(c: Case) -> Column:
    return c.is_moe & (c.tp > 1) & not_(c.sp)


@rule(
    "sequence_parallel.experts-refuse-it",
    "error",
    "sp",
    engines=("automodel",),
    message="mixture-of-experts models refuse sequence parallelism here (tp={tp})",
    symptom="ValueError: the tensor-parallel plan of this model does not support sequence parallelism",
    cause="its expert dispatch expects whole sequences on every tensor-parallel rank",
    fixes=(OFF, NO_TP),
)
def experts_refuse_sp(c: Case) -> Column:
    return c.is_moe & (c.tp > 1) & c.sp


@rule(
    "sequence_parallel.state-space",
    "error",
    "sp",
    engines=("automodel",),
    message="the state-space layers of this model refuse sequence parallelism here (tp={tp})",
    symptom="an assertion that sequence parallelism is off in the model's tensor-parallel plan",
    cause="the scan of a state-space layer runs over the whole sequence",
    fixes=(OFF, NO_TP),
)
def state_space_refuses_sp(c: Case) -> Column:
    return (c.mamba_heads > 0) & (c.tp > 1) & c.sp
