"""Mixers whose work grows with the tokens only: scans, short convolutions, linear attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..spec import LinearMixer, Mamba2
from .fields import Fields, require_divisible

CHUNK = 256  # tokens of a block inside which linear attention computes scores


def mamba(fields: Fields, traits: Any, hidden: int) -> LinearMixer:
    """Return a Mamba (version 1) mixer: a selective scan over channels."""
    inner, state, rank = fields.size("mamba_inner"), fields.size("mamba_d_state"), fields.size("mamba_dt_rank")
    conv, biased = fields.size("mamba_d_conv"), fields.flag("mamba_conv_bias")
    vectors = inner * (state + 2 + conv + biased)  # A_log, D, the bias of dt; the convolution
    vectors += (rank + 2 * state) * fields.count("mamba_inner_norms")
    if fields.flag("mamba_proj_bias"):
        vectors += 2 * inner + hidden
    between = inner * (rank + 2 * state) + rank * inner
    core = 7.0 * inner * state + 2 * inner * conv
    kept = inner * 4 + rank + 2 * state
    return LinearMixer("mamba", 2 * inner, inner, between, vectors, inner, core, kept, inner * state)


def mamba2(fields: Fields, traits: Any, hidden: int) -> Mamba2:
    """Return a Mamba-2 mixer."""
    heads, groups = fields.size("mamba_n_heads"), fields.size("mamba_n_groups")
    require_divisible(fields, "mamba_n_groups", groups, "mamba_n_heads", heads)
    return Mamba2(
        heads=heads,
        head_dim=fields.size("mamba_d_head"),
        state=fields.size("mamba_d_state"),
        groups=groups,
        conv=fields.size("mamba_d_conv"),
        conv_bias=fields.flag("mamba_conv_bias"),
        proj_bias=fields.flag("mamba_proj_bias"),
        gated_norm=fields.flag("mamba_rms_norm"),
    )


def short_conv(fields: Fields, traits: Any, hidden: int) -> LinearMixer:
    """Return a gated short convolution (LFM2)."""
    kernel, biased = fields.size("conv_L_cache"), fields.flag("conv_bias")
    vectors = hidden * kernel + (hidden + 3 * hidden + hidden) * biased
    core = (2.0 * kernel + 2) * hidden
    return LinearMixer("short_conv", 3 * hidden, hidden, 0, vectors, hidden, core, 2 * hidden, kernel * hidden)


def lightning(fields: Fields, traits: Any, hidden: int) -> LinearMixer:
    """Return lightning attention (MiniMax): linear attention with decay, in blocks."""
    heads = fields.size("num_attention_heads")
    width = fields.optional_size("head_dim") or hidden // heads
    block = fields.size("block_size")
    inner = heads * width
    core = 4.0 * inner * block / 2 + 4.0 * inner * width
    return LinearMixer("lightning", 4 * inner, inner, 0, inner, heads, core, 2 * inner, inner * width)


def kimi_delta(fields: Fields, traits: Any, hidden: int) -> LinearMixer:
    """Return Kimi delta attention: a delta rule with one decay for each channel."""
    heads, width, conv = (fields.size(f"linear_{key}") for key in ("num_heads", "head_dim", "conv_kernel_dim"))
    inner = heads * width
    # decays pass through a low rank, and so does the output gate, unless it has a projection of its own
    gate_rank, between = (inner, width * inner) if fields.flag("linear_full_rank_gate") else (width, 2 * width * inner)
    vectors = 3 * inner * conv + heads + inner + width  # convolutions, A_log, bias of dt, output norm
    core = 8.0 * inner * width + 2.0 * conv * 3 * inner
    return LinearMixer(
        "kda", 3 * inner + width + gate_rank + heads, inner, between, vectors, heads, core, 8 * inner, inner * width
    )


SCANS: Mapping[str, Callable[[Fields, Any, int], Any]] = {
    "mamba": mamba,
    "mamba2": mamba2,
    "short_conv": short_conv,
    "lightning": lightning,
    "kda": kimi_delta,
}
