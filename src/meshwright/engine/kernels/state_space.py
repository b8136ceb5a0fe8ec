"""The scan of Mamba-2 layers in chunks: nothing of size tokens × tokens or tokens × states is saved.

Every head has a state [head, state] that decays, adds a token's input and gives its output:

    S ← exp(Δ·A)·S + Δ·x ⊗ B,    y = S·C + D·x

Within a chunk that is a product with the matrix M = (C·Bᵀ) ∘ decays below the diagonal; only the state passes from
chunk to chunk. Chunks run in blocks, whose matrices take some hundred MiB whatever the length. Saved are the inputs and
the state before every block but the first; the backward pass recomputes a block's matrices.

Sums are in fp32 (of fp32 or bf16 factors), and log decays are accumulated in fp64: the difference of two large sums may
be small. Heads of a group share B and C, which are not repeated. It is a custom op for the reason in lora_linear.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.engine.kernels.chunked_scan import (
    Plan,
    block_plan,
    bmm_fp32,
    crossing_sums,
    empty_states,
    executed_blocks,
    suffix_sum,
)
from meshwright.engine.kernels.cross_entropy import upcast
from meshwright.engine.kernels.device_caps import DECOMPOSITIONS, on_gpu

CHUNK = 128  # tokens per matrix M
MATRIX_BYTES = 2**26  # fp32 matrices M of a block
SOFTPLUS_LINEAR = 20.0  # torch's softplus is the identity above this

INPUTS = "Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? skip, Tensor? bias"
SETTINGS = "bool softplus, float low, float high"
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def state_space_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor | None = None,
    bias: Tensor | None = None,
    softplus: bool = False,
    limits: tuple[float, float] = (0.0, float("inf")),
) -> Tensor:
    """Return the outputs [rows, tokens, heads, head] of the scan over x from a zero state, in the dtype of x.

    dt [rows, tokens, heads] are the raw steps: Δ is softplus(dt + bias) clamped to `limits`. a [heads] is negative, b
    and c are [rows, tokens, groups, state], skip [heads] is D of the formula.
    """
    out, _ = _scan(x, dt, a, b, c, skip, bias, softplus, *limits)
    result: Tensor = out
    return result


def plan(rows: int, tokens: int, heads: int) -> Plan:
    """Return blocks whose matrices take `MATRIX_BYTES`."""
    return block_plan(rows, tokens, CHUNK, 4 * heads * min(CHUNK, tokens) ** 2, MATRIX_BYTES)


class Block(NamedTuple):
    """The matrices of a block, for both passes. n: chunks of all rows, t: tokens of a chunk."""

    step: Tensor  # Δ [n, group, heads, t]
    log_decay: Tensor  # since the start of the chunk [n, group, heads, t], in fp64
    x: Tensor  # [n, t, group, heads, head]
    u: Tensor  # Δ·x, heads first [n, group, heads, t, head]
    b: Tensor  # [n, group, t, state]
    c: Tensor  # [n, group, t, state]
    diagonal: Tensor  # C·B of a token with itself [n, group, t]
    inner: Tensor  # C·Bᵀ below the diagonal [n, group, t, t]
    decays: Tensor  # [n, group, heads, t, t]; undefined above the diagonal
    matrix: Tensor  # M below the diagonal [n, group, heads, t, t]


def _scan_forward(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor | None,
    bias: Tensor | None,
    softplus: bool,
    low: float,
    high: float,
) -> tuple[Tensor, Tensor]:
    """Return the outputs, and the state before every block but the first."""
    blocks = plan(*x.shape[:3])
    out = x.new_empty(x.shape)
    starts = _empty_starts(x, b, blocks)
    for rows, along in _executed_blocks(blocks, x, b, FORWARD):
        state = empty_states(starts, rows)
        for number, tokens in along:
            if number:
                starts[rows, number - 1] = state
            here = (rows, tokens)
            step = _steps(dt[here], bias, softplus, low, high)
            block = _block(x[here], step, a, b[here], c[here], blocks.chunk)
            before, state = _states(block, state)
            result = _from_states(block, before).mul_(_token_first(block.log_decay.exp()))
            result += _token_first(_from_matrix(block))
            if skip is not None:
                result.addcmul_(block.x, skip.to(result.dtype).view(*block.x.shape[2:4], 1))
            out[here] = _joined(result, x[here])
            del block, before, result  # free them before the next block
    return out, starts


def _empty_starts(x: Tensor, b: Tensor, blocks: Plan) -> Tensor:
    rows, _, heads, width = x.shape
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(rows, blocks.blocks - 1, heads, width, b.shape[-1], dtype=dtype)


_scan = torch.library.custom_op(
    "meshwright::state_space_scan", _scan_forward, mutates_args=(), schema=f"({INPUTS}, {SETTINGS}) -> (Tensor, Tensor)"
)


@_scan.register_fake
def _(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), _empty_starts(x, b, plan(*x.shape[:3]))


def _scan_backward_impl(
    gradient: Tensor,
    starts: Tensor,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor | None,
    bias: Tensor | None,
    softplus: bool,
    low: float,
    high: float,
) -> Gradients:
    """Return the gradients of x, dt, a, b, c, skip and bias."""
    blocks = plan(*x.shape[:3])
    grad_x, grad_dt, grad_b, grad_c = (one.new_empty(one.shape) for one in (x, dt, b, c))
    grad_a, grad_skip, grad_bias = (starts.new_zeros(a.shape) for _ in range(3))
    for rows, along in _executed_blocks(blocks, x, b, BACKWARD):
        grad_state = empty = empty_states(starts, rows)
        for number, tokens in reversed(along):
            here = (rows, tokens)
            start = starts[rows, number - 1] if number else empty
            step = _steps(dt[here], bias, softplus, low, high)
            block = _block(x[here], step, a, b[here], c[here], blocks.chunk)
            grads, grad_state = _block_gradients(block, gradient[here], start, grad_state, a, skip)
            grad_a += grads.a
            grad_skip += grads.skip
            grad_x[here] = _joined(grads.x, x[here])
            grad_b[here], grad_c[here] = _groups_joined(grads.b, b[here]), _groups_joined(grads.c, c[here])
            grad_raw = _heads_joined(grads.step, step) * _step_derivative(dt[here], bias, softplus, low, high)
            grad_bias += grad_raw.sum((0, 1))
            grad_dt[here] = grad_raw
            del block, grads
    return grad_x, grad_dt, grad_a, grad_b, grad_c, grad_skip, grad_bias


_scan_backward = torch.library.custom_op(
    "meshwright::state_space_scan_backward",
    _scan_backward_impl,
    mutates_args=(),
    schema=f"(Tensor gradient, Tensor starts, {INPUTS}, {SETTINGS}) -> ({', '.join(['Tensor'] * 7)})",
)


@_scan_backward.register_fake
def _(gradient: Tensor, starts: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, *_: Any) -> Gradients:
    grad_x, grad_dt, grad_b, grad_c = (one.new_empty(one.shape) for one in (x, dt, b, c))
    grad_a, grad_skip, grad_bias = (starts.new_empty(a.shape) for _ in range(3))
    return grad_x, grad_dt, grad_a, grad_b, grad_c, grad_skip, grad_bias


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)  # the states have no gradient
    *tensors, ctx.softplus, ctx.low, ctx.high = inputs
    ctx.save_for_backward(output[1], *tensors)


def _gradients(ctx: Any, gradient: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if gradient is None:
        return (None,) * 10
    starts, *inputs = ctx.saved_tensors
    grads = _scan_backward(gradient, starts, *inputs, ctx.softplus, ctx.low, ctx.high)
    fitting = (None if one is None else by.to(one.dtype) for by, one in zip(grads, inputs, strict=True))
    return *fitting, None, None, None


_scan.register_autograd(_gradients, setup_context=_save_inputs)


class GemmCounts(NamedTuple):
    """Number of GEMMs of each shape in a pass: C·Bᵀ, with M, with the states, and between chunks."""

    inner: int
    matrix: int
    states: int
    between: int


FORWARD, BACKWARD = GemmCounts(1, 1, 2, 1), GemmCounts(3, 2, 6, 2)


def _executed_blocks(
    blocks: Plan, x: Tensor, b: Tensor, gemms: GemmCounts
) -> list[tuple[slice, list[tuple[int, slice]]]]:
    return executed_blocks(blocks, x, lambda rows, tokens, _: _flop(rows, tokens, blocks.chunk, x, b, gemms))


def _flop(rows: slice, tokens: slice, chunk: int, x: Tensor, b: Tensor, gemms: GemmCounts) -> int:
    """Return the FLOPs of the GEMMs of a block."""
    heads, width = x.shape[2:]
    groups, state = b.shape[2:]
    count: int = rows.stop - rows.start
    chunks: int = -(-(tokens.stop - tokens.start) // chunk)
    by_chunk = gemms.inner * groups * chunk**2 * state
    by_chunk += gemms.matrix * heads * chunk**2 * width + gemms.states * heads * width * chunk * state
    return 2 * count * (chunks * by_chunk + gemms.between * heads * (chunks + 1) ** 2 * width * state)


DECOMPOSITIONS[torch.ops.meshwright.state_space_scan.default] = _scan_forward
DECOMPOSITIONS[torch.ops.meshwright.state_space_scan_backward.default] = _scan_backward_impl


def _steps(dt: Tensor, bias: Tensor | None, softplus: bool, low: float, high: float) -> Tensor:
    """Return Δ [rows, tokens, heads]."""
    raw = _raw(dt, bias)
    return (functional.softplus(raw) if softplus else raw).clamp(low, high)


def _raw(dt: Tensor, bias: Tensor | None) -> Tensor:
    return upcast(dt) if bias is None else upcast(dt) + bias


def _step_derivative(dt: Tensor, bias: Tensor | None, softplus: bool, low: float, high: float) -> Tensor:
    """Return the derivative of Δ with respect to dt + bias."""
    raw = _raw(dt, bias)
    step = functional.softplus(raw) if softplus else raw
    inside = ((step >= low) & (step <= high)).to(raw.dtype)
    return inside * torch.where(raw > SOFTPLUS_LINEAR, 1.0, torch.sigmoid(raw)) if softplus else inside


def _chunks(tensor: Tensor, chunk: int) -> Tensor:
    """Reshape tokens to chunks [n, t, ...]; zero padding of the last one does not change the state."""
    missing = -tensor.shape[1] % chunk
    if missing:
        tensor = functional.pad(tensor, (*(0, 0) * (tensor.dim() - 2), 0, missing))
    return torch.unflatten(tensor, 1, (-1, chunk)).flatten(0, 1)


def _block(x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor, chunk: int) -> Block:
    groups = b.shape[2]
    group_heads = (groups, x.shape[2] // groups)
    factor_dtype = x.dtype if on_gpu(x) else step.dtype  # CPUs have no bf16 bmm with fp32 output
    x = torch.unflatten(_chunks(x, chunk), 2, group_heads)
    step = torch.unflatten(_chunks(step, chunk), 2, group_heads)
    log_decay = (step.double() * a.double().view(group_heads)).cumsum(1).permute(0, 2, 3, 1)
    step = step.permute(0, 2, 3, 1).contiguous()
    b, c = (_chunks(one, chunk).transpose(1, 2).to(factor_dtype) for one in (b, c))
    u = (x.permute(0, 2, 3, 1, 4) * step[..., None]).to(factor_dtype).contiguous()
    inner = bmm_fp32(c, b.transpose(2, 3))
    diagonal = inner.diagonal(dim1=2, dim2=3).clone()
    decays = torch.empty(*log_decay.shape, chunk, dtype=step.dtype, device=step.device)
    torch.sub(log_decay[..., :, None], log_decay[..., None, :], out=decays)
    decays.clamp_(max=0.0).exp_()
    matrix = torch.empty_like(decays, dtype=factor_dtype)
    torch.mul(inner.tril_(-1)[:, :, None], decays, out=matrix)
    return Block(step, log_decay, x, u, b, c, diagonal, inner, decays, matrix)


def _token_first(by_head: Tensor) -> Tensor:
    """Reshape [n, group, heads, t, ...] to [n, t, group, heads, ...], with a last dimension of 1 if there is none."""
    if by_head.dim() == 4:
        by_head = by_head.unsqueeze(-1)
    return by_head.permute(0, 3, 1, 2, 4)


def _grouped(by_token: Tensor) -> Tensor:
    """Reshape [n, t, group, heads, head] to matrices [n, group, t, heads · head]."""
    return by_token.transpose(1, 2).flatten(3)


def _decayed_to_end(block: Block) -> Tensor:
    """Return Δ·x decayed to the end of its chunk, [n, t, group, heads, head]."""
    left = block.step * (block.log_decay[..., -1:] - block.log_decay).exp().to(block.step.dtype)
    return (block.x * _token_first(left)).to(block.u.dtype)


def _from_matrix(block: Block) -> Tensor:
    """Return the outputs from within the chunk, [n, group, heads, t, head]."""
    return bmm_fp32(block.matrix, block.u).addcmul_(block.diagonal[:, :, None, :, None], block.u)


def _from_states(block: Block, before: Tensor) -> Tensor:
    """Return the outputs from the state before the chunk without decay, [n, t, group, heads, head]."""
    states = before.to(block.c.dtype).flatten(2, 3)
    seen = bmm_fp32(block.c, states.transpose(2, 3)).transpose(1, 2)
    return torch.unflatten(seen, 3, block.x.shape[3:])


def _states(block: Block, start: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states before each chunk [n, group, heads, head, state], and the last one in the shape of `start`."""
    added = bmm_fp32(_grouped(_decayed_to_end(block)).transpose(2, 3), block.b)
    rows = start.shape[0]
    left = _between_chunks(block, rows)
    known = torch.cat([start.flatten(2)[:, :, None], _by_row(added, start)], 2)  # [rows, heads, chunks + 1, numbers]
    result = bmm_fp32(left, known)
    before = _by_chunk(result[:, :, :-1], block, start)
    return before, result[:, :, -1].view(start.shape)


