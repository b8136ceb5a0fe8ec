# mypy: ignore-errors
# ruff: noqa: N803 (Triton's compile-time constants are written in capitals)
"""The Triton kernels of the causal convolution; imported only where they run. causal_conv.py calls them.

A program has T tokens and C channels of a row. The filter has TAPS taps; the last one is of the token itself.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _inputs(x, segments, t, back, first, tokens, x_token, columns, known, PACKED: tl.constexpr):
    """Load the inputs `back` tokens before tokens t of the block, 0 outside the row or the document."""
    at = first + t
    inside = (at < tokens) & (at - back >= 0) & (at - back < tokens)
    if PACKED:
        own = tl.load(segments + at, at < tokens, -1)
        inside = inside & (tl.load(segments + at - back, inside, -2) == own)
    return tl.load(x + (t - back)[:, None] * x_token + columns[None, :], inside[:, None] & known[None, :], 0.0).to(
        tl.float32
    )


@triton.jit
def _convolved(
    x, weight, bias, segments, t, c, first, tokens, x_token, columns, known, w_channel, w_tap,
    BIASED: tl.constexpr, PACKED: tl.constexpr, TAPS: tl.constexpr, T: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    total = tl.zeros([T, C], tl.float32)
    for k in tl.static_range(TAPS):
        values = _inputs(x, segments, t, TAPS - 1 - k, first, tokens, x_token, columns, known, PACKED)
        total += values * tl.load(weight + c * w_channel + k * w_tap, known, 0.0).to(tl.float32)[None, :]
    if BIASED:
        total += tl.load(bias + c, known, 0.0).to(tl.float32)[None, :]
    return total


@triton.jit
def causal_conv(
    x, weight, bias, segments, out,
    tokens, channels, x_row, x_token, x_last, w_channel, w_tap,
    SILU: tl.constexpr, BIASED: tl.constexpr, PACKED: tl.constexpr, TAPS: tl.constexpr,
    T: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Write the convolution, after the activation, [rows, tokens, channels]."""
    row, first = tl.program_id(2).to(tl.int64), tl.program_id(0).to(tl.int64) * T
    t = tl.arange(0, T)
    c = tl.program_id(1) * C + tl.arange(0, C)
    known = c < channels
    total = _convolved(
        x + row * x_row + first * x_token, weight, bias, segments + row * tokens, t, c, first, tokens, x_token,
        c * x_last, known, w_channel, w_tap, BIASED, PACKED, TAPS, T, C,
    )  # fmt: skip
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    to = out + (row * tokens + first) * channels + t[:, None] * channels + c[None, :]
    tl.store(to, total.to(out.dtype.element_ty), (first + t < tokens)[:, None] & known[None, :])


@triton.jit
def causal_conv_gradients(
    dy, x, weight, bias, segments, grad_x, sums,
    tokens, channels, dy_row, dy_token, dy_last, x_row, x_token, x_last, w_channel, w_tap,
    SILU: tl.constexpr, BIASED: tl.constexpr, PACKED: tl.constexpr, TAPS: tl.constexpr,
    T: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Write the gradient of x, and of this block the sums [TAPS + 1, channels]: of the filter and of the bias."""
    row, first = tl.program_id(2).to(tl.int64), tl.program_id(0).to(tl.int64) * T
    t = tl.arange(0, T)
    c = tl.program_id(1) * C + tl.arange(0, C)
    known = c < channels
    xs = x + row * x_row + first * x_token
    dys = dy + row * dy_row + first * dy_token
    ids = segments + row * tokens
    to = sums + (row * tl.num_programs(0) + tl.program_id(0)) * (TAPS + 1) * channels + c
    total = tl.zeros([T, C], tl.float32)
    for later in tl.static_range(TAPS):
        at = first + t + later
        inside = at < tokens
        if PACKED:
            own = tl.load(ids + first + t, first + t < tokens, -1)
            inside = inside & (tl.load(ids + at, inside, -2) == own)
        grads = tl.load(
            dys + (t + later)[:, None] * dy_token + c[None, :] * dy_last, inside[:, None] & known[None, :], 0.0
        ).to(tl.float32)
        if SILU:
            before = _convolved(
                xs, weight, bias, ids, t + later, c, first, tokens, x_token, c * x_last, known, w_channel, w_tap,
                BIASED, PACKED, TAPS, T, C,
            )  # fmt: skip
            gate = 1.0 / (1.0 + tl.exp(-before))
            grads *= gate * (1.0 + before * (1.0 - gate))
        total += (
            grads * tl.load(weight + c * w_channel + (TAPS - 1 - later) * w_tap, known, 0.0).to(tl.float32)[None, :]
        )
        if later == 0:
            for k in tl.static_range(TAPS):
                values = _inputs(xs, ids, t, TAPS - 1 - k, first, tokens, x_token, c * x_last, known, PACKED)
                tl.store(to + k * channels, tl.sum(grads * values, 0), known)
            tl.store(to + TAPS * channels, tl.sum(grads, 0), known)
    place = grad_x + (row * tokens + first) * channels + t[:, None] * channels + c[None, :]
    tl.store(place, total.to(grad_x.dtype.element_ty), (first + t < tokens)[:, None] & known[None, :])
