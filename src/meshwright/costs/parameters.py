"""Parameters per rank, by how they are sharded."""

from __future__ import annotations

import msgspec
import numpy as np

from meshwright.costs.memory_constants import FROZEN_BYTES
from meshwright.costs.memory_profiles import memory_profile
from meshwright.costs.stages import Stages, stages, trains_mtp
from meshwright.costs.vectorize import BYTES, Column, plain
from meshwright.models import MLA, Attention, Dense, GatedDelta, Layer, LinearMixer, Mamba2, MoE
from meshwright.models.spec import Mixer, is_scan
from meshwright.recipes.case import Case

FUSED_ENGINES = ("megatron",)  # one adapter on q, k and v together, and one on gate and up; elsewhere one each


class LayerParams(msgspec.Struct, frozen=True):
    """Parameters of one layer: sharded by tp, replicated on every rank, sharded by expert parallelism."""

    sharded: int
    replicated: int
    routed: int


def layer_params(layer: Layer, hidden: int) -> LayerParams:
    """Return how a layer is sharded: matrices by tp; norms, routers, biases, MLA's down projections replicated."""
    sharded = 0
    for mixer in (layer.mixer, layer.cross):
        if mixer is not None:
            sharded += layer.streams * (mixer.matmul_params(hidden) - _down_projections(mixer, hidden))
    if isinstance(layer.ffn, MoE):
        sharded += layer.ffn.always_on_params(hidden) - hidden * layer.ffn.experts
    elif layer.ffn is not None:
        sharded += layer.streams * layer.ffn.matmul_params(hidden)
    return LayerParams(sharded, layer.dense_params(hidden) - sharded, layer.routed_params(hidden))


def _down_projections(mixer: Mixer, hidden: int) -> int:
    """Return MLA's latent projections, which have no heads to shard and are replicated on every tp rank."""
    if not isinstance(mixer, MLA):
        return 0
    return hidden * (mixer.kv_lora + mixer.qk_rope + (mixer.q_lora or 0))


def adapter_params(case: Case, layer: Layer) -> LayerParams:
    """Return adapter parameters of one layer: rank × (inputs + outputs) per adapted matrix; one adapter per expert.

    DoRA adds a magnitude per output. The gate and up projections of an expert share one adapter in every engine.
    """
    hidden, rank, targets = case.model.hidden, case.rank, case.targets
    count = sum(rank * (into + out) + _is_dora(case) * out for _, into, out in _adapted(case, layer))
    routed = 0
    if isinstance(layer.ffn, MoE):
        inner = layer.ffn.latent or hidden
        up = (2 if layer.ffn.gated else 1) * layer.ffn.width
        routed = (
            layer.ffn.experts
            * rank
            * (("fc1" in targets) * (inner + up) + ("fc2" in targets) * (inner + layer.ffn.width))
        )
    return LayerParams(0, layer.streams * count, routed)


def _adapted(case: Case, layer: Layer) -> list[tuple[str, int, int]]:
    """Return the adapted linears outside the routed experts: name, inputs, outputs."""
    widths = _linear_widths(layer, case.model.hidden, fused=case.engine in FUSED_ENGINES)
    return [linear for linear in widths if linear[0] in case.targets]


def _is_dora(case: Case) -> bool:
    return bool(case.method == "dora")


def _linear_widths(layer: Layer, hidden: int, *, fused: bool) -> list[tuple[str, int, int]]:
    """Return the adaptable linears outside the routed experts: name, inputs, outputs."""
    mixer, widths = layer.mixer, []
    if isinstance(mixer, Attention):
        widths += [*_joined("qkv", hidden, _attention_outputs(mixer), fused), ("proj", mixer.out_width, hidden)]
    elif isinstance(mixer, MLA):
        queries, keys_values = mixer.heads * mixer.qk_head, mixer.heads * (mixer.qk_nope + mixer.v_head)
        if fused:
            widths += [("qkv", hidden, queries + keys_values)]
        else:
            widths += [("qkv", mixer.q_lora or hidden, queries), ("qkv", mixer.kv_lora, keys_values)]
        widths += [("proj", mixer.heads * mixer.v_head, hidden)]
    elif isinstance(mixer, Mamba2):
        widths += [
            ("mamba_in", hidden, mixer.inner + mixer.conv_width + mixer.heads),
            ("mamba_out", mixer.inner, hidden),
        ]
    elif isinstance(mixer, GatedDelta):
        widths += [("qkv", hidden, 2 * mixer.k_width + 2 * mixer.v_width), ("proj", mixer.v_width, hidden)]
    elif isinstance(mixer, LinearMixer):
        names = ("mamba_in", "mamba_out") if is_scan(mixer) else ("qkv", "proj")
        widths += [(names[0], hidden, mixer.into), (names[1], mixer.out, hidden)]
    for dense in _dense_blocks(layer):
        widths += _joined("fc1", hidden, (2 if dense.gated else 1) * [dense.width], fused)
        widths += [("fc2", dense.width, hidden)]
    return widths


def _attention_outputs(mixer: Attention) -> list[int]:
    """Return the outputs of the projections to queries (with their gate), keys and values."""
    queries = mixer.q_width * (2 if mixer.output_gate else 1)
    if mixer.reused_kv:
        return [queries]
    return [queries, mixer.kv_width] + ([] if mixer.shared_kv else [mixer.v_width])


