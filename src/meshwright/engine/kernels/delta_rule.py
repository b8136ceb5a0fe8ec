"""The gated delta rule in chunks: nothing of size tokens × chunk or tokens × states is saved.

Every head has a state [key, value] that decays, erases what it stores for a key, and writes the token's value for it:

    S ← exp(g)·S,    S ← S + β·k ⊗ (v - kᵀ·S),    o = qᵀ·S

Within a chunk the written values, each minus what earlier tokens wrote, are the solution of a triangular system
(I + A)·x = β·(v - decayed kᵀ·S); only the state passes from chunk to chunk. Chunks run in blocks, whose matrices take
some hundred MiB whatever the length. Saved are the inputs and the state before every block but the first; the backward
pass recomputes a block's matrices.

Sums are in fp32 (of fp32 or bf16 factors), systems are solved in fp32, and log decays are accumulated in fp64: the
difference of two large sums may be small. Heads that share queries and keys share their products. It is a custom op
for the reason given in lora_linear.py.
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
    first_and_last,
    suffix_sum,
)
from meshwright.engine.kernels.cross_entropy import upcast
from meshwright.engine.kernels.device_caps import DECOMPOSITIONS, is_dry, on_gpu

CHUNK = 64  # tokens per triangular system
STATE_BYTES = 2**25  # fp32 states of the chunks of a block
EPSILON = 1e-6  # of the query and key norm

INPUTS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, bool norm"
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, norm: bool = False) -> Tensor:
    """Return the outputs [rows, tokens, heads, value] from a zero state, in the dtype of q.

    q and k are [rows, tokens, groups, key], each for an equal number of heads; `norm` normalizes them to unit length.
    v is [rows, tokens, heads, value]; the log decays g and beta are [rows, tokens, heads].
    """
    # Contiguous: a saved view would keep its larger base tensor alive.
    out, _ = _rule(q.contiguous(), k.contiguous(), v.contiguous(), g, beta, norm)
    result: Tensor = out
    return result


def plan(rows: int, tokens: int, heads: int, key: int, value: int) -> Plan:
    """Return blocks whose states take `STATE_BYTES`."""
    return block_plan(rows, tokens, CHUNK, 4 * heads * key * value, STATE_BYTES)


def _plan(k: Tensor, v: Tensor) -> Plan:
    rows, tokens, heads, value = v.shape
    return plan(rows, tokens, heads, k.shape[3], value)


class Block(NamedTuple):
    """The matrices of a block, for both passes. c: chunks, b: heads of all rows, t: tokens of a chunk.

    Queries and keys, and their products, exist once per group of heads that share them (s).
    """

    q: Tensor  # scaled [c, s, t, key]
    k: Tensor  # [c, s, t, key]
    beta: Tensor  # [c, b, t]
    log_decay: Tensor  # since the start of the chunk [c, b, t], in fp64
    decays: Tensor  # from token to token [c, b, t, t]; undefined above the diagonal
    gram: Tensor  # k·kᵀ [c, s, t, t]
    inner: Tensor  # q·kᵀ [c, s, t, t]
    inverse: Tensor  # of I + A [c, b, t, t]
    scores: Tensor  # q·kᵀ with decays, lower triangle with diagonal [c, b, t, t]
    reads: Tensor  # q, decayed since the start of the chunk [c, b, t, key]
    lasting: Tensor  # k, decayed until the end of the chunk [c, b, t, key]
    erased: Tensor  # keys by which the solution subtracts the state before the chunk [c, b, t, key]
    written: Tensor  # the solution for a zero state before the chunk [c, b, t, value]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of sums."""
        return self.beta.dtype

    @property
    def shared(self) -> int:
        """Number of heads that share a query and a key."""
        return self.beta.shape[1] // self.k.shape[1]

    @property
    def chunk_decay(self) -> Tensor:
        """The decay over each chunk [c, b, 1, 1]."""
        return self.log_decay[..., -1, None, None].exp().to(self.dtype)

    def since(self) -> Tensor:
        """Return the decay since the start of the chunk [c, b, t]."""
        return self.log_decay.exp().to(self.dtype)

    def until(self) -> Tensor:
        """Return the decay until the end of the chunk [c, b, t]."""
        return (self.log_decay[..., -1:] - self.log_decay).exp().to(self.dtype)


