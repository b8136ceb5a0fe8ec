"""Seconds one rank computes for one micro batch: matmuls, attention, memory-bound kernels, recomputation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.costs.activations import kept_bytes, layer_parts, residual_cut
from meshwright.costs.columns import Column
from meshwright.costs.constants import (
    ATTENTION_BACKWARD,
    ATTENTION_EFFICIENCY,
    EXPERT_IMBALANCE,
    GROUPED_EFFICIENCY,
    HBM_EFFICIENCY,
    MATMUL_EDGE,
    MATMUL_EFFICIENCY,
    MATMUL_EFFICIENCY_ELSE,
    PASSES_EAGER,
    PASSES_FUSED,
    SCAN_EFFICIENCY,
    SELECTIVE_AGAIN,
)
from meshwright.costs.flops import core_flops, training_factor, vision_flops
from meshwright.costs.memory import logit_bytes, recomputed_share, tokens
from meshwright.costs.stages import Stages
from meshwright.models import MLA, Attention, Dense, GatedDelta, Layer, Mamba2, MoE
from meshwright.models.spec import Mixer
from meshwright.recipes.case import Case

LINEAR_PRECISION = {
    "same": "",
    "fp8_delayed": "fp8",
    "fp8_tensor": "fp8",
    "fp8_block": "fp8",
    "mxfp8": "fp8",
    "nvfp4": "fp4",
}


def linear_precision(case: Case) -> str:
    """The precision linear layers compute in, as the GPU's peaks name it."""
    wanted = LINEAR_PRECISION[case.matmul] or ("tf32" if case.compute == "fp32" else "bf16")
    return wanted if wanted in case.cluster.gpu.peak_tflops else "bf16"


def peak_flops(case: Case, precision: str) -> float:
    """Dense peak in FLOP/s."""
    peaks = case.cluster.gpu.peak_tflops
    return peaks.get(precision, peaks.get("bf16", max(peaks.values()))) * 1e12


def matmul_s(case: Case, rows: Column, outputs: Column, inputs: Column, precision: str = "") -> Column:
    """Forward seconds of one linear layer."""
    precision = precision or linear_precision(case)
    share = MATMUL_EFFICIENCY[case.gpu_arch].get(precision, MATMUL_EFFICIENCY_ELSE)
    edge = MATMUL_EDGE[precision]
    slow = 1 + edge / np.maximum(rows, 1) + edge / outputs + edge / inputs
    return 2.0 * rows * outputs * inputs * slow / (share * peak_flops(case, precision))


@dataclass(frozen=True)
class LayerTime:
    """Forward seconds of one layer's matmuls and core, and the bytes its memory-bound kernels touch."""

    matmul: Column
    core: Column


def layer_time(case: Case, layer: Layer) -> LayerTime:
    """Forward seconds of one layer for one micro batch on one rank."""
    count, matmul, core = tokens(case), 0.0, 0.0
    for mixer in (layer.mixer, layer.cross):
        if mixer is not None:
            matmul = matmul + _mixer_s(case, mixer, count)
            core = core + _core_s(case, mixer, count)
    if isinstance(layer.ffn, MoE):
        matmul = matmul + _moe_s(case, layer.ffn, count)
    elif layer.ffn is not None:
        matmul = matmul + _dense_s(case, layer.ffn, count)
    return LayerTime(matmul, core)


def _mixer_s(case: Case, mixer: Mixer, count: Column) -> Column:
    hidden, tp = case.model.hidden, case.tp
    if isinstance(mixer, Attention):
        gate = mixer.q_width if mixer.output_gate else 0
        into = (mixer.q_width + gate + (1 if mixer.shared_kv else 2) * mixer.kv_width) / tp
        out = mixer.q_width / tp
    elif isinstance(mixer, MLA):
        return _mla_s(case, mixer, count)
    elif isinstance(mixer, Mamba2):
        into, out = (mixer.inner + mixer.conv_width + mixer.heads) / tp, mixer.inner / tp
    else:
        into, out = (2 * mixer.k_width + 2 * mixer.v_width + 2 * mixer.v_heads) / tp, mixer.v_width / tp
    return matmul_s(case, count, into, hidden) + matmul_s(case, count, hidden, out)


def _mla_s(case: Case, mixer: MLA, count: Column) -> Column:
    hidden, tp = case.model.hidden, case.tp
    cut = residual_cut(case)
    down = matmul_s(case, count / cut, mixer.kv_lora + mixer.qk_rope, hidden)
    q_width = mixer.heads * mixer.qk_head / tp
    if mixer.q_lora:
        down = down + matmul_s(case, count / cut, mixer.q_lora, hidden)
    up = matmul_s(case, count, q_width, mixer.q_lora or hidden)
    up = up + matmul_s(case, count, mixer.heads * (mixer.qk_nope + mixer.v_head) / tp, mixer.kv_lora)
    return down + up + matmul_s(case, count, hidden, mixer.heads * mixer.v_head / tp)


