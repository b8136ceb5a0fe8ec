# mypy: ignore-errors
# ruff: noqa: N803 (Triton's compile-time constants are written in capitals)
"""The Triton kernels of the gated delta rule; imported only for tensors on a GPU. delta_rule_triton.py calls them.

A span of `chunks` chunks starts at token `first` of each row. Intermediate tensors are [rows, heads, chunks · CHUNK,
width], so that a chunk is contiguous and needs no mask; inputs and outputs are [rows, tokens, heads, width]. Tokens
behind the end of a row are zeros, which change no state.

Factors of products are bf16, sums are fp32. Nothing is added atomically, so results do not depend on timing. Every
transposed factor is loaded by transposed addresses or is the right factor of a product. No kernel has a loop over
blocks that carries several sums: Triton 3.4 to 3.7.0 compiles such a kernel of another library wrongly for Hopper.
"""

from __future__ import annotations

import triton
import triton.language as tl

SIZES = ("first", "tokens", "chunks")  # compiled once for all lengths


@triton.jit
def _scalars(values, row, first, tokens, head, HEADS: tl.constexpr, CHUNK: tl.constexpr):
    """Load one number per token of a chunk from [rows, tokens, heads]."""
    at = first + tl.arange(0, CHUNK)
    return tl.load(values + (row * tokens + at) * HEADS + head, at < tokens, 0.0).to(tl.float32)


@triton.jit
def _matrix(ROWS: tl.constexpr, COLUMNS: tl.constexpr, STRIDE: tl.constexpr):
    """Addresses of [ROWS, COLUMNS], rows STRIDE apart."""
    return tl.arange(0, ROWS)[:, None] * STRIDE + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def _transposed(ROWS: tl.constexpr, COLUMNS: tl.constexpr, STRIDE: tl.constexpr):
    """Addresses of the transpose [ROWS, COLUMNS] of a matrix whose rows are STRIDE apart."""
    return tl.arange(0, ROWS)[:, None] + tl.arange(0, COLUMNS)[None, :] * STRIDE


@triton.jit
def _tile(values, row, first, tokens, head, column, HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
          CHUNK: tl.constexpr):  # fmt: skip
    """Load [CHUNK, BLOCK] from [rows, tokens, heads, WIDTH], from a column on."""
    start = values + ((row * tokens + first) * HEADS + head) * WIDTH + column
    places = _matrix(CHUNK, BLOCK, HEADS * WIDTH)
    at = first + tl.arange(0, CHUNK)
    return tl.load(start + places, (at < tokens)[:, None], 0.0)


