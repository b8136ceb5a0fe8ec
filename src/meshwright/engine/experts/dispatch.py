"""How tokens travel to their experts and back over the ranks that share them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from meshwright.engine.experts.grouped_mm import run_experts
from meshwright.engine.experts.permute import combine, invert, permute, permute_to_experts, sort_by_expert
from meshwright.engine.kernels.device_caps import is_dry


@dataclass(frozen=True)
class ExchangeCounts:
    """How many rows go to and come from each rank of the group."""

    send: list[int]
    receive: list[int]
    arriving: torch.Tensor  # [ranks, local experts]: rows from each rank for each expert here


@dataclass(frozen=True)
class ExpertAxis:
    """The ranks that share a layer's experts: ep cuts the list of experts, etp cuts each expert's inner width."""

    ep: int
    etp: int
    group: dist.ProcessGroup | None  # ep·etp ranks, ep major, etp minor; None for one rank
    rank: int  # in the group
    force_balance: bool = False  # a benchmark's equal loads: the router's choice of experts is overruled
    exchange: Exchange | None = None  # replaces `exchange_counts`, e.g. where tensors have no values

    @property
    def size(self) -> int:
        return self.ep * self.etp

    @property
    def etp_rank(self) -> int:
        return self.rank % self.etp


# (rows from here for each expert [ep, local experts], their number, axis) -> traffic
Exchange = Callable[[torch.Tensor, int, ExpertAxis], ExchangeCounts]


def experts_forward(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The experts' weighted output for each token, [T, H]: the function registered with transformers."""
    axis: ExpertAxis | None = getattr(experts, "axis", None)
    if axis is not None and axis.force_balance:
        top_k_index = round_robin(top_k_index, experts.num_experts, axis.rank)
    order = sort_by_expert(top_k_index, experts.num_experts)
    rows = permute_to_experts(hidden_states, order)
    if axis is None or axis.size == 1:
        rows = run_experts(experts, rows, order.ends)
    else:
        rows = _run_on_expert_ranks(experts, rows, order.ends, axis)
    return combine(rows, top_k_weights, order, hidden_states.dtype)


def round_robin(top_k_index: torch.Tensor, experts: int, rank: int) -> torch.Tensor:
    """Choices that load all experts equally; ranks go on where the rank before stopped."""
    pairs = torch.arange(top_k_index.numel(), device=top_k_index.device, dtype=top_k_index.dtype)
    return ((pairs + rank * top_k_index.numel()) % experts).view(top_k_index.shape)


def exchange_counts(counts: torch.Tensor, rows: int, axis: ExpertAxis) -> ExchangeCounts:
    """Tells every rank how many rows will come, and waits for the numbers: the one place that asks the device."""
    leaving = counts.repeat_interleave(axis.etp, dim=0)
    arriving = torch.empty_like(leaving)
    dist.all_to_all_single(arriving, leaving, group=axis.group)
    send, receive = torch.stack((leaving.sum(1), arriving.sum(1))).tolist()
    return ExchangeCounts(send, receive, arriving)


def balanced_counts(counts: torch.Tensor, rows: int, axis: ExpertAxis) -> ExchangeCounts:
    """The traffic when every rank sends every expert the same number of rows, without looking at any value."""
    share = [rows // axis.ep + (i < rows % axis.ep) for i in range(axis.ep)]
    mine = share[axis.rank // axis.etp]
    send = [share[i] for i in range(axis.ep) for _ in range(axis.etp)]
    local = counts.shape[1]
    by_expert = mine // local + (torch.arange(local, device=counts.device) < mine % local).long()
    return ExchangeCounts(send, [mine] * axis.size, by_expert.expand(axis.size, local))


def _usual_exchange(rows: torch.Tensor) -> Exchange:
    return balanced_counts if is_dry(rows) else exchange_counts  # a dry run has no counts to ask for


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch leaves it untyped; the split sizes change every step
def _run_on_expert_ranks(experts: Any, rows: torch.Tensor, ends: torch.Tensor, axis: ExpertAxis) -> torch.Tensor:
    """Rows sorted by expert, computed where their experts live; partial outputs of etp ranks are summed here."""
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).long().view(axis.ep, -1)
    traffic = (axis.exchange or _usual_exchange(rows))(counts, rows.shape[0], axis)
    blocks = traffic.send[:: axis.etp]

    outgoing = (
        torch.cat([block for block in rows.split_with_sizes(blocks) for _ in range(axis.etp)]) if axis.etp > 1 else rows
    )
    here = _all_to_all(outgoing, traffic.send, traffic.receive, axis.group)
    order, inverse = _by_local_expert(traffic)
    local_ends = traffic.arriving.sum(0).cumsum(0).to(torch.int32)
    here = run_experts(experts, permute(here, order, inverse), local_ends, adds_down_bias=axis.etp_rank == 0)
    back = _all_to_all(permute(here, inverse, order), traffic.receive, traffic.send, axis.group)

    return _sum_slices(back, blocks, axis.etp) if axis.etp > 1 else back


def _by_local_expert(traffic: ExchangeCounts) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows come sorted within each rank's part: the order that sorts them over all parts, and its inverse."""
    ranks, local = traffic.arriving.shape
    expert = torch.arange(local, device=traffic.arriving.device).repeat(ranks)
    expert = expert.repeat_interleave(traffic.arriving.flatten(), output_size=sum(traffic.receive))
    order = expert.argsort(stable=True)
    return order, invert(order)


def _sum_slices(back: torch.Tensor, blocks: list[int], etp: int) -> torch.Tensor:
    parts = back.split_with_sizes([etp * block for block in blocks])
    return torch.cat([part.view(etp, block, back.shape[1]).sum(0) for part, block in zip(parts, blocks, strict=True)])


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
    arrived = rows.new_empty((sum(receive), rows.shape[1]))
    dist.all_to_all_single(arrived, rows.contiguous(), receive, send, group=group)
    return arrived
