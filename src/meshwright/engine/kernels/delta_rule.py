"""The gated delta rule by products of chunks: nothing of the size of tokens × chunk or tokens × states is kept.

Every head has a state [key, value] which decays, forgets what it says of a key, and takes up the token's value for it:

    S ← exp(g)·S,    S ← S + β·k ⊗ (v - kᵀ·S),    o = qᵀ·S

Within a chunk the values that are taken up, each less what those before it wrote, are the solution of a triangular
system (I + A)·x = β·(v - decayed kᵀ·S); from chunk to chunk the state goes on. Chunks are worked through in blocks,
whose matrices take some hundred MiB whatever the length. Kept are the inputs and the state before every block but the
first; the backward pass makes a block's matrices again.

Sums are in fp32 (of fp32 or bf16 factors), systems are solved in fp32, and decays are sums in fp64: the difference of
two large sums may be small. Heads that share queries and keys share their products. It is an operation of its own, as
`adapted` says why.
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
    ends,
    plan_of,
    product,
    until_end,
)
from meshwright.engine.kernels.cross_entropy import wide
from meshwright.engine.kernels.device_caps import STEPS, is_dry, on_gpu

CHUNK = 64  # tokens whose values come from one system
STATE_BYTES = 2**25  # of the states before a block's chunks, in fp32
EPSILON = 1e-6  # under the root of a norm

INPUTS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, bool norm"
Five = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, norm: bool = False) -> Tensor:
    """The outputs [rows, tokens, heads, value] of the rule, from an empty state; in the format of q.

    q and k are [rows, tokens, groups, key] and serve an equal share of the heads each; `norm` makes them unit vectors.
    v is [rows, tokens, heads, value]; g, the logarithms of decays, and beta are [rows, tokens, heads].
    """
    # Parts of a larger tensor would keep all of it.
    out, _ = _rule(q.contiguous(), k.contiguous(), v.contiguous(), g, beta, norm)
    made: Tensor = out
    return made


def plan(rows: int, tokens: int, heads: int, key: int, value: int) -> Plan:
    """Blocks whose states take `STATE_BYTES`."""
    return plan_of(rows, tokens, CHUNK, 4 * heads * key * value, STATE_BYTES)


def _plan(k: Tensor, v: Tensor) -> Plan:
    rows, tokens, heads, value = v.shape
    return plan(rows, tokens, heads, k.shape[3], value)


class Block(NamedTuple):
    """What both passes make of a block's inputs: c counts chunks, b the heads of all rows, t the tokens of a chunk.

    Queries and keys, and products of the two, are there once for the heads that share them (s).
    """

    q: Tensor  # scaled [c, s, t, key]
    k: Tensor  # [c, s, t, key]
    beta: Tensor  # [c, b, t]
    fall: Tensor  # the logarithm of the decay since the chunk began [c, b, t], in fp64
    decays: Tensor  # from token to token [c, b, t, t]; above the diagonal without meaning
    gram: Tensor  # k·kᵀ [c, s, t, t]
    inner: Tensor  # q·kᵀ [c, s, t, t]
    inverse: Tensor  # of I + A [c, b, t, t]
    scores: Tensor  # q·kᵀ with decays, from the diagonal on down [c, b, t, t]
    reads: Tensor  # q, decayed since the chunk began [c, b, t, key]
    lasting: Tensor  # k, decayed until the chunk's end [c, b, t, key]
    erased: Tensor  # by which keys the state before the chunk is read in the solution [c, b, t, key]
    written: Tensor  # the solution, were there no state before the chunk [c, b, t, value]

    @property
    def kind(self) -> torch.dtype:
        """The format of sums."""
        return self.beta.dtype

    @property
    def shared(self) -> int:
        """How many heads share a query and a key."""
        return self.beta.shape[1] // self.k.shape[1]

    @property
    def whole(self) -> Tensor:
        """The decay over each chunk [c, b, 1, 1]."""
        return self.fall[..., -1, None, None].exp().to(self.kind)

    def since(self) -> Tensor:
        """The decay since the chunk began [c, b, t]."""
        return self.fall.exp().to(self.kind)

    def until(self) -> Tensor:
        """The decay until the chunk's end [c, b, t]."""
        return (self.fall[..., -1:] - self.fall).exp().to(self.kind)


def _rule_steps(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, norm: bool) -> tuple[Tensor, Tensor]:
    """The outputs, and the state before every block but the first."""
    blocks = _plan(k, v)
    out = v.new_empty(v.shape, dtype=q.dtype)
    starts = _no_starts(k, v, blocks)
    for rows, along in _carried_out(blocks, k, v, FORWARD):
        state = empty_states(starts, rows).flatten(0, 1)
        for number, tokens in along:
            here = (rows, tokens)
            if number:
                starts[rows, number - 1] = state.view(starts[rows, number - 1].shape)
            block = _block(q[here], k[here], v[here], g[here], beta[here], norm, blocks.chunk)
            before, taken, state = _states(block, state)
            made = product(block.reads, before)
            made += product(block.scores, taken)
            out[here] = _by_token(made, v[here])
            del block, before, taken, made  # before the next block is made
    return out, starts


