"""Whole matrices out of cut ones, shared among the ranks that hold the cuts.

A rule that needs whole matrices takes them in rounds: of as many parameters as the mesh has ranks, each rank is sent
all blocks of one, works on it whole, and sends every block back. Each matrix is worked on once, not once per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

Block = tuple[slice, ...]


def cut_dims(tensor: Tensor) -> set[int]:
    """The dimensions along which a tensor is cut over more than one rank."""
    if not isinstance(tensor, DTensor):
        return set()
    return {dim for axis, dim in _cuts(tensor) if tensor.device_mesh.size(axis) > 1}


def _cuts(tensor: DTensor) -> list[tuple[int, int]]:
    """Mesh axis and tensor dimension of every cut, in the order in which the cuts were made."""
    found = []
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, (Shard, _StridedShard)):
            # Strided says that cuts of later axes were made before (FSDP cuts what tp has left).
            found.append((isinstance(placement, _StridedShard), axis, placement.dim))
        elif not placement.is_replicate():
            raise RuntimeError(f"a tensor laid out {tensor.placements} has no blocks")
    return [(axis, dim) for _, axis, dim in sorted(found)]


def ranks_of(mesh: DeviceMesh) -> list[int]:
    """The mesh's ranks, first axis outermost."""
    with unset_fake_temporarily():  # a mesh is real also where a step is traced on tensors without data
        ranks: list[int] = mesh.mesh.flatten().tolist()
    return ranks


def blocks(tensor: DTensor, ranks: Sequence[int]) -> dict[int, Block]:
    """Which part of the tensor each of its mesh's ranks holds."""
    mesh, cuts = tensor.device_mesh, _cuts(tensor)
    places = product(*(range(mesh.size(axis)) for axis in range(mesh.ndim)))
    return {rank: _block(tensor.shape, mesh, cuts, place) for rank, place in zip(ranks, places, strict=True)}


def _block(shape: Sequence[int], mesh: DeviceMesh, cuts: list[tuple[int, int]], place: tuple[int, ...]) -> Block:
    held = [range(size) for size in shape]
    for axis, dim in cuts:
        part = -(-len(held[dim]) // mesh.size(axis))  # torch.chunk: equal parts, the last ones shorter or empty
        held[dim] = held[dim][place[axis] * part : (place[axis] + 1) * part]
    return tuple(slice(one.start, one.start + len(one)) for one in held)


def _first_holders(held: dict[int, Block]) -> set[int]:
    """One rank for every distinct block: replicas need not send theirs."""
    first: dict[tuple[tuple[int, int], ...], int] = {}
    for rank, block in held.items():
        first.setdefault(tuple((one.start, one.stop) for one in block), rank)
    return set(first.values())


class Exchange:
    """Carries blocks between the ranks of one mesh."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh_ranks = ranks_of(mesh)
        # Only the mesh's own ranks take part, so others need not know of the group.
        self.group = (
            mesh.get_group()
            if mesh.ndim == 1
            else dist.new_group(sorted(self.mesh_ranks), use_local_synchronization=True)
        )
        self.ranks = dist.get_process_group_ranks(self.group)
        self.me = dist.get_rank()

    def rounds(self, count: int) -> Iterator[slice]:
        """Runs of as many matrices as there are ranks."""
        return (slice(start, start + len(self.ranks)) for start in range(0, count, len(self.ranks)))

    def on_whole(
        self, tensors: Sequence[DTensor], parts: Sequence[Tensor], work: Callable[[DTensor, Tensor], Tensor]
    ) -> list[Tensor]:
        """`work(tensor, whole)` for every tensor, at most one per rank: this rank's parts of the results.

        `parts` are this rank's blocks, all of one format and device; the values of the tensors themselves are not read.
        """
        held = [blocks(tensor, self.mesh_ranks) for tensor in tensors]
        senders = [_first_holders(one) for one in held]
        sent = [part if self.me in who else part[:0] for part, who in zip(parts, senders, strict=True)]
        own = self.ranks.index(self.me)
        mine, holders = (held[own], senders[own]) if own < len(held) else ({}, set())
        pieces = self._all_to_all(sent, [_size(mine[one]) if one in holders else 0 for one in self.ranks], parts[0])
        results: list[Tensor] = []
        if mine:
            whole = parts[0].new_empty(tensors[own].shape)
            for rank, piece in zip(self.ranks, pieces, strict=True):
                if rank in holders:
                    whole[mine[rank]] = piece.view(_shape(mine[rank]))
            result = work(tensors[own], whole)
            results = [result[mine[rank]] for rank in self.ranks]
        back = self._all_to_all(results, [part.numel() for part in parts], parts[0])
        return [flat.view(part.shape) for flat, part in zip(back, parts, strict=False)]

    def _all_to_all(self, sent: Sequence[Tensor], sizes: Sequence[int], like: Tensor) -> list[Tensor]:
        """Sends the i-th tensor to the i-th rank; what the others sent here, flat, by rank."""
        world = len(self.ranks)
        send_sizes = [one.numel() for one in sent] + [0] * (world - len(sent))
        receive_sizes = [*sizes, *[0] * (world - len(sizes))]
        outgoing = torch.cat([one.reshape(-1) for one in sent]) if sent else like.new_empty(0)
        incoming = like.new_empty(sum(receive_sizes))
        dist.all_to_all_single(incoming, outgoing, receive_sizes, send_sizes, group=self.group)
        return list(torch.split(incoming, receive_sizes))


def _shape(block: Block) -> tuple[int, ...]:
    return tuple(one.stop - one.start for one in block)


def _size(block: Block) -> int:
    return torch.Size(_shape(block)).numel()
