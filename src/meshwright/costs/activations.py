"""Bytes a layer keeps for its backward pass, per token on one rank, by named part.

Parts are named so that recompute can drop them. All linears keep their input; attention is flash attention, which
keeps q, k, v, the output and one fp32 log-sum per head, never the score matrix (unless kernels.attention is eager).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from meshwright.costs.columns import BYTES, Column
from meshwright.costs.constants import DELTA_CHUNK, EXPERT_IMBALANCE, IMAGE_SHARE, MAMBA_CHUNK
from meshwright.models import MLA, Attention, Dense, GatedDelta, Layer, Mamba2, MoE
from meshwright.models.spec import Mixer
from meshwright.recipes.case import Case

Parts = dict[str, Column]

# Parts that a recomputed module drops. Recomputing flash attention's core frees nothing: its output feeds the next
# linear and is kept anyway; the score matrix of eager attention is what it was made for.
MODULE_DROPS: Mapping[str, tuple[str, ...]] = {
    "core_attn": ("scores",),
    "layernorm": ("norm",),
    "mlp": ("fc1", "act"),
    "moe": ("routed_in", "routed_fc1", "routed_act", "routed_out", "shared_fc1", "shared_act", "router"),
    "moe_act": ("routed_act",),
    "mla_up_proj": ("up",),
    "shared_experts": ("shared_fc1", "shared_act"),
}
# Op-level selective recompute (torch engines) keeps attention outputs and every second matmul.
OP_KEEPS: Mapping[str, float] = {
    "input": 1.0,
    "core": 1.0,
    "proj": 0.5,
    "up": 0.5,
    "fc1": 0.5,
    "shared_fc1": 0.5,
    "routed_in": 1.0,
    "routed_fc1": 0.5,
    "router": 1.0,
}


def residual_cut(case: Case) -> Column:
    """Ranks over which norms and residuals are cut: tp with sequence parallelism, else none."""
    return np.where(case.sp, case.tp, 1)


def linear_input_bytes(case: Case) -> int:
    """Bytes per element of what a linear keeps of its input: Transformer Engine keeps the 8-bit copy it multiplied."""
    return 1 if case.matmul != "same" and case.engine == "megatron" else BYTES[case.compute]


def layer_parts(case: Case, layer: Layer) -> Parts:
    """Everything one layer keeps, in bytes per token."""
    size, hidden, cut = BYTES[case.compute], case.model.hidden, residual_cut(case)
    normed = linear_input_bytes(case)
    blocks = (layer.mixer is not None) + (layer.cross is not None) + (layer.ffn is not None)
    parts: Parts = {
        "input": size * hidden / cut,
        "norm": (blocks * normed + (blocks - 1) * size) * hidden / cut,  # each block's normed input, residuals between
    }
    for mixer in (layer.mixer, layer.cross):
        if mixer is not None:
            _add(parts, _mixer_parts(case, mixer))
    if isinstance(layer.ffn, MoE):
        _add(parts, _moe_parts(case, layer.ffn))
    elif layer.ffn is not None:
        _add(parts, _dense_parts(case, layer.ffn, "fc1", "act"))
    return parts


def _add(parts: Parts, more: Parts) -> None:
    for name, value in more.items():
        parts[name] = parts.get(name, 0.0) + value


def _mixer_parts(case: Case, mixer: Mixer) -> Parts:
    size, tp = BYTES[case.compute], case.tp
    if isinstance(mixer, Attention):
        gate = mixer.q_width if mixer.output_gate else 0
        linear = mixer.q_width + gate + 2 * mixer.kv_width
        rotated = mixer.q_width + mixer.kv_width if mixer.qk_norm != "none" else 0  # norm keeps its own input
        parts = {"proj": size * (linear + rotated) / tp, "core": (size * (mixer.q_width + gate) + 4 * mixer.heads) / tp}
        if case.attention == "eager":
            parts["scores"] = 2 * size * mixer.heads * case.seq_length / tp
        return parts
    if isinstance(mixer, MLA):
        latent = size * (mixer.kv_lora + mixer.qk_rope + (mixer.q_lora or 0)) * 2 / residual_cut(case)  # and normed
        up = 2 * mixer.heads * mixer.qk_head + mixer.heads * mixer.v_head
        split = mixer.heads * (mixer.qk_nope + mixer.v_head)  # kv before keys get their rotary part
        out = size * mixer.heads * mixer.v_head + 4 * mixer.heads
        return {"proj": latent, "up": size * (up + split) / tp, "core": out / tp}
    if isinstance(mixer, Mamba2):
        linear = mixer.inner + mixer.conv_width + mixer.heads
        states = 4 * mixer.inner * mixer.state / MAMBA_CHUNK
        return {"proj": size * linear / tp, "core": (2 * size * mixer.inner + states) / tp}
    return _delta_parts(size, tp, mixer)


def _delta_parts(size: int, tp: Column, mixer: GatedDelta) -> Parts:
    conv = 2 * mixer.k_width + mixer.v_width
    repeated = 2 * mixer.v_heads * mixer.k_head_dim  # q and k, normed and repeated to the value heads
    inside = 4 * mixer.v_heads * DELTA_CHUNK + 8 * mixer.v_heads  # triangular factors of a chunk, gates
    core = size * (conv + repeated + 2 * mixer.v_width) + inside
    return {"proj": size * (conv + mixer.v_width) / tp, "core": core / tp}


def _act_copies(case: Case, gated: bool) -> int:
    """Widths kept after the first linear: the product; eager torch also keeps the activation before it."""
    eager = case.engine not in ("megatron", "deepspeed") and not case.compile
    return 2 if gated and eager else 1


def _dense_parts(case: Case, block: Dense, fc1: str, act: str) -> Parts:
    size, tp = BYTES[case.compute], case.tp
    width = block.width / tp
    kept = linear_input_bytes(case) + size * (_act_copies(case, block.gated) - 1)
    return {fc1: (2 if block.gated else 1) * size * width, act: kept * width}


def _moe_parts(case: Case, moe: MoE) -> Parts:
    """Balanced routing gives each rank top-k copies of its own tokens, gathered over etp, cut at the expert width."""
    size, hidden, cut = BYTES[case.compute], case.model.hidden, residual_cut(case)
    etp = 1 if case.engine == "kempnerforge" else case.etp
    imbalance = 1.0 if case.force_balance else EXPERT_IMBALANCE
    copies = moe.topk * imbalance * etp / cut
    inner, width = moe.latent or hidden, moe.width / etp
    taken = linear_input_bytes(case)
    act = taken + size * (_act_copies(case, moe.gated) - 1)
    parts = {
        "router": 8.0 * moe.experts / cut,  # fp32 logits and probabilities
        "routed_in": taken * inner * copies,
        "routed_fc1": (2 if moe.gated else 1) * size * width * copies,
        "routed_act": act * width * copies,
        "routed_out": size * inner * copies * (case.engine != "megatron"),  # Megatron scales inside the activation
    }
    if moe.latent:
        parts["proj"] = 2 * size * moe.latent / cut
    for block in (Dense(moe.shared_width, moe.gated), moe.parallel):
        if block is not None:
            _add(parts, _dense_parts(case, block, "shared_fc1", "shared_act"))
    return parts


def kept_bytes(case: Case, parts: Parts) -> tuple[Column, Column, Column]:
    """Bytes kept per token without recompute, with selective and with full recompute."""
    everything = sum(parts.values())
    if case.recompute_modules or case.engine == "megatron":
        dropped = {p for module in case.recompute_modules or ("core_attn",) for p in MODULE_DROPS[module]}
        selective = everything - sum(parts.get(name, 0.0) for name in dropped)
    else:
        selective = sum(OP_KEEPS.get(name, 0.0) * value for name, value in parts.items())
    return everything, selective, parts["input"]


def vision_bytes(case: Case) -> Column:
    """Bytes the vision tower keeps per language token, averaged over the sequence."""
    tower = case.model.vision
    if tower is None or not case.images:
        return 0.0
    size, patches = BYTES[case.compute], IMAGE_SHARE * tower.merge
    inputs = size * tower.hidden * tower.depth
    everything = tower.depth * size * (4 * tower.hidden + (4 * tower.hidden + 2 * tower.width) / case.tp)
    return patches * np.where(case.recompute == "full", inputs, everything)
