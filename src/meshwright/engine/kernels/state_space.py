"""The scan of Mamba-2 layers by products of chunks: nothing of the size of tokens × tokens or tokens × states is kept.

Every head has a state [head, state] which decays, takes up a token's input and gives its output:

    S ← exp(Δ·A)·S + Δ·x ⊗ B,    y = S·C + D·x

Within a chunk that is a product with the matrix M = (C·Bᵀ) ∘ decays below the diagonal; from chunk to chunk only the
state goes on. Chunks are worked through in blocks, whose matrices take some hundred MiB whatever the length. Kept are
the inputs and the state before every block but the first; the backward pass makes a block's matrices again.

Sums are in fp32 (of fp32 or bf16 factors), and decays are sums in fp64: the difference of two large sums may be small.
Heads of a group share B and C, which are not copied for each. It is an operation of its own, as `adapted` says why.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.engine.kernels.chunked_scan import (
    Plan,
    carried_out,
    crossing,
    empty_states,
    plan_of,
    product,
    until_end,
)
from meshwright.engine.kernels.cross_entropy import wide
from meshwright.engine.kernels.device_caps import STEPS, on_gpu

CHUNK = 128  # tokens whose outputs come from one matrix
MATRIX_BYTES = 2**26  # of a block's matrices M, in fp32
STRAIGHT = 20.0  # from here on torch's softplus is the identity

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
    """The outputs [rows, tokens, heads, head] of the scan over x, from an empty state; in the format of x.

    dt [rows, tokens, heads] are the raw steps: with `bias` added, through softplus and cut to `limits` they are Δ.
    a [heads] is negative, b and c are [rows, tokens, groups, state], skip [heads] is what the formula calls D.
    """
    out, _ = _scan(x, dt, a, b, c, skip, bias, softplus, *limits)
    made: Tensor = out
    return made


def plan(rows: int, tokens: int, heads: int) -> Plan:
    """Long blocks before many rows: fewer states are kept."""
    return plan_of(rows, tokens, CHUNK, 4 * heads * min(CHUNK, tokens) ** 2, MATRIX_BYTES)


class Block(NamedTuple):
    """What both passes make of a block's inputs. n counts the chunks of all rows, t the tokens of a chunk."""

    step: Tensor  # Δ [n, group, heads, t]
    fall: Tensor  # the logarithm of the decay since the chunk began [n, group, heads, t], in fp64
    x: Tensor  # [n, t, group, heads, head]
    u: Tensor  # Δ·x, heads first [n, group, heads, t, head]
    b: Tensor  # [n, group, t, state]
    c: Tensor  # [n, group, t, state]
    own: Tensor  # what a token sees of itself, C·B [n, group, t]
    inner: Tensor  # C·Bᵀ below the diagonal [n, group, t, t]
    decays: Tensor  # [n, group, heads, t, t]; above the diagonal without meaning
    matrix: Tensor  # M below the diagonal [n, group, heads, t, t]


