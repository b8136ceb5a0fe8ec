"""Peak memory of every pipeline stage, by part; the worst stage is what has to fit.

A stage peaks either in the loss, with logits alive, or in the backward pass of one layer, with that layer recomputed
and its gradients alive. Both come on top of weights, gradients, optimizer state, and the saved activations of all micro
batches in flight (activations.py).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.clusters import AMD_ARCHS
from meshwright.costs.activations import (
    DROPPED_BY_MODULE,
    STAYS,
    Parts,
    activation_bytes_by_recompute,
    backward_working_bytes,
    layer_activation_bytes,
    residual_shards,
    vision_activation_bytes,
)
from meshwright.costs.memory_constants import (
    COMMUNICATOR_GIB,
    CONTEXT_GIB,
    FRAGMENTATION_FLOOR,
    FUSED_CHUNK_TOKENS,
    GATHERED_LAYERS,
    HOST_MARGIN,
    LOSS_CHUNKS,
    MEMORY_BANDS,
    RESERVE,
)
from meshwright.costs.memory_profiles import memory_profile
from meshwright.costs.parameters import RankParams, as_stored, rank_adapters, rank_params, stage_params
from meshwright.costs.schedule import in_flight
from meshwright.costs.stages import FIRST, LAST, Stages, stages, trains_mtp
from meshwright.costs.state import (
    State,
    frozen_bytes,
    frozen_weights,
    host_state,
    keeps_weights,
    least_state_gib,
    trained_state,
)
from meshwright.costs.vectorize import BYTES, GIB, Column, any_of, anywhere, larger, pick, shape_of, smaller, where
from meshwright.errors import InputError
from meshwright.models import Mamba2
from meshwright.recipes.capabilities import executed, fp8_experts
from meshwright.recipes.case import Case

PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "overhead")
COLUMNS = (*PARTS, "total", "cache", "host")
Where = Literal["worst", "first", "last"]
NORMAL_80 = 1.2816  # standard deviations from the mean within which 80 per cent lie


class Memory(msgspec.Struct, frozen=True):
    """GiB on one rank, of the worst stage unless another was requested; the parts add up to the total."""

    weights: Column
    gradients: Column
    optimizer: Column
    activations: Column
    logits: Column
    buffers: Column
    overhead: Column  # CUDA context, communicators, allocator cache
    total: Column
    capacity: float
    cache: Column = 0.0  # the allocator cache within the overhead
    band_pct: float = 0.0  # half-width of the 80 per cent error band of the total
    host: Column = 0.0  # host memory per GPU that offloading needs
    least_state: float = 0.0  # weights, gradients and optimizer state if all GPUs shared them equally

    def rows(self, chosen: Any) -> Memory:
        """Return the memory of some candidates."""
        columns = {name: value for name in COLUMNS if isinstance(value := getattr(self, name), np.ndarray)}
        return msgspec.structs.replace(self, **{name: value[chosen] for name, value in columns.items()})

    @property
    def allocated(self) -> Column:
        """torch would report it as max_memory_allocated."""
        return self.total - self.overhead

    @property
    def reserved(self) -> Column:
        """torch would report it as max_memory_reserved."""
        return self.allocated + self.cache

    @property
    def fits(self) -> Column:
        """Whether the total leaves the reserve of the GPU free."""
        return self.total <= self.usable * (1 + 1e-12)

    @property
    def usable(self) -> float:
        """GiB of the GPU without the reserve."""
        return self.capacity * (1 - RESERVE)

    @property
    def fit_probability(self) -> Column:
        """Chance that it fits, if errors are as spread as the band: half if the total is exactly what is usable."""
        spread = np.log1p(max(self.band_pct, 0.1) / 100) / NORMAL_80
        return _normal_cdf(np.log(self.usable / self.total) / spread)


Fit = Literal["fits", "probably fits", "may not fit", "probably does not fit", "does not fit"]
FITS: tuple[tuple[float, Fit], ...] = (
    (0.9, "fits"),
    (0.7, "probably fits"),
    (0.5, "may not fit"),
    (0.1, "probably does not fit"),
    (0.0, "does not fit"),
)
"""Least chance for each verdict; between a tenth and nine tenths, capacity is within the error band."""


def fit_words(found: Memory) -> Fit:
    """Return the verdict on one layout in words, by the chance that it fits; it never contradicts `fits`."""
    chance = round(float(found.fit_probability), 3)
    bounded = max(chance, 0.5) if bool(found.fits) else min(chance, 0.499)
    return next(text for least, text in FITS if bounded >= least)


def _normal_cdf(z: Column) -> Column:
    """Return the normal distribution function, to 1e-3."""
    z = np.clip(z, -6, 6)
    return 1 / (1 + np.exp(-1.5976 * z - 0.070566 * z**3))


class Peak(msgspec.Struct, frozen=True):
    """Bytes at one moment, on every stage."""

    activations: Column
    logits: Column
    buffers: Column

    @property
    def total(self) -> Column:
        return self.activations + self.logits + self.buffers


def memory(case: Case, stage: Where = "worst") -> Memory:
    """Peak memory of the worst stage, or of the first or the last."""
    case = executed(case)
    return case.cached(_on_worst_stage) if stage == "worst" else _on_stage(case, stage)


def _on_worst_stage(case: Case) -> Memory:
    """Return the memory of the worst stage; cached, as rules, searches and estimates need it."""
    return _on_stage(case, "worst")


def _on_stage(case: Case, stage: Where) -> Memory:
    found = _on_stages(case, stages(case))
    given = {"first": FIRST, "last": LAST}.get(stage)
    at = found[-1].argmax(axis=0) if given is None else np.full(found.shape[2:], given)
    if found.ndim == 2:
        return _memory(case, found[:, int(at)].tolist())
    return _memory(case, list(np.take_along_axis(found, at[None, None], axis=1)[:, 0]))


def memory_by_stage(case: Case) -> tuple[Memory, ...]:
    """Peak memory of every pipeline stage of one layout, first to last."""
    if shape_of(case):
        raise InputError("must be one layout, not a column of layouts", field="case")
    case = executed(case)
    return tuple(_memory(case, values) for values in _on_stages(case, stages(case, every=True)).T.tolist())


def _memory(case: Case, values: list[Column]) -> Memory:
    named = dict(zip((*PARTS, "cache", "total"), values, strict=True))
    host = case.cached(_host_gib)
    return Memory(
        **named,
        capacity=case.cluster.gpu.memory_gib,
        band_pct=memory_band(case),
        host=host,
        least_state=least_state_gib(case),
    )


def _host_gib(case: Case) -> Column:
    """Return GiB of host memory per GPU that offloaded state or activations need, on the stage that needs most."""
    if not anywhere(case.offload != "none"):
        return 0.0
    pipeline, params = stages(case), stage_params(case)
    trained = rank_adapters(case, pipeline) if case.goal == "peft" else params
    state = host_state(case, trained)
    if case.goal == "peft":
        state = state + (case.offload == "params") * frozen_bytes(case, params)
    saved = offloaded_per_micro_batch(case, pipeline) * in_flight(case, pipeline)
    return np.broadcast_to(HOST_MARGIN * (state + saved) / GIB, pipeline.index.shape).max(axis=0)


def _on_stages(case: Case, pipeline: Stages) -> NDArray[np.float64]:
    """GiB of every part, the allocator's loss and the total (rows) on every stage."""
    out = np.empty((len(PARTS) + 2, *pipeline.index.shape))
    for row, value in enumerate(_values(case, pipeline)):
        out[row] = value
    out[:7] /= GIB
    fixed, owned = _fixed_gib(case), out[:6].sum(axis=0)
    room = case.cluster.gpu.memory_gib * (1 - RESERVE) - owned - fixed
    # torch releases cached blocks before an allocation fails, except for a small share.
    out[7] = np.maximum(np.minimum(out[6], room), FRAGMENTATION_FLOOR * owned)
    out[6] = fixed + out[7]
    out[8] = owned + out[6]
    return out