def _no_starts(k: Tensor, v: Tensor, blocks: Plan) -> Tensor:
    rows, _, heads, width = v.shape
    kind = torch.promote_types(v.dtype, torch.float32)
    return v.new_empty(rows, blocks.blocks - 1, heads, k.shape[3], width, dtype=kind)


_rule = torch.library.custom_op(
    "meshwright::gated_delta_rule", _rule_steps, mutates_args=(), schema=f"({INPUTS}) -> (Tensor, Tensor)"
)


@_rule.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape, dtype=q.dtype), _no_starts(k, v, _plan(k, v))


def _backward_steps(
    gradient: Tensor, starts: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, norm: bool
) -> Five:
    """The gradients of q, k, v, g and beta."""
    blocks = _plan(k, v)
    found = _empty_like(q, k, v, g, beta)
    for rows, along in _carried_out(blocks, k, v, BACKWARD):
        empty = empty_states(starts, rows)
        by_state = empty.flatten(0, 1)
        for number, tokens in reversed(along):
            here = (rows, tokens)
            start = starts[rows, number - 1] if number else empty
            inputs = (q[here], k[here], v[here], g[here], beta[here])
            block = _block(*inputs, norm, blocks.chunk)
            here_found, by_state = _gradients_of(block, inputs[2], gradient[here], start, by_state)
            into = tuple(one[here] for one in found)
            _write_vectors(into[0], here_found[0], inputs[0], norm, k.shape[3] ** -0.5)
            _write_vectors(into[1], here_found[1], inputs[1], norm, 1.0)
            into[2].copy_(_by_token(here_found[2], into[2]))
            for one, by in zip(into[3:], here_found[3:], strict=True):
                one.copy_(_by_token(by[..., None], one[..., None])[..., 0])
            del block, here_found
    return found


