"""Maps tensors as a stage stores them to the model's tensors: in segments, or with one dimension split in two.

Both are detected from shapes alone, so that a checkpoint can be read without building its model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from meshwright.engine.model.init import local_indices
from meshwright.errors import MeshwrightError

Shape = tuple[int, ...]
Box = tuple[slice, ...]
ADAPTER_TENSOR = re.compile(r"(\.|_)lora_(A|B|magnitude)(_\d+)?$")


@dataclass(frozen=True)
class TensorLocation:
    """The part of a model tensor that a stored tensor represents."""

    name: str  # of the model tensor
    dim: int = 0  # the dimension along which segments are concatenated
    start: int = 0  # of this segment
    split_dim: int | None = None  # a model dimension that is stored as two: this and the next


def locate_tensors(
    stored: Mapping[str, Shape], shapes: Mapping[str, Shape], tied: Mapping[str, str]
) -> dict[str, TensorLocation]:
    """Return the location of every stored tensor in the model, except adapters."""
    found: dict[str, TensorLocation] = {}
    segments: dict[str, list[str]] = {}
    for name, shape in stored.items():
        full = tied.get(name, name)
        if ADAPTER_TENSOR.search(name):
            continue
        if full in shapes:
            found[name] = TensorLocation(full, split_dim=_split_dim(name, shape, shapes[full]))
        elif name.rpartition("_")[0] in shapes and name.rpartition("_")[2].isdigit():
            segments.setdefault(name.rpartition("_")[0], []).append(name)
    for full, parts in segments.items():
        parts.sort(key=lambda part: int(part.rpartition("_")[2]))
        dim = _segment_dim(full, [stored[part] for part in parts], shapes[full])
        start = 0
        for part in parts:
            found[part] = TensorLocation(full, dim, start)
            start += stored[part][dim]
    return found


def _split_dim(name: str, shape: Shape, full: Shape) -> int | None:
    """Return the model dimension that is stored as two; None if the shapes are equal."""
    if shape == full:
        return None
    for dim in range(len(full) if len(shape) == len(full) + 1 else 0):
        if (*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :]) == full:
            return dim
    raise _shape_mismatch(name, shape, full)


def _segment_dim(name: str, parts: list[Shape], full: Shape) -> int:
    for dim in range(len(full)):
        rest = {(*part[:dim], *part[dim + 1 :]) for part in parts}
        if rest == {(*full[:dim], *full[dim + 1 :])} and sum(part[dim] for part in parts) == full[dim]:
            return dim
    raise _shape_mismatch(name, parts[0], full)


def _shape_mismatch(name: str, shape: Shape, full: Shape) -> MeshwrightError:
    return MeshwrightError(f"{name} is stored with shape {shape}, which cannot be mapped to the model's {full}")


def local_views(tensor: torch.Tensor, location: TensorLocation) -> Iterator[tuple[torch.Tensor, Box]]:
    """Yield views of this rank's part of a stored tensor, each with its slices in the model tensor."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if local.numel() == 0:
        return
    box = local_box(tensor)
    dim = location.split_dim
    if dim is None:
        if box:
            first = box[location.dim]
            box[location.dim] = slice(first.start + location.start, first.stop + location.start)
        yield local, tuple(box)
        return
    outer, inner, width = box[dim], box[dim + 1], tensor.shape[dim + 1]
    if inner.stop - inner.start == width:
        shape = local.shape
        view = local.view(*shape[:dim], shape[dim] * width, *shape[dim + 2 :])  # must not copy: it is written to
        yield view, (*box[:dim], slice(outer.start * width, outer.stop * width), *box[dim + 2 :])
        return
    for i in range(outer.start, outer.stop):
        inside = slice(i * width + inner.start, i * width + inner.stop)
        yield local.select(dim, i - outer.start), (*box[:dim], inside, *box[dim + 2 :])


def local_box(tensor: torch.Tensor) -> list[slice]:
    """Return the slices of a tensor that this rank has: contiguous, even if several mesh axes shard a dimension."""
    indices = [local_indices(tensor, dim) for dim in range(tensor.ndim)]
    return [slice(int(one[0]), int(one[-1]) + 1) for one in indices]