def _values(case: Case, pipeline: Stages) -> tuple[Column, ...]:
    """Return the bytes on every stage: the parts without overhead, and the allocator cache."""
    params = stage_params(case) if pipeline is stages(case) else rank_params(case, pipeline)
    state, trained = _state(case, pipeline, params)
    saved, working = _activations(case, pipeline)
    loss = _loss_peak(case, pipeline, params, trained, saved)
    end = _backward_peak(case, pipeline, params, trained, working)
    peak = _larger(loss, Peak(saved + end.activations, end.logits, end.buffers))
    if memory_profile(case).lean_gather:
        peak = _larger(peak, _head_peak(case, trained, loss))
        end = _larger(end, _embedding_peak(case, params, trained))
    holes = _expert_holes(case, state, trained)
    state, peak = _with_growing_gradients(case, state, peak, end)
    profile = memory_profile(case)
    always = (profile.workspaces_gib + profile.scan_gib * bool(case.model.mixers(Mamba2))) * GIB
    peak = Peak(peak.activations, peak.logits, peak.buffers + always)
    owned = state.weights + state.gradients + state.optimizer
    cache = profile.state_fragmentation * owned + profile.fragmentation * peak.total
    cache = cache + _offload_cache(case, trained) + holes
    return (state.weights, state.gradients, state.optimizer, peak.activations, peak.logits, peak.buffers, cache)


