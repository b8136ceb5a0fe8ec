"""Activation memory: bytes a layer saves for its backward pass, per token on one rank, by named part.

Parts are named so that recompute can drop them. A trained linear saves its input, a frozen one only if it has an
adapter. Attention is flash attention, which saves q, k, v, the output and one fp32 log-sum-exp per head, never the
score matrix (unless kernels.attention is eager). How norms and gated activations are saved differs by engine; the
counts for torch, eager and compiled, were read from the tensors that autograd saves.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from meshwright.costs.flops import image_share
from meshwright.costs.memory_constants import DELTA_CHUNK, MAMBA_CHUNK, OWN_CHUNK, SCORE_BYTES
from meshwright.costs.memory_profiles import MemoryProfile, memory_profile
from meshwright.costs.vectorize import BYTES, Column, larger, smaller, where
from meshwright.models import MLA, Attention, Dense, GatedDelta, Layer, LinearMixer, Mamba2, MoE
from meshwright.models.spec import Mixer
from meshwright.recipes.case import Case

Parts = dict[str, Column]

# Parts that recomputing a module drops. Recomputing the core of flash attention frees nothing, because its output is
# saved anyway as the input of the next linear; it was made for the score matrix of eager attention.
DROPPED_BY_MODULE: Mapping[str, tuple[str, ...]] = {
    "core_attn": ("scores",),
    "layernorm": ("norm",),
    "mlp": ("fc1", "act"),
    "moe": ("routed_in", "routed_fc1", "routed_act", "routed_out", "shared_fc1", "shared_act", "router"),
    "moe_act": ("routed_act",),
    "mla_up_proj": ("up",),
    "shared_experts": ("shared_fc1", "shared_act"),
    "attention": ("proj", "up", "core", "scores", "scan"),
}
# Parts that stay on the GPU where activations of named modules are offloaded: its modules are attention, norms and the
# inputs of experts' two linears. Engines without an entry offload everything.
STAYS: Mapping[str, tuple[str, ...]] = {
    "megatron": ("fc1", "act", "shared_fc1", "shared_act", "routed_act", "routed_out", "router")
}
# Modules of selective recompute if a recipe names none; other engines choose single operations.
SELECTIVE_MODULES: Mapping[str, tuple[str, ...]] = {"megatron": ("core_attn",), "kempnerforge": ("attention",)}
# Op-level selective recompute (torch engines) saves attention's output and every second matmul: of a gated block's
# seven, q, v, the first of the two up-projections and the last; a compiled block drops the last, which nothing reads.
SAVED_BY_OP: Mapping[str, float] = {
    "input": 1.0,
    "core": 1.0,
    "up": 0.5,
    "fc1": 0.5,
    "shared_fc1": 0.5,
    "routed_in": 1.0,
    "routed_fc1": 0.5,
    "router": 1.0,
}
# Gradients that one layer's backward pass holds besides activations, which are freed one by one: of its widest
# tensors. Measured on H200 with torch: 57,344 bytes per token of Llama 3 8B, the two outputs of its first linears.
WORKING_BLOCKS = (("fc1",), ("routed_in", "routed_fc1", "routed_out"), ("proj", "up", "scores"))


CAST_AGAIN = ("fp8_tensor", "fp8_row")  # MXFP8 saves what bf16 does: 146.6 and 145.6 GiB (two layers of Llama 4 Scout)


def residual_shards(case: Case) -> Column:
    """Return over how many ranks norms and residuals are sharded: tp with sequence parallelism, else 1."""
    return where(case.sp, case.tp, 1)


def linear_input_bytes(case: Case, *, expert: bool = False) -> int:
    """Return bytes per element of a linear's saved input.

    Transformer Engine saves the 8-bit copy. torch.compile saves none that a cheap operation can compute again.
    """
    if case.matmul != "same" and case.engine == "megatron":
        return 1
    casts_again = memory_profile(case).casts_again and case.goal != "peft"  # adapters read what was not cast
    again = case.matmul in CAST_AGAIN and case.compile and casts_again and not expert
    return 0 if again else BYTES[case.compute]


def layer_activation_bytes(case: Case, layer: Layer) -> Parts:
    """Return everything one layer saves, in bytes per token."""
    profile = memory_profile(case)
    size, hidden, shards = BYTES[case.compute], case.model.hidden, residual_shards(case)
    mixers = (layer.mixer is not None) + (layer.cross is not None)
    blocks = mixers + (layer.ffn is not None)
    # Norms that feed a linear which saves its input.
    feeds = mixers * _saves_input(case, "qkv") + (layer.ffn is not None) * _saves_input(case, "fc1")
    normed = feeds * linear_input_bytes(case)
    parts: Parts = {"input": layer.residuals * size * hidden / shards}
    if profile.gathers_inputs or profile.gathers_again:
        parts |= _norms_and_residual(case, layer, blocks, normed)
    else:
        beside = (blocks - 1) * size * layer.residuals + blocks * _norm_extra(case, profile) + _dropout(case, layer)
        parts["norm"] = (normed + beside) * hidden / shards
    for mixer in (layer.mixer, layer.cross):
        if mixer is not None:
            _add(parts, _mixer_parts(case, mixer))
    if isinstance(layer.ffn, MoE):
        _add(parts, _moe_parts(case, layer.ffn))
    elif layer.ffn is not None:
        _add(parts, _dense_parts(case, layer.ffn, "fc1", "act"))
    return parts


def _input_shards(case: Case) -> Column:
    """Return over how many ranks the saved inputs of linears are sharded."""
    profile = memory_profile(case)
    if profile.gathers_inputs or (profile.gathers_again and case.compile):
        return 1
    return residual_shards(case)


def _norms_and_residual(case: Case, layer: Layer, blocks: int, normed: int) -> Parts:
    """Return what norms save for the linears they feed, and the residual stream between blocks.

    Experts save their own rows and routers their own copy; only shared and parallel blocks beside them gather.
    """
    profile, size, hidden, shards = memory_profile(case), BYTES[case.compute], case.model.hidden, residual_shards(case)
    if isinstance(layer.ffn, MoE) and not (layer.ffn.shared_width or layer.ffn.parallel):
        normed -= linear_input_bytes(case) * _saves_input(case, "fc1")
    if saves_fp32_norms(case):
        norms = layer.norm_params / hidden
        residual = (4 * norms - size) * hidden / shards  # replaces the layer's input and the residual stream
    else:
        residual = (blocks - 1) * size * layer.residuals * hidden / shards
    extra = (blocks * _norm_extra(case, profile) + _dropout(case, layer)) * hidden / shards
    return {"norm": normed * hidden / _input_shards(case) + extra, "residual": residual}


def saves_fp32_norms(case: Case) -> bool:
    """Return whether norms save an fp32 copy of their input: those scaled by one plus a weight, unless compiled."""
    names = memory_profile(case).wide_norms
    return bool(names) and not case.compile and any(name in names for name in (case.model.family, _delta_name(case)))


def _delta_name(case: Case) -> str:
    """Return a name for models with gated delta rules, whose families also have other models."""
    return "gated_delta" if any(isinstance(group.layer.mixer, GatedDelta) for group in case.model.groups) else ""


def _saves_input(case: Case, name: str) -> bool:
    """Return whether linears of that name save their input: all that are trained or have an adapter."""
    return case.goal != "peft" or name in case.targets or (name == "qkv" and "mamba_in" in case.targets)


def _norm_extra(case: Case, profile: MemoryProfile) -> float:
    """Return fp32 copies of a norm that is not a fused kernel; compiling fuses it."""
    return 0.0 if case.compile or getattr(case, "norm_kernel", "") == "fused" else profile.norm_extra


def _dropout(case: Case, layer: Layer) -> int:
    """Return the masks of the two residual dropouts, in models that have them (GPT, not Llama)."""
    plain = isinstance(layer.ffn, Dense) and not layer.ffn.gated
    return 2 if plain and getattr(case, "dropout", False) else 0


def _add(parts: Parts, more: Parts) -> None:
    for name, value in more.items():
        parts[name] = parts.get(name, 0.0) + value


def _mixer_parts(case: Case, mixer: Mixer) -> Parts:
    size, tp = BYTES[case.compute], case.tp
    if isinstance(mixer, Attention):
        return _attention_parts(case, mixer)
    if isinstance(mixer, MLA):
        gathers = memory_profile(case).gathers_inputs or memory_profile(case).gathers_again
        shards = 1 if gathers else residual_shards(case)  # computed from a gathered input
        latent = size * (mixer.kv_lora + mixer.qk_rope + (mixer.q_lora or 0)) * 2 / shards  # and normed
        up = 2 * mixer.heads * mixer.qk_head + mixer.heads * mixer.v_head
        split = mixer.heads * (mixer.qk_nope + mixer.v_head)  # kv before keys get their rotary part
        out = size * mixer.heads * mixer.v_head + 4 * mixer.heads
        return {"proj": latent, "up": size * (up + split) / tp, "core": out / tp}
    if isinstance(mixer, LinearMixer):
        return {"proj": size * mixer.into / tp, "scan": size * (mixer.kept + mixer.out) / tp}
    parts = _scan_parts(case, mixer) if isinstance(mixer, Mamba2) else _delta_parts(case, mixer)
    rows = _rows_of_documents(case)
    return {name: rows * value for name, value in parts.items()}


def _rows_of_documents(case: Case) -> float:
    """Return the memory of packed samples over that of their tokens, in layers that isolate documents."""
    return (memory_profile(case).document_rows or 1.0) if case.packing and case.scan == "torch" else 1.0


def _scan_parts(case: Case, mixer: Mamba2) -> Parts:
    size, tp = BYTES[case.compute], case.tp
    linear = mixer.inner + mixer.conv_width + mixer.heads
    states = 4 * mixer.inner * mixer.state * _saved_states(case, _scan_block(case, mixer))
    convolved = _saved_convolutions(case) * size * mixer.conv_width * memory_profile(case).plain_convolutions
    return {"proj": size * linear / tp, "scan": (convolved + 2 * size * mixer.inner + states) / tp}


def _saved_convolutions(case: Case) -> int:
    """Return how often a mixer saves what it convolves: before and after the activation if no kernel does both."""
    return 2 if case.scan == "torch" else 1


def _scan_block(case: Case, mixer: Mamba2) -> Column:
    """Return the tokens between saved states of a scan: those whose matrices of all heads fill the engine's bound."""
    bound = memory_profile(case).scan_block_bytes
    if not bound:
        return MAMBA_CHUNK
    return OWN_CHUNK * larger(1, bound // (4 * mixer.heads * OWN_CHUNK**2 / case.tp))


def _saved_states(case: Case, block: Column) -> Column:
    """Return the states a scan saves per token. Ours saves none before a row's first block; documents are short."""
    if not memory_profile(case).scan_block_bytes:
        return 1 / block
    return larger(0, 1 / block - 1 / case.seq_length) * (not case.packing)


def _attention_parts(case: Case, mixer: Attention) -> Parts:
    size, tp = BYTES[case.compute], case.tp
    gate = mixer.q_width if mixer.output_gate else 0
    repeated = memory_profile(case).repeats_kv
    kv = mixer.q_width + mixer.out_width if repeated else mixer.kv_width + mixer.v_width
    rotated = mixer.q_width + mixer.kv_width if mixer.qk_norm != "none" else 0  # the norm saves its own input
    rotated *= 2 if saves_fp32_norms(case) else 1  # in fp32
    parts: Parts = {
        "proj": size * (mixer.q_width + gate + kv + rotated) / tp,
        "core": (size * (mixer.out_width + gate) + 4 * mixer.heads) / tp,
    }
    eager = case.attention == "eager"
    if np.any(eager):
        each = SCORE_BYTES.get(getattr(case, "attention_kernel", "eager"), SCORE_BYTES["eager"])
        parts["scores"] = eager * (each + 1.0 * getattr(case, "dropout", False)) * mixer.heads * case.seq_length / tp
    return parts


def _delta_parts(case: Case, mixer: GatedDelta) -> Parts:
    size, tp = BYTES[case.compute], case.tp
    conv = 2 * mixer.k_width + mixer.v_width
    bound = memory_profile(case).delta_block_bytes
    if bound:  # one state per block of chunks
        states = 4 * mixer.v_heads * mixer.k_head_dim * mixer.v_head_dim
        chunks = smaller(larger(1, bound // (states / tp)), larger(1, case.seq_length // DELTA_CHUNK))
        inside = (4 + size) * mixer.v_heads + states * _saved_states(case, DELTA_CHUNK * chunks)
        scan = size * (_saved_convolutions(case) * conv + 2 * mixer.v_width) + inside
    else:
        repeated = 2 * mixer.v_heads * mixer.k_head_dim  # q and k, normalized and repeated to the value heads
        inside = 4 * mixer.v_heads * DELTA_CHUNK + 8 * mixer.v_heads  # triangular factors of a chunk, gates
        scan = size * (conv + repeated + 2 * mixer.v_width) + inside
    return {"proj": size * (conv + mixer.v_width) / tp, "scan": scan / tp}


def _product_bytes(case: Case, gated: bool, *, expert: bool = False) -> int:
    """Return bytes per element saved after the first linear: the product, and unfused the activation before it."""
    product = linear_input_bytes(case, expert=expert) if _saves_input(case, "fc2") else 0
    return product + (BYTES[case.compute] if gated and not _fuses_activation(case) else 0)


def _fuses_activation(case: Case) -> bool:
    return memory_profile(case).fused_activation or case.compile


def _dense_parts(case: Case, block: Dense, fc1: str, act: str) -> Parts:
    width = block.width / case.tp
    first = (2 if block.gated else 1) * BYTES[case.compute] * width
    return {fc1: first, act: _product_bytes(case, block.gated) * width}


def _moe_parts(case: Case, moe: MoE) -> Parts:
    """Return the parts of an MoE layer: each rank has top-k copies of its tokens, gathered over etp."""
    size, hidden, shards = BYTES[case.compute], case.model.hidden, residual_shards(case)
    etp = 1 if case.engine == "kempnerforge" else case.etp
    copies = moe.topk * _imbalance(case) * etp / shards
    inner, width = moe.latent or hidden, moe.width / etp
    weighted = _weights_inner_rows(case, moe, inner)  # the gradient of the weights needs them, not the outputs
    parts = {
        "router": (8.0 * moe.experts + _router_input(case)) / shards,  # fp32 logits and probabilities
        "routed_in": linear_input_bytes(case, expert=True) * inner * copies * _saves_rows(case),
        "routed_fc1": (2 if moe.gated else 1) * size * width * copies,
        "routed_act": (_product_bytes(case, moe.gated, expert=True) + _clamped(case, moe)) * width * copies,
        "routed_out": where(weighted, 0.0, size * inner * copies),
    }
    if _saves_input(case, "fc2") and not _fuses_activation(case):
        parts["routed_act"] = parts["routed_act"] + where(weighted, size * width * copies, 0.0)  # before and after
    if moe.latent:
        parts["proj"] = 2 * size * moe.latent / shards
    for block in (Dense(moe.shared_width, moe.gated), moe.parallel):
        if block is not None:
            _add(parts, _dense_parts(case, block, "shared_fc1", "shared_act"))
    return parts


def _weights_inner_rows(case: Case, moe: MoE, outer: int) -> Column:
    """Return whether the routing weights multiply the experts' inner rows instead of their outputs."""
    if memory_profile(case).weights_local_rows:
        return (case.ep * case.etp == 1) & (moe.width <= outer)
    return case.engine == "megatron"


def _clamped(case: Case, moe: MoE) -> float:
    """Return bytes per element of a clamped gate, which only experts with biases have; compiling fuses it."""
    return memory_profile(case).clamped_gate if moe.bias and moe.gated and not case.compile else 0.0


def _router_input(case: Case) -> float:
    """Return bytes per token of the router's input, if it is saved in fp32."""
    return 4.0 * case.model.hidden * (memory_profile(case).wide_router and case.goal != "peft")


def _saves_rows(case: Case) -> bool:
    """Return whether experts save their input rows: for gradients of their own weights or of adapters."""
    return _saves_input(case, "fc1") or not memory_profile(case).drops_frozen_rows


def _imbalance(case: Case) -> Column:
    """Return the rows of the fullest rank's experts over the mean."""
    if case.force_balance:
        return 1.0
    profile = memory_profile(case)
    return profile.imbalance * where(case.ep > 1, profile.exchanged, 1.0)


def activation_bytes_by_recompute(case: Case, parts: Parts) -> tuple[Column, Column, Column]:
    """Return the bytes saved per token without recompute, with selective and with full recompute."""
    everything = sum(parts.values())
    modules = case.recompute_modules or SELECTIVE_MODULES.get(case.engine, ())
    if modules and "ops" not in modules:
        dropped = {p for module in modules for p in DROPPED_BY_MODULE[module]}
        selective = everything - sum(parts.get(name, 0.0) for name in dropped)
    else:
        selective = smaller(_op_level(case, parts), everything)
    return everything, selective, parts["input"]


def _op_level(case: Case, parts: Parts) -> Column:
    if memory_profile(case).splits_recompute and "routed_in" in parts:
        return _op_level_with_experts(case, parts)
    kept = sum(SAVED_BY_OP.get(name, 0.0) * value for name, value in parts.items())
    if "core" in parts and "up" not in parts:
        kept = kept + parts["core"]  # the queries, as wide as attention's output
    if "scan" in parts:
        kept = kept + parts["proj"]  # the first of two matmuls; the scan is recomputed
    if "fc1" in parts and not case.compile:
        # The output of the last linear, on its way to be summed over tp where the engine does that by itself.
        split = memory_profile(case).splits_recompute
        kept = kept + (BYTES[case.compute] * case.model.hidden if split else parts["input"])
    return kept


def _op_level_with_experts(case: Case, parts: Parts) -> Column:
    """Experts drop only their activation; attention and norms are recomputed alone and save their inputs too."""
    saved = ("norm", "residual", "router", "routed_in", "routed_fc1", "routed_out", "shared_fc1", "shared_act")
    attention = parts.get("core", 0.0) + (1.0 if "scan" in parts else 0.5) * parts.get("proj", 0.0)
    out = BYTES[case.compute] * case.model.hidden * ("up" in parts)  # output of MLA's last linear, its fifth
    return parts["input"] + attention + out + sum(parts.get(name, 0.0) for name in saved)


def backward_working_bytes(case: Case, parts: Parts) -> Column:
    """Return bytes per token of the gradients that one layer's backward pass holds, including its output's."""
    reused = {"fc1": "act"} if memory_profile(case).inplace_activation else {}
    blocks = [sum(parts.get(reused.get(name, name), 0.0) for name in block) for block in WORKING_BLOCKS]
    return larger(larger(blocks[0], blocks[1]), blocks[2]) + parts["input"]


def vision_activation_bytes(case: Case) -> Column:
    """Return the bytes the vision encoder saves per language token, averaged over the sequence."""
    encoder = case.model.vision
    replicated = memory_profile(case).replicates_vision
    if encoder is None or not case.images or (replicated and case.goal == "peft"):
        return 0.0
    tp, copies = (1, case.cp) if replicated else (case.tp, 1)  # cp shards only the tokens of the language model
    size, patches = BYTES[case.compute], image_share(case) * encoder.merge
    inputs = size * encoder.hidden * encoder.depth
    everything = encoder.depth * size * (4 * encoder.hidden + (4 * encoder.hidden + 2 * encoder.width) / tp)
    return copies * patches * where(case.recompute == "full", inputs, everything)
