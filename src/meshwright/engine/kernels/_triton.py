# mypy: ignore-errors
# ruff: noqa: N803 (Triton's compile-time constants are written in capitals)
"""The Triton kernels of this package; imported only for tensors on a GPU."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def logits_to_gradient(
    logits, labels, weights, statistics, rows, columns, stride, z_loss, cap, CAPPED: tl.constexpr, BLOCK: tl.constexpr
):
    """Process one row: log-sum-exp in a first pass, the gradient in a second pass that hits the cache."""
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * stride
    label = tl.load(labels + row)
    weight = tl.load(weights + row)
    inside_shard = (label >= 0) & (label < columns)
    target = tl.load(line + tl.where(inside_shard, label, 0)).to(tl.float32)
    if CAPPED:
        target = _capped(target, cap)
    highest = float("-inf")
    total = 0.0
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        x = tl.load(line + offsets, offsets < columns, float("-inf")).to(tl.float32)
        if CAPPED:
            x = tl.where(offsets < columns, _capped(x, cap), float("-inf"))
        now = tl.maximum(highest, tl.max(x, 0))
        total = total * tl.exp(highest - now) + tl.sum(tl.exp(x - now), 0)
        highest = now
    log_sum = highest + tl.log(total)
    tl.store(statistics + row, log_sum)
    tl.store(statistics + rows + row, tl.where(inside_shard, target, 0.0))
    slope = weight * (1.0 + 2.0 * z_loss * log_sum)
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        x = tl.load(line + offsets, offsets < columns, float("-inf")).to(tl.float32)
        if CAPPED:
            x = _capped(x, cap)
        gradient = tl.exp(x - log_sum) * slope - tl.where(offsets == label, weight, 0.0)
        if CAPPED:
            gradient = gradient * (1.0 - (x / cap) * (x / cap))
        tl.store(line + offsets, gradient.to(logits.dtype.element_ty), offsets < columns)


@triton.jit
def _capped(x, cap):
    return cap * (1.0 - 2.0 / (tl.exp(2.0 * x / cap) + 1.0))


@triton.jit
def adamw(
    parameter, gradient, average, square, factor, count,
    step_size, keep, beta1, beta2, one_less_beta1, one_less_beta2, root_correction, epsilon,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """AdamW on one block of elements, all arithmetic in fp32."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    g = tl.load(gradient + offsets, inside, 0.0).to(tl.float32) * tl.load(factor)
    p = tl.load(parameter + offsets, inside, 0.0).to(tl.float32) * keep
    m = tl.load(average + offsets, inside, 0.0).to(tl.float32) * beta1 + g * one_less_beta1
    v = tl.load(square + offsets, inside, 0.0).to(tl.float32) * beta2 + g * g * one_less_beta2
    p = p - step_size * m / (tl.sqrt(v) * root_correction + epsilon)
    tl.store(parameter + offsets, p.to(parameter.dtype.element_ty), inside)
    tl.store(average + offsets, m.to(average.dtype.element_ty), inside)
    tl.store(square + offsets, v.to(square.dtype.element_ty), inside)


@triton.jit
def sum_of_squares(values, partial, count, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Sum the squares of one chunk."""
    first = tl.program_id(0).to(tl.int64) * CHUNK
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, CHUNK, BLOCK):
        offsets = first + start + tl.arange(0, BLOCK)
        x = tl.load(values + offsets, offsets < count, 0.0).to(tl.float32)
        total += x * x
    tl.store(partial + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def scale_unless_one(values, factor, count, BLOCK: tl.constexpr):
    """Multiply by a factor that is nearly always one; then nothing is read or written."""
    by = tl.load(factor).to(tl.float32)
    if by != 1.0:
        offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = offsets < count
        x = tl.load(values + offsets, inside, 0.0).to(tl.float32)
        tl.store(values + offsets, (x * by).to(values.dtype.element_ty), inside)


@triton.jit
def unpack_nf4(codes, scales, levels, out, count, bytes_per_scale, BLOCK: tl.constexpr):
    """Write two values per byte: the level of each half times the scale of its block."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    pair = tl.load(codes + offsets, inside, 0).to(tl.int32)
    scale = tl.load(scales + offsets // bytes_per_scale, inside, 0.0).to(tl.float32)
    first = tl.load(levels + (pair >> 4)) * scale
    second = tl.load(levels + (pair & 15)) * scale
    both = tl.interleave(first, second)
    positions = tl.program_id(0).to(tl.int64) * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
    tl.store(out + positions, both.to(out.dtype.element_ty), positions < 2 * count)