def _expert_holes(case: Case, state: State, trained: RankParams) -> Column:
    """Return bytes between the gradients of experts, which do not fit where smaller activations were."""
    fresh = (case.accumulation == 1) & (case.world == case.pp) & case.cached(_gathers_weights)
    return fresh * memory_profile(case).expert_holes * state.gradients * trained.routed / larger(trained.total, 1)


def _offload_cache(case: Case, trained: RankParams) -> Column:
    """Return bytes that the allocator keeps per stream while FSDP copies its largest unit from and to the host."""
    offloaded = any_of(case.offload, "optimizer", "params") & memory_profile(case).offloads_masters
    return offloaded * 2 * pick(case.reduce, BYTES) * larger(trained.ends / 2, trained.unit_dense + trained.unit_routed)


def _with_growing_gradients(case: Case, state: State, peak: Peak, end: Peak) -> tuple[State, Peak]:
    """Choose the peak of a step with one micro batch: gradients appear while activations are freed."""
    grows = (case.accumulation == 1) & memory_profile(case).fresh_gradients
    early = grows & (peak.total >= state.gradients + end.total)  # all activations, no gradients yet
    late = grows & (peak.total < state.gradients + end.total)
    gradients = where(early, 0.0, state.gradients)
    return (
        State(state.weights, gradients, state.optimizer),
        Peak(
            where(late, end.activations, peak.activations),
            where(late, end.logits, peak.logits),
            where(late, end.buffers, peak.buffers),
        ),
    )


def _larger(one: Peak, other: Peak) -> Peak:
    first = one.total >= other.total
    return Peak(
        where(first, one.activations, other.activations),
        where(first, one.logits, other.logits),
        where(first, one.buffers, other.buffers),
    )


def tokens(case: Case) -> Column:
    """Return the tokens of one micro batch on one rank."""
    return case.micro_batch_size * case.seq_length / case.cp


def _state(case: Case, pipeline: Stages, params: RankParams) -> tuple[State, RankParams]:
    """Return the state of a rank, and its trained parameters."""
    if case.goal != "peft":
        return trained_state(case, params), params
    adapters = rank_adapters(case, pipeline)
    state = trained_state(case, adapters)
    return State(state.weights + frozen_weights(case, params), state.gradients, state.optimizer), adapters


def _gathers_weights(case: Case) -> Column:
    """Whether sharded weights are gathered before they are used."""
    shards = any_of(case.strategy, "fsdp2", "megatron_fsdp")
    if memory_profile(case).plain_one_rank:
        return shards & ((case.world > case.pp) | (case.master != case.compute))
    if not memory_profile(case).lean_gather:
        return shards
    casts = case.master != case.compute and (case.goal != "peft" or any_of(case.offload, "params", "optimizer"))
    # Unsharded weights use the same code path, which makes a copy in the compute dtype.
    return (shards | (case.strategy == "ddp")) & ((case.world > case.pp) | casts)


