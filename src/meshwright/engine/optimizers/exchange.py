"""Gathers sharded matrices on one rank each, for update rules that need the full matrix.

Matrices are processed in rounds of as many parameters as the mesh has ranks: each rank receives all blocks of one
parameter, updates the full matrix and sends the blocks back. Each matrix is processed once, not once per rank.
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


def sharded_dims(tensor: Tensor) -> set[int]:
    """Return the dimensions along which a tensor is sharded over more than one rank."""
    if not isinstance(tensor, DTensor):
        return set()
    return {dim for axis, dim in _shardings(tensor) if tensor.device_mesh.size(axis) > 1}


def _shardings(tensor: DTensor) -> list[tuple[int, int]]:
    """Return mesh axis and tensor dimension of every sharding, in the order in which they were applied."""
    found = []
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, (Shard, _StridedShard)):
            # _StridedShard: later mesh axes were sharded first (FSDP shards what tp has sharded).
            found.append((isinstance(placement, _StridedShard), axis, placement.dim))
        elif not placement.is_replicate():
            raise RuntimeError(f"a tensor with placements {tensor.placements} has no blocks")
    return [(axis, dim) for _, axis, dim in sorted(found)]


def ranks_of(mesh: DeviceMesh) -> list[int]:
    """Return the mesh's ranks, first axis outermost."""
    with unset_fake_temporarily():  # the mesh tensor is real even when the step is traced on fake tensors
        ranks: list[int] = mesh.mesh.flatten().tolist()
    return ranks


def blocks(tensor: DTensor, ranks: Sequence[int]) -> dict[int, Block]:
    """Return the block of the tensor that each of its mesh's ranks holds."""
    mesh, shardings = tensor.device_mesh, _shardings(tensor)
    coordinates = product(*(range(mesh.size(axis)) for axis in range(mesh.ndim)))
    return {rank: _block(tensor.shape, mesh, shardings, at) for rank, at in zip(ranks, coordinates, strict=True)}


def _block(shape: Sequence[int], mesh: DeviceMesh, shardings: list[tuple[int, int]], at: tuple[int, ...]) -> Block:
    local = [range(size) for size in shape]
    for axis, dim in shardings:
        size = -(-len(local[dim]) // mesh.size(axis))  # torch.chunk: equal chunks, the last ones shorter or empty
        local[dim] = local[dim][at[axis] * size : (at[axis] + 1) * size]
    return tuple(slice(one.start, one.start + len(one)) for one in local)


def _first_holders(by_rank: dict[int, Block]) -> set[int]:
    """Return one rank for every distinct block: replicas need not send theirs."""
    first: dict[tuple[tuple[int, int], ...], int] = {}
    for rank, block in by_rank.items():
        first.setdefault(tuple((one.start, one.stop) for one in block), rank)
    return set(first.values())


class Exchange:
    """Exchanges blocks between the ranks of one mesh."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh_ranks = ranks_of(mesh)
        # Ranks outside the mesh do not call this, so the group must not need them.
        self.group = (
            mesh.get_group()
            if mesh.ndim == 1
            else dist.new_group(sorted(self.mesh_ranks), use_local_synchronization=True)
        )
        self.ranks = dist.get_process_group_ranks(self.group)
        self.me = dist.get_rank()

    def rounds(self, count: int) -> Iterator[slice]:
        """Yield slices of as many matrices as there are ranks."""
        return (slice(start, start + len(self.ranks)) for start in range(0, count, len(self.ranks)))

    def on_full_matrices(
        self, tensors: Sequence[DTensor], parts: Sequence[Tensor], update: Callable[[DTensor, Tensor], Tensor]
    ) -> list[Tensor]:
        """Run `update(tensor, full)` for every tensor, at most one per rank; return this rank's blocks of the results.

        `parts` are this rank's blocks, all of one dtype and device; the tensors themselves are not read.
        """
        by_rank = [blocks(tensor, self.mesh_ranks) for tensor in tensors]
        senders = [_first_holders(one) for one in by_rank]
        sent = [part if self.me in who else part[:0] for part, who in zip(parts, senders, strict=True)]
        index = self.ranks.index(self.me)
        mine, holders = (by_rank[index], senders[index]) if index < len(by_rank) else ({}, set())
        pieces = self._all_to_all(sent, [_size(mine[one]) if one in holders else 0 for one in self.ranks], parts[0])
        results: list[Tensor] = []
        if mine:
            full = parts[0].new_empty(tensors[index].shape)
            for rank, piece in zip(self.ranks, pieces, strict=True):
                if rank in holders:
                    full[mine[rank]] = piece.view(_shape(mine[rank]))
            result = update(tensors[index], full)
            results = [result[mine[rank]] for rank in self.ranks]
        back = self._all_to_all(results, [part.numel() for part in parts], parts[0])
        return [flat.view(part.shape) for flat, part in zip(back, parts, strict=False)]

    def _all_to_all(self, sent: Sequence[Tensor], sizes: Sequence[int], like: Tensor) -> list[Tensor]:
        """Send the i-th tensor to the i-th rank; return what this rank received, flat, by sender."""
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
