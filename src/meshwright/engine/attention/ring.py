"""Attention over keys and values that travel around a ring of ranks, block by block.

At every step a rank works on the block it holds while the next one is on its way. What comes out of the blocks is
merged by log-sum; the backward runs the same ring again and lets the gradients of keys and values travel with them,
until they are home.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.engine.attention import kernels
from meshwright.engine.attention.cp_layout import Span
from meshwright.engine.attention.mask_spec import AttentionSpec, Block, merged_blocks, tiles, visibility, visible_blocks

# Scores that the math kernel holds at once (fp32: 256 MiB).
SCORES = 2**26


@dataclass(frozen=True)
class RingLayout:
    """Who holds which tokens: this rank's queries, and the keys of every rank of the ring."""

    queries: tuple[Span, ...]
    keys: tuple[tuple[Span, ...], ...]
    rank: int = 0
    group: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        return len(self.keys)


def attend_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: AttentionSpec,
    track: RingLayout,
    sinks: Tensor | None = None,
    documents: tuple[Tensor, Tensor] | None = None,
    flash: bool = True,
) -> Tensor:
    """Attention [batch, heads, queries, width] of this rank's queries to every key on the track.

    `documents` are the ids of this rank's queries and of the keys it holds; `flash` allows the flash kernels.
    """
    query_documents, key_documents = documents or (None, None)
    flash = flash and documents is None and terms.softcap is None and kernels.flash_takes(q, k)
    out: Tensor = _Blocks.apply(q, k, v, sinks, query_documents, key_documents, terms, track, flash)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return out


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        query_documents: Tensor | None,
        key_documents: Tensor | None,
        terms: AttentionSpec,
        track: RingLayout,
        flash: bool,
    ) -> Tensor:
        out = q.new_zeros(*q.shape[:-1], v.shape[-1], dtype=torch.float32)
        lse = torch.full(q.shape[:-1], kernels.EMPTY_LSE, dtype=torch.float32, device=q.device)
        for source, (keys, values, *ids) in _ring_steps([k, v, *_present(key_documents)], track):
            for block, seen in _block_tasks(q, track.keys[source], query_documents, ids, terms, track, flash):
                a, b, c = q[:, :, block.rows], keys[:, :, block.columns], values[:, :, block.columns]
                if _by_flash(block, flash):
                    more = kernels.flash_forward(a, b, c, block.kind == "causal", terms.scale)
                else:
                    more = kernels.math_forward(a, b, c, seen(), terms)
                kernels.merge(out[:, :, block.rows], lse[:, :, block.rows], *more)
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.float()[:, None])
            out.mul_((lse - total).exp_()[..., None])
            lse = total
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, query_documents, key_documents, out, lse)
        ctx.terms, ctx.track, ctx.flash = terms, track, flash
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, query_documents, key_documents, out, lse = ctx.saved_tensors
        terms, track, flash = ctx.terms, ctx.track, ctx.flash
        grad = grad.contiguous()
        delta = (grad.float() * out.float()).sum(-1)
        dq = torch.zeros_like(q, dtype=torch.float32, memory_format=torch.contiguous_format)
        home: Callable[[], list[Tensor]] | None = None
        for source, (keys, values, *ids) in _ring_steps([k, v, *_present(key_documents)], track):
            dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (keys, values))
            for block, seen in _block_tasks(q, track.keys[source], query_documents, ids, terms, track, flash):
                rows, columns = block.rows, block.columns
                g, a, b, c = grad[:, :, rows], q[:, :, rows], keys[:, :, columns], values[:, :, columns]
                if _by_flash(block, flash):
                    found = kernels.flash_backward(
                        g, a, b, c, out[:, :, rows], lse[:, :, rows], block.kind == "causal", terms.scale
                    )
                else:
                    found = kernels.math_backward(g, a, b, c, lse[:, :, rows], delta[:, :, rows], seen(), terms)
                dq[:, :, rows] += found[0]
                dk[:, :, columns] += found[1]
                dv[:, :, columns] += found[2]
            if home is not None:  # what the ranks before us found for this block
                earlier = home()
                dk, dv = dk.add_(earlier[0]), dv.add_(earlier[1])
            home = _send_to_next([dk, dv], track)
        dk, dv = home() if home is not None else (dk, dv)
        dsinks = None
        if sinks is not None:  # a sink takes exp(sink - lse) of a row and gives nothing back
            dsinks = -((sinks.float()[:, None] - lse).exp() * delta).sum((0, 2)).to(sinks.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None, None, None, None, None


def _block_tasks(
    q: Tensor,
    keys: tuple[Span, ...],
    query_documents: Tensor | None,
    key_documents: Sequence[Tensor],
    terms: AttentionSpec,
    track: RingLayout,
    flash: bool,
) -> Iterator[tuple[Block, Callable[[], Tensor | None]]]:
    """The blocks to compute against one rank's keys, each with the function that makes its mask if it needs one."""
    documents = None if query_documents is None else (query_documents, key_documents[0])
    plan = merged_blocks(track.queries, keys, terms) if flash else visible_blocks(track.queries, keys, terms)
    for block in plan:
        if _by_flash(block, flash):
            yield block, _no_mask
            continue
        rows = max(16, SCORES // (q.shape[0] * q.shape[1] * min(block.key.length, terms.window or block.key.length)))
        for tile in tiles(block, terms, rows):
            yield tile, functools.partial(visibility, tile, terms, documents, q.device)


def _no_mask() -> None:
    return None


def _by_flash(block: Block, flash: bool) -> bool:
    return flash and block.kind != "partial"


def _present(documents: Tensor | None) -> list[Tensor]:
    return [] if documents is None else [documents]


def _ring_steps(tensors: list[Tensor], track: RingLayout) -> Iterator[tuple[int, list[Tensor]]]:
    """Every rank's tensors in turn, own first, with the rank they come from; the next are fetched meanwhile."""
    held = [x.contiguous() for x in tensors] if track.size > 1 else tensors
    for step in range(track.size):
        arriving = _send_to_next(held, track) if step + 1 < track.size else None
        yield (track.rank - step) % track.size, held
        if arriving is not None:
            held = arriving()


def _send_to_next(tensors: list[Tensor], track: RingLayout) -> Callable[[], list[Tensor]]:
    """Starts sending tensors to the next rank; the returned function waits for those of the previous one."""
    if track.size == 1 or track.group is None:
        return lambda: tensors
    after = dist.get_global_rank(track.group, (track.rank + 1) % track.size)
    before = dist.get_global_rank(track.group, (track.rank - 1) % track.size)
    received = [torch.empty_like(x) for x in tensors]
    sends = [dist.P2POp(dist.isend, x, after, track.group) for x in tensors]
    takes = [dist.P2POp(dist.irecv, x, before, track.group) for x in received]
    pending = dist.batch_isend_irecv(sends + takes)

    def arrived() -> list[Tensor]:
        for one in pending:
            one.wait()
        sends.clear()  # not before: the memory that is being sent must not be given to something else
        return received

    return arrived