def _all_layers_gathered(case: Case) -> Column:
    """Return whether every layer of the stage stays gathered: inside a torch pipeline, or without resharding."""
    kept = memory_profile(case).keeps_experts_gathered and bool(case.is_moe)
    copies = (case.strategy == "ddp") & memory_profile(case).lean_gather & (case.goal != "peft")
    return ((case.pp > 1) & (case.engine != "megatron")) | (not case.reshard_after_forward) | kept | copies


def _gathered(case: Case, params: RankParams, layers: float) -> Column:
    """Return the bytes of gathered weights: embedding and head, and some layers or all of them."""
    params = as_stored(case, params)
    full = BYTES[case.compute]
    mixed = case.is_moe and not fp8_experts(case)  # experts keep the compute format
    in_fp8 = 1 + params.routed / larger(params.total, 1) * (full - 1) if mixed else 1  # a rank may hold no weight
    size = where(case.fp8_gather, in_fp8, full)  # a column where only some layouts gather in FP8
    if memory_profile(case).lean_gather:
        pipeline = _units(case, params, layers)
    else:
        pipeline = params.ends + larger(
            layers * (params.unit_dense + params.unit_routed), memory_profile(case).live_parameters
        )
    some = smaller(pipeline, params.total)
    gathers = case.cached(_gathers_weights) & np.logical_not(case.cached(keeps_weights))
    return gathers * where(_all_layers_gathered(case), params.total, some) * size


def _units(case: Case, params: RankParams, layers: float) -> Column:
    """Return the parameters gathered at a time: a layer, its experts and the next; in the loss, head and last layer.

    A tied head is the embedding, which stays gathered from the start of the step to the loss.
    """
    if layers:
        return _tied(case) * params.ends + layers * params.unit_dense + params.unit_routed
    return where(_tied(case), params.ends, params.head) + params.unit_dense


def _tied(case: Case) -> Column:
    """Return whether head and embedding are one weight on one rank."""
    return (case.pp == 1) & bool(case.model.tied)


def _loss_peak(case: Case, pipeline: Stages, params: RankParams, trained: RankParams, saved: Column) -> Peak:
    """Return the peak in the loss: logits with softmax and gradient, while sharded layers are freed."""
    fresh = memory_profile(case).layer_gradients * pipeline.last * (trained.head + trained.unit_dense)
    return Peak(saved, _logits(case, pipeline, trained), _gathered(case, params, 0.0) + fresh)


def _backward_peak(case: Case, pipeline: Stages, params: RankParams, trained: RankParams, working: Column) -> Peak:
    """Return the peak in the last layer's backward pass: it and the next are gathered, its gradients unreduced.

    In earlier ones the saved activations of other layers come on top.
    """
    profile = memory_profile(case)
    reduced = larger(trained.unit_dense + trained.unit_routed, smaller(profile.reduce_bucket, trained.total))
    # A pipeline that defers the reduction reduces after all backward passes.
    later = profile.lean_gather & (case.pp > 1) & (case.accumulation > 1)
    reduced = reduced * (BYTES[case.compute] + where(later, 0, _reduce_bytes(case)))
    fresh = profile.layer_gradients * trained.unit_dense + profile.stacked_experts * trained.unit_routed
    logits = profile.keeps_logits * pipeline.last * tokens(case) * case.model.vocab
    gathered = _gathered(case, params, GATHERED_LAYERS)
    return Peak(working, logits, gathered + case.cached(_gathers_weights) * reduced + fresh)


def _reduce_bytes(case: Case) -> Column:
    """Return bytes per gradient of the buffer that is reduced, besides the gradient it becomes.

    One rank of our engine reduces nothing: the buffer of its only micro batch is the gradient (parallelize/fsdp.py).
    """
    in_place = memory_profile(case).lean_gather & (case.world == case.pp) & (case.accumulation == 1)
    return where(in_place, 0, pick(case.reduce, BYTES))


