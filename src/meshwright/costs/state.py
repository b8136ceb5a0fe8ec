"""Bytes of weights, gradients and optimizer state, by strategy, precision and engine."""

from __future__ import annotations

import msgspec
import numpy as np

from meshwright.costs.memory_constants import FROZEN_BYTES
from meshwright.costs.memory_profiles import MemoryProfile, memory_profile
from meshwright.costs.parameters import RankParams
from meshwright.costs.vectorize import BYTES, GIB, Column, any_of, everywhere, larger, pick, smaller, where
from meshwright.recipes.case import Case

# Moments of an optimizer, all in precision.moments: recipes that lower the first lower the second too.
MOMENTS = {
    "adamw": 2.0,
    "adamw8bit": 2.0,
    "schedule_free_adamw": 2.0,
    "muon": 1.1,  # momentum only for matrices; embedding, head and vectors use AdamW
    "lion": 1.0,
    "sgd": 1.0,
}


MOMENT_BLOCK = 256  # 8-bit moments that share an fp32 scale


class PerParam(msgspec.Struct, frozen=True):
    """Bytes per parameter: replicated on every data-parallel rank, and sharded."""

    weights_replicated: Column
    weights_sharded: Column
    gradients_replicated: Column
    gradients_sharded: Column
    optimizer_replicated: Column
    optimizer_sharded: Column


def master_bytes(case: Case) -> int:
    """Return the bytes of the weight the optimizer updates; some engines train entirely in the compute dtype."""
    return BYTES[case.compute] if memory_profile(case).pure_low else BYTES[case.master]


def moment_bytes(case: Case) -> float:
    """Return the bytes of all moments of one parameter."""
    if case.optimizer_name == "adamw8bit":
        return MOMENTS["adamw8bit"] * (1 + BYTES["fp32"] / MOMENT_BLOCK)
    if memory_profile(case).wide_second_moment and case.optimizer_name == "adamw":
        return BYTES[case.moments] + (BYTES[case.moments] if case.master == case.moments else 4)
    return MOMENTS[case.optimizer_name] * (2 if master_bytes(case) == 2 else BYTES[case.moments])


def defers_reduction(case: Case) -> Column:
    """Return whether unreduced gradients wait for the last micro batch: by setting, or in torch's pipeline."""
    in_pipeline = (case.pp > 1) & (case.engine != "megatron") & (case.pass_micro_batches > 1)
    return (case.accumulation > 1) & (_defers_by_setting(case) | in_pipeline)


def reductions(case: Case) -> Column:
    """Return how often a step reduces gradients: once, once in each pass of torch's pipeline, or every micro batch."""
    deferred = where(_defers_by_setting(case), 1, case.pipeline_passes)
    return where(defers_reduction(case), deferred, case.accumulation)


def _defers_by_setting(case: Case) -> Column:
    return case.defer_grad_sync & memory_profile(case).defers


def reduction_saves_memory(case: Case) -> bool:
    """Return whether gradients reduced in every micro batch never take more memory than deferred ones.

    Where nothing is sharded they may: the reduced ones have the bytes of the updated weight.
    """
    return everywhere(pick(case.reduce, BYTES) >= master_bytes(case))


def keeps_weights(case: Case) -> Column:
    """Return whether gradients and optimizer state are sharded but weights are not: ZeRO stage 2."""
    shards = any_of(case.strategy, "fsdp2", "megatron_fsdp")
    return shards & (not case.reshard_after_forward) & (case.engine == "deepspeed")


def per_param(case: Case) -> PerParam:
    """Return the bytes per trained parameter.

    fsdp2          the updated weight, its gradient and the moments, all sharded; deferred gradients are not
    ddp            torch: 16 bytes on every rank. Megatron: bf16 weight, fp32 gradient, fp32 master, moments = 18
    zero1          bf16 weight and its gradient on every rank, master and moments sharded: 6 + 12 / ranks
    megatron_fsdp  bf16 weight, gradient, master and moments, all sharded
    """
    master, moments, profile = master_bytes(case), moment_bytes(case), memory_profile(case)
    low, accumulate = BYTES[case.compute], _accumulated_bytes(case, profile)
    reduce, deferred = pick(case.reduce, BYTES), defers_reduction(case)
    separate = low if master > low else 0  # a compute copy in addition to a wider master
    low_ddp = separate if profile.separate_copy else 0
    zero1, ddp = case.strategy == "zero1", case.strategy == "ddp"
    sharded = (case.strategy == "megatron_fsdp") | ((case.strategy == "fsdp2") & profile.separate_copy)
    fsdp = (case.strategy == "fsdp2") & (not profile.separate_copy)
    extra = _extra_gradients(case, profile)
    gradient = (accumulate if profile.separate_copy else master) + extra
    whole = case.cached(keeps_weights)
    return PerParam(
        weights_replicated=ddp * (low_ddp or master) + zero1 * low + sharded * whole * (separate or master),
        weights_sharded=fsdp * master + sharded * (1 - 1 * whole) * (separate or master),
        gradients_replicated=ddp * gradient + zero1 * (accumulate + extra) + fsdp * deferred * reduce,
        gradients_sharded=fsdp * (1 - 1 * deferred) * master + sharded * accumulate,
        optimizer_replicated=ddp * (moments + (master if low_ddp else 0)),
        optimizer_sharded=fsdp * moments
        + zero1 * (moments + (master if separate else 0))
        + sharded * (moments + (master if separate else 0)),
    )


