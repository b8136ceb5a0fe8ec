"""Experts: sharding, load balancing and routing."""

from __future__ import annotations

import numpy as np

from meshwright.recipes.case import Case, Column
from meshwright.rules.memory import GIB
from meshwright.rules.rule import Fix, rule
from meshwright.rules.search_values import NO_EP, degrees, divisors_of, larger, not_, one_of

NO_ETP: Fix = {"etp": [1]}


@rule(
    "moe.ep-needs-experts",
    "error",
    "ep",
    message="ep={ep}, etp={etp}, but the model has no experts",
    symptom="expert parallelism is set for a model without MoE layers",
    cause="expert parallelism shards routed experts only",
    fixes=(NO_EP,),
)
def ep_without_experts(c: Case) -> Column:
    return not_(c.is_moe) & (c.ep * c.etp > 1)


@rule(
    "moe.experts-divide",
    "error",
    "ep",
    message="{experts} experts are not divisible by ep={ep}",
    symptom="number of experts must be divisible by the expert-parallel size, when the first expert layer is built",
    cause="each rank holds experts / ep complete experts",
    fixes=({"ep": divisors_of("experts", "ep")}, {"ep": [1]}),
)
def experts_not_divisible(c: Case) -> Column:
    return c.is_moe & (c.experts % c.ep != 0)


@rule(
    "moe.tensor-parallel-experts",
    "error",
    "tp",
    engines=("automodel",),
    message="tp={tp} with ep={ep}: AutoModel has no tensor-parallel plan for MoE models with expert parallelism",
    symptom="AssertionError: Tensor parallelism not supported for custom MoE models; or ValueError: no safe plan",
    cause="with ep > 1 its MoE parallelizer shards the model, and no model class has a tensor-parallel plan for it",
    fixes=({"tp": [1], "sp": [False]}, {"tp": [1], "sp": [False], "cp": degrees("cp")}, NO_EP),
)
def experts_with_tensor_parallelism(c: Case) -> Column:
    return c.is_moe & (c.tp > 1) & (c.ep > 1)


@rule(
    "moe.topk",
    "error",
    "topk",
    message="topk={topk} is larger than the {experts} experts",
    symptom="top-k out of range in the router",
    cause="a token cannot be routed to more experts than there are",
    fixes=({"topk": lambda c: [c.experts]},),
)
def topk_above_experts(c: Case) -> Column:
    return c.is_moe & (c.topk > c.experts)


@rule(
    "moe.expert-bias",
    "error",
    "etp",
    engines=("megatron",),
    message="experts with biases do not support etp={etp}",
    symptom="bias in MoE layers is only supported when the expert tensor-parallel size is 1",
    cause="the output bias would be added once per rank",
    fixes=(NO_ETP,),
)
def biased_experts_sharded(c: Case) -> Column:
    return c.expert_bias & (c.etp > 1)


@rule(
    "moe.expert-width",
    "error",
    "etp",
    message="the expert width {expert_width} is not divisible by etp={etp}",
    symptom="… is not divisible by … when the experts are built",
    cause="each rank gets the same number of columns of every expert",
    fixes=({"etp": divisors_of("expert_width", "etp")}, NO_ETP),
)
def expert_width_not_divisible(c: Case) -> Column:
    return c.is_moe & (c.expert_width % c.etp != 0)


def expert_memory_gib(c: Case) -> Column:
    """Return GiB of the routed experts on one rank, which expert parallelism divides.

    If the case has an estimate, it is at most the part of the estimate that holds them: with replicated experts the
    experts' share of weights, gradients and optimizer state, with sharded experts the buffers of gathered layers.
    """
    alone = _experts_alone_gib(c)
    memory = c.memory
    if memory is None:
        return alone
    state = memory.weights + memory.gradients + memory.optimizer
    routed = c.params_routed / (c.ep * c.etp)
    share = routed / (routed + (c.params_total - c.params_routed) / c.tp)
    return np.where(one_of(c.strategy, ("ddp", "zero1")), state * share, np.minimum(alone, memory.buffers))


def _experts_alone_gib(c: Case) -> Column:
    """Return GiB of the routed experts on one rank by bytes per parameter.

    Replicated experts: weights and gradients, and the optimizer state or the rank's shard of it. Sharded experts:
    the weights and gradients of two layers, gathered one ahead of the other.
    """
    params_per_rank = c.params_routed / (c.ep * c.etp * c.pp)
    if c.goal == "peft":
        return (
            np.where(one_of(c.strategy, ("ddp", "zero1")), params_per_rank, params_per_rank * c.pp / c.layers * 2)
            * 2
            / GIB
        )
    replicated = params_per_rank * np.where(c.strategy == "zero1", 6 + 12 / c.expert_dp, 18)
    gathered = params_per_rank * c.pp / c.layers * 2 * 6
    return np.where(one_of(c.strategy, ("ddp", "zero1")), replicated, gathered) / GIB


@rule(
    "moe.ep-too-low",
    "warning",
    "ep",
    message="the experts of one rank need {needed:.0f} GiB of {capacity_gib:.0f} GiB at ep={ep}",
    symptom="out of memory while experts or their optimizer state are allocated",
    cause="expert weights shrink with ep (experts / ep per rank), not with tp; ep does not shard attention",
    fixes=({"ep": larger("ep")}, {"strategy": ["fsdp2"]}, {"pp": larger("pp")}),
    pitfall="EP too low for large MoE",
    values={"needed": expert_memory_gib},
)
def ep_too_low(c: Case) -> Column:
    return c.is_moe & (expert_memory_gib(c) > 0.6 * c.capacity_gib)


