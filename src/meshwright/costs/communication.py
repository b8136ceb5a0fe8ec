"""Exposed seconds of tensor, context, expert, pipeline and data-parallel communication."""

from __future__ import annotations

import numpy as np

from meshwright.costs.activations import residual_shards
from meshwright.costs.compute import LayerTime
from meshwright.costs.gemm import routing_imbalance
from meshwright.costs.links import all_to_all_s, forwarding_all_to_all_s, gather_s, neighbor_s
from meshwright.costs.memory import tokens
from meshwright.costs.parameters import RankParams, as_stored, expert_parallel_ranks
from meshwright.costs.speeds import Speeds
from meshwright.costs.state import defers_reduction, dense_ranks, expert_ranks, keeps_weights, reductions
from meshwright.costs.vectorize import BYTES, Column, any_of, anywhere, everywhere, larger, pick, smaller, where
from meshwright.models import MLA, Attention, Layer, MoE
from meshwright.models.numerics import expert_groups
from meshwright.recipes.capabilities import fp8_experts
from meshwright.recipes.case import Case


def is_one(degree: Column) -> bool:
    """Return whether an axis is unused in every candidate."""
    return everywhere(degree == 1)


def tp_s(case: Case, speed: Speeds, layer: Layer, passes: Column) -> Column:
    """Tensor parallelism: per block and pass one all-gather and one reduce-scatter of the residual (or one all-reduce).

    With sequence parallelism the backward pass gathers the input once more for the weight gradient.
    """
    if is_one(case.tp):
        return 0.0
    blocks = (layer.mixer is not None) + (layer.cross is not None)
    blocks += layer.ffn is not None and (not isinstance(layer.ffn, MoE) or bool(layer.ffn.shared_width))
    full = tokens(case) * case.model.hidden * BYTES[case.compute]
    once = gather_s(case, speed, full, 1, case.tp)
    times = 2 * passes + (where(case.sp, 1, 0) if case.goal != "peft" else 0)
    visible = speed.shared.tp_overlap_visible if case.tp_comm_overlap else 1.0
    return blocks * times * once * visible


def cp_s(case: Case, speed: Speeds, layer: Layer, time: LayerTime, passes: Column) -> Column:
    """Context parallelism: a ring overlaps with the attention it feeds, the other methods precede it."""
    mixer = layer.mixer
    if is_one(case.cp) or not isinstance(mixer, Attention | MLA):
        return 0.0
    count, size, stride = tokens(case), BYTES[case.compute], case.tp
    times = passes + 1  # the backward also sends gradients of keys and values
    kv = (
        mixer.kv_width + mixer.v_width if isinstance(mixer, Attention) else mixer.heads * (mixer.qk_head + mixer.v_head)
    )
    q = mixer.q_width if isinstance(mixer, Attention) else mixer.heads * mixer.qk_head
    kv_bytes, all_bytes = size * count * kv / case.tp, size * count * (kv + 2 * q) / case.tp
    core = time.core * (1 + time.core_backward)
    ring = times * (case.cp - 1) * neighbor_s(case, speed, kv_bytes, stride, case.cp)
    hidden_ring = larger(ring - core, 0.0) + speed.shared.cp_visible * ring
    gathered = times * gather_s(case, speed, kv_bytes * case.cp, stride, case.cp)
    exchanged = times * all_to_all_s(case, speed, all_bytes, stride, case.cp)
    one = where(case.cp_comm == "a2a", exchanged, where(case.cp_comm == "allgather", gathered, hidden_ring))
    one = where(case.cp_comm == "a2a+ring", smaller(exchanged, hidden_ring), one)
    return (case.cp > 1) * one


def ep_s(case: Case, speed: Speeds, layer: Layer, exchanges: Column) -> Column:
    """Expert parallelism: all-to-all of tokens to their experts and back, forward and backward.

    A plain all-to-all sends a copy per chosen expert. DeepEP and HybridEP send one to each domain that has some of the
    token's experts, and forward it there to each rank that has some.
    """
    moe = layer.ffn
    if is_one(case.ep) or not isinstance(moe, MoE):
        return 0.0
    size = BYTES[case.compute] * routing_imbalance(case, speed, moe)
    each = tokens(case) / residual_shards(case) * (moe.latent or case.model.hidden) * size
    each = each / pick(case.dispatcher, {"alltoall": 1.0, "allgather": 1.0, **speed.shared.dispatch})
    forwards = any_of(case.dispatcher, "deepep", "hybridep")
    once: Column = 0.0
    if not everywhere(forwards):
        once = all_to_all_s(case, speed, each * moe.topk, case.etp, case.ep)
    if anywhere(forwards):
        ranks = _places(case, moe, case.ep)
        domains = _places(case, moe, larger(case.ep * case.etp / case.nvlink_domain, 1))
        once = where(
            forwards, forwarding_all_to_all_s(case, speed, each * ranks, each * domains, case.etp, case.ep), once
        )
    visible = speed.shared.ep_overlap_visible if case.ep_overlap else 1.0
    return (case.ep > 1) * exchanges * once * visible