def _empty_like(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Five:
    by_q, by_k, by_v, by_g, by_beta = (one.new_empty(one.shape) for one in (q, k, v, g, beta))
    return by_q, by_k, by_v, by_g, by_beta


_rule_backward = torch.library.custom_op(
    "meshwright::gated_delta_rule_backward",
    _backward_steps,
    mutates_args=(),
    schema=f"(Tensor gradient, Tensor starts, {INPUTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@_rule_backward.register_fake
def _(gradient: Tensor, starts: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, norm: bool) -> Five:
    return _empty_like(q, k, v, g, beta)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)  # nobody has a gradient of the states
    *tensors, ctx.norm = inputs
    ctx.save_for_backward(output[1], *tensors)


def _gradients(ctx: Any, gradient: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if gradient is None:
        return (None,) * 6
    starts, *inputs = ctx.saved_tensors  # asked for once: where they are computed again, they are there once
    return *_rule_backward(gradient, starts, *inputs, ctx.norm), None


_rule.register_autograd(_gradients, setup_context=_remember)

STEPS[torch.ops.meshwright.gated_delta_rule.default] = _rule_steps
STEPS[torch.ops.meshwright.gated_delta_rule_backward.default] = _backward_steps


class Products(NamedTuple):
    """How many products of each kind a pass makes for a chunk.

    Tokens × tokens by keys for heads that share them, by keys and by values for each head; with the states of all
    chunks at once; and with the state of one chunk after another.
    """

    shared: int
    keys: int
    values: int
    states: int
    onwards: int


FORWARD, BACKWARD = Products(2, 1, 2, 1, 2), Products(5, 3, 5, 4, 4)


def _carried_out(blocks: Plan, k: Tensor, v: Tensor, products: Products) -> list[tuple[slice, list[tuple[int, slice]]]]:
    return carried_out(blocks, v, lambda rows, tokens, dry: _flop(rows, tokens, blocks.chunk, k, v, products, dry))


def _flop(rows: slice, tokens: slice, chunk: int, k: Tensor, v: Tensor, products: Products, dry: bool = False) -> int:
    """Floating-point operations of the products of a block."""
    (groups, key), (heads, value) = k.shape[2:], v.shape[2:]
    chunks: int = -(-(tokens.stop - tokens.start) // chunk)
    by_tokens = products.shared * groups * key + heads * (products.keys * key + products.values * value)
    with_states = heads * chunk * key * value
    one_by_one = len(_in_turn(chunks, dry)) * products.onwards * with_states
    count: int = rows.stop - rows.start
    return 2 * count * (chunks * (chunk**2 * by_tokens + products.states * with_states) + one_by_one)


def _in_turn(chunks: int, dry: bool) -> list[int]:
    """The chunks that are worked through one after another. In a dry run the first and last alone."""
    return ends(list(range(chunks))) if dry else list(range(chunks))


def _by_chunk(tensor: Tensor, chunk: int, kind: torch.dtype) -> Tensor:
    """[rows, tokens, heads, ...] as [c, rows · heads, t, ...]; zeros, which change no state, fill up the last chunk."""
    missing = -tensor.shape[1] % chunk
    if missing:
        tensor = functional.pad(tensor, (*(0, 0) * (tensor.dim() - 2), 0, missing))
    chunks = torch.unflatten(tensor, 1, (-1, chunk)).transpose(0, 1).transpose(2, 3)
    return chunks.to(kind, memory_format=torch.contiguous_format).flatten(1, 2)


def _by_token(chunks: Tensor, like: Tensor) -> Tensor:
    """[c, rows · heads, t, ...] as [rows, tokens, heads, ...], without what filled up the last chunk."""
    by_row = torch.unflatten(chunks, 1, (like.shape[0], -1)).transpose(0, 1).transpose(2, 3)
    return by_row.flatten(1, 2)[:, : like.shape[1]]


def _vectors(raw: Tensor, chunk: int, norm: bool, scale: float, factors: torch.dtype) -> Tensor:
    """Queries or keys by chunk: of length `scale`, or times it."""
    vectors = _by_chunk(raw, chunk, wide(raw).dtype)
    if norm:
        vectors = vectors * _by_length(vectors)
    return vectors.mul(scale).to(factors)


def _by_length(vectors: Tensor) -> Tensor:
    """One by the length of each vector."""
    return torch.rsqrt(vectors.square().sum(-1, keepdim=True) + EPSILON)


def _write_vectors(into: Tensor, by_chunk: Tensor, raw: Tensor, norm: bool, scale: float) -> None:
    """Writes the gradient of queries or keys as they came, from that of what `_vectors` made of them."""
    by = _by_token(by_chunk, raw) * scale
    if norm:
        vectors = wide(raw)
        by_length = _by_length(vectors)
        unit = vectors * by_length
        by = (by - unit * (unit * by).sum(-1, keepdim=True)).mul_(by_length)
    into.copy_(by)


def _for_heads(shared: Tensor, by_head: Tensor) -> Tensor:
    """What heads share [c, s, t, n], times their own [c, b, t, n] or [c, b, t, 1]."""
    heads = by_head.shape[1] // shared.shape[1]
    return (shared[:, :, None] * torch.unflatten(by_head, 1, (-1, heads))).flatten(1, 2)


def _summed(by_head: Tensor, heads: int) -> Tensor:
    """Gradients of all heads [c, b, ...] summed for what they share [c, s, ...]."""
    return torch.unflatten(by_head, 1, (-1, heads)).sum(2) if heads > 1 else by_head


def _block(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, norm: bool, chunk: int) -> Block:
    kind = wide(v).dtype
    factors = v.dtype if on_gpu(v) else kind  # a CPU has no products of bf16 with sums in fp32
    q = _vectors(q, chunk, norm, q.shape[-1] ** -0.5, factors)
    k = _vectors(k, chunk, norm, 1.0, factors)
    beta = _by_chunk(beta, chunk, kind)
    fall = _by_chunk(g, chunk, torch.float64).cumsum(-1)
    decays = torch.empty(*fall.shape, fall.shape[-1], dtype=kind, device=fall.device)
    torch.sub(fall[..., :, None], fall[..., None, :], out=decays)
    decays.clamp_(max=0.0).exp_()
    gram, inner = product(k, k.transpose(2, 3)), product(q, k.transpose(2, 3))
    inverse = _inverse(_for_heads(gram, decays).mul_(beta[..., None])).to(factors)
    scores = _for_heads(inner, decays).tril_().to(factors)
    since, until = fall.exp().to(kind), (fall[..., -1:] - fall).exp().to(kind)
    erased = product(inverse, _for_heads(k, (beta * since)[..., None]).to(factors)).to(factors)
    written = product(inverse, (_by_chunk(v, chunk, kind) * beta[..., None]).to(factors))
    reads, lasting = (_for_heads(one, by[..., None]).to(factors) for one, by in ((q, since), (k, until)))
    return Block(q, k, beta, fall, decays, gram, inner, inverse, scores, reads, lasting, erased, written)


def _inverse(system: Tensor) -> Tensor:
    """The inverse of I + the part of each matrix [..., t, t] below its diagonal."""
    one = torch.eye(system.shape[-1], dtype=system.dtype, device=system.device).expand(system.shape)
    solved: Tensor = torch.linalg.solve_triangular(system, one, upper=False, unitriangular=True)
    return solved


def _states(block: Block, start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The states before each chunk [c, b, key, value], the values taken up [c, b, t, value], and the state behind."""
    factors = block.k.dtype
    taken = torch.empty_like(block.written, dtype=factors)
    before = start.new_empty(taken.shape[0], *start.shape, dtype=factors)
    whole, state = block.whole, start
    for i in _in_turn(taken.shape[0], is_dry(start)):
        before[i] = state
        torch.sub(block.written[i], product(block.erased[i], before[i]), out=taken[i])
        state = product(block.lasting[i].transpose(1, 2), taken[i]).addcmul_(state, whole[i])
    return before, taken, state


def _gradients_of(block: Block, v: Tensor, gradient: Tensor, start: Tensor, behind: Tensor) -> tuple[Five, Tensor]:
    """The gradients of a block's inputs, by chunk, and of the state before it, from those of what comes out of it.

    That of a decay's logarithm is the sum over all that decays there: rows less columns of a matrix would give it as
    the small difference of large numbers.
    """
    heads, factors, kind = block.shared, block.k.dtype, block.kind
    since, until, beta = block.since(), block.until(), block.beta
    before, taken, _ = _states(block, start.flatten(0, 1))
    by_out = _by_chunk(gradient, block.k.shape[2], factors)

    # By the states: what is read from them, what lasts until the next, and what is erased.
    by_taken, by_behind, through, by_start = _states_backward(block, by_out, before, behind)
    by_reads = product(by_out, before.transpose(2, 3))
    by_lasting = product(taken, by_behind.transpose(2, 3))
    by_erased = product(by_taken, before.transpose(2, 3)).neg_().to(factors)
    by_fall = until_end((by_reads * block.reads).sum(-1)) + through[..., None]
    held = (by_lasting * block.lasting).sum(-1).double().cumsum(-1)
    by_fall += functional.pad(held[..., :-1], (1, 0))
    by_q = _summed(by_reads.mul_(since[..., None]), heads)
    by_k = _summed(by_lasting.mul_(until[..., None]), heads)
    del by_reads, by_lasting, by_behind, before

    # By the solution of the triangular system: its right sides, and the system itself.
    by_values = product(block.inverse.transpose(2, 3), by_taken)
    by_keys = product(block.inverse.transpose(2, 3), by_erased)
    by_system = product(by_values.to(factors), block.written.to(factors).transpose(2, 3))
    by_system += product(by_keys.to(factors), block.erased.transpose(2, 3))
    by_system.neg_().mul_(block.decays).tril_(-1)
    from_keys = _for_heads(block.k, by_keys).sum(-1).mul_(since)
    by_beta = (by_values * _by_chunk(v, block.k.shape[2], kind)).sum(-1) + from_keys
    by_fall += until_end(from_keys * beta)
    by_k += _summed(by_keys.mul_((beta * since)[..., None]), heads)
    by_v = by_values.mul_(beta[..., None])
    crossed = _for_heads(block.gram, by_system)
    by_beta += crossed.sum(-1)
    crossed.mul_(beta[..., None])
    by_gram = _summed(by_system.mul_(beta[..., None]), heads)
    by_k += product((by_gram + by_gram.transpose(2, 3)).to(factors), block.k)
    del by_system, by_gram, by_keys, by_erased

    # By what tokens see of their own chunk.
    by_scores = product(by_out, taken.transpose(2, 3)).mul_(block.decays).tril_()
    crossed += _for_heads(block.inner, by_scores)
    by_inner = _summed(by_scores, heads).to(factors)
    by_q += product(by_inner, block.k)
    by_k += product(by_inner.transpose(2, 3), block.q)
    by_fall[..., 1:] += crossing(crossed)
    return (by_q, by_k, by_v, by_fall, by_beta), by_start


def _states_backward(
    block: Block, by_out: Tensor, before: Tensor, behind: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the values taken up, of the states behind chunks, of decays over chunks, and of the start."""
    by_taken = product(block.scores.transpose(2, 3), by_out)
    by_before = product(block.reads.transpose(2, 3), by_out)
    by_behind = torch.empty_like(before)
    low = by_taken if by_taken.dtype == before.dtype else torch.empty_like(by_taken, dtype=before.dtype)
    whole, state = block.whole, behind
    through = whole.new_zeros(whole.shape[:2])
    for i in reversed(_in_turn(before.shape[0], is_dry(behind))):
        by_behind[i] = state
        torch.sum((state * before[i]).mul_(whole[i]), (1, 2), out=through[i])
        torch.add(by_taken[i], product(block.lasting[i], by_behind[i]), out=low[i])
        state = by_before[i].addcmul(state, whole[i]).sub_(product(block.erased[i].transpose(1, 2), low[i]))
    return low, by_behind, through, state