def _head_peak(case: Case, trained: RankParams, loss: Peak) -> Peak:
    """Return the peak after the loss: the head's new gradient, and the copy that is reduced."""
    fresh = trained.head * (BYTES[case.compute] + case.cached(_gathers_weights) * _reduce_bytes(case))
    return Peak(loss.activations, 0.0, loss.buffers + fresh)


def _embedding_peak(case: Case, params: RankParams, trained: RankParams) -> Peak:
    """Return the peak at the end of backward: the gathered embedding, its gradient, and the reduced copy."""
    params = as_stored(case, params)
    only_head = where(_tied(case), 0.0, params.head)
    gathered = case.cached(_gathers_weights) * where(_all_layers_gathered(case), params.total, params.ends - only_head)
    fresh = larger(trained.ends - only_head, 0) * (
        BYTES[case.compute] + case.cached(_gathers_weights) * _reduce_bytes(case)
    )
    return Peak(0.0, 0.0, gathered * BYTES[case.compute] + fresh)


def _own_logits(case: Case, pipeline: Stages, trained: RankParams) -> Column:
    """Return the bytes at the peak of our engine's loss functions, which process `loss_chunk` tokens at a time.

    vocab_parallel  all logits and their gradient, and one chunk of it in progress
    chunked         logits of one chunk and their gradient, with those of the next or, at the end, the head's gradient
                    in the compute dtype; the gradients of hidden states and, in fp32, of the head
    fused_linear    one chunk of logits that becomes its own gradient (with tp a separate one), and the next; the
                    gradients of hidden states and, in fp32, of the head
    """
    count, low = tokens(case), BYTES[case.compute]
    chunk = smaller(count, memory_profile(case).loss_chunk)
    wide = case.model.vocab / case.tp
    if case.loss == "vocab_parallel":
        return pipeline.last * wide * low * (2 * count + chunk)
    hidden = count * case.model.hidden * low
    if case.loss == "chunked":
        several, narrowed = 3 * chunk * wide * (count > chunk), 2 * chunk * wide + trained.head
        return pipeline.last * (low * larger(several, narrowed) + 4 * trained.head + hidden)
    blocks = 1 + 1 * (count > chunk) + 1 * (case.tp > 1)
    return pipeline.last * (blocks * low * chunk * wide + 4 * trained.head + hidden)


def _logits(case: Case, pipeline: Stages, trained: RankParams) -> Column:
    """Return the bytes of logits, softmax and gradient on the stage that computes the loss."""
    if not case.model.vocab:
        return 0.0
    count, profile = tokens(case), memory_profile(case)
    if profile.loss_chunk and case.loss != "plain":
        return (1 + (case.model.mtp_layers if trains_mtp(case) else 0)) * _own_logits(case, pipeline, trained)
    if case.loss == "chunked":
        count = count / LOSS_CHUNKS
    elif case.loss == "fused_linear":
        count = smaller(count, FUSED_CHUNK_TOKENS)
    each, shards = logit_bytes(case)
    heads = 1 + (case.model.mtp_layers if trains_mtp(case) else 0)
    outputs = BYTES[case.compute] * (case.pass_micro_batches - 1) * (case.pp > 1) * tokens(case) * profile.keeps_outputs
    return pipeline.last * case.model.vocab * (heads * count * each + outputs) / shards


def logit_bytes(case: Case) -> tuple[Column, Column]:
    """Return bytes alive per logit, and over how many ranks logits are sharded."""
    profile = memory_profile(case)
    each = (profile.logits_compiled if case.compile else 0.0) or profile.logits
    if case.compile and profile.logits_one_rank:
        each = where(case.world == case.pp, profile.logits_one_rank, each)
    if case.loss == "plain" or profile.gathers_logits:
        return each + profile.logits_gathered * (case.tp > 1), 1
    if case.loss == "vocab_parallel" and profile.logits_parallel:
        each = where(case.tp > 1, larger(profile.logits_parallel, each), each)
    return each, case.tp