def _between_chunks(block: Block, rows: int) -> Tensor:
    """Return the decay from chunk j to chunk i (i includes the end), [rows, heads, i, j]."""
    whole = torch.unflatten(block.log_decay[..., -1].flatten(1), 0, (rows, -1))  # [rows, chunks, heads]
    since = functional.pad(whole.transpose(1, 2), (1, 0)).cumsum(2)
    return (since[..., :, None] - since[..., None, :]).clamp_(max=0.0).exp().tril().to(block.step.dtype)


def _by_row(of_chunks: Tensor, start: Tensor) -> Tensor:
    """Reshape states [n, group, heads · head, state] to [rows, all heads, chunks, head · state]."""
    rows, heads, width, state = start.shape
    return of_chunks.reshape(rows, -1, heads, width * state).transpose(1, 2)


def _by_chunk(of_rows: Tensor, block: Block, start: Tensor) -> Tensor:
    """Reshape states [rows, all heads, chunks, head · state] to [n, group, heads, head, state]."""
    groups, heads = block.x.shape[2:4]
    return of_rows.transpose(1, 2).reshape(-1, groups, heads, *start.shape[2:])


class BlockGradients(NamedTuple):
    """The gradients of a block's inputs in their shapes; those of A and D summed over its tokens."""

    x: Tensor
    step: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    skip: Tensor


