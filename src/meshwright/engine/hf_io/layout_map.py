"""How tensors are stored in a stage, against what they are in the model: in segments, or two dimensions for one.

Both are found from the shapes alone, so that a checkpoint without its model can be read the same way.
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
ADAPTER = re.compile(r"(\.|_)lora_(A|B|magnitude)(_\d+)?$")


@dataclass(frozen=True)
class Place:
    """Where a stored tensor lies in a tensor of the model."""

    name: str  # the model's
    dim: int = 0  # of several segments: along which they lie one behind the other
    start: int = 0  # where this one begins
    pair: int | None = None  # a dimension that is stored as two, this and the next


def places(stored: Mapping[str, Shape], shapes: Mapping[str, Shape], tied: Mapping[str, str]) -> dict[str, Place]:
    """Where every stored tensor lies in the model; adapters have no place in it."""
    found: dict[str, Place] = {}
    segments: dict[str, list[str]] = {}
    for name, shape in stored.items():
        whole = tied.get(name, name)
        if ADAPTER.search(name):
            continue
        if whole in shapes:
            found[name] = Place(whole, pair=_pair(name, shape, shapes[whole]))
        elif name.rpartition("_")[0] in shapes and name.rpartition("_")[2].isdigit():
            segments.setdefault(name.rpartition("_")[0], []).append(name)
    for whole, parts in segments.items():
        parts.sort(key=lambda part: int(part.rpartition("_")[2]))
        dim = _joined_dim(whole, [stored[part] for part in parts], shapes[whole])
        start = 0
        for part in parts:
            found[part] = Place(whole, dim, start)
            start += stored[part][dim]
    return found


def _pair(name: str, shape: Shape, whole: Shape) -> int | None:
    """The dimension of the whole that is stored as two; None where the shapes are the same."""
    if shape == whole:
        return None
    for at in range(len(whole) if len(shape) == len(whole) + 1 else 0):
        if (*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :]) == whole:
            return at
    raise _unlike(name, shape, whole)


def _joined_dim(name: str, parts: list[Shape], whole: Shape) -> int:
    for dim in range(len(whole)):
        rest = {(*part[:dim], *part[dim + 1 :]) for part in parts}
        if rest == {(*whole[:dim], *whole[dim + 1 :])} and sum(part[dim] for part in parts) == whole[dim]:
            return dim
    raise _unlike(name, parts[0], whole)


def _unlike(name: str, shape: Shape, whole: Shape) -> MeshwrightError:
    return MeshwrightError(f"{name} is stored as {shape} and the model has {whole}: these are not the same tensor")


def pieces(tensor: torch.Tensor, place: Place) -> Iterator[tuple[torch.Tensor, Box]]:
    """This rank's part of a stored tensor as views, each with the box of the model's tensor that it is."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if local.numel() == 0:
        return
    box = [_range(local_indices(tensor, dim)) for dim in range(tensor.ndim)]
    at = place.pair
    if at is None:
        if box:
            first = box[place.dim]
            box[place.dim] = slice(first.start + place.start, first.stop + place.start)
        yield local, tuple(box)
        return
    outer, inner, width = box[at], box[at + 1], tensor.shape[at + 1]
    if inner.stop - inner.start == width:
        shape = local.shape
        view = local.view(*shape[:at], shape[at] * width, *shape[at + 2 :])  # never a copy: it is written to
        yield view, (*box[:at], slice(outer.start * width, outer.stop * width), *box[at + 2 :])
        return
    for i in range(outer.start, outer.stop):
        inside = slice(i * width + inner.start, i * width + inner.stop)
        yield local.select(at, i - outer.start), (*box[:at], inside, *box[at + 2 :])


def _range(rows: torch.Tensor) -> slice:
    """What a rank holds along a dimension: always one run, also where several axes cut it."""
    return slice(int(rows[0]), int(rows[-1]) + 1)
