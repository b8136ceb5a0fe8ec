"""Seconds of tensor, context, expert and data-parallel communication that compute does not hide."""

from __future__ import annotations

import numpy as np

from meshwright.costs.activations import residual_cut
from meshwright.costs.columns import BYTES, Column, any_of
from meshwright.costs.compute import layer_time
from meshwright.costs.constants import ATTENTION_BACKWARD, EP_OVERLAP_VISIBLE, TP_OVERLAP_VISIBLE, VISIBLE
from meshwright.costs.links import all_to_all_s, gather_s, neighbour_s
from meshwright.costs.memory import recomputed_share, tokens
from meshwright.costs.parameters import RankParams, expert_cut
from meshwright.costs.stages import Stages
from meshwright.costs.state import defers_reduction, dense_ranks, expert_ranks
from meshwright.models import MLA, Attention, MoE
from meshwright.recipes.case import Case


def _passes(case: Case, held: Stages) -> Column:
    """Forward, backward, and the forward again where it is recomputed."""
    return 2 + (case.recompute == "full") * recomputed_share(case, held)


def tp_s(case: Case, held: Stages) -> Column:
    """Tensor parallelism: per block and pass one gather and one scatter of the residual (or one all-reduce of it).

    With sequence parallelism the backward pass gathers the input once more for the weight gradient.
    """
    whole = tokens(case) * case.model.hidden * BYTES[case.compute]
    once = gather_s(case, whole, 1, case.tp)
    blocks: Column = 0.0
    for layer, number in held.layers:
        cut_blocks = (layer.mixer is not None) + (layer.cross is not None)
        cut_blocks += layer.ffn is not None and not isinstance(layer.ffn, MoE)
        blocks = blocks + number * cut_blocks
    passes = 2 * _passes(case, held) + np.where(case.sp, 1, 0) * (case.goal != "peft")
    visible = TP_OVERLAP_VISIBLE if case.tp_comm_overlap else 1.0
    return blocks * passes * once * visible


def cp_s(case: Case, held: Stages) -> Column:
    """Context parallelism: a ring hides behind the attention it feeds, the others stand before it."""
    count, size, stride = tokens(case), BYTES[case.compute], case.tp
    passes = _passes(case, held) + 1  # the backward also returns gradients of keys and values
    total: Column = 0.0
    for layer, number in held.layers:
        mixer = layer.mixer
        if not isinstance(mixer, Attention | MLA):
            continue
        kv = 2 * mixer.kv_width if isinstance(mixer, Attention) else mixer.heads * (mixer.qk_head + mixer.v_head)
        q = mixer.q_width if isinstance(mixer, Attention) else mixer.heads * mixer.qk_head
        kv_bytes, all_bytes = size * count * kv / case.tp, size * count * (kv + 2 * q) / case.tp
        core = layer_time(case, layer).core * (1 + ATTENTION_BACKWARD)
        ring = passes * (case.cp - 1) * neighbour_s(case, kv_bytes, stride, case.cp)
        hidden_ring = np.maximum(ring - core, 0) + VISIBLE * ring
        gathered = passes * gather_s(case, kv_bytes * case.cp, stride, case.cp)
        exchanged = passes * all_to_all_s(case, all_bytes, stride, case.cp)
        one = np.where(case.cp_comm == "a2a", exchanged, np.where(case.cp_comm == "allgather", gathered, hidden_ring))
        one = np.where(case.cp_comm == "a2a+ring", np.minimum(exchanged, hidden_ring), one)
        total = total + number * one
    return (case.cp > 1) * total