def _rule_forward(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, norm: bool) -> tuple[Tensor, Tensor]:
    """Return the outputs, and the state before every block but the first."""
    blocks = _plan(k, v)
    out = v.new_empty(v.shape, dtype=q.dtype)
    starts = _empty_starts(k, v, blocks)
    for rows, along in _executed_blocks(blocks, k, v, FORWARD):
        state = empty_states(starts, rows).flatten(0, 1)
        for number, tokens in along:
            here = (rows, tokens)
            if number:
                starts[rows, number - 1] = state.view(starts[rows, number - 1].shape)
            block = _block(q[here], k[here], v[here], g[here], beta[here], norm, blocks.chunk)
            before, values_written, state = _states(block, state)
            result = bmm_fp32(block.reads, before)
            result += bmm_fp32(block.scores, values_written)
            out[here] = _by_token(result, v[here])
            del block, before, values_written, result  # free them before the next block
    return out, starts


def _empty_starts(k: Tensor, v: Tensor, blocks: Plan) -> Tensor:
    rows, _, heads, width = v.shape
    dtype = torch.promote_types(v.dtype, torch.float32)
    return v.new_empty(rows, blocks.blocks - 1, heads, k.shape[3], width, dtype=dtype)


_rule = torch.library.custom_op(
    "meshwright::gated_delta_rule", _rule_forward, mutates_args=(), schema=f"({INPUTS}) -> (Tensor, Tensor)"
)


@_rule.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape, dtype=q.dtype), _empty_starts(k, v, _plan(k, v))


def _rule_backward_impl(
    gradient: Tensor, starts: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, norm: bool
) -> Gradients:
    """Return the gradients of q, k, v, g and beta."""
    blocks = _plan(k, v)
    found = _empty_like(q, k, v, g, beta)
    for rows, along in _executed_blocks(blocks, k, v, BACKWARD):
        empty = empty_states(starts, rows)
        grad_state = empty.flatten(0, 1)
        for number, tokens in reversed(along):
            here = (rows, tokens)
            start = starts[rows, number - 1] if number else empty
            inputs = (q[here], k[here], v[here], g[here], beta[here])
            block = _block(*inputs, norm, blocks.chunk)
            grads, grad_state = _block_gradients(block, inputs[2], gradient[here], start, grad_state)
            into = tuple(one[here] for one in found)
            _write_qk_grad(into[0], grads[0], inputs[0], norm, k.shape[3] ** -0.5)
            _write_qk_grad(into[1], grads[1], inputs[1], norm, 1.0)
            into[2].copy_(_by_token(grads[2], into[2]))
            for one, by in zip(into[3:], grads[3:], strict=True):
                one.copy_(_by_token(by[..., None], one[..., None])[..., 0])
            del block, grads
    return found