@rule(
    "moe.experts-before-tensor-parallel",
    "advice",
    "tp",
    engines=("meshwright", "megatron", "torchtitan", "automodel"),
    message="tp={tp} with ep=1, although the experts take the memory",
    symptom="many small matmuls and communication in every layer",
    cause="experts are narrow already; complete experts per rank keep their matrices large",
    fixes=(
        {"tp": [1], "sp": [False], "tp_comm_overlap": [False], "ep": degrees("tp")},
        {"ep": larger("ep")},
        {"tp": [1], "sp": [False], "tp_comm_overlap": [False]},
    ),
)
def tp_before_ep(c: Case) -> Column:
    return c.is_moe & (c.tp > 1) & (c.ep == 1)


@rule(
    "moe.copied-over-tensor-ranks",
    "advice",
    "tp",
    engines=("kempnerforge",),
    message="{engine} replicates every expert on all tp={tp} ranks",
    symptom="low utilization: each tensor-parallel rank repeats the compute of its experts",
    cause="its MoE blocks apply tensor parallelism to attention only",
    fixes=({"tp": [1], "sp": [False]},),
)
def experts_replicated_over_tp(c: Case) -> Column:
    return c.is_moe & (c.tp > 1)


@rule(
    "moe.same-batch-on-expert-ranks",
    "advice",
    "ep",
    engines=("kempnerforge",),
    message="all ep={ep} ranks of {engine} read the same samples",
    symptom="throughput per GPU falls as ep grows",
    cause="its data-parallel size is dp_replicate × dp_shard; expert-parallel ranks repeat the dense compute",
    fixes=({"ep": [1]},),
)
def ep_ranks_repeat_data(c: Case) -> Column:
    return c.ep > 1


@rule(
    "moe.forced-balance",
    "error",
    "force_balance",
    message="force_balance=true overrides the router outside a benchmark",
    symptom="runs fast, but the model does not learn to route",
    cause="forced balance exists to measure throughput",
    fixes=({"force_balance": [False]},),
)
def balance_forced(c: Case) -> Column:
    return c.is_moe & c.force_balance & not_(c.benchmark)


@rule(
    "moe.unbalanced-router",
    "warning",
    "balancing",
    message="nothing balances the router (balancing={balancing}, aux_loss={aux_loss})",
    symptom="a few experts get most tokens: slow steps, memory peaks on some ranks, dead experts",
    cause="routers collapse without a balancing loss or bias",
    fixes=({"aux_loss": [1e-3], "balancing": ["aux_loss"]},),
)
def router_unbalanced(c: Case) -> Column:
    by_loss = one_of(c.balancing, ("aux_loss", "seq_aux_loss", "global_aux_loss"))
    idle = (c.balancing == "none") | (by_loss & (c.aux_loss == 0))
    return c.is_moe & (c.goal == "pretrain") & idle & not_(c.force_balance) & not_(c.benchmark)


@rule(
    "moe.balanced-without-bias",
    "warning",
    "balancing",
    engines=("meshwright", "megatron"),
    message="the routers of this model have a bias that balances experts, but balancing={balancing} leaves it at 0",
    symptom="the experts' load differs from the published training, and the loss that balances disturbs the main one",
    cause="DeepSeek-V3 and the architectures like it are pretrained with a bias on the choice of experts",
    fixes=({"balancing": ["bias"]},),
)
def balanced_without_bias(c: Case) -> Column:
    trained = (c.goal == "pretrain") & not_(c.force_balance) & not_(c.benchmark)
    return c.is_moe & c.balance_bias & (c.balancing != "bias") & trained


@rule(
    "moe.bias-balancing",
    "error",
    "balancing",
    engines=("meshwright",),
    message="balancing=bias needs a router with a selection bias, which {family} models do not have",
    symptom="the router has no selection bias: rejected when the model is built",
    cause="the bias is part of the architecture (DeepSeek-V3, GLM-4.5, Nemotron) and of its checkpoints",
    fixes=({"balancing": ["aux_loss"]}, {"balancing": ["aux_loss"], "aux_loss": [1e-3]}),
)
def balancing_bias_missing(c: Case) -> Column:
    return c.is_moe & (c.balancing == "bias") & not_(c.balance_bias)


@rule(
    "moe.bias-changes-scores",
    "warning",
    "balancing",
    engines=("megatron",),
    message="balancing=bias makes the router score experts with sigmoids on megatron; {family} models use a softmax",
    symptom="the router differs from that of the published model: its checkpoints load, but choose other experts",
    cause="Megatron refuses a balancing bias beside softmax scores",
    fixes=({"balancing": ["aux_loss"]}, {"balancing": ["aux_loss"], "aux_loss": [1e-3]}),
)
def bias_beside_softmax(c: Case) -> Column:
    return balancing_bias_missing(c)


@rule(
    "moe.drops-tokens",
    "warning",
    "capacity_factor",
    message="capacity_factor={capacity_factor} drops tokens even if the load is perfectly balanced",
    symptom="a higher loss than the dropless model",
    cause="below 1.0, the experts together cannot process all tokens",
    fixes=({"capacity_factor": [1.0]}, {"capacity_factor": [0.0]}),
)
def capacity_drops_tokens(c: Case) -> Column:
    return c.is_moe & (c.capacity_factor > 0) & (c.capacity_factor < 1) & not_(c.benchmark)


@rule(
    "moe.router-precision",
    "advice",
    "router_dtype",
    message="the router selects among {experts} experts in bf16",
    symptom="ties and unstable routing later in training",
    cause="scores of many experts differ by less than bf16 can resolve",
    fixes=({"router_dtype": ["fp32"]},),
)
def router_in_bf16(c: Case) -> Column:
    return c.is_moe & (c.experts >= 64) & (c.router_dtype == "bf16") & not_(c.benchmark)
