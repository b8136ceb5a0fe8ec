"""Which tokens each context-parallel rank has, and the process groups that exchange them.

The cost of a causal row grows with its position, so contiguous shards would leave most of the work to the last rank.
A ring of R ranks splits the sequence into 2R chunks, and ring rank r has chunks r and 2R-1-r: an early and a late one,
the same work for every rank. Ranks of an all-to-all compute full sequences of fewer heads and are balanced anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.errors import InputError, unknown

COMMS = ("ring", "a2a", "allgather", "a2a+ring")


@dataclass(frozen=True)
class ContextAxis:
    """A rank's position on the context-parallel axis, its communication method and its process groups."""

    comm: str
    size: int
    rank: int
    inner: int = 1  # ranks of the all-to-all; neighbors in the cp group
    group: dist.ProcessGroup | None = None  # all cp ranks
    ring_group: dist.ProcessGroup | None = None  # ranks with the same inner rank, one per all-to-all group
    inner_group: dist.ProcessGroup | None = None  # this rank's all-to-all group

    @property
    def ring(self) -> int:
        """Number of ranks in the ring (or in the all-gather)."""
        return self.size // self.inner

    @property
    def ring_rank(self) -> int:
        return self.rank // self.inner

    @property
    def inner_rank(self) -> int:
        return self.rank % self.inner

    @property
    def parts(self) -> int:
        """Number of contiguous token runs per rank: an early and a late chunk, or one run without a ring."""
        return 2 if self.ring > 1 else 1


@dataclass(frozen=True)
class Span:
    """A run of consecutive tokens: its first position in the sequence, its offset on this rank, and its length."""

    position: int
    offset: int
    length: int

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.position + self.length


def chunk_spans(seq_length: int, ring: int, ring_rank: int) -> tuple[Span, ...]:
    """Return the token runs of one rank of the ring (all of its all-to-all group)."""
    if ring == 1:
        return (Span(0, 0, seq_length),)
    length = seq_length // (2 * ring)
    return Span(ring_rank * length, 0, length), Span((2 * ring - 1 - ring_rank) * length, length, length)


def positions(seq_length: int, axis: ContextAxis | None) -> Tensor:
    """Return the sequence position of every token of this rank, in local order."""
    if axis is None or axis.size == 1:
        return torch.arange(seq_length)
    _reject_uneven_length(seq_length, axis)
    local = []
    for span in chunk_spans(seq_length, axis.ring, axis.ring_rank):
        length = span.length // axis.inner
        local.append(torch.arange(length) + span.position + axis.inner_rank * length)
    return torch.cat(local)


def context_axis(
    groups: Sequence[Sequence[int]], comm: str, inner: int = 1, whole: dist.ProcessGroup | None = None
) -> ContextAxis:
    """Return this rank's context-parallel axis, given the global ranks of every cp group of the world.

    Every rank of the world must call this with the same list, because creating a process group is collective. `whole`
    is this rank's cp group if a device mesh has created it already.
    """
    size = len(groups[0])
    if size == 1:
        return ContextAxis(comm, 1, 0)
    inner = _inner(comm, size, inner)
    group = whole or _own_group(groups)
    inner_group = ring_group = group
    if comm == "a2a+ring":
        inner_group = _own_group([ranks[at : at + inner] for ranks in groups for at in range(0, size, inner)])
        ring_group = _own_group([ranks[at::inner] for ranks in groups for at in range(inner)])
    rank = dist.get_rank(group)
    return ContextAxis(comm, size, rank, inner, group=group, ring_group=ring_group, inner_group=inner_group)


def _inner(comm: str, size: int, inner: int) -> int:
    if comm not in COMMS:
        raise unknown("cp_comm", comm, COMMS)
    if comm == "a2a":
        return size
    if comm != "a2a+ring":
        return 1
    if inner < 2 or size % inner or inner == size:
        divisors = [n for n in range(2, size) if size % n == 0]
        raise InputError(
            f"a2a+ring splits cp={size} into all-to-all groups of equal size, larger than 1 and smaller than cp",
            field="cp_inner",
            value=inner,
            fix=tuple(f"cp_inner={n}" for n in divisors) or ("cp_comm=ring", "cp_comm=a2a"),
        )
    return inner


def _own_group(all_ranks: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    here = dist.get_rank()
    own: dist.ProcessGroup | None = None
    for ranks in all_ranks:
        group = dist.new_group(list(ranks))
        own = group if here in ranks else own
    if own is None:
        raise InputError(f"rank {here} is in none of the cp groups", field="cp", value=list(all_ranks))
    return own


def _reject_uneven_length(seq_length: int, axis: ContextAxis) -> None:
    unit = axis.size * axis.parts
    if seq_length % unit:
        near = max(seq_length // unit, 1) * unit
        raise InputError(
            f"cp={axis.size} with {axis.comm} splits the sequence into {unit} equal chunks",
            field="seq_length",
            value=seq_length,
            fix=(f"seq_length={near}", f"seq_length={near + unit}"),
        )
