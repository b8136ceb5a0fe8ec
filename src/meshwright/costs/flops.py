"""Model FLOPs per token, exact by construction.

A matmul parameter costs 2 FLOPs forward and 4 backward. Attention adds 4 x width x context forward and twice that
backward. The LM head counts; input embedding, norms, routers and recomputation do not. Two conventions exist for causal
attention: "causal" counts the unmasked half (Megatron), "full" counts the full matrix (torchtitan, PaLM), which reports
the same run a few per cent higher.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from meshwright.costs.memory_constants import IMAGE_SHARE, IMAGES_PER_SAMPLE
from meshwright.costs.stages import trains_mtp
from meshwright.costs.vectorize import Column, plain
from meshwright.models import MLA, Attention, Dense, Layer, LinearMixer, Mamba2, ModelSpec, MoE
from meshwright.models.spec import Compressor, Mixer
from meshwright.recipes.case import Case

Convention = Literal["causal", "full"]


def context(seq: Column, window: int | None, convention: Convention) -> Column:
    """Return the mean number of keys per query."""
    if window is None:
        return seq / 2 if convention == "causal" else seq * 1.0
    visible = np.minimum(window, seq)
    return visible * (1 - visible / (2 * seq)) if convention == "causal" else visible * 1.0


def chunk_context(seq: Column, chunk: int, convention: Convention) -> Column:
    """Return the mean number of keys per query if tokens see their own chunk only."""
    return context(np.minimum(chunk, seq), None, convention)


def _compressed(compressor: Compressor | None, seq: Column, convention: Convention) -> tuple[Column, Column]:
    """Return the mean number of compressed keys per query, and the FLOPs of the indexer that selects them."""
    if compressor is None:
        return 0.0, 0.0
    keys = seq / compressor.rate
    indexed = 2 * compressor.index_heads * compressor.index_dim * context(keys, None, convention)
    return context(keys, compressor.topk, convention), indexed


def core_flops(mixer: Mixer, seq: Column, convention: Convention) -> Column:
    """Return the forward FLOPs per token of a mixer without its projections."""
    if isinstance(mixer, Attention):
        chunk = mixer.window if mixer.chunked else None
        seen = mixer.window or mixer.topk
        keys = chunk_context(seq, chunk, convention) if chunk else context(seq, seen, convention)
        further, indexed = _compressed(mixer.compressor, seq, convention)
        indexed = indexed + 2 * mixer.index_heads * mixer.index_dim * context(seq, None, convention)
        return 2 * (mixer.q_width + mixer.out_width) * (keys + further) * (2 if mixer.differential else 1) + indexed
    if isinstance(mixer, MLA):
        indexed = 2 * mixer.index_heads * mixer.index_dim * context(seq, None, convention)
        return 2 * mixer.heads * (mixer.qk_head + mixer.v_head) * context(seq, mixer.topk, convention) + indexed
    if isinstance(mixer, Mamba2):
        return 7.0 * mixer.inner * mixer.state  # scan: decay, input and output products
    if isinstance(mixer, LinearMixer):
        return mixer.core + (mixer.per_key * context(seq, None, convention) if mixer.per_key else 0.0)
    conv = 2 * mixer.conv * (2 * mixer.k_width + mixer.v_width)
    return 8.0 * mixer.v_heads * mixer.k_head_dim * mixer.v_head_dim + conv


def matmul_params(layer: Layer, hidden: int) -> int:
    """Return the matmul parameters per token in a layer, without the router."""
    count = layer.extra_matmul
    count += sum(m.matmul_params(hidden) for m in (layer.mixer, layer.cross) if m is not None)
    ffn = layer.ffn
    if isinstance(ffn, Dense):
        return count + ffn.matmul_params(hidden)
    if isinstance(ffn, MoE):
        count += ffn.topk * ffn.one_expert(hidden).matmul_params(ffn.latent or hidden)
        count += Dense(ffn.shared_width, ffn.gated).matmul_params(hidden) + 2 * hidden * (ffn.latent or 0)
        count += ffn.parallel.matmul_params(hidden) if ffn.parallel else 0
    return count


def layer_flops(layer: Layer, model: ModelSpec, seq: Column, convention: Convention) -> tuple[int, Column]:
    """Return the forward FLOPs per token of one layer: matmuls, and the mixer's core."""
    mask: Convention = "full" if model.kind == "diffusion" else convention  # diffusion attention is bidirectional
    core = sum((core_flops(m, seq, mask) for m in (layer.mixer, layer.cross) if m is not None), start=0.0)
    return 2 * matmul_params(layer, model.hidden), core + layer.extra_flops


def forward_flops(case: Case, convention: Convention = "causal") -> tuple[Column, Column]:
    """Return the forward FLOPs per token of the model: matmuls with the LM head, and attention cores."""
    model, seq = case.model, case.seq_length
    matmul: Column = 0.0
    core: Column = 0.0
    layers = [(g.layer, g.count) for g in model.groups]
    extra = model.mtp_layers if trains_mtp(case) else 0
    if extra and model.mtp_layer is not None:
        layers.append((model.mtp_layer, extra))
        matmul += extra * 4 * model.hidden**2
    for layer, number in layers:
        one_matmul, one_core = layer_flops(layer, model, seq, convention)
        matmul, core = matmul + number * one_matmul, core + number * one_core
    return matmul + (1 + extra) * 2 * model.hidden * model.vocab + vision_flops(case), core


def image_share(case: Case) -> float:
    """Return the share of the sequence that is image tokens."""
    encoder = case.model.vision
    if encoder is None or not case.images:
        return 0.0
    if not encoder.image_tokens:
        return IMAGE_SHARE
    images = IMAGES_PER_SAMPLE if case.packing else 1
    return float(min(1.0, images * encoder.image_tokens / case.seq_length))


def vision_flops(case: Case) -> float:
    """Return the forward FLOPs of the vision encoder per language token."""
    encoder = case.model.vision
    if encoder is None:
        return 0.0
    return image_share(case) * (2 * encoder.merge * encoder.depth * encoder.layer_params + 2 * encoder.connector_params)


def training_factor(case: Case) -> float:
    """Return forward plus gradients of inputs and weights; frozen weights have no weight gradient."""
    return 2.0 if case.goal == "peft" else 3.0


def flops_per_token(case: Case, convention: Convention = "causal") -> Column:
    """Return the model FLOPs per trained token."""
    matmul, core = forward_flops(case, convention)
    return plain(training_factor(case) * matmul + 3 * core)