def _core_s(case: Case, mixer: Mixer, count: Column) -> Column:
    """Attention over the causal half (a ring balances it), scans at their own speed."""
    flops = count * core_flops(mixer, case.seq_length, "full" if case.model.kind == "diffusion" else "causal") / case.tp
    share = SCAN_EFFICIENCY if isinstance(mixer, Mamba2 | GatedDelta) else ATTENTION_EFFICIENCY[case.gpu_arch]
    return flops / (share * peak_flops(case, "bf16"))


def _dense_s(case: Case, block: Dense, count: Column) -> Column:
    hidden, width = case.model.hidden, block.width / case.tp
    return matmul_s(case, count, (2 if block.gated else 1) * width, hidden) + matmul_s(case, count, hidden, width)


def _moe_s(case: Case, moe: MoE, count: Column) -> Column:
    """Router, shared and parallel blocks, latent projections, and the experts as one grouped matmul each way."""
    hidden, cut = case.model.hidden, residual_cut(case)
    etp = 1 if case.engine == "kempnerforge" else case.etp
    routed = count * moe.topk * etp / cut * (1.0 if case.force_balance else EXPERT_IMBALANCE)
    local = np.maximum(moe.experts / case.ep, 1)
    width, inner = moe.width / etp, moe.latent or hidden
    each = np.maximum(routed / local, 1)
    one = matmul_s(case, each, (2 if moe.gated else 1) * width, inner) + matmul_s(case, each, inner, width)
    total = local * one / GROUPED_EFFICIENCY + matmul_s(case, count / cut, moe.experts, hidden, "bf16")
    if moe.latent:
        total = total + 2 * matmul_s(case, count / cut, moe.latent, hidden)
    for block in (Dense(moe.shared_width, moe.gated) if moe.shared_width else None, moe.parallel):
        total = total + (_dense_s(case, block, count) if block else 0.0)
    return total


def micro_batch_s(case: Case, held: Stages) -> tuple[Column, Column]:
    """Seconds of one micro batch on each stage, forward plus backward with recomputation; and the forward alone."""
    factor, count, again = training_factor(case), tokens(case), recomputed_share(case, held)
    passes = PASSES_FUSED if case.compile or case.engine == "megatron" else PASSES_EAGER
    hbm = case.cluster.gpu.hbm_gb_s * 1e9 * HBM_EFFICIENCY
    total: Column = 0.0
    forward: Column = 0.0
    for layer, number in held.layers:
        time = layer_time(case, layer)
        everything, _, _ = kept_bytes(case, layer_parts(case, layer))
        glue = passes * everything * count / hbm
        once = time.matmul + time.core + glue / 3
        redo = np.where(case.recompute == "full", again, _selective_again(case, time) * (case.recompute == "selective"))
        both = factor * time.matmul + (1 + ATTENTION_BACKWARD) * time.core + glue + redo * once
        total, forward = total + number * both, forward + number * once
    head, head_forward = _head_s(case, held)
    vision = held.first * vision_flops(case) * count / case.tp / (0.5 * peak_flops(case, "bf16"))
    return total + head + 3 * vision, forward + head_forward + vision


def _selective_again(case: Case, time: LayerTime) -> Column:
    """Share of a layer's forward that selective recompute repeats."""
    if not (case.recompute_modules or case.engine == "megatron"):
        return SELECTIVE_AGAIN
    whole = time.matmul + time.core
    share: Column = 0.02
    for module in case.recompute_modules or ("core_attn",):
        share = share + {"core_attn": time.core / whole, "mlp": 0.5, "moe": 0.5, "mla_up_proj": 0.1}.get(module, 0.02)
    return np.minimum(share, 1.0)


def _head_s(case: Case, held: Stages) -> tuple[Column, Column]:
    """LM head and loss on the last stage: matmuls in bf16, then passes over the logits."""
    model, count = case.model, tokens(case)
    if not model.vocab:
        return 0.0, 0.0
    matmul = matmul_s(case, count, model.vocab / case.tp, model.hidden, "bf16")
    hbm = case.cluster.gpu.hbm_gb_s * 1e9 * HBM_EFFICIENCY
    each, cut = logit_bytes(case)
    glue = 2 * each * count * model.vocab / cut / hbm
    redo = 1.0 if case.loss in ("chunked", "fused_linear") else 0.0
    factor = training_factor(case) + redo
    heads = held.last * (1 + model.mtp_layers * (case.mtp_loss > 0))
    return heads * (factor * matmul + glue), heads * (matmul + glue / 2)
