"""Gathers rows of full tensors from the ranks that shard them, never more than the requested rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from meshwright.engine.hf_io.layout_map import Shape, local_box
from meshwright.engine.mesh import Mesh


class TensorSource(Protocol):
    """Stored tensors that can be read by rows."""

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Return the full tensors' shapes by stored name."""

    def rows(self, name: str, first: int, last: int, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """Return rows of a full tensor on the CPU of the writing rank; None on the others."""


class FullTensorSource:
    """Tensors that a function reads in full; the last one is cached because its rows are requested in sequence."""

    def __init__(self, shapes: Mapping[str, Shape], read: Callable[[str], torch.Tensor]) -> None:
        self.shapes: Mapping[str, Shape] = shapes
        self._read = read
        self._last: tuple[str, torch.Tensor] | None = None

    def rows(self, name: str, first: int, last: int, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        if self._last is None or self._last[0] != name:
            self._last = None  # freed before the next one is read
            self._last = (name, self._read(name))
        tensor = self._last[1]
        part = tensor[first:last] if tensor.ndim else tensor.reshape(1)
        return part.to(dtype or part.dtype)


class ShardedTensors:
    """The tensors of a rank's stages. All ranks of a pipeline stage must request the same rows in the same order."""

    def __init__(self, stages: Sequence[Any], mesh: Mesh) -> None:
        self.mesh = mesh
        self.tensors: dict[str, torch.Tensor] = {}
        for stage in stages:
            _reshard(stage)
            copied = stage.embedding_weight if not stage.first else ""
            tensors = [*stage.named_parameters(), *stage.named_buffers()]
            self.tensors |= {name: tensor.detach() for name, tensor in tensors if name != copied}
        self.shapes: Mapping[str, Shape] = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    @property
    def writes(self) -> bool:
        """Whether this rank receives the rows of its pipeline stage."""
        return self.mesh.stage.rank == 0

    @torch.no_grad()
    def rows(self, name: str, first: int, last: int, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        tensor = self.tensors[name]
        target_dtype = dtype or tensor.dtype
        if not isinstance(tensor, DTensor):
            part = tensor[first:last] if tensor.ndim else tensor.reshape(1)
            return part.to("cpu", target_dtype) if self.writes else None
        rows = torch.zeros(last - first, *tensor.shape[1:], dtype=target_dtype, device=self._device())
        if self._owns_shard(tensor):
            _copy_local_rows(rows, tensor, first, last)
        stage = self.mesh.stage
        if stage.size > 1:
            # Exactly one rank is nonzero at each element, so summing bytes copies them exactly in any dtype.
            dist.reduce(rows.view(torch.uint8), stage.ranks[0], group=stage.group)
        return rows.cpu() if self.writes else None

    def _device(self) -> torch.device:
        return torch.device(self.mesh.device_type)

    def _owns_shard(self, tensor: DTensor) -> bool:
        """Return whether this rank contributes its shard: the first replica, in the writer's mesh."""
        mesh = tensor.device_mesh
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        first = all(
            at == 0 for at, placement in zip(coordinate, tensor.placements, strict=True) if not _is_shard(placement)
        )
        return first and self.mesh.stage.ranks[0] in mesh.mesh.flatten().tolist()


def _is_shard(placement: Any) -> bool:
    return isinstance(placement, Shard) or getattr(placement, "dim", None) is not None


def _copy_local_rows(out: torch.Tensor, tensor: DTensor, first: int, last: int) -> None:
    """Copy this rank's part of the rows into `out`."""
    local = tensor.to_local()
    if local.numel() == 0:
        return
    box = local_box(tensor)
    start, stop = max(first, box[0].start), min(last, box[0].stop)
    if start < stop:
        out[(slice(start - first, stop - first), *box[1:])] = local[start - box[0].start : stop - box[0].start].to(
            out.device, out.dtype
        )


def _reshard(stage: Any) -> None:
    """Reshard weights that stayed gathered after a forward pass: only the shards are up to date."""
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
