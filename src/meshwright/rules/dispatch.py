"""Token dispatch to experts, and what overlaps with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from meshwright.clusters import AMD_ARCHS
from meshwright.recipes.capabilities import deepep_runs_on, engines_with
from meshwright.recipes.case import Case, Column
from meshwright.rules.rule import Fix, rule
from meshwright.rules.search_values import larger, not_, one_of, without

FLEX = ("deepep", "hybridep")
ALLTOALL: Fix = {"dispatcher": ["alltoall"]}
NO_OVERLAP: Fix = {"ep_overlap": [False]}


@rule(
    "dispatch.deepep-gpu",
    "error",
    "dispatcher",
    engines=engines_with("dispatcher", "deepep"),
    message="the deepep dispatcher does not support {gpu}",
    symptom="rejected if set by the user; a recipe's setting falls back to all-to-all with a log line",
    cause="DeepEP kernels exist for Ampere, Hopper, B200 and B300",
    fixes=({"dispatcher": ["hybridep", "alltoall"]}, ALLTOALL),
)
def deepep_unsupported_gpu(c: Case) -> Column:
    return c.is_moe & (c.dispatcher == "deepep") & not_(deepep_runs_on(c))


@rule(
    "dispatch.hybridep-gpu",
    "error",
    "dispatcher",
    engines=engines_with("dispatcher", "hybridep"),
    message="the hybridep dispatcher does not support {gpu} (compute capability {capability})",
    symptom="rejected if set by the user; a recipe's setting falls back to all-to-all with a log line",
    cause="HybridEP kernels exist for compute capabilities 8, 9 and 10",
    fixes=(ALLTOALL,),
)
def hybridep_unsupported_gpu(c: Case) -> Column:
    supported = (int(c.capability) in (8, 9, 10)) & (c.gpu_arch not in AMD_ARCHS)
    return c.is_moe & (c.dispatcher == "hybridep") & not_(supported)


@rule(
    "dispatch.nothing-to-send",
    "advice",
    "dispatcher",
    engines=engines_with("dispatcher", "deepep"),
    message="the {dispatcher} dispatcher has no effect at ep × etp = 1",
    symptom="no gain; some releases assert that expert-parallel ranks exist",
    cause="its buffers are allocated over the expert-parallel group",
    fixes=(ALLTOALL, {"ep": larger("ep")}),
)
def flex_dispatcher_without_ep(c: Case) -> Column:
    return c.is_moe & one_of(c.dispatcher, FLEX) & (c.ep * c.etp == 1)


@rule(
    "dispatch.allgather-large",
    "warning",
    "dispatcher",
    engines=engines_with("dispatcher", "allgather"),
    message="the allgather dispatcher sends all tokens to all ep={ep} ranks",
    symptom="memory and traffic grow with ep, although each token needs only its top-k experts",
    cause="it gathers every token on every expert-parallel rank and discards most of them",
    fixes=(ALLTOALL,),
)
def allgather_over_many_ranks(c: Case) -> Column:
    return c.is_moe & (c.dispatcher == "allgather") & (c.ep > 8)


@rule(
    "dispatch.capacity-allgather",
    "error",
    "dispatcher",
    engines=("megatron",),
    message="capacity_factor={capacity_factor} does not work with the allgather dispatcher",
    symptom="expert capacity is only supported with the all-to-all dispatchers",
    cause="tokens are dropped and padded when they are sent",
    fixes=(ALLTOALL, {"capacity_factor": [0.0]}),
)
def capacity_with_allgather(c: Case) -> Column:
    return c.is_moe & (c.capacity_factor > 0) & (c.dispatcher == "allgather")


@rule(
    "dispatch.shared-overlap-nothing",
    "advice",
    "shared_expert_overlap",
    engines=engines_with("shared_expert_overlap", True),
    message="shared_expert_overlap=true, but the model has no shared experts",
    symptom="the setting has no effect",
    cause="only shared experts, which process every token, can run during the dispatch",
    fixes=({"shared_expert_overlap": [False]},),
)
def overlap_without_shared_experts(c: Case) -> Column:
    return c.is_moe & c.shared_expert_overlap & not_(c.has_shared_experts)


@rule(
    "dispatch.shared-overlap-recompute",
    "error",
    "shared_expert_overlap",
    engines=engines_with("shared_expert_overlap", True),
    message="shared experts are both overlapped with the dispatch and recomputed",
    symptom="shared_experts recompute cannot be combined with shared-expert overlap",
    cause="the overlapped compute runs on another stream, outside the recomputed region",
    fixes=(
        {"recompute_modules": without("recompute_modules", lambda c: ("shared_experts",))},
        {"shared_expert_overlap": [False]},
    ),
)
def shared_experts_overlapped_and_recomputed(c: Case) -> Column:
    recomputed = "shared_experts" in c.recompute_modules
    return c.is_moe & c.shared_expert_overlap & recomputed & (c.recompute == "selective")


@rule(
    "dispatch.grouped-gemm",
    "error",
    "grouped_gemm",
    engines=engines_with("grouped_gemm", False),
    message="grouped_gemm=true needs compute capability 8, {gpu} has {capability}",
    symptom="grouped GEMM is not supported on this device",
    cause="the kernel that computes all experts of a rank in one launch does not exist for older GPUs",
    fixes=({"grouped_gemm": [False]},),
)
def grouped_gemm_unsupported_gpu(c: Case) -> Column:
    return c.is_moe & c.grouped_gemm & (c.capability < 8)


class OverlapRequirement(NamedTuple):
    """A requirement of ep_overlap: where it is not met, and its fixes."""

    name: str
    message: str
    unmet: Callable[[Case], Column]
    fixes: tuple[Fix, ...]


def _recomputes_experts(c: Case) -> Column:
    return (c.recompute == "full") | ((c.recompute == "selective") & ("moe" in c.recompute_modules))


OVERLAP_REQUIREMENTS = (
    OverlapRequirement(
        "ranks", "ep={ep} has no expert communication to overlap", lambda c: c.ep == 1, ({"ep": larger("ep")},)
    ),
    OverlapRequirement(
        "dispatcher",
        "it needs the alltoall, deepep or hybridep dispatcher",
        lambda c: c.dispatcher == "allgather",
        (ALLTOALL,),
    ),
    OverlapRequirement(
        "interleaving",
        "with pp={pp} it needs interleaved stages (vp > 1)",
        lambda c: (c.pp > 1) & (c.vp == 1),
        ({"vp": [2, 3, 4], "pp_schedule": ["interleaved_1f1b"]},),
    ),
    OverlapRequirement(
        "recompute",
        "full recompute or recompute of moe would repeat the communication",
        _recomputes_experts,
        (
            {"recompute_modules": without("recompute_modules", lambda c: ("moe",)), "recompute": ["selective"]},
            {"recompute": ["none"], "recompute_modules": [()]},
        ),
    ),
    OverlapRequirement(
        "shared-experts",
        "shared_expert_overlap already uses the dispatch time",
        lambda c: c.shared_expert_overlap,
        ({"shared_expert_overlap": [False]},),
    ),
    OverlapRequirement(
        "precision", "it supports bf16 and fp16 only", lambda c: c.compute == "fp32", ({"compute": ["bf16"]},)
    ),
    OverlapRequirement(
        "prediction-layers",
        "it supports one multi-token-prediction layer, the model has {mtp_layers}",
        lambda c: (c.mtp_layers > 1) & (c.mtp_loss > 0),
        ({"mtp_loss": [0.0]},),
    ),
)


def _register(requirement: OverlapRequirement) -> None:
    def unmet(c: Case) -> Column:
        return c.is_moe & c.ep_overlap & requirement.unmet(c)

    rule(
        f"dispatch.overlap-{requirement.name}",
        "error",
        "ep_overlap",
        engines=("megatron",),
        message=f"ep_overlap=true does not work: {requirement.message}",
        symptom="assertion on overlap_moe_expert_parallel_comm in config validation",
        cause="the communication of one micro batch overlaps with the compute of another, in one specific schedule",
        fixes=(*requirement.fixes, NO_OVERLAP),
    )(unmet)


for _requirement in OVERLAP_REQUIREMENTS:
    _register(_requirement)