def _accumulated_bytes(case: Case, profile: MemoryProfile) -> Column:
    """Return the bytes of an accumulated gradient.

    Megatron reduces the buffer in which it accumulates, so both have the narrower format. Its optimizer copies
    gradients to fp32 before the update: a shard of them, or without a distributed optimizer all of them.
    """
    if profile.pure_low:
        return BYTES[case.compute]
    wide = pick(case.grads, BYTES)
    if not profile.reduces_in_place:
        return wide
    return where(case.strategy == "ddp", wide, smaller(wide, pick(case.reduce, BYTES)))


def _extra_gradients(case: Case, profile: MemoryProfile) -> Column:
    """Return bytes per parameter besides the accumulated gradients: in reduction, or returned by one compiled graph."""
    whole_graph = profile.whole_graph and case.compile
    copied = profile.gradient_buckets * (case.strategy == "ddp") * master_bytes(case)  # as long as the model lives
    return (profile.extra_gradients + copied) * (case.dp > 1) + whole_graph * (case.accumulation > 1) * BYTES[
        case.compute
    ]


def dense_ranks(case: Case) -> Column:
    """Return the ranks that share one copy of a dense parameter, including context-parallel ranks."""
    return where(case.strategy == "ddp", 1, case.shard * case.cp)


def expert_ranks(case: Case) -> Column:
    """Return the ranks that share one copy of an expert."""
    if case.engine == "kempnerforge":
        return dense_ranks(case)
    return where(case.strategy == "ddp", 1, larger(case.expert_dp // case.dp_replicate, 1))


def expert_shards(case: Case) -> Column:
    """Return over how many ranks an expert's state is sharded, for the rank with the largest shard."""
    ranks = expert_ranks(case)
    if not memory_profile(case).shards_by_expert or not case.model.moe:
        return ranks
    local = larger(case.model.moe.experts // case.ep, 1)  # a shard is an integer number of experts
    return local / -(-local // ranks)


class State(msgspec.Struct, frozen=True):
    """Bytes on one rank of each stage."""

    weights: Column
    gradients: Column
    optimizer: Column


def trained_state(case: Case, params: RankParams) -> State:
    """Return the state of trained parameters, without what is offloaded to the host."""
    each = per_param(case)
    dense, routed = params.dense + params.ends, params.routed
    shared = dense / dense_ranks(case) + routed / expert_shards(case)
    full = dense + routed
    optimizer_on_gpu = where(any_of(case.offload, "params", "optimizer"), 0, 1)
    profile = memory_profile(case)
    on_gpu = optimizer_on_gpu if profile.offloads_masters else case.offload != "params"
    shards_on_gpu = optimizer_on_gpu if profile.offloads_gradients else on_gpu
    return State(
        weights=on_gpu * (each.weights_replicated * full + each.weights_sharded * shared),
        # Unreduced gradients wait on the GPU, wherever shards go afterwards.
        gradients=each.gradients_replicated * full + shards_on_gpu * each.gradients_sharded * shared,
        optimizer=optimizer_on_gpu * (each.optimizer_replicated * full + each.optimizer_sharded * shared),
    )


def least_state_gib(case: Case) -> float:
    """Return GiB per GPU of weights, gradients and optimizer state if all GPUs shared them equally."""
    if case.goal == "peft":
        each = FROZEN_BYTES.get(case.method, frozen_weight_bytes(case))
    else:
        each = 2 * master_bytes(case) + moment_bytes(case)
    return float(each * case.params_total / case.cluster.world / GIB)


def host_state(case: Case, trained: RankParams) -> Column:
    """Return the bytes of trained state that offloading keeps in host memory: this rank's share of it.

    FSDP moves the updated weights, their reduced gradients and the moments; other engines only the optimizer's state
    and a copy of the gradients, unless parameters are offloaded.
    """
    master, moments, profile = master_bytes(case), moment_bytes(case), memory_profile(case)
    separate = master > BYTES[case.compute]
    everything = 2 * master + moments
    updated = everything if profile.offloads_masters else moments + master * (1 + separate)
    each = any_of(case.offload, "params") * everything + any_of(case.offload, "optimizer") * updated
    return each * ((trained.dense + trained.ends) / dense_ranks(case) + trained.routed / expert_shards(case))


def frozen_weight_bytes(case: Case) -> Column:
    """Return the bytes of one frozen weight that is not quantized."""
    return pick(case.frozen, {"same": BYTES[case.compute], "fp32": BYTES["fp32"]})


def frozen_weights(case: Case, params: RankParams) -> Column:
    """Return the bytes of frozen weights on the GPU."""
    return (case.offload != "params") * frozen_bytes(case, params)


def frozen_bytes(case: Case, params: RankParams) -> Column:
    """Return the bytes of frozen weights: their dtype, fewer bits for the layers' matrices; only FSDP shards them."""
    low = frozen_weight_bytes(case)
    matrix = FROZEN_BYTES.get(case.method, low)
    shares = any_of(case.strategy, "fsdp2", "megatron_fsdp") & np.logical_not(case.cached(keeps_weights))
    dense = (params.dense * matrix + params.ends * low) / where(shares, dense_ranks(case), 1)
    routed = params.routed * matrix / where(shares, expert_shards(case), 1)
    return dense + routed
