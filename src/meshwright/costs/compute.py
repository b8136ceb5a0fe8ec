"""Compute seconds of one rank for one micro batch: matmuls, attention, memory-bound kernels, recomputation."""

from __future__ import annotations

import msgspec
import numpy as np

from meshwright.costs.activations import residual_shards
from meshwright.costs.flops import core_flops, training_factor, vision_flops
from meshwright.costs.gemm import Linear, expert_rows, fuses_experts, gradient_s, linear_s, linears, side_bytes
from meshwright.costs.memory import recomputed_share, tokens
from meshwright.costs.speeds import Speeds
from meshwright.costs.stages import Stages, trains_mtp
from meshwright.costs.vectorize import Column, smaller, where
from meshwright.models import MLA, Attention, Dense, GatedDelta, Layer, LinearMixer, Mamba2, MoE
from meshwright.models.spec import Mixer
from meshwright.recipes.case import Case

UNFUSED_BIAS = 9.0  # additional widths if experts have biases: adding them, clamping and gating are separate kernels
EAGER_NORM = 14.0  # additional widths per block of an unfused torch norm: five kernels, most of them in fp32
WIDE_HEAD = 128
WIDEST_HEAD = 256  # kernels compute wider heads in parts
SCANS: dict[type, str] = {Mamba2: "mamba2", GatedDelta: "gated_delta"}
VISION_SHARE = 0.5  # share of the bf16 peak: vision encoders are small and padded


class LayerTime(msgspec.Struct, frozen=True):
    """Seconds of one layer for one micro batch on one rank, forward unless noted."""

    matmul: Column
    core: Column  # attention or scan without the projections
    glue: Column  # memory-bound kernels
    side: Column  # quantization and adapters, forward and backward
    gradient: Column  # accumulating weight gradients, in the backward
    core_backward: float  # backward of the core over its forward
    last: Column  # the matmul of the block's last linear: of its dense block or of its experts
    experts: Column  # matmuls and quantization of the experts, forward and backward

    @property
    def forward(self) -> Column:
        return self.matmul + self.core + self.glue + self.side / 3

    def both(self, factor: float) -> Column:
        """Return forward and backward; the matmuls count `factor` times their forward."""
        return factor * self.matmul + (1 + self.core_backward) * self.core + 3 * self.glue + self.side + self.gradient


def layer_time(case: Case, speed: Speeds, layer: Layer) -> LayerTime:
    """Return the seconds of one layer."""
    count = tokens(case)
    found = linears(case, speed, layer, count)
    seconds = [linear_s(speed, linear) for linear in found]
    core, backward = _core_s(case, speed, layer.mixer, count)
    cross, _ = _core_s(case, speed, layer.cross, count)
    glue = speed.traffic * 2.0 * count * _touched(case, speed, layer) / speed.hbm
    return LayerTime(
        matmul=sum(seconds),
        core=core + cross,
        glue=glue,
        side=side_bytes(case, speed, found) / speed.hbm,
        gradient=gradient_s(case, speed, found),
        core_backward=backward,
        last=_last_s(layer, found, seconds),
        experts=_experts_s(case, speed, found, seconds) if isinstance(layer.ffn, MoE) else 0.0,
    )


def _last_s(layer: Layer, found: list[Linear], seconds: list[Column]) -> Column:
    if isinstance(layer.ffn, Dense):
        return seconds[-1]
    return sum(one for one, linear in zip(seconds, found, strict=True) if linear.expert and linear.name == "fc2")


def _experts_s(case: Case, speed: Speeds, found: list[Linear], seconds: list[Column]) -> Column:
    matmuls = sum(one for one, linear in zip(seconds, found, strict=True) if linear.expert)
    quantized = side_bytes(case, speed, [linear for linear in found if linear.expert]) / speed.hbm
    return training_factor(case) * matmuls + quantized


