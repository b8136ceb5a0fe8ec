# mypy: ignore-errors
# ruff: noqa: N803 (Triton's compile-time constants are written in capitals)
"""The Triton kernels of the Mamba-2 scan; imported only where they run. state_space_triton.py says what they compute.

Arrays by head and token are [rows, heads, chunks · T], zero after the last token. T: tokens of a chunk, N: the state
padded to a power of two, BP and BN: blocks of the head and of the state. Every product has factors of the input dtype
and fp32 sums.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scan_steps(
    dt, bias, a, segments, step, log_decay, from_start, to_end, whole, slope,
    tokens, heads, chunks, dt_row, dt_token, dt_head, low, high,
    SOFTPLUS: tl.constexpr, BIASED: tl.constexpr, PACKED: tl.constexpr, SLOPE: tl.constexpr,
    T: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Write the steps of a chunk and their decays: since its start, from its start to a token, from there to its end.

    A decay between two documents is 0.
    """
    place = tl.program_id(0).to(tl.int64)
    row, chunk = place // chunks, place % chunks
    at = chunk * T + tl.arange(0, T)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    known = head < heads
    inside = (at < tokens)[:, None] & known[None, :]
    raw = tl.load(dt + row * dt_row + at[:, None] * dt_token + head[None, :] * dt_head, inside, 0.0).to(tl.float32)
    if BIASED:
        raw += tl.load(bias + head, known, 0.0).to(tl.float32)[None, :]
    value = raw
    if SOFTPLUS:
        value = _softplus(raw)
    size = tl.where(inside, tl.minimum(tl.maximum(value, low), high), 0.0)
    rate = tl.load(a + head, known, 0.0).to(tl.float64)
    # fp64: the difference of two large sums may be small.
    log = size.to(tl.float64) * rate[None, :]
    since = tl.cumsum(log, 0)
    total = tl.sum(log, 0)
    start = tl.exp(since.to(tl.float32))
    end = tl.exp(tl.minimum(total[None, :] - since, 0.0).to(tl.float32))
    through = tl.exp(total.to(tl.float32))
    if PACKED:
        ids = segments + row * tokens
        segment = tl.load(ids + at, at < tokens, -2)
        before = tl.load(ids + tl.maximum(chunk * T - 1, 0))
        before = tl.where(chunk > 0, before, -1)
        last = tl.load(ids + tl.minimum(chunk * T + T, tokens) - 1)
        start = tl.where((segment == before)[:, None], start, 0.0)
        end = tl.where((segment == last)[:, None], end, 0.0)
        through = tl.where(last == before, through, 0.0)
    to = (row * heads + head[None, :]) * chunks * T + at[:, None]
    tl.store(step + to, size, known[None, :])
    tl.store(log_decay + to, since, known[None, :])
    tl.store(from_start + to, start, known[None, :])
    tl.store(to_end + to, end, known[None, :])
    tl.store(whole + (row * heads + head) * chunks + chunk, through, known)
    if SLOPE:
        inner = tl.where(inside & (value >= low) & (value <= high), 1.0, 0.0)
        if SOFTPLUS:
            inner = tl.where(raw > 20.0, inner, inner / (1.0 + tl.exp(-raw)))
        tl.store(slope + to, inner, known[None, :])


@triton.jit
def _softplus(x):
    e = tl.exp(tl.minimum(x, 20.0))
    more = 1.0 + e
    # log(1 + e) of a small e: the correction undoes the rounding of 1 + e.
    small = tl.where(more == 1.0, e, tl.log(more) * (e / tl.where(more == 1.0, 1.0, more - 1.0)))
    return tl.where(x > 20.0, x, small)