def _empty_like(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Gradients:
    grad_q, grad_k, grad_v, grad_g, grad_beta = (one.new_empty(one.shape) for one in (q, k, v, g, beta))
    return grad_q, grad_k, grad_v, grad_g, grad_beta


_rule_backward = torch.library.custom_op(
    "meshwright::gated_delta_rule_backward",
    _rule_backward_impl,
    mutates_args=(),
    schema=f"(Tensor gradient, Tensor starts, {INPUTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@_rule_backward.register_fake
def _(
    gradient: Tensor, starts: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, norm: bool
) -> Gradients:
    return _empty_like(q, k, v, g, beta)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)  # the states have no gradient
    *tensors, ctx.norm = inputs
    ctx.save_for_backward(output[1], *tensors)


def _gradients(ctx: Any, gradient: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if gradient is None:
        return (None,) * 6
    starts, *inputs = ctx.saved_tensors  # read once: with recompute every access would recompute them
    return *_rule_backward(gradient, starts, *inputs, ctx.norm), None


_rule.register_autograd(_gradients, setup_context=_save_inputs)

DECOMPOSITIONS[torch.ops.meshwright.gated_delta_rule.default] = _rule_forward
DECOMPOSITIONS[torch.ops.meshwright.gated_delta_rule_backward.default] = _rule_backward_impl


class GemmCounts(NamedTuple):
    """Number of GEMMs of each shape that a pass runs for a chunk.

    tokens × tokens over keys per group of heads, over keys and over values per head; with the states of all chunks in
    one batch; and with the state of one chunk after another.
    """

    shared: int
    keys: int
    values: int
    states: int
    sequential: int


FORWARD, BACKWARD = GemmCounts(2, 1, 2, 1, 2), GemmCounts(5, 3, 5, 4, 4)


def _executed_blocks(
    blocks: Plan, k: Tensor, v: Tensor, gemms: GemmCounts
) -> list[tuple[slice, list[tuple[int, slice]]]]:
    return executed_blocks(blocks, v, lambda rows, tokens, dry: _flop(rows, tokens, blocks.chunk, k, v, gemms, dry))


def _flop(rows: slice, tokens: slice, chunk: int, k: Tensor, v: Tensor, gemms: GemmCounts, dry: bool = False) -> int:
    """Return the FLOPs of the GEMMs of a block."""
    (groups, key), (heads, value) = k.shape[2:], v.shape[2:]
    chunks: int = -(-(tokens.stop - tokens.start) // chunk)
    by_tokens = gemms.shared * groups * key + heads * (gemms.keys * key + gemms.values * value)
    with_states = heads * chunk * key * value
    one_by_one = len(_sequential_chunks(chunks, dry)) * gemms.sequential * with_states
    count: int = rows.stop - rows.start
    return 2 * count * (chunks * (chunk**2 * by_tokens + gemms.states * with_states) + one_by_one)


def _sequential_chunks(chunks: int, dry: bool) -> list[int]:
    """Return the chunks that run one after another; in a dry run only the first and last."""
    return first_and_last(list(range(chunks))) if dry else list(range(chunks))


def _by_chunk(tensor: Tensor, chunk: int, dtype: torch.dtype) -> Tensor:
    """Reshape [rows, tokens, heads, ...] to [c, rows · heads, t, ...]; zero padding does not change the state."""
    missing = -tensor.shape[1] % chunk
    if missing:
        tensor = functional.pad(tensor, (*(0, 0) * (tensor.dim() - 2), 0, missing))
    chunks = torch.unflatten(tensor, 1, (-1, chunk)).transpose(0, 1).transpose(2, 3)
    return chunks.to(dtype, memory_format=torch.contiguous_format).flatten(1, 2)


def _by_token(chunks: Tensor, like: Tensor) -> Tensor:
    """Reshape [c, rows · heads, t, ...] to [rows, tokens, heads, ...] without the padding."""
    by_row = torch.unflatten(chunks, 1, (like.shape[0], -1)).transpose(0, 1).transpose(2, 3)
    return by_row.flatten(1, 2)[:, : like.shape[1]]


def _qk_by_chunk(raw: Tensor, chunk: int, norm: bool, scale: float, factor_dtype: torch.dtype) -> Tensor:
    """Queries or keys by chunk: of length `scale`, or times it."""
    vectors = _by_chunk(raw, chunk, upcast(raw).dtype)
    if norm:
        vectors = vectors * _inverse_norm(vectors)
    return vectors.mul(scale).to(factor_dtype)


def _inverse_norm(vectors: Tensor) -> Tensor:
    """One by the length of each vector."""
    return torch.rsqrt(vectors.square().sum(-1, keepdim=True) + EPSILON)


def _write_qk_grad(into: Tensor, by_chunk: Tensor, raw: Tensor, norm: bool, scale: float) -> None:
    """Write the gradient of raw queries or keys from that of the output of `_qk_by_chunk`."""
    by = _by_token(by_chunk, raw) * scale
    if norm:
        vectors = upcast(raw)
        inverse_norm = _inverse_norm(vectors)
        unit = vectors * inverse_norm
        by = (by - unit * (unit * by).sum(-1, keepdim=True)).mul_(inverse_norm)
    into.copy_(by)


def _for_heads(shared: Tensor, by_head: Tensor) -> Tensor:
    """Multiply a tensor shared by heads [c, s, t, n] by one per head [c, b, t, n] or [c, b, t, 1]."""
    heads = by_head.shape[1] // shared.shape[1]
    return (shared[:, :, None] * torch.unflatten(by_head, 1, (-1, heads))).flatten(1, 2)


def _sum_over_heads(by_head: Tensor, heads: int) -> Tensor:
    """Sum gradients of all heads [c, b, ...] to those of the shared tensor [c, s, ...]."""
    return torch.unflatten(by_head, 1, (-1, heads)).sum(2) if heads > 1 else by_head


def _block(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, norm: bool, chunk: int) -> Block:
    dtype = upcast(v).dtype
    factor_dtype = v.dtype if on_gpu(v) else dtype  # CPUs have no bf16 bmm with fp32 output
    q = _qk_by_chunk(q, chunk, norm, q.shape[-1] ** -0.5, factor_dtype)
    k = _qk_by_chunk(k, chunk, norm, 1.0, factor_dtype)
    beta = _by_chunk(beta, chunk, dtype)
    log_decay = _by_chunk(g, chunk, torch.float64).cumsum(-1)
    decays = torch.empty(*log_decay.shape, log_decay.shape[-1], dtype=dtype, device=log_decay.device)
    torch.sub(log_decay[..., :, None], log_decay[..., None, :], out=decays)
    decays.clamp_(max=0.0).exp_()
    gram, inner = bmm_fp32(k, k.transpose(2, 3)), bmm_fp32(q, k.transpose(2, 3))
    inverse = _inverse(_for_heads(gram, decays).mul_(beta[..., None])).to(factor_dtype)
    scores = _for_heads(inner, decays).tril_().to(factor_dtype)
    since, until = log_decay.exp().to(dtype), (log_decay[..., -1:] - log_decay).exp().to(dtype)
    erased = bmm_fp32(inverse, _for_heads(k, (beta * since)[..., None]).to(factor_dtype)).to(factor_dtype)
    written = bmm_fp32(inverse, (_by_chunk(v, chunk, dtype) * beta[..., None]).to(factor_dtype))
    reads, lasting = (_for_heads(one, by[..., None]).to(factor_dtype) for one, by in ((q, since), (k, until)))
    return Block(q, k, beta, log_decay, decays, gram, inner, inverse, scores, reads, lasting, erased, written)


def _inverse(system: Tensor) -> Tensor:
    """Return the inverse of I + the strictly lower triangle of each matrix [..., t, t]."""
    one = torch.eye(system.shape[-1], dtype=system.dtype, device=system.device).expand(system.shape)
    solved: Tensor = torch.linalg.solve_triangular(system, one, upper=False, unitriangular=True)
    return solved


def _states(block: Block, start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the states before each chunk [c, b, key, value], the written values [c, b, t, value], the last state."""
    factor_dtype = block.k.dtype
    values_written = torch.empty_like(block.written, dtype=factor_dtype)
    before = start.new_empty(values_written.shape[0], *start.shape, dtype=factor_dtype)
    chunk_decay, state = block.chunk_decay, start
    for i in _sequential_chunks(values_written.shape[0], is_dry(start)):
        before[i] = state
        torch.sub(block.written[i], bmm_fp32(block.erased[i], before[i]), out=values_written[i])
        state = bmm_fp32(block.lasting[i].transpose(1, 2), values_written[i]).addcmul_(state, chunk_decay[i])
    return before, values_written, state


def _block_gradients(
    block: Block, v: Tensor, gradient: Tensor, start: Tensor, after: Tensor
) -> tuple[Gradients, Tensor]:
    """Return the gradients of a block's inputs, by chunk, and of the state before it.

    The gradient of a log decay is summed over everything that decays at that token. Row sums minus column sums of one
    matrix would be cheaper, but a small difference of large numbers.
    """
    heads, factor_dtype, dtype = block.shared, block.k.dtype, block.dtype
    since, until, beta = block.since(), block.until(), block.beta
    before, values_written, _ = _states(block, start.flatten(0, 1))
    grad_out = _by_chunk(gradient, block.k.shape[2], factor_dtype)

    # Through the states: reads, what lasts until the next chunk, and what is erased.
    grad_values_written, grad_after, through, grad_start = _states_backward(block, grad_out, before, after)
    grad_reads = bmm_fp32(grad_out, before.transpose(2, 3))
    grad_lasting = bmm_fp32(values_written, grad_after.transpose(2, 3))
    grad_erased = bmm_fp32(grad_values_written, before.transpose(2, 3)).neg_().to(factor_dtype)
    grad_log_decay = suffix_sum((grad_reads * block.reads).sum(-1)) + through[..., None]
    decayed_sums = (grad_lasting * block.lasting).sum(-1).double().cumsum(-1)
    grad_log_decay += functional.pad(decayed_sums[..., :-1], (1, 0))
    grad_q = _sum_over_heads(grad_reads.mul_(since[..., None]), heads)
    grad_k = _sum_over_heads(grad_lasting.mul_(until[..., None]), heads)
    del grad_reads, grad_lasting, grad_after, before

    # Through the solution of the triangular system: its right-hand sides, and the system itself.
    grad_values = bmm_fp32(block.inverse.transpose(2, 3), grad_values_written)
    grad_keys = bmm_fp32(block.inverse.transpose(2, 3), grad_erased)
    grad_system = bmm_fp32(grad_values.to(factor_dtype), block.written.to(factor_dtype).transpose(2, 3))
    grad_system += bmm_fp32(grad_keys.to(factor_dtype), block.erased.transpose(2, 3))
    grad_system.neg_().mul_(block.decays).tril_(-1)
    from_keys = _for_heads(block.k, grad_keys).sum(-1).mul_(since)
    grad_beta = (grad_values * _by_chunk(v, block.k.shape[2], dtype)).sum(-1) + from_keys
    grad_log_decay += suffix_sum(from_keys * beta)
    grad_k += _sum_over_heads(grad_keys.mul_((beta * since)[..., None]), heads)
    grad_v = grad_values.mul_(beta[..., None])
    crossed = _for_heads(block.gram, grad_system)
    grad_beta += crossed.sum(-1)
    crossed.mul_(beta[..., None])
    grad_gram = _sum_over_heads(grad_system.mul_(beta[..., None]), heads)
    grad_k += bmm_fp32((grad_gram + grad_gram.transpose(2, 3)).to(factor_dtype), block.k)
    del grad_system, grad_gram, grad_keys, grad_erased

    # Through attention within the chunk.
    grad_scores = bmm_fp32(grad_out, values_written.transpose(2, 3)).mul_(block.decays).tril_()
    crossed += _for_heads(block.inner, grad_scores)
    grad_inner = _sum_over_heads(grad_scores, heads).to(factor_dtype)
    grad_q += bmm_fp32(grad_inner, block.k)
    grad_k += bmm_fp32(grad_inner.transpose(2, 3), block.q)
    grad_log_decay[..., 1:] += crossing_sums(crossed)
    return (grad_q, grad_k, grad_v, grad_log_decay, grad_beta), grad_start


def _states_backward(
    block: Block, grad_out: Tensor, before: Tensor, after: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the written values, the states after chunks, the chunk decays and the first state."""
    grad_values_written = bmm_fp32(block.scores.transpose(2, 3), grad_out)
    grad_before = bmm_fp32(block.reads.transpose(2, 3), grad_out)
    grad_after = torch.empty_like(before)
    low = (
        grad_values_written
        if grad_values_written.dtype == before.dtype
        else torch.empty_like(grad_values_written, dtype=before.dtype)
    )
    chunk_decay, state = block.chunk_decay, after
    through = chunk_decay.new_zeros(chunk_decay.shape[:2])
    for i in reversed(_sequential_chunks(before.shape[0], is_dry(after))):
        grad_after[i] = state
        torch.sum((state * before[i]).mul_(chunk_decay[i]), (1, 2), out=through[i])
        torch.add(grad_values_written[i], bmm_fp32(block.lasting[i], grad_after[i]), out=low[i])
        state = grad_before[i].addcmul(state, chunk_decay[i]).sub_(bmm_fp32(block.erased[i].transpose(1, 2), low[i]))
    return low, grad_after, through, state
