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
def _tile(values, t, p, tokens, width, token_stride, last_stride):
    """Load [tokens, width] of a chunk; `values` points to its first token, and `tokens` of it are inside."""
    # Offsets within a chunk fit into 32 bits, and take half the registers.
    return tl.load(
        values + t[:, None] * token_stride + p[None, :] * last_stride, (t < tokens)[:, None] & (p < width)[None, :], 0.0
    )


@triton.jit
def _state(states, p, n, width, state):
    """Load [head, state] of a state."""
    return tl.load(states + p[:, None] * state + n[None, :], (p < width)[:, None] & (n < state)[None, :], 0.0)


@triton.jit
def _same_document(segments, t, tokens):
    """Return which pairs of tokens of a chunk are in one document."""
    segment = tl.load(segments + t, t < tokens, -2)
    return segment[:, None] == segment[None, :]


@triton.jit
def _decays(log_decay, t):
    """Return the decays from token j to token i of a chunk; 1 above the diagonal."""
    since = tl.load(log_decay + t)
    return tl.exp(tl.minimum(since[:, None] - since[None, :], 0.0).to(tl.float32))


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
    t = tl.arange(0, T)
    xs = x + row * x_row + head * x_head
    bs = b + row * b_row + (head // per_group) * b_group
    line = (row * heads + head) * chunks
    stored = (p < width)[:, None] & (n < state)[None, :]
    current = tl.zeros([BP, BN], tl.float32)
    for i in range(chunks):
        chunk = 0 * row + i  # in 64 bits
        if REVERSE:
            chunk = chunks - 1 - chunk
        to = states + ((row * chunks + chunk) * heads + head) * width * state
        tl.store(to + p[:, None] * state + n[None, :], current.to(states.dtype.element_ty), stored)
        first = chunk * T
        left = (tokens - first).to(tl.int32)
        scale = tl.load(weight + line * T + first + t)
        if not REVERSE:
            scale *= tl.load(step + line * T + first + t)
        values = _tile(xs + first * x_token, t, p, left, width, x_token, x_last)
        keys = _tile(bs + first * b_token, t, n, left, state, b_token, b_last)
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
    row, at = place // chunks, (place % chunks) * T
    first = tl.program_id(1).to(tl.int64) * HEADS
    group = first // per_group
    left = (tokens - at).to(tl.int32)
    t = tl.arange(0, T)
    n = tl.arange(0, N)
    keys = _tile(b + row * b_row + at * b_token + group * b_group, t, n, left, state, b_token, b_last)
    queries = _tile(c + row * c_row + at * c_token + group * c_group, t, n, left, state, c_token, c_last)
    inner = tl.dot(queries, tl.trans(keys))
    diagonal = tl.sum(queries.to(tl.float32) * keys.to(tl.float32), 1)
    below = t[:, None] > t[None, :]
    if PACKED:
        below = below & _same_document(segments + row * tokens + at, t, left)
    for k in range(HEADS):
        head = first + k
        line = (row * heads + head) * chunks * T + at
        size = tl.load(step + line + t)
        start = tl.load(from_start + line + t)
        matrix = tl.where(below, inner * _decays(log_decay + line, t) * size[None, :], 0.0).to(keys.dtype)
        own = diagonal * size
        if SKIP:
            own += tl.load(skip + head).to(tl.float32)
        before = states + (place * heads + head) * width * state
        xs = x + row * x_row + at * x_token + head * x_head
        to = out + ((row * tokens + at) * heads + head) * width
        for p0 in tl.static_range(0, WIDTH, BP):
            p = p0 + tl.arange(0, BP)
            values = _tile(xs, t, p, left, width, x_token, x_last)
            past = _state(before, p, n, width, state)
            result = tl.dot(queries, tl.trans(past)) * start[:, None]
            result += tl.dot(matrix, values)
            result += own[:, None] * values.to(tl.float32)
            each = (t < left)[:, None] & (p < width)[None, :]
            tl.store(to + t[:, None] * (heads * width) + p[None, :], result.to(out.dtype.element_ty), each)


# The gradients, in three kernels of one program per chunk and HEADS heads of a group: one would spill registers.


@triton.jit
def scan_x_gradients(
    dy, x, b, c, skip, segments, step, log_decay, to_end, grad_states,
    grad_x, grad_inner, direct, decayed, own,
    tokens, heads, chunks, per_group, width, state,
    dy_row, dy_token, dy_head, dy_last, x_row, x_token, x_head, x_last,
    b_row, b_token, b_group, b_last, c_row, c_token, c_group, c_last,
    SKIP: tl.constexpr, PACKED: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    T: tl.constexpr, BP: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Write the gradients of x, of C·Bᵀ (summed over the heads) and, through the matrix of the chunk, of the steps.

    `direct` is the gradient of a step itself, `decayed` what log decays add at a token minus what they add from it on,
    `own` the product of a token's x with its gradient.
    """
    place = tl.program_id(0).to(tl.int64)
    row, at = place // chunks, (place % chunks) * T
    first = tl.program_id(1).to(tl.int64) * HEADS
    group = first // per_group
    left = (tokens - at).to(tl.int32)
    t = tl.arange(0, T)
    n = tl.arange(0, N)
    keys = _tile(b + row * b_row + at * b_token + group * b_group, t, n, left, state, b_token, b_last)
    queries = _tile(c + row * c_row + at * c_token + group * c_group, t, n, left, state, c_token, c_last)
    inner = tl.dot(queries, tl.trans(keys))
    diagonal = tl.sum(queries.to(tl.float32) * keys.to(tl.float32), 1)
    below = t[:, None] > t[None, :]
    near = t[:, None] >= t[None, :]
    if PACKED:
        near = near & _same_document(segments + row * tokens + at, t, left)
    total = tl.zeros([T, T], tl.float32)
    for k in range(HEADS):
        head = first + k
        line = (row * heads + head) * chunks * T + at
        size = tl.load(step + line + t)
        end = tl.load(to_end + line + t)
        xs = x + row * x_row + at * x_token + head * x_head
        dys = dy + row * dy_row + at * dy_token + head * dy_head
        product = tl.zeros([T, T], tl.float32)
        with_itself = tl.zeros([T], tl.float32)
        for p0 in tl.static_range(0, WIDTH, BP):
            p = p0 + tl.arange(0, BP)
            values = _tile(xs, t, p, left, width, x_token, x_last)
            grads = _tile(dys, t, p, left, width, dy_token, dy_last)
            product += tl.dot(grads, tl.trans(values))
            with_itself += tl.sum(grads.to(tl.float32) * values.to(tl.float32), 1)
        decays = tl.where(near, _decays(log_decay + line, t), 0.0)
        matrix = tl.where(below, inner * decays * size[None, :], 0.0).to(keys.dtype)
        product *= decays
        total += product * size[None, :]
        crossing = tl.where(below, product * inner, 0.0)
        by_column = tl.sum(crossing, 0)
        by_row = tl.sum(crossing * size[None, :], 1)
        tl.store(direct + line + t, by_column + with_itself * diagonal)
        tl.store(decayed + line + t, by_row - size * by_column)
        tl.store(own + line + t, with_itself)
        scale = diagonal * size
        if SKIP:
            scale += tl.load(skip + head).to(tl.float32)
        after = grad_states + (place * heads + head) * width * state
        to = grad_x + ((row * tokens + at) * heads + head) * width
        for p0 in tl.static_range(0, WIDTH, BP):
            p = p0 + tl.arange(0, BP)
            grads = _tile(dys, t, p, left, width, dy_token, dy_last)
            future = _state(after, p, n, width, state)
            result = tl.dot(keys, tl.trans(future)) * (size * end)[:, None]
            result += tl.dot(tl.trans(matrix), grads)
            result += scale[:, None] * grads.to(tl.float32)
            each = (t < left)[:, None] & (p < width)[None, :]
            tl.store(to + t[:, None] * (heads * width) + p[None, :], result.to(grad_x.dtype.element_ty), each)
    to = grad_inner + (place * (heads // HEADS) + tl.program_id(1)) * T * T
    tl.store(to + t[:, None] * T + t[None, :], total.to(grad_inner.dtype.element_ty))


@triton.jit
def scan_c_gradients(
    dy, b, c, from_start, states, grad_inner, decayed, grad_c,
    rows, tokens, heads, chunks, per_group, width, state,
    dy_row, dy_token, dy_head, dy_last, b_row, b_token, b_group, b_last, c_row, c_token, c_group, c_last,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, T: tl.constexpr, BP: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Write the gradient of C, summed over the heads, and add to `decayed` what passes from the state before the chunk.

    grad_c is [parts, rows, tokens, groups, state], one part for every HEADS heads of a group.
    """
    place = tl.program_id(0).to(tl.int64)
    row, at = place // chunks, (place % chunks) * T
    first = tl.program_id(1).to(tl.int64) * HEADS
    group = first // per_group
    left = (tokens - at).to(tl.int32)
    t = tl.arange(0, T)
    n = tl.arange(0, N)
    queries = _tile(c + row * c_row + at * c_token + group * c_group, t, n, left, state, c_token, c_last)
    keys = _tile(b + row * b_row + at * b_token + group * b_group, t, n, left, state, b_token, b_last)
    inner = grad_inner + (place * (heads // HEADS) + tl.program_id(1)) * T * T
    total = tl.dot(tl.load(inner + t[:, None] * T + t[None, :]), keys)
    for k in range(HEADS):
        head = first + k
        line = (row * heads + head) * chunks * T + at
        dys = dy + row * dy_row + at * dy_token + head * dy_head
        before = states + (place * heads + head) * width * state
        part = tl.zeros([T, N], tl.float32)
        for p0 in tl.static_range(0, WIDTH, BP):
            p = p0 + tl.arange(0, BP)
            grads = _tile(dys, t, p, left, width, dy_token, dy_last)
            part += tl.dot(grads, _state(before, p, n, width, state))
        part *= tl.load(from_start + line + t)[:, None]
        total += part
        reaching = tl.sum(part * queries.to(tl.float32), 1)
        tl.store(decayed + line + t, tl.load(decayed + line + t) + reaching)
    part_number = (first % per_group) // HEADS
    to = grad_c + (((part_number * rows + row) * tokens + at) * (heads // per_group) + group) * state
    both = (t < left)[:, None] & (n < state)[None, :]
    tl.store(to + t[:, None] * (heads // per_group * state) + n[None, :], total, both)


@triton.jit
def scan_b_gradients(
    x, b, c, a, step, to_end, whole, slope, states, grad_states, grad_inner, direct, decayed, own,
    grad_dt, grad_b, sums,
    rows, tokens, heads, chunks, per_group, width, state,
    x_row, x_token, x_head, x_last, b_row, b_token, b_group, b_last, c_row, c_token, c_group, c_last,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, T: tl.constexpr, BP: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Write the gradient of B, summed over the heads, and those of the steps.

    `sums` [3, rows · chunks, heads] are the gradients of A, D and the bias; grad_b is like grad_c.
    """
    place = tl.program_id(0).to(tl.int64)
    row, chunk = place // chunks, place % chunks
    at = chunk * T
    first = tl.program_id(1).to(tl.int64) * HEADS
    group = first // per_group
    left = (tokens - at).to(tl.int32)
    t = tl.arange(0, T)
    n = tl.arange(0, N)
    keys = _tile(b + row * b_row + at * b_token + group * b_group, t, n, left, state, b_token, b_last)
    queries = _tile(c + row * c_row + at * c_token + group * c_group, t, n, left, state, c_token, c_last)
    inner = grad_inner + (place * (heads // HEADS) + tl.program_id(1)) * T * T
    total = tl.dot(tl.load(inner + t[None, :] * T + t[:, None]), queries)
    near = t[:, None] >= t[None, :]
    for k in range(HEADS):
        head = first + k
        line = (row * heads + head) * chunks * T + at
        size = tl.load(step + line + t)
        end = tl.load(to_end + line + t)
        xs = x + row * x_row + at * x_token + head * x_head
        at_state = (place * heads + head) * width * state
        part = tl.zeros([T, N], tl.float32)
        carried = tl.zeros([BP], tl.float32)
        for p0 in tl.static_range(0, WIDTH, BP):
            p = p0 + tl.arange(0, BP)
            values = _tile(xs, t, p, left, width, x_token, x_last)
            future = _state(grad_states + at_state, p, n, width, state)
            past = _state(states + at_state, p, n, width, state)
            part += tl.dot(values, future)
            carried += tl.sum(past.to(tl.float32) * future.to(tl.float32), 1)
        part *= end[:, None]
        total += part * size[:, None]
        kept = tl.sum(part * keys.to(tl.float32), 1)

        # A log decay counts in everything that decays at its token: from there on, up to it, and across the chunk.
        later = tl.load(decayed + line + t)
        sooner = size * kept
        grad_log = tl.sum(tl.where(near, later[:, None], sooner[:, None]), 0)
        grad_log += tl.sum(carried, 0) * tl.load(whole + (row * heads + head) * chunks + chunk)
        rate = tl.load(a + head).to(tl.float32)
        grad_raw = (tl.load(direct + line + t) + kept + grad_log * rate) * tl.load(slope + line + t)
        to = grad_dt + (row * tokens + at) * heads + head
        tl.store(to + t * heads, grad_raw.to(grad_dt.dtype.element_ty), t < left)
        to = sums + place * heads + head
        many = tl.num_programs(0).to(tl.int64) * heads
        tl.store(to, tl.sum(grad_log * size, 0))
        tl.store(to + many, tl.sum(tl.load(own + line + t), 0))
        tl.store(to + 2 * many, tl.sum(grad_raw, 0))
    part_number = (first % per_group) // HEADS
    to = grad_b + (((part_number * rows + row) * tokens + at) * (heads // per_group) + group) * state
    both = (t < left)[:, None] & (n < state)[None, :]
    tl.store(to + t[:, None] * (heads // per_group * state) + n[None, :], total, both)