@triton.jit
def scan_states(
    x, b, step, weight, whole, states,
    tokens, heads, chunks, per_group, width, state,
    x_row, x_token, x_head, x_last, b_row, b_token, b_group, b_last,
    REVERSE: tl.constexpr, T: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write the states before all chunks of a head; in reverse, the gradients of the states after them.

    x is the scan's input and b its B, weighted by step · weight; in reverse they are the gradient of the output and C,
    weighted by `weight`.
    """
    place = tl.program_id(0).to(tl.int64)
    row, head = place // heads, place % heads
    p = tl.program_id(1) * BP + tl.arange(0, BP)
    n = tl.program_id(2) * BN + tl.arange(0, BN)
    t = tl.arange(0, T).to(tl.int64)
    xs = x + row * x_row + head * x_head + p[None, :] * x_last
    bs = b + row * b_row + (head // per_group) * b_group + n[None, :] * b_last
    line = (row * heads + head) * chunks
    stored = (p < width)[:, None] & (n < state)[None, :]
    current = tl.zeros([BP, BN], tl.float32)
    for i in range(chunks):
        chunk = i
        if REVERSE:
            chunk = chunks - 1 - i
        to = states + ((row * chunks + chunk) * heads + head) * width * state
        tl.store(to + p[:, None] * state + n[None, :], current.to(states.dtype.element_ty), stored)
        at = chunk * T + t
        scale = tl.load(weight + line * T + at)
        if not REVERSE:
            scale *= tl.load(step + line * T + at)
        known = (at < tokens)[:, None]
        values = tl.load(xs + at[:, None] * x_token, known & (p < width)[None, :], 0.0)
        keys = tl.load(bs + at[:, None] * b_token, known & (n < state)[None, :], 0.0)
        keys = (keys.to(tl.float32) * scale[:, None]).to(values.dtype)
        current = current * tl.load(whole + line + chunk) + tl.dot(tl.trans(values), keys)


@triton.jit
def scan_outputs(
    x, b, c, skip, segments, step, log_decay, from_start, states, out,
    tokens, heads, chunks, per_group, width, state,
    x_row, x_token, x_head, x_last, b_row, b_token, b_group, b_last, c_row, c_token, c_group, c_last,
    SKIP: tl.constexpr, PACKED: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    T: tl.constexpr, BP: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Write the outputs of a chunk for some heads of a group."""
    place = tl.program_id(0).to(tl.int64)
    row, chunk = place // chunks, place % chunks
    first = tl.program_id(1).to(tl.int64) * HEADS
    group = first // per_group
    t = tl.arange(0, T)
    n = tl.arange(0, N)
    at = chunk * T + t
    known = at < tokens
    both = known[:, None] & (n < state)[None, :]
    keys = tl.load(b + row * b_row + group * b_group + at[:, None] * b_token + n[None, :] * b_last, both, 0.0)
    queries = tl.load(c + row * c_row + group * c_group + at[:, None] * c_token + n[None, :] * c_last, both, 0.0)
    inner = tl.dot(queries, tl.trans(keys))
    diagonal = tl.sum(queries.to(tl.float32) * keys.to(tl.float32), 1)
    below = t[:, None] > t[None, :]
    if PACKED:
        segment = tl.load(segments + row * tokens + at, known, -2)
        below = below & (segment[:, None] == segment[None, :])
    for k in range(HEADS):
        head = first + k
        line = (row * heads + head) * chunks * T
        size = tl.load(step + line + at)
        since = tl.load(log_decay + line + at)
        start = tl.load(from_start + line + at)
        decays = tl.exp(tl.minimum(since[:, None] - since[None, :], 0.0).to(tl.float32))
        matrix = tl.where(below, inner * decays * size[None, :], 0.0).to(keys.dtype)
        own = diagonal * size
        if SKIP:
            own += tl.load(skip + head).to(tl.float32)
        before = states + ((row * chunks + chunk) * heads + head) * width * state
        xs = x + row * x_row + head * x_head
        to = out + ((row * tokens) * heads + head) * width
        for p0 in tl.static_range(0, WIDTH, BP):
            p = p0 + tl.arange(0, BP)
            each = known[:, None] & (p < width)[None, :]
            values = tl.load(xs + at[:, None] * x_token + p[None, :] * x_last, each, 0.0)
            past = tl.load(before + p[:, None] * state + n[None, :], (p < width)[:, None] & (n < state)[None, :], 0.0)
            result = tl.dot(queries, tl.trans(past)) * start[:, None]
            result += tl.dot(matrix, values)
            result += own[:, None] * values.to(tl.float32)
            tl.store(to + at[:, None] * (heads * width) + p[None, :], result.to(out.dtype.element_ty), each)


@triton.jit
def scan_gradients(
    dy, x, b, c, a, skip, segments, step, log_decay, from_start, to_end, whole, slope, states, grad_states,
    grad_x, grad_dt, grad_b, grad_c, sums,
    rows, tokens, heads, chunks, per_group, width, state,
    dy_row, dy_token, dy_head, dy_last, x_row, x_token, x_head, x_last,
    b_row, b_token, b_group, b_last, c_row, c_token, c_group, c_last,
    SKIP: tl.constexpr, PACKED: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    T: tl.constexpr, BP: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a chunk for some heads of a group; those of B and C are sums over these heads.

    `sums` [3, rows · chunks, heads] are the gradients of A, D and the bias. grad_b and grad_c are [parts, rows, tokens,
    groups, state], one part for every HEADS heads of a group.
    """
    place = tl.program_id(0).to(tl.int64)
    row, chunk = place // chunks, place % chunks
    first = tl.program_id(1).to(tl.int64) * HEADS
    group = first // per_group
    t = tl.arange(0, T)
    n = tl.arange(0, N)
    at = chunk * T + t
    known = at < tokens
    both = known[:, None] & (n < state)[None, :]
    keys = tl.load(b + row * b_row + group * b_group + at[:, None] * b_token + n[None, :] * b_last, both, 0.0)
    queries = tl.load(c + row * c_row + group * c_group + at[:, None] * c_token + n[None, :] * c_last, both, 0.0)
    inner = tl.dot(queries, tl.trans(keys))
    diagonal = tl.sum(queries.to(tl.float32) * keys.to(tl.float32), 1)
    since_self = t[:, None] >= t[None, :]
    below = t[:, None] > t[None, :]
    near = since_self
    if PACKED:
        segment = tl.load(segments + row * tokens + at, known, -2)
        near = near & (segment[:, None] == segment[None, :])
    total_b = tl.zeros([T, N], tl.float32)
    total_c = tl.zeros([T, N], tl.float32)
    total_inner = tl.zeros([T, T], tl.float32)
    for k in range(HEADS):
        head = first + k
        line = (row * heads + head) * chunks
        size = tl.load(step + line * T + at)
        since = tl.load(log_decay + line * T + at)
        start = tl.load(from_start + line * T + at)
        end = tl.load(to_end + line * T + at)
        d = 0.0
        if SKIP:
            d += tl.load(skip + head).to(tl.float32)
        xs = x + row * x_row + head * x_head
        dys = dy + row * dy_row + head * dy_head
        at_state = ((row * chunks + chunk) * heads + head) * width * state

        # Through the matrix of the chunk.
        product = tl.zeros([T, T], tl.float32)
        own = tl.zeros([T], tl.float32)
        for p0 in tl.static_range(0, WIDTH, BP):
            p = p0 + tl.arange(0, BP)
            each = known[:, None] & (p < width)[None, :]
            values = tl.load(xs + at[:, None] * x_token + p[None, :] * x_last, each, 0.0)
            grads = tl.load(dys + at[:, None] * dy_token + p[None, :] * dy_last, each, 0.0)
            product += tl.dot(grads, tl.trans(values))
            own += tl.sum(grads.to(tl.float32) * values.to(tl.float32), 1)
        decays = tl.exp(tl.minimum(since[:, None] - since[None, :], 0.0).to(tl.float32))
        decays = tl.where(near, decays, 0.0)
        matrix = tl.where(below, inner * decays * size[None, :], 0.0).to(keys.dtype)
        pairs = product * decays
        total_inner += pairs * size[None, :]
        crossing = tl.where(below, pairs * inner, 0.0)
        by_column = tl.sum(crossing, 0)
        by_row = tl.sum(crossing * size[None, :], 1)

        # Through the state before the chunk.
        part_c = tl.zeros([T, N], tl.float32)
        for p0 in tl.static_range(0, WIDTH, BP):
            p = p0 + tl.arange(0, BP)
            each = known[:, None] & (p < width)[None, :]
            stored = (p < width)[:, None] & (n < state)[None, :]
            grads = tl.load(dys + at[:, None] * dy_token + p[None, :] * dy_last, each, 0.0)
            past = tl.load(states + at_state + p[:, None] * state + n[None, :], stored, 0.0)
            part_c += tl.dot(grads, past)
        part_c = part_c * start[:, None]
        total_c += part_c
        reaching = tl.sum(part_c * queries.to(tl.float32), 1)  # what the state before the chunk adds at a token

        # Through the state after the chunk, and the gradient of x from all three.
        part_b = tl.zeros([T, N], tl.float32)
        carried = 0.0
        for p0 in tl.static_range(0, WIDTH, BP):
            p = p0 + tl.arange(0, BP)
            each = known[:, None] & (p < width)[None, :]
            stored = (p < width)[:, None] & (n < state)[None, :]
            values = tl.load(xs + at[:, None] * x_token + p[None, :] * x_last, each, 0.0)
            grads = tl.load(dys + at[:, None] * dy_token + p[None, :] * dy_last, each, 0.0)
            past = tl.load(states + at_state + p[:, None] * state + n[None, :], stored, 0.0)
            future = tl.load(grad_states + at_state + p[:, None] * state + n[None, :], stored, 0.0)
            part_b += tl.dot(values, future)
            carried += tl.sum(tl.sum(past.to(tl.float32) * future.to(tl.float32), 1), 0)
            result = tl.dot(keys, tl.trans(future)) * (size * end)[:, None]
            result += tl.dot(tl.trans(matrix), grads)
            result += (diagonal * size + d)[:, None] * grads.to(tl.float32)
            to = grad_x + (row * tokens * heads + head) * width
            tl.store(to + at[:, None] * (heads * width) + p[None, :], result.to(grad_x.dtype.element_ty), each)
        total_b += part_b * (size * end)[:, None]
        kept = tl.sum(part_b * keys.to(tl.float32), 1) * end

        # A log decay counts in everything that decays at its token: from there on, up to it, and across the chunk.
        later = by_row - size * by_column + reaching
        sooner = size * kept
        grad_log = tl.sum(tl.where(since_self, later[:, None], sooner[:, None]), 0)
        grad_log += carried * tl.load(whole + line + chunk)
        rate = tl.load(a + head).to(tl.float32)
        grad_raw = (by_column + own * diagonal + kept + grad_log * rate) * tl.load(slope + line * T + at)
        tl.store(grad_dt + (row * tokens + at) * heads + head, grad_raw.to(grad_dt.dtype.element_ty), known)
        to = sums + place * heads + head
        many = rows * chunks * heads
        tl.store(to, tl.sum(grad_log * size, 0))
        tl.store(to + many, tl.sum(own, 0))
        tl.store(to + 2 * many, tl.sum(grad_raw, 0))

    low = total_inner.to(keys.dtype)
    total_c += tl.dot(low, keys)
    total_b += tl.dot(tl.trans(low), queries)
    groups = heads // per_group
    part = (first % per_group) // HEADS
    to = (((part * rows + row) * tokens + at[:, None]) * groups + group) * state + n[None, :]
    tl.store(grad_b + to, total_b, both)
    tl.store(grad_c + to, total_c, both)