def _activations(case: Case, pipeline: Stages) -> tuple[Column, Column]:
    """Return the activation bytes saved by all micro batches in flight, and the working set of one layer."""
    saved, moved, working = _per_token(case, pipeline)
    saved = (saved - moved) * tokens(case) + _joined_weights(case, pipeline)
    return saved * in_flight(case, pipeline), working * tokens(case)


def _joined_weights(case: Case, pipeline: Stages) -> Column:
    """Return the bytes of the weights that a forward pass joins from segments and saves: of state-space layers."""
    if not memory_profile(case).joins_segments:
        return 0.0
    widths = [
        number * (layer.mixer.inner + layer.mixer.conv_width + layer.mixer.heads)
        for layer, number in pipeline.layers
        if isinstance(layer.mixer, Mamba2)
    ]
    saved = BYTES[case.compute] * case.model.hidden * sum(widths, start=0.0) / case.tp
    return where(case.recompute == "full", 1 - recomputed_share(case, pipeline), 1.0) * saved


def offloaded_per_micro_batch(case: Case, pipeline: Stages) -> Column:
    """Return the activation bytes that every stage moves to the host for one micro batch."""
    return _per_token(case, pipeline)[1] * tokens(case)


def _per_token(case: Case, pipeline: Stages) -> tuple[Column, Column, Column]:
    """Return per token the activation bytes saved, those of them that are offloaded, and the working set of a layer."""
    saved: Column = 0.0
    stay: Column = 0.0
    working: Column = 0.0
    recomputed, offloads = recomputed_share(case, pipeline), anywhere(case.offload == "activations")
    for layer, number in pipeline.layers:
        parts = layer_activation_bytes(case, layer)
        everything, selective, inputs = activation_bytes_by_recompute(case, parts)
        full = recomputed * inputs + (1 - recomputed) * everything
        kept = where(case.recompute == "none", everything, where(case.recompute == "full", full, selective))
        saved = saved + number * kept
        if offloads:
            stay = stay + number * smaller(_staying(case, parts), kept)
        rebuilt = where(case.recompute == "none", 0, everything - where(case.recompute == "full", inputs, selective))
        working = larger(working, (number > 0) * (rebuilt + backward_working_bytes(case, parts)))
    ends = pipeline.first * vision_activation_bytes(case) + 2 * pipeline.last * BYTES[
        case.compute
    ] * case.model.hidden / residual_shards(case)
    return saved + ends, (case.offload == "activations") * (saved + ends - stay), working


def _staying(case: Case, parts: Parts) -> Column:
    """Return the bytes per token of a layer that offloading activations leaves on the GPU."""
    stay = {name: parts.get(name, 0.0) for name in STAYS.get(case.engine, ())}
    dropped = {part for module in case.recompute_modules for part in DROPPED_BY_MODULE.get(module, ())}
    left = sum(value for name, value in stay.items() if name not in dropped)
    return where(case.recompute == "selective", left, sum(stay.values()))


def recomputed_share(case: Case, pipeline: Stages) -> Column:
    """Return the share of a stage's layers that full recompute covers."""
    share = smaller(case.recompute_layers / larger(pipeline.count, 1), 1)
    return where(case.recompute_layers == 0, 1.0, share)


def _fixed_gib(case: Case) -> Column:
    """Return CUDA context and one communicator per axis in use."""
    axes = (case.tp, case.pp, case.cp, case.ep, case.dp)
    return CONTEXT_GIB + COMMUNICATOR_GIB * sum((degree > 1) * 1 for degree in axes)


def memory_band(case: Case) -> float:
    """Return the half-width of the 80 per cent error band of the total, in per cent: the widest that applies."""
    applies = {
        "dense": True,
        "moe": case.is_moe,
        "low_precision": case.matmul != "same",
        "hybrid": case.is_hybrid,
        "peft": case.goal == "peft",
        "unmeasured": case.matmul == "nvfp4"
        or case.is_diffusion
        or case.images
        or case.gpu_arch in ("volta", "turing", "rubin", *AMD_ARCHS),
    }
    return max(MEMORY_BANDS[name] for name, member in applies.items() if member)
