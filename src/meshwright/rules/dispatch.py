"""How tokens reach their experts, and what may run meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from meshwright.recipes.case import Case, Column
from meshwright.rules.rule import Fix, rule
from meshwright.rules.search_values import larger, not_, one_of, without

FLEX = ("deepep", "hybridep")
ALLTOALL: Fix = {"dispatcher": ["alltoall"]}
DEEPEP_GPUS = ("B200", "B300")  # of Blackwell; the rack-scale kinds have none
NO_OVERLAP: Fix = {"ep_overlap": [False]}


@rule(
    "dispatch.deepep-gpu",
    "error",
    "dispatcher",
    message="the deepep dispatcher does not run on {gpu}",
    symptom="validation refuses it when set by hand; a recipe's own setting falls back to all-to-all with a log line",
    cause="its kernels exist for Ampere, Hopper, B200 and B300",
    fixes=({"dispatcher": ["hybridep", "alltoall"]}, ALLTOALL),
)
def deepep_runs_here(c: Case) -> Column:
    supported = (c.gpu_arch in ("ampere", "hopper")) | (c.gpu in DEEPEP_GPUS)
    return c.is_moe & (c.dispatcher == "deepep") & not_(supported)


@rule(
    "dispatch.hybridep-gpu",
    "error",
    "dispatcher",
    message="the hybridep dispatcher does not run on {gpu} (compute capability {capability})",
    symptom="validation refuses it when set by hand; a recipe's own setting falls back to all-to-all with a log line",
    cause="its kernels exist for compute capabilities 8, 9 and 10",
    fixes=(ALLTOALL,),
)
def hybridep_runs_here(c: Case) -> Column:
    supported = (int(c.capability) in (8, 9, 10)) & (c.gpu_arch != "cdna3")
    return c.is_moe & (c.dispatcher == "hybridep") & not_(supported)


@rule(
    "dispatch.nothing-to-send",
    "advice",
    "dispatcher",
    message="the {dispatcher} dispatcher has nowhere to send tokens at ep × etp = 1",
    symptom="nothing is gained; some releases assert that the dispatcher has expert ranks",
    cause="its buffers are built over the expert-parallel group",
    fixes=(ALLTOALL, {"ep": larger("ep")}),
)
def flex_has_expert_ranks(c: Case) -> Column:
    return c.is_moe & one_of(c.dispatcher, FLEX) & (c.ep * c.etp == 1)


@rule(
    "dispatch.allgather-large",
    "warning",
    "dispatcher",
    message="the allgather dispatcher sends all tokens to all ep={ep} ranks",
    symptom="memory and traffic grow with ep, although each token needs {topk} experts only",
    cause="it gathers every token on every expert rank and throws most away",
    fixes=(ALLTOALL,),
)
def allgather_stays_small(c: Case) -> Column:
    return c.is_moe & (c.dispatcher == "allgather") & (c.ep > 8)


@rule(
    "dispatch.capacity-allgather",
    "error",
    "dispatcher",
    engines=("megatron",),
    message="a capacity factor ({capacity_factor}) cannot be kept by the allgather dispatcher",
    symptom="expert capacity is only supported with the all-to-all dispatchers",
    cause="dropping and padding happen where tokens are sent",
    fixes=(ALLTOALL, {"capacity_factor": [0.0]}),
)
def capacity_needs_alltoall(c: Case) -> Column:
    return c.is_moe & (c.capacity_factor > 0) & (c.dispatcher == "allgather")


@rule(
    "dispatch.shared-overlap-nothing",
    "advice",
    "shared_expert_overlap",
    message="the model has no shared experts that could be computed while tokens travel",
    symptom="the setting does nothing",
    cause="only shared experts, which every token visits, need no dispatch",
    fixes=({"shared_expert_overlap": [False]},),
)
def shared_experts_exist(c: Case) -> Column:
    return c.is_moe & c.shared_expert_overlap & not_(c.has_shared_experts)


@rule(
    "dispatch.shared-overlap-recompute",
    "error",
    "shared_expert_overlap",
    message="shared experts are both overlapped with the dispatch and recomputed",
    symptom="shared_experts recompute cannot be combined with shared-expert overlap",
    cause="overlapped work runs on another stream, outside the recomputed part",
    fixes=(
        {"recompute_modules": without("recompute_modules", lambda c: ("shared_experts",))},
        {"shared_expert_overlap": [False]},
    ),
)
def shared_experts_do_one_thing(c: Case) -> Column:
    recomputed = "shared_experts" in c.recompute_modules
    return c.is_moe & c.shared_expert_overlap & recomputed & (c.recompute == "selective")


@rule(
    "dispatch.grouped-gemm",
    "error",
    "grouped_gemm",
    message="grouped matrix products need compute capability 8, {gpu} has {capability}",
    symptom="grouped GEMM is not supported on this device",
    cause="the kernel that computes all experts of a rank at once does not exist for older GPUs",
    fixes=({"grouped_gemm": [False]},),
)
def grouped_gemm_runs_here(c: Case) -> Column:
    return c.is_moe & c.grouped_gemm & (c.capability < 8)


class OverlapRequirement(NamedTuple):
    """Something the overlap of expert traffic needs, where it lacks, and how to get it."""

    name: str
    message: str
    lacking: Callable[[Case], Column]
    fixes: tuple[Fix, ...]


def _recomputes_experts(c: Case) -> Column:
    return (c.recompute == "full") | ((c.recompute == "selective") & ("moe" in c.recompute_modules))


OVERLAP_REQUIREMENTS = (
    OverlapRequirement(
        "ranks", "ep={ep}: there is no expert traffic to overlap", lambda c: c.ep == 1, ({"ep": larger("ep")},)
    ),
    OverlapRequirement(
        "dispatcher", "it needs all-to-all or flexible dispatch", lambda c: c.dispatcher == "allgather", (ALLTOALL,)
    ),
    OverlapRequirement(
        "interleaving",
        "with pp={pp} it needs interleaved stages (vp above 1)",
        lambda c: (c.pp > 1) & (c.vp == 1),
        ({"vp": [2, 3, 4], "pp_schedule": ["interleaved_1f1b"]},),
    ),
    OverlapRequirement(
        "recompute",
        "recomputing whole layers or experts would repeat the traffic",
        _recomputes_experts,
        (
            {"recompute_modules": without("recompute_modules", lambda c: ("moe",)), "recompute": ["selective"]},
            {"recompute": ["none"], "recompute_modules": [()]},
        ),
    ),
    OverlapRequirement(
        "shared-experts",
        "shared-expert overlap wants the same time",
        lambda c: c.shared_expert_overlap,
        ({"shared_expert_overlap": [False]},),
    ),
    OverlapRequirement(
        "precision", "it runs in bf16 or fp16 only", lambda c: c.compute == "fp32", ({"compute": ["bf16"]},)
    ),
    OverlapRequirement(
        "prediction-layers",
        "{mtp_layers} multi-token-prediction layers are more than one",
        lambda c: (c.mtp_layers > 1) & (c.mtp_loss > 0),
        ({"mtp_loss": [0.0]},),
    ),
)


def _require(condition: OverlapRequirement) -> None:
    def lacking(c: Case) -> Column:
        return c.is_moe & c.ep_overlap & condition.lacking(c)

    rule(
        f"dispatch.overlap-{condition.name}",
        "error",
        "ep_overlap",
        engines=("megatron",),
        message=f"the overlap of expert traffic cannot work: {condition.message}",
        symptom="an assertion on overlap_moe_expert_parallel_comm when the configuration is checked",
        cause="the traffic of one micro batch hides behind the compute of another, in one particular schedule",
        fixes=(*condition.fixes, NO_OVERLAP),
    )(lacking)


for _condition in OVERLAP_REQUIREMENTS:
    _require(_condition)