def _block_gradients(
    block: Block, gradient: Tensor, start: Tensor, after: Tensor, a: Tensor, skip: Tensor | None
) -> tuple[BlockGradients, Tensor]:
    """Return the gradients of a block's inputs and of the state before it.

    The gradient of a log decay is summed over everything that decays at that token. Row sums minus column sums of one
    matrix would be cheaper, but a small difference of large numbers.
    """
    group_heads = block.x.shape[2:4]
    dtype = block.step.dtype
    grad_y = torch.unflatten(_chunks(gradient, block.x.shape[1]), 2, group_heads)  # [n, t, group, heads, head]
    grad_y_by_head = grad_y.permute(0, 2, 3, 1, 4).to(block.u.dtype).contiguous()

    # Through the states before chunks: dC, and the decay from the start of the chunk to a token.
    before, _ = _states(block, start)
    states = before.to(block.c.dtype).flatten(2, 3)
    decayed = _grouped((grad_y * _token_first(block.log_decay.exp())).to(block.u.dtype))
    grad_c = bmm_fp32(decayed, states)
    grad_added, grad_start = _states_backward(block, bmm_fp32(decayed.transpose(2, 3), block.c), after)
    grad_log_decay = suffix_sum(_by_heads(decayed * bmm_fp32(block.c, states.transpose(2, 3)), group_heads[1]).sum(-1))

    # Through the states after chunks: dB, and the decay from a token, or the start of the chunk, to its end.
    left = (block.log_decay[..., -1:] - block.log_decay).exp().to(dtype)
    incoming = _grouped(_decayed_to_end(block))
    at_ends = grad_added.to(block.c.dtype).flatten(2, 3)
    grad_b = bmm_fp32(incoming, at_ends)
    grad_end = bmm_fp32(block.b, at_ends.transpose(2, 3))
    decayed_sums = _by_heads(incoming * grad_end, group_heads[1]).sum(-1)
    through = (before * grad_added).sum((3, 4)).mul_(block.log_decay[..., -1].exp())
    grad_log_decay += functional.pad(decayed_sums.double().cumsum(-1)[..., :-1], (1, 0)) + through[..., None]

    # Through the matrix M of the chunk.
    grad_u = bmm_fp32(block.matrix.transpose(3, 4), grad_y_by_head).addcmul_(
        block.diagonal[:, :, None, :, None], grad_y_by_head
    )
    grad_u.addcmul_(_by_heads(grad_end, group_heads[1]), left[..., None])
    grad_matrix = bmm_fp32(grad_y_by_head, block.u.transpose(3, 4)).mul_(block.decays)
    grad_inner = grad_matrix.sum(2).tril_().to(block.c.dtype)
    grad_b += bmm_fp32(grad_inner.transpose(2, 3), block.c)
    grad_c += bmm_fp32(grad_inner, block.b)
    grad_log_decay[..., 1:] += crossing_sums(grad_matrix.mul_(block.inner[:, :, None]))

    grad_step = (grad_log_decay * a.double().view(*group_heads, 1)).to(dtype) + (
        block.x.permute(0, 2, 3, 1, 4) * grad_u
    ).sum(-1)
    grad_a = (grad_log_decay * block.step).sum((0, 3)).flatten().to(dtype)
    grad_skip = (grad_y * upcast(block.x)).sum((0, 1, 4)).flatten()
    grad_x = _token_first(grad_u.mul_(block.step[..., None]))
    if skip is not None:
        grad_x = grad_x.addcmul_(grad_y, skip.to(dtype).view(*group_heads, 1))
    return BlockGradients(grad_x, grad_step, grad_a, grad_b, grad_c, grad_skip), grad_start