def _scan_steps(
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
    """The outputs, and the state before every block but the first."""
    blocks = plan(*x.shape[:3])
    out = x.new_empty(x.shape)
    starts = _no_starts(x, b, blocks)
    for rows, along in _carried_out(blocks, x, b, FORWARD):
        state = empty_states(starts, rows)
        for number, tokens in along:
            if number:
                starts[rows, number - 1] = state
            here = (rows, tokens)
            step = _steps(dt[here], bias, softplus, low, high)
            block = _block(x[here], step, a, b[here], c[here], blocks.chunk)
            before, state = _states(block, state)
            made = _from_states(block, before).mul_(_token_first(block.fall.exp()))
            made += _token_first(_from_matrix(block))
            if skip is not None:
                made.addcmul_(block.x, skip.to(made.dtype).view(*block.x.shape[2:4], 1))
            out[here] = _joined(made, x[here])
            del block, before, made  # before the next block is made
    return out, starts


def _no_starts(x: Tensor, b: Tensor, blocks: Plan) -> Tensor:
    rows, _, heads, width = x.shape
    kind = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(rows, blocks.blocks - 1, heads, width, b.shape[-1], dtype=kind)


_scan = torch.library.custom_op(
    "meshwright::state_space_scan",
    _scan_steps,
    mutates_args=(),
    schema=f"({INPUTS}, {SETTINGS}) -> (Tensor, Tensor)",
)


@_scan.register_fake
def _(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), _no_starts(x, b, plan(*x.shape[:3]))


def _backward_steps(
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
    """The gradients of x, dt, a, b, c, skip and bias."""
    blocks = plan(*x.shape[:3])
    by_x, by_dt, by_b, by_c = (one.new_empty(one.shape) for one in (x, dt, b, c))
    by_a, by_skip, by_bias = (starts.new_zeros(a.shape) for _ in range(3))
    for rows, along in _carried_out(blocks, x, b, BACKWARD):
        by_state = empty = empty_states(starts, rows)
        for number, tokens in reversed(along):
            here = (rows, tokens)
            start = starts[rows, number - 1] if number else empty
            step = _steps(dt[here], bias, softplus, low, high)
            block = _block(x[here], step, a, b[here], c[here], blocks.chunk)
            found, by_state = _gradients_of(block, gradient[here], start, by_state, a, skip)
            by_a += found.a
            by_skip += found.skip
            by_x[here] = _joined(found.x, x[here])
            by_b[here], by_c[here] = _groups_joined(found.b, b[here]), _groups_joined(found.c, c[here])
            by_raw = _heads_joined(found.step, step) * _slope(dt[here], bias, softplus, low, high)
            by_bias += by_raw.sum((0, 1))
            by_dt[here] = by_raw
            del block, found
    return by_x, by_dt, by_a, by_b, by_c, by_skip, by_bias


_scan_backward = torch.library.custom_op(
    "meshwright::state_space_scan_backward",
    _backward_steps,
    mutates_args=(),
    schema=f"(Tensor gradient, Tensor starts, {INPUTS}, {SETTINGS}) -> ({', '.join(['Tensor'] * 7)})",
)


@_scan_backward.register_fake
def _(gradient: Tensor, starts: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, *_: Any) -> Gradients:
    by_x, by_dt, by_b, by_c = (one.new_empty(one.shape) for one in (x, dt, b, c))
    by_a, by_skip, by_bias = (starts.new_empty(a.shape) for _ in range(3))
    return by_x, by_dt, by_a, by_b, by_c, by_skip, by_bias


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)  # nobody has a gradient of the states
    *tensors, ctx.softplus, ctx.low, ctx.high = inputs
    ctx.save_for_backward(output[1], *tensors)


def _gradients(ctx: Any, gradient: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if gradient is None:
        return (None,) * 10
    starts, *inputs = ctx.saved_tensors
    found = _scan_backward(gradient, starts, *inputs, ctx.softplus, ctx.low, ctx.high)
    fitting = (None if one is None else by.to(one.dtype) for by, one in zip(found, inputs, strict=True))
    return *fitting, None, None, None


_scan.register_autograd(_gradients, setup_context=_remember)


class Products(NamedTuple):
    """How many products of each kind a pass makes: of tokens by their states, by tokens, with states, of chunks."""

    inner: int
    matrix: int
    states: int
    between: int


FORWARD, BACKWARD = Products(1, 1, 2, 1), Products(3, 2, 6, 2)


def _carried_out(blocks: Plan, x: Tensor, b: Tensor, products: Products) -> list[tuple[slice, list[tuple[int, slice]]]]:
    return carried_out(blocks, x, lambda rows, tokens, _: _flop(rows, tokens, blocks.chunk, x, b, products))


def _flop(rows: slice, tokens: slice, chunk: int, x: Tensor, b: Tensor, products: Products) -> int:
    """Floating-point operations of the products of a block."""
    heads, width = x.shape[2:]
    groups, state = b.shape[2:]
    count: int = rows.stop - rows.start
    chunks: int = -(-(tokens.stop - tokens.start) // chunk)
    by_chunk = products.inner * groups * chunk**2 * state
    by_chunk += products.matrix * heads * chunk**2 * width + products.states * heads * width * chunk * state
    return 2 * count * (chunks * by_chunk + products.between * heads * (chunks + 1) ** 2 * width * state)


STEPS[torch.ops.meshwright.state_space_scan.default] = _scan_steps
STEPS[torch.ops.meshwright.state_space_scan_backward.default] = _backward_steps


def _steps(dt: Tensor, bias: Tensor | None, softplus: bool, low: float, high: float) -> Tensor:
    """Δ [rows, tokens, heads]."""
    raw = _raw(dt, bias)
    return (functional.softplus(raw) if softplus else raw).clamp(low, high)


def _raw(dt: Tensor, bias: Tensor | None) -> Tensor:
    return wide(dt) if bias is None else wide(dt) + bias


def _slope(dt: Tensor, bias: Tensor | None, softplus: bool, low: float, high: float) -> Tensor:
    """How Δ changes with its raw value."""
    raw = _raw(dt, bias)
    step = functional.softplus(raw) if softplus else raw
    inside = ((step >= low) & (step <= high)).to(raw.dtype)
    return inside * torch.where(raw > STRAIGHT, 1.0, torch.sigmoid(raw)) if softplus else inside


def _chunks(tensor: Tensor, chunk: int) -> Tensor:
    """Tokens by chunks [n, t, ...]; the last is filled up with zeros, which change no state."""
    missing = -tensor.shape[1] % chunk
    if missing:
        tensor = functional.pad(tensor, (*(0, 0) * (tensor.dim() - 2), 0, missing))
    return torch.unflatten(tensor, 1, (-1, chunk)).flatten(0, 1)


def _block(x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor, chunk: int) -> Block:
    groups = b.shape[2]
    shares = (groups, x.shape[2] // groups)
    factors = x.dtype if on_gpu(x) else step.dtype  # a CPU has no products of bf16 with sums in fp32
    x = torch.unflatten(_chunks(x, chunk), 2, shares)
    step = torch.unflatten(_chunks(step, chunk), 2, shares)
    fall = (step.double() * a.double().view(shares)).cumsum(1).permute(0, 2, 3, 1)
    step = step.permute(0, 2, 3, 1).contiguous()
    b, c = (_chunks(one, chunk).transpose(1, 2).to(factors) for one in (b, c))
    u = (x.permute(0, 2, 3, 1, 4) * step[..., None]).to(factors).contiguous()
    inner = product(c, b.transpose(2, 3))
    own = inner.diagonal(dim1=2, dim2=3).clone()
    decays = torch.empty(*fall.shape, chunk, dtype=step.dtype, device=step.device)
    torch.sub(fall[..., :, None], fall[..., None, :], out=decays)
    decays.clamp_(max=0.0).exp_()
    matrix = torch.empty_like(decays, dtype=factors)
    torch.mul(inner.tril_(-1)[:, :, None], decays, out=matrix)
    return Block(step, fall, x, u, b, c, own, inner, decays, matrix)


def _token_first(by_head: Tensor) -> Tensor:
    """[n, group, heads, t, ...] as [n, t, group, heads, ...]; a last dimension for numbers that have none."""
    if by_head.dim() == 4:
        by_head = by_head.unsqueeze(-1)
    return by_head.permute(0, 3, 1, 2, 4)


def _grouped(by_token: Tensor) -> Tensor:
    """[n, t, group, heads, head] as matrices [n, group, t, heads · head]."""
    return by_token.transpose(1, 2).flatten(3)


def _decayed_to_end(block: Block) -> Tensor:
    """Δ·x as much as is left of it at its chunk's end, [n, t, group, heads, head]."""
    left = block.step * (block.fall[..., -1:] - block.fall).exp().to(block.step.dtype)
    return (block.x * _token_first(left)).to(block.u.dtype)


def _from_matrix(block: Block) -> Tensor:
    """What tokens see of their own chunk, [n, group, heads, t, head]."""
    return product(block.matrix, block.u).addcmul_(block.own[:, :, None, :, None], block.u)


def _from_states(block: Block, before: Tensor) -> Tensor:
    """What tokens would see of the state before their chunk, were there no decay; [n, t, group, heads, head]."""
    states = before.to(block.c.dtype).flatten(2, 3)
    seen = product(block.c, states.transpose(2, 3)).transpose(1, 2)
    return torch.unflatten(seen, 3, block.x.shape[3:])


def _states(block: Block, start: Tensor) -> tuple[Tensor, Tensor]:
    """The states before each chunk [n, group, heads, head, state], and behind the last, laid out like the start."""
    added = product(_grouped(_decayed_to_end(block)).transpose(2, 3), block.b)
    rows = start.shape[0]
    taken = _between_chunks(block, rows)
    known = torch.cat([start.flatten(2)[:, :, None], _by_row(added, start)], 2)  # [rows, heads, chunks + 1, numbers]
    made = product(taken, known)
    before = _by_chunk(made[:, :, :-1], block, start)
    return before, made[:, :, -1].view(start.shape)


def _between_chunks(block: Block, rows: int) -> Tensor:
    """How much is left before chunk i (behind the last too) of what came in before chunk j: [rows, heads, i, j]."""
    whole = torch.unflatten(block.fall[..., -1].flatten(1), 0, (rows, -1))  # [rows, chunks, heads]
    since = functional.pad(whole.transpose(1, 2), (1, 0)).cumsum(2)
    return (since[..., :, None] - since[..., None, :]).clamp_(max=0.0).exp().tril().to(block.step.dtype)


def _by_row(of_chunks: Tensor, start: Tensor) -> Tensor:
    """States [n, group, heads · head, state] as [rows, all heads, chunks, head · state]."""
    rows, heads, width, state = start.shape
    return of_chunks.reshape(rows, -1, heads, width * state).transpose(1, 2)


def _by_chunk(of_rows: Tensor, block: Block, start: Tensor) -> Tensor:
    """States [rows, all heads, chunks, head · state] as [n, group, heads, head, state]."""
    groups, heads = block.x.shape[2:4]
    return of_rows.transpose(1, 2).reshape(-1, groups, heads, *start.shape[2:])


class Found(NamedTuple):
    """The gradients of a block's inputs, laid out like them; of A and D those of all its tokens."""

    x: Tensor
    step: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    skip: Tensor


def _gradients_of(
    block: Block, gradient: Tensor, start: Tensor, behind: Tensor, a: Tensor, skip: Tensor | None
) -> tuple[Found, Tensor]:
    """The gradients of a block's inputs and of the state before it, from those of its outputs and the state behind it.

    That of a decay's logarithm is the sum over all that decays there. Sums over rows less sums over columns of a matrix
    would give it sooner, but as the small difference of large numbers.
    """
    shares = block.x.shape[2:4]
    kind = block.step.dtype
    by_y = torch.unflatten(_chunks(gradient, block.x.shape[1]), 2, shares)  # [n, t, group, heads, head]
    by_head = by_y.permute(0, 2, 3, 1, 4).to(block.u.dtype).contiguous()

    # By the states before chunks: dC, and what decays between the chunk's begin and a token.
    before, _ = _states(block, start)
    states = before.to(block.c.dtype).flatten(2, 3)
    decayed = _grouped((by_y * _token_first(block.fall.exp())).to(block.u.dtype))
    by_c = product(decayed, states)
    by_added, by_start = _states_backward(block, product(decayed.transpose(2, 3), block.c), behind)
    by_fall = until_end(_by_heads(decayed * product(block.c, states.transpose(2, 3)), shares[1]).sum(-1))

    # By the states behind chunks: dB, and what decays between a token, or the chunk's begin, and its end.
    left = (block.fall[..., -1:] - block.fall).exp().to(kind)
    incoming = _grouped(_decayed_to_end(block))
    at_ends = by_added.to(block.c.dtype).flatten(2, 3)
    by_b = product(incoming, at_ends)
    by_end = product(block.b, at_ends.transpose(2, 3))
    held = _by_heads(incoming * by_end, shares[1]).sum(-1)
    through = (before * by_added).sum((3, 4)).mul_(block.fall[..., -1].exp())
    by_fall += functional.pad(held.double().cumsum(-1)[..., :-1], (1, 0)) + through[..., None]

    # By the chunk's own matrix.
    by_u = product(block.matrix.transpose(3, 4), by_head).addcmul_(block.own[:, :, None, :, None], by_head)
    by_u.addcmul_(_by_heads(by_end, shares[1]), left[..., None])
    by_matrix = product(by_head, block.u.transpose(3, 4)).mul_(block.decays)
    by_inner = by_matrix.sum(2).tril_().to(block.c.dtype)
    by_b += product(by_inner.transpose(2, 3), block.c)
    by_c += product(by_inner, block.b)
    by_fall[..., 1:] += crossing(by_matrix.mul_(block.inner[:, :, None]))

    by_step = (by_fall * a.double().view(*shares, 1)).to(kind) + (block.x.permute(0, 2, 3, 1, 4) * by_u).sum(-1)
    by_a = (by_fall * block.step).sum((0, 3)).flatten().to(kind)
    by_skip = (by_y * wide(block.x)).sum((0, 1, 4)).flatten()
    by_x = _token_first(by_u.mul_(block.step[..., None]))
    if skip is not None:
        by_x = by_x.addcmul_(by_y, skip.to(kind).view(*shares, 1))
    return Found(by_x, by_step, by_a, by_b, by_c, by_skip), by_start


def _by_heads(matrices: Tensor, heads: int) -> Tensor:
    """[n, group, t, heads · head] as [n, group, heads, t, head]."""
    return torch.unflatten(matrices, 3, (heads, -1)).transpose(2, 3)


def _states_backward(block: Block, by_before: Tensor, behind: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of what each chunk adds [n, group, heads, head, state], and of the state before the block."""
    known = torch.cat([_by_row(by_before, behind), behind.flatten(2)[:, :, None]], 2)
    made = product(_between_chunks(block, behind.shape[0]).transpose(2, 3), known)
    return _by_chunk(made[:, :, 1:], block, behind), made[:, :, 0].view(behind.shape)


def _joined(by_token: Tensor, like: Tensor) -> Tensor:
    """[n, t, group, heads, head] as [rows, tokens, all heads, head]."""
    return _rows(by_token.flatten(2, 3), like)


def _groups_joined(by_group: Tensor, like: Tensor) -> Tensor:
    """[n, group, t, state] as [rows, tokens, groups, state]."""
    return _rows(by_group.transpose(1, 2), like)


def _heads_joined(by_head: Tensor, like: Tensor) -> Tensor:
    """[n, group, heads, t] as [rows, tokens, all heads]."""
    return _rows(by_head.flatten(1, 2).transpose(1, 2), like)


def _rows(chunks: Tensor, like: Tensor) -> Tensor:
    """Chunks [n, t, ...] put together [rows, tokens, ...], without what filled up the last."""
    return torch.unflatten(chunks, 0, (like.shape[0], -1)).flatten(1, 2)[:, : like.shape[1]]
