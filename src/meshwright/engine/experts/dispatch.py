"""Expert dispatch: an all-to-all sends tokens to the ranks of their experts, another one returns the outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from meshwright.engine.experts.expert_params import down_proj_widths
from meshwright.engine.experts.grouped_mm import down_bias_by_token, run_experts
from meshwright.engine.experts.permute import (
    combine,
    invert,
    permute,
    permute_to_experts,
    sort_by_expert,
    sum_by_token,
    weights_by_row,
)
from meshwright.engine.kernels.device_caps import is_dry


@dataclass(frozen=True)
class ExchangeCounts:
    """Number of rows sent to and received from each rank of the group."""

    send: list[int]
    receive: list[int]
    by_expert: torch.Tensor  # [ranks, local experts]: rows received from each rank for each local expert


@dataclass(frozen=True)
class ExpertAxis:
    """The ranks that share a layer's experts: ep shards the list of experts, etp each expert's inner width."""

    ep: int
    etp: int
    group: dist.ProcessGroup | None  # ep·etp ranks, etp fastest; None for one rank
    rank: int  # in the group
    force_balance: bool = False  # benchmark mode: equal loads in place of the router's choice
    exchange: Exchange | None = None  # replaces `exchange_counts`, e.g. for tensors without data

    @property
    def size(self) -> int:
        return self.ep * self.etp

    @property
    def etp_rank(self) -> int:
        return self.rank % self.etp


# (local rows for each expert [ep, local experts], number of rows, axis) -> counts
Exchange = Callable[[torch.Tensor, int, ExpertAxis], ExchangeCounts]


def experts_forward(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted expert output of each token, [T, H]; the function registered with transformers."""
    axis: ExpertAxis | None = getattr(experts, "axis", None)
    if axis is not None and axis.force_balance:
        top_k_index = round_robin(top_k_index, experts.num_experts, axis.rank)
    order = sort_by_expert(top_k_index, experts.num_experts)
    rows = permute_to_experts(hidden_states, order)
    if axis is not None and axis.size > 1:
        rows = _run_on_expert_ranks(experts, rows, order.ends, axis)
    elif weights_before_down_proj(experts):
        rows = run_experts(experts, rows, order.ends, weights=weights_by_row(top_k_weights, order))
        out = sum_by_token(rows, order, hidden_states.dtype)
        return out + down_bias_by_token(experts, top_k_index, top_k_weights).to(out.dtype) if experts.has_bias else out
    else:
        rows = run_experts(experts, rows, order.ends)
    return combine(rows, top_k_weights, order, hidden_states.dtype)


def weights_before_down_proj(experts: Any) -> bool:
    """Return whether local experts multiply the input of their down projection by the routing weights, not its output.

    The gradient of the weights then needs the experts' inner rows, which are saved anyway or recomputed, and no outputs
    are saved. Not for experts that are wider inside than outside: their inner rows would be saved twice.
    """
    inner, outer = down_proj_widths(experts)
    return inner <= outer


def round_robin(top_k_index: torch.Tensor, experts: int, rank: int) -> torch.Tensor:
    """Return choices that load all experts equally; each rank continues where the previous one stopped."""
    pairs = torch.arange(top_k_index.numel(), device=top_k_index.device, dtype=top_k_index.dtype)
    return ((pairs + rank * top_k_index.numel()) % experts).view(top_k_index.shape)


def exchange_counts(counts: torch.Tensor, rows: int, axis: ExpertAxis) -> ExchangeCounts:
    """Exchange row counts with all ranks. The only host synchronization of a layer: split sizes must be on the host."""
    sent = counts.repeat_interleave(axis.etp, dim=0)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=axis.group)
    send, receive = torch.stack((sent.sum(1), received.sum(1))).tolist()
    return ExchangeCounts(send, receive, received)


def balanced_counts(counts: torch.Tensor, rows: int, axis: ExpertAxis) -> ExchangeCounts:
    """Return the counts for equal loads of all experts, without reading any value."""
    per_rank = [rows // axis.ep + (i < rows % axis.ep) for i in range(axis.ep)]
    received = per_rank[axis.rank // axis.etp]
    send = [per_rank[i] for i in range(axis.ep) for _ in range(axis.etp)]
    local = counts.shape[1]
    by_expert = received // local + (torch.arange(local, device=counts.device) < received % local).long()
    return ExchangeCounts(send, [received] * axis.size, by_expert.expand(axis.size, local))


def _default_exchange(rows: torch.Tensor) -> Exchange:
    return balanced_counts if is_dry(rows) else exchange_counts  # a dry run has no values to exchange


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch leaves it untyped; the split sizes change every step
def _run_on_expert_ranks(experts: Any, rows: torch.Tensor, ends: torch.Tensor, axis: ExpertAxis) -> torch.Tensor:
    """Compute rows sorted by expert on the ranks of their experts; sum the partial outputs of etp ranks here.

    With etp a row is sent to all etp ranks of its expert, each of which computes a slice of the inner width. The slices
    are summed after the second all-to-all, which saves a separate reduction.
    """
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).long().view(axis.ep, -1)
    exchange = (axis.exchange or _default_exchange(rows))(counts, rows.shape[0], axis)
    blocks = exchange.send[:: axis.etp]

    outgoing = (
        torch.cat([block for block in rows.split_with_sizes(blocks) for _ in range(axis.etp)]) if axis.etp > 1 else rows
    )
    received = _all_to_all(outgoing, exchange.send, exchange.receive, axis.group)
    order, inverse = _by_local_expert(exchange)
    local_ends = exchange.by_expert.sum(0).cumsum(0).to(torch.int32)
    out = run_experts(experts, permute(received, order, inverse), local_ends, adds_down_bias=axis.etp_rank == 0)
    returned = _all_to_all(permute(out, inverse, order), exchange.receive, exchange.send, axis.group)

    return _sum_slices(returned, blocks, axis.etp) if axis.etp > 1 else returned


def _by_local_expert(exchange: ExchangeCounts) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the order that sorts received rows by expert over all ranks, and its inverse.

    Rows arrive sorted by expert within each sending rank only.
    """
    ranks, local = exchange.by_expert.shape
    expert = torch.arange(local, device=exchange.by_expert.device).repeat(ranks)
    expert = expert.repeat_interleave(exchange.by_expert.flatten(), output_size=sum(exchange.receive))
    order = expert.argsort(stable=True)
    return order, invert(order)


def _sum_slices(rows: torch.Tensor, blocks: list[int], etp: int) -> torch.Tensor:
    parts = rows.split_with_sizes([etp * block for block in blocks])
    return torch.cat([part.view(etp, block, rows.shape[1]).sum(0) for part, block in zip(parts, blocks, strict=True)])


def _all_to_all(
    rows: torch.Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup | None
) -> torch.Tensor:
    return _AllToAll.apply(rows, send, receive, group)  # type: ignore[no-any-return,no-untyped-call]


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, send: list[int], receive: list[int], group: Any) -> torch.Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _exchange(rows, send, receive, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _exchange(grads[0], ctx.receive, ctx.send, ctx.group), None, None, None


def _exchange(rows: torch.Tensor, send: list[int], receive: list[int], group: Any) -> torch.Tensor:
    received = rows.new_empty((sum(receive), rows.shape[1]))
    dist.all_to_all_single(received, rows.contiguous(), receive, send, group=group)
    return received