def _places(case: Case, moe: MoE, places: Column) -> Column:
    """Return on how many of `places` ranks or domains the experts of a token are on average.

    AutoModel's balanced gate gives token t the experts from t × topk on, one after the other; others choose at random.
    """
    if case.force_balance and case.engine == "automodel":
        each = larger(moe.experts // places, 1)
        return 1 + (moe.topk - np.gcd(moe.topk, np.asarray(each, int))) / each
    candidates = _candidates(case, places)
    return candidates * (1 - (1 - 1 / candidates) ** moe.topk)


def _candidates(case: Case, places: Column) -> Column:
    """Return how many of `places` can have experts of one token: all, unless its router chooses some groups first.

    DeepSeek-V3 takes 4 of 8 groups. A group is on several places, or a place has several groups.
    """
    groups, chosen = expert_groups(case.model.name)
    if chosen >= groups:
        return places
    here = larger(groups / places, 1)
    missed: Column = 1.0  # the probability that no chosen group is at a place
    for taken in range(chosen):
        missed = missed * larger(groups - here - taken, 0) / (groups - taken)
    return larger(places * (1 - missed), 1)


def p2p_s(case: Case, speed: Speeds) -> Column:
    """Exposed sends between stages for one micro batch, both ways."""
    if is_one(case.pp):
        return 0.0
    sent = tokens(case) * case.model.hidden * BYTES[case.compute] / residual_shards(case)
    one = neighbor_s(case, speed, sent, case.world // case.pp, case.pp)
    return (case.pp > 1) * 2 * case.vp * speed.shared.p2p_visible * one


def dp_s(
    case: Case, speed: Speeds, params: RankParams, trained: RankParams, busy_s: Column, forward_s: Column
) -> Column:
    """Data parallelism: weight gathers and gradient reductions beyond what compute hides.

    FSDP gathers every layer before its forward and again before its backward, in every micro batch, and reduces in
    every backward; a deferred reduction happens once. ZeRO-1 and Megatron's optimizer reduce once, behind the
    last backward, and gather once, during the next forward; ZeRO-2 gathers as they do. Plain data parallelism only
    reduces.
    """
    fsdp = any_of(case.strategy, "fsdp2", "megatron_fsdp")
    each_time = fsdp & (np.asarray(defers_reduction(case)) == 0)
    rounds = case.accumulation
    twice = 2 if case.reshard_after_forward else 1
    in_pipeline = case.pipeline_passes  # each pass of torch's pipeline gathers once
    each_pass = where(keeps_weights(case), 1, where(case.pp > 1, in_pipeline, twice * rounds))
    gathers = where(fsdp, each_pass, (case.strategy == "zero1") * 1)
    gather = gathers * _gather_once_s(case, speed, fsdp, params, trained)
    reduce = where(fsdp, reductions(case), 1) * _reduce_once_s(case, speed, trained)
    full, once = busy_s * rounds, (busy_s - forward_s) * case.pipeline_passes
    visible = speed.engine.dp_visible
    joint = _exposed(gather + reduce, full, case.overlap_param_gather, visible)
    gather_window = where(fsdp, full, forward_s)
    separate = _exposed(gather, gather_window, case.overlap_param_gather, visible) + _exposed(
        reduce, once, case.overlap_grad_reduce, visible
    )
    return where(each_time, joint, separate)


def _exposed(comm: Column, window: Column, overlaps: Column, visible: float) -> Column:
    """Return the exposed part of communication that may overlap with a window of compute."""
    room = window * (1 - visible)
    return where(overlaps, larger(comm - room, 0.0) + visible * smaller(comm, room), comm)


def _gather_once_s(case: Case, speed: Speeds, frozen_too: Column, params: RankParams, trained: RankParams) -> Column:
    """Return the seconds to gather a rank's weights once; frozen weights are gathered only if they are sharded."""
    params = as_stored(case, params)
    size = where(case.fp8_gather, 1, BYTES[case.compute])
    dense = where(frozen_too, params.dense + params.ends, trained.dense + trained.ends)
    routed = where(frozen_too, params.routed, trained.routed)
    expert_size = size if fp8_experts(case) else BYTES[case.compute]
    return _ring_s(case, speed, dense, size, case.tp, dense_ranks(case)) + _ring_s(
        case, speed, routed, expert_size, expert_parallel_ranks(case), expert_ranks(case)
    )


def _reduce_once_s(case: Case, speed: Speeds, trained: RankParams) -> Column:
    """Return the seconds to reduce a rank's gradients once: reduce-scatter among shards, all-reduce among replicas."""
    size, shards = pick(case.reduce, BYTES), expert_parallel_ranks(case)
    dense, routed = trained.dense + trained.ends, trained.routed
    shard, expert_shard = dense_ranks(case), expert_ranks(case)
    copies = larger(case.dp * case.cp // shard, 1)
    expert_copies = larger(case.expert_dp // expert_shard, 1)
    scatter = _ring_s(case, speed, dense, size, case.tp, shard) + _ring_s(
        case, speed, routed, size, shards, expert_shard
    )
    replicas = _ring_s(case, speed, dense / shard, size, case.tp * shard, copies)
    return scatter + 2 * (
        replicas + _ring_s(case, speed, routed / expert_shard, size, shards * expert_shard, expert_copies)
    )


def _ring_s(case: Case, speed: Speeds, params: Column, size: float, stride: Column, ranks: Column) -> Column:
    """Return the seconds of one ring pass over parameters, in as many collectives as the engine uses."""
    engine = speed.engine
    messages = params / (1e6 * larger(engine.bucket_params, engine.bucket_per_rank * ranks)) + 1
    return gather_s(case, speed, params * size / speed.engine.dp_rate, stride, ranks, messages)
