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
    if np.all(case.tp == 1):
        return 0.0
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
    if np.all(case.cp == 1):
        return 0.0
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
    if np.all(case.ep == 1):
        return 0.0
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


def dp_s(case: Case, params: RankParams, trained: RankParams, busy_s: Column, forward_s: Column) -> Column:
    """Data parallelism: gathers of weights and reductions of gradients beyond what compute hides.

    FSDP gathers every layer before its forward and again before its backward, in every micro batch, and reduces in
    every backward unless that is deferred; inside a pipeline weights stay gathered. ZeRO-1 reduces once, during the
    last backward, and gathers once, during the next forward. Plain data parallelism only reduces.
    """
    fsdp = any_of(case.strategy, "fsdp2", "megatron_fsdp")
    each_time = fsdp & ~np.asarray(defers_reduction(case))
    rounds, pipelined = case.accumulation, case.pp > 1
    twice = 2 if case.reshard_after_forward else 1
    gathers = np.where(fsdp, np.where(pipelined, 1, twice * rounds), case.strategy == "zero1")
    gather = gathers * _gather_once_s(case, np.where(fsdp, 1, 0), params, trained)
    reduce = np.where(each_time, rounds, 1) * _reduce_once_s(case, trained)
    whole, once = busy_s * rounds, busy_s - forward_s
    together = _exposed(gather + reduce, whole, case.overlap_param_gather)
    gather_window = np.where(fsdp, whole, forward_s)
    apart = _exposed(gather, gather_window, case.overlap_param_gather) + _exposed(
        reduce, once, case.overlap_grad_reduce
    )
    return np.where(each_time, together, apart)


def _exposed(comm: Column, window: Column, overlaps: bool) -> Column:
    """What stays visible of a communication that may hide in a window of compute."""
    room = window * (1 - VISIBLE)
    return np.maximum(comm - room, 0) + VISIBLE * np.minimum(comm, room) if overlaps else comm


def _gather_once_s(case: Case, frozen_too: Column, params: RankParams, trained: RankParams) -> Column:
    """Seconds to gather a rank's weights once; frozen weights travel only where they are sharded."""
    size = 1 if case.fp8_gather else BYTES[case.compute]
    dense = np.where(frozen_too, params.dense + params.ends, trained.dense + trained.ends)
    routed = np.where(frozen_too, params.routed, trained.routed)
    near = gather_s(case, dense * size, case.tp, dense_ranks(case))
    return near + gather_s(case, routed * size, expert_cut(case), expert_ranks(case))


def _reduce_once_s(case: Case, trained: RankParams) -> Column:
    """Seconds to sum a rank's gradients once: scatter among those that share a copy, all-reduce among the copies."""
    size = BYTES[case.reduce]
    dense, routed = (trained.dense + trained.ends) * size, trained.routed * size
    shard, expert_shard = dense_ranks(case), expert_ranks(case)
    copies = np.maximum(case.dp * case.cp // shard, 1)
    expert_copies = np.maximum(case.expert_dp // expert_shard, 1)
    scatter = gather_s(case, dense, case.tp, shard) + gather_s(case, routed, expert_cut(case), expert_shard)
    replicas = gather_s(case, dense / shard, case.tp * shard, copies)
    return scatter + 2 * (
        replicas + gather_s(case, routed / expert_shard, expert_cut(case) * expert_shard, expert_copies)
    )
