"""Peak memory of the worst rank, by part."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.costs.activations import kept_bytes, layer_parts, residual_cut, vision_bytes
from meshwright.costs.columns import BYTES, GIB, Column, any_of, plain
from meshwright.costs.constants import (
    BACKWARD_WORKING_SET,
    COMMUNICATOR_GIB,
    CONTEXT_GIB,
    FRAGMENTATION_DYNAMIC,
    FRAGMENTATION_STATE,
    FUSED_CHUNK_TOKENS,
    GATHERED_LAYERS,
    LOGIT_BYTES,
    LOGIT_BYTES_GATHERED,
    LOSS_CHUNKS,
    RESERVE,
)
from meshwright.costs.parameters import RankParams, rank_adapters, rank_params
from meshwright.costs.schedule import in_flight
from meshwright.costs.stages import Stages, stages, trains_mtp
from meshwright.costs.state import State, frozen_weights, trained_state
from meshwright.recipes.case import Case

PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "overhead")


@dataclass(frozen=True)
class Memory:
    """GiB on the worst rank; the parts add up to the total."""

    weights: Column
    gradients: Column
    optimizer: Column
    activations: Column
    logits: Column
    buffers: Column
    overhead: Column  # CUDA context, communicators, allocator loss
    total: Column
    capacity: float

    @property
    def allocated(self) -> Column:
        """What torch would report as max_memory_allocated."""
        return self.total - self.overhead

    @property
    def fits(self) -> Column:
        """Whether the total leaves the stated reserve of the GPU free."""
        return self.total <= self.capacity * (1 - RESERVE)


def memory(case: Case) -> Memory:
    """Peak memory of the worst rank."""
    held = stages(case)
    state, buffers = _state_and_buffers(case, held)
    logits = _logits(case, held)
    saved, working = _activations(case, held)
    activations = saved + np.maximum(working - logits, 0)  # the two transients never meet
    dynamic = activations + logits + buffers
    fixed = state.weights + state.gradients + state.optimizer
    overhead = _overhead_gib(case) * GIB + FRAGMENTATION_STATE * fixed + FRAGMENTATION_DYNAMIC * dynamic
    values = (state.weights, state.gradients, state.optimizer, activations, logits, buffers, overhead)
    return _worst(case, held, values)


def _worst(case: Case, held: Stages, values: tuple[Column, ...]) -> Memory:
    """The stage with the largest sum, in GiB."""
    parts = [np.broadcast_to(value, held.index.shape) for value in values]
    total = sum(parts[1:], start=parts[0])
    at = np.argmax(total, axis=0)[None]
    chosen = [plain(np.take_along_axis(part, at, axis=0)[0] / GIB) for part in parts]
    return Memory(**dict(zip(PARTS, chosen, strict=True)), total=sum(chosen), capacity=case.cluster.gpu.memory_gib)


def tokens(case: Case) -> Column:
    """Tokens of one micro batch on one rank."""
    return case.micro_batch_size * case.seq_length / case.cp


def _state_and_buffers(case: Case, held: Stages) -> tuple[State, Column]:
    params = rank_params(case, held)
    if case.goal != "peft":
        return trained_state(case, params), _buffers(case, params, params)
    adapters = rank_adapters(case, held)
    state = trained_state(case, adapters)
    return State(state.weights + frozen_weights(case, params), state.gradients, state.optimizer), _buffers(
        case, params, adapters
    )


def _buffers(case: Case, params: RankParams, trained: RankParams) -> Column:
    """Gathered weights and gradients on their way to the owner, for the strategies that shard weights.

    The layer in use and the prefetched one are whole, and so are embedding and head. Inside a torch pipeline, or when
    told not to reshard, all layers of the stage stay whole. One layer's gradients are whole before they are reduced.
    """
    size = 1 if case.fp8_gather else BYTES[case.compute]
    some = GATHERED_LAYERS * (params.unit_dense + params.unit_routed) + params.ends
    keeps_all = ((case.pp > 1) & (case.engine != "megatron")) | (not case.reshard_after_forward) | _keeps_experts(case)
    gathered = np.where(keeps_all, params.total, np.minimum(some, params.total)) * size
    reduced = (trained.unit_dense + trained.unit_routed) * (BYTES[case.compute] + BYTES[case.reduce])
    return any_of(case.strategy, "fsdp2", "megatron_fsdp") * (gathered + reduced)


def _keeps_experts(case: Case) -> bool:
    """KempnerForge's measured MoE runs only add up when gathered blocks stay: 16 experts on 8 GPUs need 33 GiB more."""
    return case.engine == "kempnerforge" and bool(case.is_moe)


def _logits(case: Case, held: Stages) -> Column:
    """Bytes of logits, their softmax and their gradient on the stage that computes the loss."""
    if not case.model.vocab:
        return 0.0
    count = tokens(case)
    if case.loss == "chunked":
        count = count / LOSS_CHUNKS
    elif case.loss == "fused_linear":
        count = np.minimum(count, FUSED_CHUNK_TOKENS)
    each, cut = logit_bytes(case)
    heads = 1 + (case.model.mtp_layers if trains_mtp(case) else 0)
    return held.last * heads * count * case.model.vocab * each / cut


def logit_bytes(case: Case) -> tuple[Column, Column]:
    """Bytes alive per logit, and the ranks over which logits are cut; KempnerForge always gathers them."""
    each = LOGIT_BYTES.get(case.engine, LOGIT_BYTES["torch"])
    if case.loss == "vocab_parallel" and case.engine != "kempnerforge":
        return each, case.tp
    return each + LOGIT_BYTES_GATHERED * (case.tp > 1), 1


def _activations(case: Case, held: Stages) -> tuple[Column, Column]:
    """Bytes kept for the backward pass of all micro batches in flight, and the working set of one layer."""
    count = tokens(case)
    saved: Column = 0.0
    working: Column = 0.0
    again = recomputed_share(case, held)
    for layer, number in held.layers:
        everything, selective, inputs = kept_bytes(case, layer_parts(case, layer))
        full = again * inputs + (1 - again) * everything
        kept = np.where(case.recompute == "none", everything, np.where(case.recompute == "full", full, selective))
        saved = saved + number * kept
        rebuilt = np.where(
            case.recompute == "none", 0, everything - np.where(case.recompute == "full", inputs, selective)
        )
        working = np.maximum(working, rebuilt + BACKWARD_WORKING_SET * everything)
    ends = held.first * vision_bytes(case) + 2 * held.last * BYTES[case.compute] * case.model.hidden / residual_cut(
        case
    )
    saved = (saved + ends) * in_flight(case, held) * count * (case.offload != "activations")
    return saved, working * count


def recomputed_share(case: Case, held: Stages) -> Column:
    """Share of a stage's layers that full recompute covers."""
    share = np.minimum(case.recompute_layers / np.maximum(held.count, 1), 1)
    return np.where(case.recompute_layers == 0, 1.0, share)


def _overhead_gib(case: Case) -> Column:
    """CUDA context and one communicator per axis in use."""
    axes = (case.tp, case.pp, case.cp, case.ep, case.dp)
    return CONTEXT_GIB + COMMUNICATOR_GIB * sum((degree > 1) * 1 for degree in axes)