def ep_s(case: Case, held: Stages) -> Column:
    """Expert parallelism: tokens travel to their experts and back, forward and backward."""
    size, cut = BYTES[case.compute], residual_cut(case)
    visible = EP_OVERLAP_VISIBLE if case.ep_overlap else 1.0
    total: Column = 0.0
    for layer, number in held.layers:
        if not isinstance(layer.ffn, MoE):
            continue
        moe = layer.ffn
        copies = moe.topk
        if case.dispatcher in ("deepep", "hybridep"):  # one copy per domain that holds some of the token's experts
            copies = np.minimum(moe.topk, np.maximum(case.ep * case.etp / case.nvlink_domain, 1) * 2)
        sent = tokens(case) / cut * copies * (moe.latent or case.model.hidden) * size
        total = total + number * 2 * _passes(case, held) * all_to_all_s(case, sent, case.etp, case.ep)
    return (case.ep > 1) * total * visible


def p2p_s(case: Case) -> Column:
    """Sends between stages for one micro batch, both ways, that stay visible."""
    sent = tokens(case) * case.model.hidden * BYTES[case.compute] / residual_cut(case)
    stride = case.world // case.pp
    return (case.pp > 1) * 2 * case.vp * VISIBLE * neighbour_s(case, sent, stride, case.pp)


def dp_s(case: Case, params: RankParams, micro_s: Column, forward_s: Column) -> Column:
    """Data parallelism: gathers of weights and reductions of gradients beyond what compute hides."""
    fsdp = any_of(case.strategy, "fsdp2", "megatron_fsdp")
    weights, gradients = _volumes(case, params)
    rounds = np.where(fsdp, case.accumulation, 1)
    regathers = np.where(fsdp, (2 if case.reshard_after_forward else 1), np.where(case.strategy == "ddp", 0, 1))
    regathers = np.where(
        fsdp & (case.pp > 1), 1 / np.maximum(case.accumulation, 1), regathers
    )  # kept between micro batches
    reductions = np.where(defers_reduction(case) | ~fsdp, 1, case.accumulation)
    gather = weights * regathers * rounds
    window = np.where(fsdp, micro_s * case.accumulation, forward_s) * (1 - VISIBLE)
    exposed = _exposed(gather, window, case.overlap_param_gather)
    back = np.where(defers_reduction(case) | ~fsdp, 1, case.accumulation) * (micro_s - forward_s) * (1 - VISIBLE)
    left = np.maximum(np.where(fsdp, back - np.maximum(gather - forward_s * rounds, 0), back), 0)
    return exposed + _exposed(gradients * reductions, left, case.overlap_grad_reduce)


def _exposed(comm: Column, window: Column, overlaps: bool) -> Column:
    return np.maximum(comm - window, 0) + VISIBLE * np.minimum(comm, window) if overlaps else comm


def _volumes(case: Case, params: RankParams) -> tuple[Column, Column]:
    """Seconds to gather all weights of a rank once, and to reduce all its gradients once."""
    trained = 0.01 if case.goal == "peft" else 1.0
    size = 1 if case.fp8_gather else BYTES[case.compute]
    dense, routed = params.dense + params.ends, params.routed
    shard, experts = np.maximum(dense_ranks(case), 1), expert_ranks(case)
    everyone = case.dp * case.cp
    gather = gather_s(case, dense * size, case.tp, shard) + gather_s(case, routed * size, expert_cut(case), experts)
    grad = BYTES[case.reduce]
    sharded = np.where(case.strategy == "ddp", 2 * everyone, shard)  # an all-reduce moves everything twice
    reduce = np.where(
        case.strategy == "ddp",
        2 * gather_s(case, dense * grad, case.tp, everyone),
        gather_s(case, dense * grad, case.tp, shard),
    )
    copies = np.maximum(case.expert_dp, 1)
    routed_reduce = np.where(
        case.strategy == "ddp",
        2 * gather_s(case, routed * grad, expert_cut(case), copies),
        gather_s(case, routed * grad, expert_cut(case), experts),
    )
    replicas = 2 * gather_s(case, dense / np.maximum(sharded, 1) * grad, case.tp * shard * case.cp, case.dp_replicate)
    return gather * trained if case.goal == "peft" else gather, trained * (reduce + routed_reduce + replicas)