def _joined(name: str, inputs: int, outputs: list[int], fused: bool) -> list[tuple[str, int, int]]:
    """Return projections of the same inputs as one linear or as one each."""
    return [(name, inputs, width) for width in ([sum(outputs)] if fused else outputs)]


def _tp_sharded_adapters(case: Case, layer: Layer) -> int:
    """Return the adapter parameters that tp shards: those of outputs on entry of a block, of inputs at its end."""
    ends, rank = ("proj", "fc2", "mamba_out"), int(case.rank)
    each = (rank * into if name in ends else (rank + _is_dora(case)) * out for name, into, out in _adapted(case, layer))
    return layer.streams * sum(each)


def _dense_blocks(layer: Layer) -> list[Dense]:
    """Return the feed-forward blocks every token passes: the layer's own, or the shared and parallel ones of an MoE."""
    ffn = layer.ffn
    if isinstance(ffn, Dense):
        return [ffn]
    if ffn is None:
        return []
    shared = [Dense(ffn.shared_width, ffn.gated, ffn.dense_bias)] if ffn.shared_width else []
    return shared + ([ffn.parallel] if ffn.parallel else [])


class RankParams(msgspec.Struct, frozen=True):
    """Parameters on one rank of each stage, before data-parallel sharding."""

    dense: Column  # layers without routed experts
    routed: Column  # routed experts
    ends: Column  # embedding, head, vision encoder and other parts outside the layers
    head: Column  # the output projection, part of ends
    unit_dense: Column  # largest single layer, which FSDP gathers at a time
    unit_routed: Column

    @property
    def total(self) -> Column:
        return self.dense + self.routed + self.ends


def as_stored(case: Case, params: RankParams) -> RankParams:
    """Return parameters counted in the compute dtype's bytes as gathered: frozen ones in 4 or 8 bits take fewer."""
    if case.goal != "peft" or case.method not in FROZEN_BYTES:
        return params
    packed = FROZEN_BYTES[case.method] / BYTES[case.compute]
    return msgspec.structs.replace(
        params,
        dense=packed * params.dense,
        routed=packed * params.routed,
        unit_dense=packed * params.unit_dense,
        unit_routed=packed * params.unit_routed,
    )


def expert_parallel_ranks(case: Case) -> Column:
    """Return over how many ranks one layer's experts are spread; KempnerForge replicates them on its tp ranks."""
    return case.ep * (1 if case.engine == "kempnerforge" else case.etp)


def stage_params(case: Case) -> RankParams:
    """Return the model parameters on one rank of each representative stage; cached per case."""
    return case.cached(_stage_params)


def _stage_params(case: Case) -> RankParams:
    return rank_params(case, stages(case))


def rank_params(case: Case, pipeline: Stages) -> RankParams:
    """Return the model parameters on one rank of each stage."""
    hidden, shards = case.model.hidden, expert_parallel_ranks(case)
    parts = [(layer_params(layer, hidden), number) for layer, number in pipeline.layers]
    dense = [p.sharded / case.tp + p.replicated for p, _ in parts]
    return RankParams(
        dense=sum(number * d for d, (_, number) in zip(dense, parts, strict=True)),
        routed=sum(number * p.routed for p, number in parts) / shards,
        ends=_ends(case, pipeline),
        head=pipeline.last * case.model.vocab * hidden / case.tp,
        unit_dense=_largest(dense),
        unit_routed=max(p.routed for p, _ in parts) / shards,
    )


def rank_adapters(case: Case, pipeline: Stages) -> RankParams:
    """Return the adapter parameters on one rank of each stage; in some engines tp shards one side of each."""
    shards = expert_parallel_ranks(case)
    parts = [(adapter_params(case, layer), n) for layer, n in pipeline.layers]
    if memory_profile(case).shards_adapters:
        sharded = [_tp_sharded_adapters(case, layer) for layer, _ in pipeline.layers]
        each = [p.replicated - size * (1 - 1 / case.tp) for (p, _), size in zip(parts, sharded, strict=True)]
    else:
        each = [p.replicated for p, _ in parts]
    return RankParams(
        dense=sum(number * size for size, (_, number) in zip(each, parts, strict=True)),
        routed=sum(number * p.routed for p, number in parts) / shards,
        ends=0.0,
        head=0.0,
        unit_dense=_largest([1.0 * size for size in each]),
        unit_routed=max(p.routed for p, _ in parts) / shards,
    )


def _ends(case: Case, pipeline: Stages) -> Column:
    """First stage: embedding, vision encoder, embedders. Last: head, final norm, entry of the MTP modules."""
    model = case.model
    count = model.params
    head = model.vocab * model.hidden
    tied_copy = (case.pp > 1) * head if model.tied else head  # across stages a tied head is a second copy
    mtp = model.mtp_layers * 2 * model.hidden**2 if trains_mtp(case) else 0  # projections of [hidden, embedding]
    replicates_vision = memory_profile(case).replicates_vision
    # Without images there is no vision encoder.
    replicated = count.vision * bool(case.images) if replicates_vision else 0
    first = count.embedding + (0 if replicates_vision else count.vision) + model.extra_params
    sharded = (pipeline.first * first + pipeline.last * (tied_copy + mtp)) / case.tp
    return sharded + pipeline.first * replicated + pipeline.last * model.final_norm_params


def _largest(values: list[Column]) -> Column:
    out = values[0]
    for value in values[1:]:
        out = np.maximum(out, value)
    return out


def parameters(case: Case) -> Column:
    """Return the parameters of the rank with the most, before data-parallel sharding."""
    return plain(np.max(stage_params(case).total, axis=0))