def _by_heads(matrices: Tensor, heads: int) -> Tensor:
    """Reshape [n, group, t, heads · head] to [n, group, heads, t, head]."""
    return torch.unflatten(matrices, 3, (heads, -1)).transpose(2, 3)


def _states_backward(block: Block, grad_before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the chunks' additions [n, group, heads, head, state], and of the first state."""
    known = torch.cat([_by_row(grad_before, after), after.flatten(2)[:, :, None]], 2)
    result = bmm_fp32(_between_chunks(block, after.shape[0]).transpose(2, 3), known)
    return _by_chunk(result[:, :, 1:], block, after), result[:, :, 0].view(after.shape)


def _joined(by_token: Tensor, like: Tensor) -> Tensor:
    """Reshape [n, t, group, heads, head] to [rows, tokens, all heads, head]."""
    return _rows(by_token.flatten(2, 3), like)


def _groups_joined(by_group: Tensor, like: Tensor) -> Tensor:
    """Reshape [n, group, t, state] to [rows, tokens, groups, state]."""
    return _rows(by_group.transpose(1, 2), like)


def _heads_joined(by_head: Tensor, like: Tensor) -> Tensor:
    """Reshape [n, group, heads, t] to [rows, tokens, all heads]."""
    return _rows(by_head.flatten(1, 2).transpose(1, 2), like)


def _rows(chunks: Tensor, like: Tensor) -> Tensor:
    """Reshape chunks [n, t, ...] to [rows, tokens, ...] without the padding."""
    return torch.unflatten(chunks, 0, (like.shape[0], -1)).flatten(1, 2)[:, : like.shape[1]]
