"""Bytes of weights, gradients and optimizer state per parameter, by strategy, precision and engine."""

from __future__ import annotations

import msgspec

from meshwright.costs.memory_constants import NF4_BYTES
from meshwright.costs.memory_profiles import MemoryProfile, memory_profile
from meshwright.costs.parameters import RankParams
from meshwright.costs.vectorize import BYTES, Column, any_of, larger, where
from meshwright.recipes.case import Case

# Moments an optimizer keeps, all in precision.moments: recipes that lower the first lower the second too.
MOMENTS = {
    "adamw": 2.0,
    "schedule_free_adamw": 2.0,
    "muon": 1.1,  # momentum only for matrices; embedding, head and vectors go to AdamW
    "lion": 1.0,
    "sgd": 1.0,
}


class PerParam(msgspec.Struct, frozen=True):
    """Bytes per parameter: on every data-parallel rank, and divided among those that share one copy."""

    weights_whole: Column
    weights_shared: Column
    gradients_whole: Column
    gradients_shared: Column
    optimizer_whole: Column
    optimizer_shared: Column


def master_bytes(case: Case) -> int:
    """Bytes of the weight the optimizer updates; some engines train in the compute format throughout."""
    return BYTES[case.compute] if memory_profile(case).pure_low else BYTES[case.master]


def moment_bytes(case: Case) -> float:
    """Bytes of all moments of one parameter."""
    if memory_profile(case).wide_second_moment and case.optimizer_name == "adamw":
        return BYTES[case.moments] + (BYTES[case.moments] if case.master == case.moments else 4)
    return MOMENTS[case.optimizer_name] * (2 if master_bytes(case) == 2 else BYTES[case.moments])


def defers_reduction(case: Case) -> Column:
    """Where whole gradients wait for the last micro batch: told to, or inside torch's pipeline, which always does."""
    told = case.defer_grad_sync & memory_profile(case).defers
    return (case.accumulation > 1) & (told | ((case.pp > 1) & (case.engine != "megatron")))


def per_param(case: Case) -> PerParam:
    """Bytes per trained parameter.

    fsdp2          the updated weight, its gradient and the moments, all shared; deferred gradients are whole
    ddp            torch: 16 bytes on every rank. Megatron: bf16 weight, fp32 gradient, fp32 master, moments = 18
    zero1          bf16 weight and its gradient on every rank, master and moments shared: 6 + 12 / ranks
    megatron_fsdp  bf16 weight, gradient, master and moments, all shared
    """
    master, moments, profile = master_bytes(case), moment_bytes(case), memory_profile(case)
    low, accumulate = BYTES[case.compute], BYTES[case.compute] if profile.pure_low else BYTES[case.grads]
    reduce, deferred = BYTES[case.reduce], defers_reduction(case)
    separate = low if master > low else 0  # a compute copy exists beside a wider master
    low_ddp = separate if profile.separate_copy else 0
    zero1, ddp = case.strategy == "zero1", case.strategy == "ddp"
    sharded = (case.strategy == "megatron_fsdp") | ((case.strategy == "fsdp2") & profile.separate_copy)
    fsdp = (case.strategy == "fsdp2") & (not profile.separate_copy)
    extra = _extra_gradients(case, profile)
    gradient = (accumulate if profile.separate_copy else master) + extra
    return PerParam(
        weights_whole=ddp * (low_ddp or master) + zero1 * low,
        weights_shared=fsdp * master + sharded * (separate or master),
        gradients_whole=ddp * gradient + zero1 * (accumulate + extra) + fsdp * deferred * reduce,
        gradients_shared=fsdp * (1 - 1 * deferred) * master + sharded * accumulate,
        optimizer_whole=ddp * (moments + (master if low_ddp else 0)),
        optimizer_shared=fsdp * moments
        + zero1 * (moments + (master if separate else 0))
        + sharded * (moments + (master if separate else 0)),
    )


def _extra_gradients(case: Case, profile: MemoryProfile) -> Column:
    """Bytes per parameter beside the accumulated gradients: what ranks reduce, what one compiled graph returns."""
    whole_graph = profile.whole_graph and case.compile
    return profile.extra_gradients * (case.dp > 1) + whole_graph * (case.accumulation > 1) * BYTES[case.compute]


def dense_ranks(case: Case) -> Column:
    """Ranks that share one copy of a dense parameter; context-parallel ranks hold the same weights and join in."""
    return where(case.strategy == "ddp", 1, case.shard * case.cp)


def expert_ranks(case: Case) -> Column:
    """Ranks that share one copy of an expert."""
    if case.engine == "kempnerforge":
        return dense_ranks(case)
    return where(case.strategy == "ddp", 1, larger(case.expert_dp // case.dp_replicate, 1))


def expert_shares(case: Case) -> Column:
    """Over how many ranks one copy of an expert's state is spread, seen from the rank that holds most of it."""
    ranks = expert_ranks(case)
    if not memory_profile(case).shards_by_expert or not case.model.moe:
        return ranks
    held = larger(case.model.moe.experts // case.ep, 1)  # the first rank takes a whole number of them
    return held / -(-held // ranks)


class State(msgspec.Struct, frozen=True):
    """Bytes on one rank of each stage."""

    weights: Column
    gradients: Column
    optimizer: Column


def trained_state(case: Case, params: RankParams) -> State:
    """State of trained parameters, less what is kept in host memory."""
    each = per_param(case)
    dense, routed = params.dense + params.ends, params.routed
    shared = dense / dense_ranks(case) + routed / expert_shares(case)
    whole = dense + routed
    optimizer_on_gpu = where(any_of(case.offload, "params", "optimizer"), 0, 1)
    masters_too = memory_profile(case).offloads_masters
    on_gpu = optimizer_on_gpu if masters_too else case.offload != "params"
    return State(
        weights=on_gpu * (each.weights_whole * whole + each.weights_shared * shared),
        # Whole gradients wait for their reduction on the GPU, wherever shards go after it.
        gradients=(masters_too | on_gpu) * each.gradients_whole * whole + on_gpu * each.gradients_shared * shared,
        optimizer=optimizer_on_gpu * (each.optimizer_whole * whole + each.optimizer_shared * shared),
    )


def frozen_weights(case: Case, params: RankParams) -> Column:
    """Bytes of frozen weights: compute precision, or NF4 for the layers' matrices; shared only by the FSDPs."""
    low = BYTES[case.compute]
    matrix = NF4_BYTES if case.method == "qlora" else low
    shares = any_of(case.strategy, "fsdp2", "megatron_fsdp")
    dense = (params.dense * matrix + params.ends * low) / where(shares, dense_ranks(case), 1)
    routed = params.routed * matrix / where(shares, expert_shares(case), 1)
    return (case.offload != "params") * (dense + routed)