def _core_s(case: Case, speed: Speeds, mixer: Mixer | None, count: Column) -> tuple[Column, float]:
    """Return forward seconds of attention (causal half, balanced by a ring) or of a scan, and backward over forward."""
    if mixer is None:
        return 0.0, 2.0
    both_ways = case.model.kind == "diffusion"
    flops = count * core_flops(mixer, case.seq_length, "full" if both_ways else "causal") / case.tp
    if isinstance(mixer, Mamba2 | GatedDelta | LinearMixer):
        return flops / (speed.scan * speed.engine.scan.get(SCANS.get(type(mixer), ""), 1.0)), 2.0
    width = mixer.head_dim if isinstance(mixer, Attention) else (mixer.qk_head + mixer.v_head) / 2
    eager = case.attention == "eager"
    # Softmax costs the same for narrow heads as for wide ones, and blocks on the diagonal are half wasted.
    narrow = (1 + speed.softmax / min(width, WIDEST_HEAD)) / (1 + speed.softmax / WIDE_HEAD)
    wide = speed.engine.wide_heads if width > WIDE_HEAD else 1.0
    spent = flops * narrow * wide * (1 + speed.block / _span(mixer, case.seq_length)) / speed.core
    if np.any(eager):
        slow = _eager_s(case, speed, mixer, count)
        return where(eager, slow, spent), where(eager, 2.0, speed.shared.attention_backward)
    return spent, speed.shared.attention_backward


def _span(mixer: Attention | MLA, seq: Column) -> Column:
    """Return the keys that a query may see: a kernel computes whole blocks at the edges of a window too.

    128 keys of 16,384 take 5.1 (B200) to 5.4 (H100) times their share of full attention, as 550 wasted tokens do.
    """
    window = mixer.window if isinstance(mixer, Attention) else None
    return smaller(window, seq) if window else seq


def _eager_s(case: Case, speed: Speeds, mixer: Attention | MLA, count: Column) -> Column:
    """Return the seconds of eager attention: two batched matmuls over the full square, and passes over the scores."""
    width = mixer.head_dim if isinstance(mixer, Attention) else mixer.qk_head
    batches = count * mixer.heads / case.tp / case.seq_length
    matmuls = 2 * linear_s(speed, Linear(case.seq_length, case.seq_length, width, batches, precision="bf16"))
    kernel = getattr(case, "attention_kernel", "") or "eager"
    passes = speed.shared.score_passes.get(kernel, speed.shared.score_passes["eager"])
    scores = count * mixer.heads * case.seq_length / case.tp
    return matmuls + passes / 3 * 2.0 * scores / speed.hbm


def _touched(case: Case, speed: Speeds, layer: Layer) -> Column:
    """Return the elements per token that perfectly fused memory-bound kernels of a layer read and write in the forward.

    A norm reads and writes the residual, adding to it reads two and writes one: five widths per block. Rotary
    embedding and norms of queries and keys read and write them; a gated activation reads two widths and writes one.
    """
    hidden, shards, tp = case.model.hidden, residual_shards(case), case.tp
    blocks = (layer.mixer is not None) + (layer.cross is not None) + (layer.ffn is not None)
    total = (5.0 + EAGER_NORM * (getattr(case, "norm_kernel", "") == "eager")) * blocks * hidden / shards
    for mixer in (layer.mixer, layer.cross):
        total = total + _mixer_touched(mixer) / tp
    ffn = layer.ffn
    if isinstance(ffn, MoE):
        etp = 1 if case.engine == "kempnerforge" else case.etp
        inner = ffn.latent or hidden
        copies = ffn.topk * expert_rows(case, speed, ffn) / shards
        # permuting reads and writes every copy, unpermuting reads them and writes one; the router works in fp32
        acted = 0 if fuses_experts(case) else ((3 if ffn.gated else 2) + UNFUSED_BIAS * ffn.bias) * ffn.width
        total = total + copies * (3 * inner + acted) + (inner + 8 * ffn.experts) / shards
        total = total + 2 * copies * inner * (etp - 1)  # gathered for the ranks that share an expert
        beside = ffn.shared_width + (ffn.parallel.width if ffn.parallel else 0)
        return total + (3 if ffn.gated else 2) * beside / tp
    return total + ((3 if ffn.gated else 2) * ffn.width / tp if ffn is not None else 0)


