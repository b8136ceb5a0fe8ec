"""Ring attention: keys and values are passed around a ring of ranks, block by block.

At every step a rank computes with the keys and values it has while the next ones are being received. Block outputs are
merged by their log-sum-exp. The backward pass runs the same ring again; the gradients of keys and values travel with
them, each rank adds its part, and after a full turn they are back on the rank that owns them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.engine import shared_gpu
from meshwright.engine.attention import kernels
from meshwright.engine.attention.cp_layout import Span
from meshwright.engine.attention.mask_spec import AttentionSpec, Block, merged_blocks, tiles, visibility, visible_blocks

MAX_SCORES = 2**26  # scores that the math kernel computes at once (fp32: 256 MiB)


@dataclass(frozen=True)
class RingLayout:
    """The token runs of this rank's queries and of the keys of every rank of the ring."""

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
    spec: AttentionSpec,
    layout: RingLayout,
    sinks: Tensor | None = None,
    documents: tuple[Tensor, Tensor] | None = None,
    flash: bool = True,
) -> Tensor:
    """Return attention [batch, heads, queries, width] of this rank's queries to the keys of all ranks.

    `documents` are the ids of this rank's queries and of its keys; `flash` allows the flash kernels.
    """
    query_documents, key_documents = documents or (None, None)
    flash = flash and documents is None and spec.softcap is None and kernels.flash_takes(q, k)
    out: Tensor = _Blocks.apply(q, k, v, sinks, query_documents, key_documents, spec, layout, flash)  # type: ignore[no-untyped-call]  # torch leaves it untyped
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
        spec: AttentionSpec,
        layout: RingLayout,
        flash: bool,
    ) -> Tensor:
        out = q.new_zeros(*q.shape[:-1], v.shape[-1], dtype=torch.float32)
        lse = torch.full(q.shape[:-1], kernels.EMPTY_LSE, dtype=torch.float32, device=q.device)
        for source, (keys, values, *ids) in _ring_steps([k, v, *_present(key_documents)], layout):
            for block, mask in _block_tasks(q, layout.keys[source], query_documents, ids, spec, layout, flash):
                a, b, c = q[:, :, block.rows], keys[:, :, block.columns], values[:, :, block.columns]
                if _by_flash(block, flash):
                    partial = kernels.flash_forward(a, b, c, block.kind == "causal", spec.scale)
                else:
                    partial = kernels.math_forward(a, b, c, mask(), spec)
                kernels.merge(out[:, :, block.rows], lse[:, :, block.rows], *partial)
        if sinks is not None:  # a sink is one more key per head without a value: it only adds to the denominator
            total = torch.logaddexp(lse, sinks.float()[:, None])
            out.mul_((lse - total).exp_()[..., None])
            lse = total
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, query_documents, key_documents, out, lse)
        ctx.spec, ctx.layout, ctx.flash = spec, layout, flash
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, query_documents, key_documents, out, lse = ctx.saved_tensors
        spec, layout, flash = ctx.spec, ctx.layout, ctx.flash
        grad = grad.contiguous()
        delta = (grad.float() * out.float()).sum(-1)
        dq = torch.zeros_like(q, dtype=torch.float32, memory_format=torch.contiguous_format)
        # Gradients in flight: sent one step after their keys and values, so that the send overlaps the next block.
        arriving: Callable[[], list[Tensor]] | None = None
        for source, (keys, values, *ids) in _ring_steps([k, v, *_present(key_documents)], layout):
            dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (keys, values))
            for block, mask in _block_tasks(q, layout.keys[source], query_documents, ids, spec, layout, flash):
                rows, columns = block.rows, block.columns
                g, a, b, c = grad[:, :, rows], q[:, :, rows], keys[:, :, columns], values[:, :, columns]
                if _by_flash(block, flash):
                    grads = kernels.flash_backward(
                        g, a, b, c, out[:, :, rows], lse[:, :, rows], block.kind == "causal", spec.scale
                    )
                else:
                    grads = kernels.math_backward(g, a, b, c, lse[:, :, rows], delta[:, :, rows], mask(), spec)
                dq[:, :, rows] += grads[0]
                dk[:, :, columns] += grads[1]
                dv[:, :, columns] += grads[2]
            if arriving is not None:  # the gradients of these keys and values from the ranks before
                earlier = arriving()
                dk, dv = dk.add_(earlier[0]), dv.add_(earlier[1])
            arriving = _send_to_next([dk, dv], layout)
        dk, dv = arriving() if arriving is not None else (dk, dv)
        dsinks = None
        if sinks is not None:  # a sink takes the share exp(sink - lse) of a row's probability and has no value
            dsinks = -((sinks.float()[:, None] - lse).exp() * delta).sum((0, 2)).to(sinks.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None, None, None, None, None


def _block_tasks(
    q: Tensor,
    keys: tuple[Span, ...],
    query_documents: Tensor | None,
    key_documents: Sequence[Tensor],
    spec: AttentionSpec,
    layout: RingLayout,
    flash: bool,
) -> Iterator[tuple[Block, Callable[[], Tensor | None]]]:
    """Yield the blocks to compute against one rank's keys, each with a function that makes its mask (or None)."""
    documents = None if query_documents is None else (query_documents, key_documents[0])
    plan = merged_blocks(layout.queries, keys, spec) if flash else visible_blocks(layout.queries, keys, spec)
    for block in plan:
        if _by_flash(block, flash):
            yield block, _no_mask
            continue
        rows = max(16, MAX_SCORES // (q.shape[0] * q.shape[1] * min(block.key.length, spec.window or block.key.length)))
        for tile in tiles(block, spec, rows):
            yield tile, functools.partial(visibility, tile, spec, documents, q.device)


def _no_mask() -> None:
    return None


def _by_flash(block: Block, flash: bool) -> bool:
    return flash and block.kind != "partial"


def _present(documents: Tensor | None) -> list[Tensor]:
    return [] if documents is None else [documents]


def _ring_steps(tensors: list[Tensor], layout: RingLayout) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield every rank's tensors with its ring rank, this rank's first; the next ones are received meanwhile."""
    current = [x.contiguous() for x in tensors] if layout.size > 1 else tensors
    for step in range(layout.size):
        arriving = _send_to_next(current, layout) if step + 1 < layout.size else None
        yield (layout.rank - step) % layout.size, current
        if arriving is not None:
            current = arriving()


def _send_to_next(tensors: list[Tensor], layout: RingLayout) -> Callable[[], list[Tensor]]:
    """Start sending tensors to the next rank; the returned function waits for those of the previous rank."""
    if layout.size == 1 or layout.group is None:
        return lambda: tensors
    after = dist.get_global_rank(layout.group, (layout.rank + 1) % layout.size)
    before = dist.get_global_rank(layout.group, (layout.rank - 1) % layout.size)
    device = tensors[0].device
    through_host = shared_gpu.sends_through_host(device.type, layout.group)
    if through_host:
        tensors = [shared_gpu.on_host(x) for x in tensors]
    received = [torch.empty_like(x) for x in tensors]
    sends = [dist.P2POp(dist.isend, x, after, layout.group) for x in tensors]
    receives = [dist.P2POp(dist.irecv, x, before, layout.group) for x in received]
    pending = dist.batch_isend_irecv(sends + receives)

    def arrived() -> list[Tensor]:
        for work in pending:
            work.wait()
        sends.clear()  # only now: the allocator must not reuse memory that is still being sent
        return [x.to(device) for x in received] if through_host else received

    return arrived