@triton.jit
def _store_tile(values, block, row, first, tokens, head, column, HEADS: tl.constexpr, WIDTH: tl.constexpr,
                BLOCK: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    start = values + ((row * tokens + first) * HEADS + head) * WIDTH + column
    places = _matrix(CHUNK, BLOCK, HEADS * WIDTH)
    at = first + tl.arange(0, CHUNK)
    tl.store(start + places, block.to(values.dtype.element_ty), (at < tokens)[:, None])


@triton.jit
def _segment_ids(segments, row, first, tokens, CHUNK: tl.constexpr):
    """Document numbers of the tokens of a chunk, before it and at its last token; behind the row the last one's."""
    line = segments + row * tokens
    at = first + tl.arange(0, CHUNK)
    own = tl.load(line + tl.minimum(at, tokens - 1))
    previous = tl.load(line + tl.maximum(first - 1, 0))
    last = tl.load(line + tl.minimum(first + CHUNK - 1, tokens - 1))
    return own, previous, last


@triton.jit
def _since(log_decay, segments, row, first, tokens, PACKED: tl.constexpr, CHUNK: tl.constexpr):
    """Return the decay since the state before the chunk; zero behind a document boundary."""
    decay = tl.exp(tl.load(log_decay + tl.arange(0, CHUNK)))
    if PACKED:
        own, previous, _ = _segment_ids(segments, row, first, tokens, CHUNK)
        decay = tl.where(own == previous, decay, 0.0)
    return decay


@triton.jit
def _until(log_decay, segments, row, first, tokens, PACKED: tl.constexpr, CHUNK: tl.constexpr):
    """Return the decay until the state after the chunk; zero before a document boundary."""
    decay = tl.exp(tl.load(log_decay + CHUNK - 1) - tl.load(log_decay + tl.arange(0, CHUNK)))
    if PACKED:
        own, _, last = _segment_ids(segments, row, first, tokens, CHUNK)
        decay = tl.where(own == last, decay, 0.0)
    return decay


@triton.jit
def _through(log_decay, segments, row, first, tokens, PACKED: tl.constexpr, CHUNK: tl.constexpr):
    """Return the decay of the state over the chunk; zero if a document starts in it."""
    decay = tl.exp(tl.load(log_decay + CHUNK - 1))
    if PACKED:
        _, previous, last = _segment_ids(segments, row, first, tokens, CHUNK)
        decay = tl.where(previous == last, decay, 0.0)
    return decay


@triton.jit
def _between(logs, segments, row, first, tokens, PACKED: tl.constexpr, CHUNK: tl.constexpr):
    """Return the decay from each token (column) to each later one (row) [CHUNK, CHUNK]; zero between documents.

    One above the diagonal, where no caller looks.
    """
    decay = tl.exp(tl.minimum(logs[:, None] - logs[None, :], 0.0))
    if PACKED:
        own, _, _ = _segment_ids(segments, row, first, tokens, CHUNK)
        decay = tl.where(own[:, None] == own[None, :], decay, 0.0)
    return decay


@triton.jit
def _doubled(inverse, system, HALF: tl.constexpr, CHUNK: tl.constexpr):
    """Return the inverses of diagonal blocks of 2 · HALF from those of HALF."""
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    below = tl.where((i // (2 * HALF) == j // (2 * HALF)) & (i // HALF != j // HALF), system, 0.0)
    product = tl.dot(inverse, below, input_precision="tf32x3")
    return inverse - tl.dot(product, inverse, input_precision="tf32x3")


@triton.jit
def _inverse(system, CHUNK: tl.constexpr):
    """Return the inverse of I + a strictly lower triangular matrix [64, 64].

    By diagonal blocks of doubling size: [[A, 0], [C, B]] has the inverse [[A⁻¹, 0], [-B⁻¹·C·A⁻¹, B⁻¹]]. The product
    (I - A)·(I + A²)·(I + A⁴)… has as many factors, but with similar keys its powers are as large as 10¹⁷ and cancel.
    """
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, system, 0.0)
    inverse = _doubled(inverse, system, 2, CHUNK)
    inverse = _doubled(inverse, system, 4, CHUNK)
    inverse = _doubled(inverse, system, 8, CHUNK)
    inverse = _doubled(inverse, system, 16, CHUNK)
    return _doubled(inverse, system, 32, CHUNK)


@triton.jit
def _unit(raw, EPSILON: tl.constexpr):
    """Return vectors [CHUNK, KEY] with unit length, and one by their lengths."""
    inverse_norm = tl.rsqrt(tl.sum(raw * raw, 1) + EPSILON)
    return raw * inverse_norm[:, None], inverse_norm


@triton.jit
def _raw_gradient(gradient, raw, scale, NORM: tl.constexpr, EPSILON: tl.constexpr):
    """Return the gradient of raw queries or keys from that of the scaled unit vectors."""
    gradient = gradient * scale
    if NORM:
        unit, inverse_norm = _unit(raw, EPSILON)
        gradient = (gradient - unit * tl.sum(unit * gradient, 1)[:, None]) * inverse_norm[:, None]
    return gradient


@triton.jit(do_not_specialize=SIZES)
def prepare_keys(
    q, k, queries, keys, first, tokens, chunks, scale,
    GROUPS: tl.constexpr, KEY: tl.constexpr, NORM: tl.constexpr, EPSILON: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write queries (scaled) and keys by chunk, with unit length if NORM."""
    chunk, line = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row, group = line // GROUPS, line % GROUPS
    start = first + chunk * CHUNK
    place = (line * chunks + chunk) * CHUNK * KEY
    x = _tile(q, row, start, tokens, group, 0, GROUPS, KEY, KEY, CHUNK).to(tl.float32)
    y = _tile(k, row, start, tokens, group, 0, GROUPS, KEY, KEY, CHUNK).to(tl.float32)
    if NORM:
        x, _ = _unit(x, EPSILON)
        y, _ = _unit(y, EPSILON)
    tl.store(queries + place + _matrix(CHUNK, KEY, KEY), (x * scale).to(queries.dtype.element_ty))
    tl.store(keys + place + _matrix(CHUNK, KEY, KEY), y.to(keys.dtype.element_ty))


@triton.jit(do_not_specialize=SIZES)
def solve_chunks(
    queries, keys, v, g, beta, segments, grad_out, log_decays, inverses, erased, written, grad_values,
    first, tokens, chunks,
    HEADS: tl.constexpr, SHARED: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, BLOCK: tl.constexpr,
    PACKED: tl.constexpr, BACKWARD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Solve the triangular system of a chunk and head: the values written by a zero state, and the keys to erase by.

    BACKWARD also writes the inverse, and the gradient of the written values through attention within the chunk.
    """
    chunk, line = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row, head = line // HEADS, line % HEADS
    start = first + chunk * CHUNK
    place = (line * chunks + chunk) * CHUNK
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    keys += ((line // SHARED) * chunks + chunk) * CHUNK * KEY

    decay = _scalars(g, row, start, tokens, head, HEADS, CHUNK)
    logs = tl.sum(tl.where(j <= i, decay[None, :], 0.0), 1)
    tl.store(log_decays + place + tl.arange(0, CHUNK), logs)
    strength = _scalars(beta, row, start, tokens, head, HEADS, CHUNK)
    between = _between(logs, segments, row, start, tokens, PACKED, CHUNK)
    k = tl.load(keys + _matrix(CHUNK, KEY, KEY))
    k_t = tl.load(keys + _transposed(KEY, CHUNK, KEY))
    system = tl.where(i > j, tl.dot(k, k_t) * between * strength[:, None], 0.0)
    inverse = _inverse(system, CHUNK).to(k.dtype)
    if BACKWARD:
        tl.store(inverses + place * CHUNK + _matrix(CHUNK, CHUNK, CHUNK), inverse)

    since = tl.exp(logs)
    if PACKED:
        own, previous, _ = _segment_ids(segments, row, start, tokens, CHUNK)
        since = tl.where(own == previous, since, 0.0)
    right = (k.to(tl.float32) * (strength * since)[:, None]).to(k.dtype)
    tl.store(erased + place * KEY + _matrix(CHUNK, KEY, KEY), tl.dot(inverse, right).to(k.dtype))
    for column in tl.static_range(0, VALUE, BLOCK):
        x = _tile(v, row, start, tokens, head, column, HEADS, VALUE, BLOCK, CHUNK).to(tl.float32)
        x = tl.dot(inverse, (x * strength[:, None]).to(k.dtype))
        tl.store(written + place * VALUE + column + _matrix(CHUNK, BLOCK, VALUE), x.to(k.dtype))

    if BACKWARD:
        queries += ((line // SHARED) * chunks + chunk) * CHUNK * KEY
        q_t = tl.load(queries + _transposed(KEY, CHUNK, KEY))
        later = tl.exp(tl.minimum(logs[None, :] - logs[:, None], 0.0))  # the transpose of `between`
        if PACKED:
            own, _, _ = _segment_ids(segments, row, start, tokens, CHUNK)
            later = tl.where(own[:, None] == own[None, :], later, 0.0)
        scores_t = tl.where(i <= j, tl.dot(k, q_t) * later, 0.0).to(k.dtype)
        for column in tl.static_range(0, VALUE, BLOCK):
            x = _tile(grad_out, row, start, tokens, head, column, HEADS, VALUE, BLOCK, CHUNK)
            x = tl.dot(scores_t, x)
            tl.store(grad_values + place * VALUE + column + _matrix(CHUNK, BLOCK, VALUE), x.to(k.dtype))


@triton.jit(do_not_specialize=SIZES)
def pass_states(
    keys, erased, written, log_decays, segments, before, values, state, first, tokens, chunks,
    HEADS: tl.constexpr, SHARED: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, BLOCK: tl.constexpr,
    PACKED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the state before every chunk and the written values, for a block of value columns of a head.

    `state` [rows, heads, KEY, VALUE], in fp32, is the state before the span, and then the one after it.
    """
    column, line = tl.program_id(0) * BLOCK, tl.program_id(1).to(tl.int64)
    row = line // HEADS
    state += line * KEY * VALUE + column
    now = tl.load(state + _matrix(KEY, BLOCK, VALUE))
    for chunk in range(chunks):
        place = (line * chunks + chunk) * CHUNK
        start = first + chunk * CHUNK
        low = now.to(keys.dtype.element_ty)
        tl.store(before + (line * chunks + chunk) * KEY * VALUE + column + _matrix(KEY, BLOCK, VALUE), low)
        w = tl.load(erased + place * KEY + _matrix(CHUNK, KEY, KEY))
        x = tl.load(written + place * VALUE + column + _matrix(CHUNK, BLOCK, VALUE)).to(tl.float32)
        x -= tl.dot(w, low)
        tl.store(values + place * VALUE + column + _matrix(CHUNK, BLOCK, VALUE), x.to(low.dtype))
        until = _until(log_decays + place, segments, row, start, tokens, PACKED, CHUNK)
        lasting = (x * until[:, None]).to(low.dtype)
        k_t = tl.load(keys + ((line // SHARED) * chunks + chunk) * CHUNK * KEY + _transposed(KEY, CHUNK, KEY))
        now = now * _through(log_decays + place, segments, row, start, tokens, PACKED, CHUNK)
        now += tl.dot(k_t, lasting)
    tl.store(state + _matrix(KEY, BLOCK, VALUE), now)


@triton.jit(do_not_specialize=SIZES)
def write_outputs(
    queries, keys, log_decays, segments, before, values, out, first, tokens, chunks,
    HEADS: tl.constexpr, SHARED: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, BLOCK: tl.constexpr,
    PACKED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the outputs of a chunk and head: from the state before the chunk, and attention within it."""
    chunk, line = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row, head = line // HEADS, line % HEADS
    start = first + chunk * CHUNK
    place = (line * chunks + chunk) * CHUNK
    shared = ((line // SHARED) * chunks + chunk) * CHUNK * KEY
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    q = tl.load(queries + shared + _matrix(CHUNK, KEY, KEY))
    k_t = tl.load(keys + shared + _transposed(KEY, CHUNK, KEY))
    logs = tl.load(log_decays + place + tl.arange(0, CHUNK))
    between = _between(logs, segments, row, start, tokens, PACKED, CHUNK)
    scores = tl.where(i >= j, tl.dot(q, k_t) * between, 0.0).to(q.dtype)
    since = _since(log_decays + place, segments, row, start, tokens, PACKED, CHUNK)
    for column in tl.static_range(0, VALUE, BLOCK):
        state = tl.load(before + (line * chunks + chunk) * KEY * VALUE + column + _matrix(KEY, BLOCK, VALUE))
        x = tl.load(values + place * VALUE + column + _matrix(CHUNK, BLOCK, VALUE))
        result = tl.dot(q, state) * since[:, None]
        result += tl.dot(scores, x)
        _store_tile(out, result, row, start, tokens, head, column, HEADS, VALUE, BLOCK, CHUNK)


@triton.jit(do_not_specialize=SIZES)
def pass_state_gradients(
    queries, keys, erased, log_decays, segments, grad_out, grad_values, after, state, first, tokens, chunks,
    HEADS: tl.constexpr, SHARED: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, BLOCK: tl.constexpr,
    PACKED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the state after every chunk, and complete that of the written values, last chunk first.

    `state` is the gradient of the state after the span, and then of the one before it.
    """
    column, line = tl.program_id(0) * BLOCK, tl.program_id(1).to(tl.int64)
    row, head = line // HEADS, line % HEADS
    state += line * KEY * VALUE + column
    now = tl.load(state + _matrix(KEY, BLOCK, VALUE))
    for done in range(chunks):
        chunk = chunks - 1 - done
        place = (line * chunks + chunk) * CHUNK
        shared = ((line // SHARED) * chunks + chunk) * CHUNK * KEY
        start = first + chunk * CHUNK
        low = now.to(keys.dtype.element_ty)
        tl.store(after + (line * chunks + chunk) * KEY * VALUE + column + _matrix(KEY, BLOCK, VALUE), low)
        k = tl.load(keys + shared + _matrix(CHUNK, KEY, KEY))
        own = grad_values + place * VALUE + column + _matrix(CHUNK, BLOCK, VALUE)
        until = _until(log_decays + place, segments, row, start, tokens, PACKED, CHUNK)
        x = (tl.load(own).to(tl.float32) + tl.dot(k, low) * until[:, None]).to(low.dtype)
        tl.store(own, x)
        since = _since(log_decays + place, segments, row, start, tokens, PACKED, CHUNK)
        given = _tile(grad_out, row, start, tokens, head, column, HEADS, VALUE, BLOCK, CHUNK).to(tl.float32)
        q_t = tl.load(queries + shared + _transposed(KEY, CHUNK, KEY))
        w_t = tl.load(erased + place * KEY + _transposed(KEY, CHUNK, KEY))
        now = now * _through(log_decays + place, segments, row, start, tokens, PACKED, CHUNK)
        now += tl.dot(q_t, (given * since[:, None]).to(low.dtype))
        now -= tl.dot(w_t, x)
    tl.store(state + _matrix(KEY, BLOCK, VALUE), now)


@triton.jit(do_not_specialize=SIZES)
def read_gradients(
    q, queries, keys, log_decays, segments, before, after, values, grad_out, grad_q, grad_keys, grad_logs,
    first, tokens, chunks, scale,
    GROUPS: tl.constexpr, SHARED: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, BLOCK: tl.constexpr,
    PACKED: tl.constexpr, NORM: tl.constexpr, EPSILON: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the queries of a chunk, and those of its keys and log decays but for the system's part.

    The heads that share queries and keys run one after another. Gradients of log decays are those of the sums since
    the start of the chunk.
    """
    chunk, line = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row, group = line // GROUPS, line % GROUPS
    start = first + chunk * CHUNK
    shared = (line * chunks + chunk) * CHUNK * KEY
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    token = tl.arange(0, CHUNK)
    total_q = tl.zeros([CHUNK, KEY], tl.float32)
    total_k = tl.zeros([CHUNK, KEY], tl.float32)
    for number in range(SHARED):
        head = group * SHARED + number
        own = (row * GROUPS * SHARED + head) * chunks + chunk
        logs = log_decays + own * CHUNK
        query = tl.load(queries + shared + _matrix(CHUNK, KEY, KEY))
        reads = tl.zeros([CHUNK, KEY], tl.float32)
        for column in tl.static_range(0, VALUE, BLOCK):
            given = _tile(grad_out, row, start, tokens, head, column, GROUPS * SHARED, VALUE, BLOCK, CHUNK)
            state_t = tl.load(before + own * KEY * VALUE + column + _transposed(BLOCK, KEY, VALUE))
            reads += tl.dot(given, state_t)
        reads = reads * _since(logs, segments, row, start, tokens, PACKED, CHUNK)[:, None]
        grad_log = tl.sum(reads * query.to(tl.float32), 1)
        total_q += reads

        k = tl.load(keys + shared + _matrix(CHUNK, KEY, KEY))
        lasting = tl.zeros([CHUNK, KEY], tl.float32)
        for column in tl.static_range(0, VALUE, BLOCK):
            x = tl.load(values + own * CHUNK * VALUE + column + _matrix(CHUNK, BLOCK, VALUE))
            grad_t = tl.load(after + own * KEY * VALUE + column + _transposed(BLOCK, KEY, VALUE))
            lasting += tl.dot(x, grad_t)
        lasting = lasting * _until(logs, segments, row, start, tokens, PACKED, CHUNK)[:, None]
        kept = tl.sum(lasting * k.to(tl.float32), 1)
        total_k += lasting

        grad_scores = tl.zeros([CHUNK, CHUNK], tl.float32)
        for column in tl.static_range(0, VALUE, BLOCK):
            given = _tile(grad_out, row, start, tokens, head, column, GROUPS * SHARED, VALUE, BLOCK, CHUNK)
            x_t = tl.load(values + own * CHUNK * VALUE + column + _transposed(BLOCK, CHUNK, VALUE))
            grad_scores += tl.dot(given, x_t)
        between = _between(tl.load(logs + token), segments, row, start, tokens, PACKED, CHUNK)
        grad_scores = tl.where(i >= j, grad_scores * between, 0.0)
        k_t = tl.load(keys + shared + _transposed(KEY, CHUNK, KEY))
        pairs = tl.where(i > j, grad_scores * tl.dot(query, k_t), 0.0)
        grad_log += tl.sum(pairs, 1) - tl.sum(pairs, 0) - kept
        low = grad_scores.to(k.dtype)
        total_q += tl.dot(low, k)
        total_k += tl.dot(tl.trans(low), query)

        # The state and its gradient once more, by few rows: as a whole they take all registers.
        crossing = tl.zeros([16, VALUE], tl.float32)
        for first_key in range(0, KEY, 16):
            piece = (own * KEY + first_key) * VALUE
            one = tl.load(before + piece + _matrix(16, VALUE, VALUE)).to(tl.float32)
            crossing += one * tl.load(after + piece + _matrix(16, VALUE, VALUE)).to(tl.float32)
        at_end = tl.sum(kept, 0)
        at_end += tl.sum(tl.sum(crossing, 1), 0) * _through(logs, segments, row, start, tokens, PACKED, CHUNK)
        tl.store(grad_logs + own * CHUNK + token, grad_log + tl.where(token == CHUNK - 1, at_end, 0.0))
    raw = _tile(q, row, start, tokens, group, 0, GROUPS, KEY, KEY, CHUNK).to(tl.float32)
    _store_tile(
        grad_q, _raw_gradient(total_q, raw, scale, NORM, EPSILON), row, start, tokens, group, 0, GROUPS, KEY, KEY, CHUNK
    )
    tl.store(grad_keys + shared + _matrix(CHUNK, KEY, KEY), total_k)


@triton.jit(do_not_specialize=SIZES)
def system_gradients(
    k, v, beta, keys, log_decays, segments, inverses, erased, written, before, grad_values, grad_keys, grad_logs,
    grad_k, grad_v, grad_g, grad_beta, first, tokens, chunks,
    GROUPS: tl.constexpr, SHARED: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, BLOCK: tl.constexpr,
    PACKED: tl.constexpr, NORM: tl.constexpr, EPSILON: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the gradients of keys, values, log decays and beta: through the triangular systems of a chunk."""
    chunk, line = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row, group = line // GROUPS, line % GROUPS
    start = first + chunk * CHUNK
    shared = (line * chunks + chunk) * CHUNK * KEY
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    total = tl.load(grad_keys + shared + _matrix(CHUNK, KEY, KEY))
    for number in range(SHARED):
        head = group * SHARED + number
        own = (row * GROUPS * SHARED + head) * chunks + chunk
        strength = _scalars(beta, row, start, tokens, head, GROUPS * SHARED, CHUNK)
        inverse_t = tl.load(inverses + own * CHUNK * CHUNK + _transposed(CHUNK, CHUNK, CHUNK))
        grad_erased = tl.zeros([CHUNK, KEY], tl.float32)
        for column in tl.static_range(0, VALUE, BLOCK):
            given = tl.load(grad_values + own * CHUNK * VALUE + column + _matrix(CHUNK, BLOCK, VALUE))
            state_t = tl.load(before + own * KEY * VALUE + column + _transposed(BLOCK, KEY, VALUE))
            grad_erased -= tl.dot(given, state_t)
        right_keys = tl.dot(inverse_t, grad_erased.to(inverse_t.dtype))
        w_t = tl.load(erased + own * CHUNK * KEY + _transposed(KEY, CHUNK, KEY))
        grad_system = tl.dot(right_keys.to(inverse_t.dtype), w_t)
        since = _since(log_decays + own * CHUNK, segments, row, start, tokens, PACKED, CHUNK)
        key = tl.load(keys + shared + _matrix(CHUNK, KEY, KEY))
        from_keys = tl.sum(right_keys * key.to(tl.float32), 1) * since
        total += right_keys * (strength * since)[:, None]

        by_beta = from_keys
        for column in tl.static_range(0, VALUE, BLOCK):
            given = tl.load(grad_values + own * CHUNK * VALUE + column + _matrix(CHUNK, BLOCK, VALUE))
            right = tl.dot(inverse_t, given)
            x = _tile(v, row, start, tokens, head, column, GROUPS * SHARED, VALUE, BLOCK, CHUNK).to(tl.float32)
            by_beta += tl.sum(right * x, 1)
            _store_tile(
                grad_v, right * strength[:, None], row, start, tokens, head, column,
                GROUPS * SHARED, VALUE, BLOCK, CHUNK,
            )  # fmt: skip
            u_t = tl.load(written + own * CHUNK * VALUE + column + _transposed(BLOCK, CHUNK, VALUE))
            grad_system += tl.dot(right.to(key.dtype), u_t)

        logs = tl.load(log_decays + own * CHUNK + tl.arange(0, CHUNK))
        between = _between(logs, segments, row, start, tokens, PACKED, CHUNK)
        grad_system = tl.where(i > j, -grad_system * between, 0.0)
        key_t = tl.load(keys + shared + _transposed(KEY, CHUNK, KEY))
        pairs = grad_system * tl.dot(key, key_t)
        by_beta += tl.sum(pairs, 1)
        pairs = pairs * strength[:, None]
        grad_log = tl.load(grad_logs + own * CHUNK + tl.arange(0, CHUNK))
        grad_log += tl.sum(pairs, 1) - tl.sum(pairs, 0) + from_keys * strength
        # The log decay of a token is in the sums of itself and of all later tokens of the chunk.
        grad_log = tl.sum(tl.where(i >= j, grad_log[:, None], 0.0), 0)
        at = start + tl.arange(0, CHUNK)
        place = (row * tokens + at) * (GROUPS * SHARED) + head
        tl.store(grad_g + place, grad_log.to(grad_g.dtype.element_ty), at < tokens)
        tl.store(grad_beta + place, by_beta.to(grad_beta.dtype.element_ty), at < tokens)
        grad_gram = grad_system * strength[:, None]
        total += tl.dot((grad_gram + tl.trans(grad_gram)).to(key.dtype), key)
    raw = _tile(k, row, start, tokens, group, 0, GROUPS, KEY, KEY, CHUNK).to(tl.float32)
    _store_tile(
        grad_k, _raw_gradient(total, raw, 1.0, NORM, EPSILON), row, start, tokens, group, 0, GROUPS, KEY, KEY, CHUNK
    )
