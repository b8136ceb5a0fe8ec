"""Rows of whole tensors, gathered from the ranks that hold parts of them; never more than the rows asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from meshwright.engine.hf_io.layout_map import Shape
from meshwright.engine.mesh import Mesh
from meshwright.engine.model.init import local_indices


class Source(Protocol):
    """Stored tensors of which rows can be had."""

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """The whole tensors' shapes by their stored names."""

    def rows(self, name: str, first: int, last: int, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """Some rows of a whole tensor, on the CPU of the rank that writes; None on the others."""


class Read:
    """Tensors that a function reads whole; the last one is kept, as its rows are asked for one after the other."""

    def __init__(self, shapes: Mapping[str, Shape], read: Callable[[str], torch.Tensor]) -> None:
        self.shapes: Mapping[str, Shape] = shapes
        self._read = read
        self._last: tuple[str, torch.Tensor] | None = None

    def rows(self, name: str, first: int, last: int, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        if self._last is None or self._last[0] != name:
            self._last = None  # before the next one is read
            self._last = (name, self._read(name))
        tensor = self._last[1]
        part = tensor[first:last] if tensor.ndim else tensor.reshape(1)
        return part.to(dtype or part.dtype)


class LocalTensors:
    """The tensors of a rank's stages. Every rank of a pipeline stage must ask for the same rows in the same order."""

    def __init__(self, stages: Sequence[Any], mesh: Mesh) -> None:
        self.mesh = mesh
        self.tensors: dict[str, torch.Tensor] = {}
        for stage in stages:
            _cut_again(stage)
            copied = f"{stage.parts.body}.{stage.parts.embedding}.weight" if not stage.first else ""
            own = [*stage.named_parameters(), *stage.named_buffers()]
            self.tensors |= {name: tensor.detach() for name, tensor in own if name != copied}
        self.shapes: Mapping[str, Shape] = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    @property
    def writes(self) -> bool:
        """Whether this rank is the one of its pipeline stage that gets the rows."""
        return self.mesh.stage.rank == 0

    @torch.no_grad()
    def rows(self, name: str, first: int, last: int, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        tensor = self.tensors[name]
        kind = dtype or tensor.dtype
        if not isinstance(tensor, DTensor):
            part = tensor[first:last] if tensor.ndim else tensor.reshape(1)
            return part.to("cpu", kind) if self.writes else None
        found = torch.zeros(last - first, *tensor.shape[1:], dtype=kind, device=self._device())
        if self._answers(tensor):
            _paste(found, tensor, first, last)
        stage = self.mesh.stage
        if stage.size > 1:
            # Only one rank has anything but noughts at a place, so sums of bytes are the bytes.
            dist.reduce(found.view(torch.uint8), stage.ranks[0], group=stage.group)
        return found.cpu() if self.writes else None

    def _device(self) -> torch.device:
        return torch.device(self.mesh.device_type)

    def _answers(self, tensor: DTensor) -> bool:
        """Whether this rank's copy of its part is the one that counts."""
        mesh = tensor.device_mesh
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        first = all(at == 0 for at, place in zip(coordinate, tensor.placements, strict=True) if not _cuts(place))
        return first and self.mesh.stage.ranks[0] in mesh.mesh.flatten().tolist()


def _cuts(place: Any) -> bool:
    return isinstance(place, Shard) or getattr(place, "dim", None) is not None


def _paste(found: torch.Tensor, tensor: DTensor, first: int, last: int) -> None:
    """Puts what this rank holds of some rows into their places."""
    local = tensor.to_local()
    if local.numel() == 0:
        return
    box = []
    for dim in range(tensor.ndim):
        rows = local_indices(tensor, dim)
        box.append(slice(int(rows[0]), int(rows[-1]) + 1))
    start, stop = max(first, box[0].start), min(last, box[0].stop)
    if start < stop:
        found[(slice(start - first, stop - first), *box[1:])] = local[start - box[0].start : stop - box[0].start].to(
            found.device, found.dtype
        )


def _cut_again(stage: Any) -> None:
    """Weights that stayed gathered after a forward pass are cut again: the parts are what is up to date."""
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