def _mixer_touched(mixer: Mixer | None) -> float:
    if isinstance(mixer, Attention):
        return 2.0 * (mixer.q_width + mixer.kv_width) * (2 if mixer.qk_norm != "none" else 1)
    if isinstance(mixer, MLA):
        return 2.0 * mixer.heads * 2 * mixer.qk_head + 4.0 * (mixer.kv_lora + (mixer.q_lora or 0))
    if isinstance(mixer, Mamba2):
        return 2.0 * mixer.conv_width + 4.0 * mixer.inner
    if isinstance(mixer, GatedDelta):
        return 2.0 * (2 * mixer.k_width + mixer.v_width) + 2.0 * mixer.v_heads * mixer.k_head_dim + 4.0 * mixer.v_width
    return 2.0 * mixer.kept if isinstance(mixer, LinearMixer) else 0.0


def repeated_s(case: Case, speed: Speeds, pipeline: Stages, layer: Layer, time: LayerTime) -> Column:
    """Return the seconds of forward work that is recomputed."""
    if isinstance(case.recompute, str) and case.recompute == "none":
        return 0.0
    full = recomputed_share(case, pipeline) * (time.forward - (time.last if stops_early(case) else 0.0))
    if isinstance(layer.ffn, MoE):
        full = speed.engine.moe_recompute * full
    selective = _selective_s(case, speed, layer, time)
    return where(case.recompute == "full", full, where(case.recompute == "selective", selective, 0.0))


def stops_early(case: Case) -> bool:
    """Return whether recompute ends before the block's last linear and the experts' combine.

    torch's checkpoint stops once everything saved is back; Megatron's runs to the end.
    """
    return case.engine not in ("megatron", "deepspeed", "fsdp1")


def _selective_s(case: Case, speed: Speeds, layer: Layer, time: LayerTime) -> Column:
    """Return the recomputed seconds of selective recompute: modules in Megatron, every second matmul in torch."""
    if "ops" in case.recompute_modules or not (case.recompute_modules or case.engine == "megatron"):
        return speed.shared.selective_again * time.forward
    total: Column = 0.0
    for module in case.recompute_modules or ("core_attn",):
        if module == "core_attn":
            total = total + time.core * isinstance(layer.mixer, Attention | MLA)
        elif module == "moe" and isinstance(layer.ffn, MoE):
            again = time.experts / training_factor(case) + 0.5 * time.glue
            total = total + speed.engine.moe_recompute * again
        elif module == "mlp" and not isinstance(layer.ffn, MoE):
            total = total + 0.6 * time.matmul + 0.3 * time.glue
        elif module == "mla_up_proj" and isinstance(layer.mixer, MLA):
            total = total + 0.1 * time.matmul
        elif module in ("layernorm", "moe_act", "shared_experts"):
            total = total + 0.3 * time.glue
    return total


def head_s(case: Case, speed: Speeds, pipeline: Stages) -> tuple[Column, Column]:
    """Return seconds of LM head and loss on the last stage: both passes, and forward alone."""
    model, count = case.model, tokens(case)
    if not model.vocab:
        return 0.0, 0.0
    matmul = linear_s(speed, Linear(count, model.vocab / case.tp, model.hidden, precision="bf16"))
    glue = _loss_bytes(case, speed) * count * model.vocab / speed.hbm
    again = 1.0 if case.loss in ("chunked", "fused_linear") else 0.0
    factor = training_factor(case) + again
    heads = pipeline.last * (1 + (model.mtp_layers if trains_mtp(case) else 0))
    return heads * (factor * matmul + glue), heads * (matmul + glue / 2)


def _loss_bytes(case: Case, speed: Speeds) -> Column:
    """Return the bytes the loss moves per logit of the full vocabulary on one rank; compiled losses are fused."""
    kind = "vocab_parallel" if case.loss == "plain" and case.compile else case.loss
    shards = case.tp if case.loss == "vocab_parallel" and case.engine != "kempnerforge" else 1
    return speed.shared.loss_bytes[kind] / shards


def vision_s(case: Case, speed: Speeds) -> Column:
    """Return the forward seconds of the vision encoder."""
    flops = vision_flops(case)
    return flops * tokens(case) / case.tp / (VISION_SHARE * speed.linear_bf16) if flops else 0.0
