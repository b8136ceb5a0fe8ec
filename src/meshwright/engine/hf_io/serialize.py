"""Assembles the tensors of a model's files from stored tensors, a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.engine.hf_io.barriers import TensorChunks
from meshwright.engine.hf_io.gather import TensorSource
from meshwright.engine.hf_io.layout_map import Shape, TensorLocation, locate_tensors
from meshwright.engine.hf_io.merge import Adapter, AdapterNames, find_adapters, join_part, merge_rows
from meshwright.engine.hf_io.name_map import FileTensor, NameMap
from meshwright.engine.hf_io.shards import Entry
from meshwright.engine.patching import base_class

CHUNK_BYTES = 1 << 27  # gathered at once


@dataclass(frozen=True)
class TensorMeta:
    """A model tensor: the stored tensors it is assembled from, and the file tensors it is written as."""

    name: str
    shape: Shape
    dtype: torch.dtype  # in the files
    parts: tuple[tuple[str, TensorLocation], ...]
    file_tensors: tuple[FileTensor, ...]
    adapter: AdapterNames | None = None
    inputs_first: bool = False  # a matrix that is stored [in, out]

    @property
    def stacked(self) -> bool:
        return self.file_tensors[0].index is not None

    def entry(self, file_tensor: FileTensor) -> Entry:
        """Return the file entry of a file tensor."""
        shape = list(self.shape)
        if file_tensor.sources > 1:
            shape[file_tensor.dim] //= file_tensor.sources
        return Entry(file_tensor.name, self.dtype, tuple(shape[1:] if self.stacked else shape))


def model_tensors(source: TensorSource, names: NameMap, dtype: torch.dtype, scale: float | None) -> list[TensorMeta]:
    """Return the model tensors of a source, in its order."""
    grouped: dict[str, list[tuple[str, TensorLocation]]] = {}
    found = locate_tensors(source.shapes, names.shapes, names.tied)
    for stored, location in found.items():
        if stored not in names.tied:
            grouped.setdefault(location.name, []).append((stored, location))
    adapters = find_adapters(source.shapes) if scale is not None else {}
    return [
        TensorMeta(
            name,
            names.shapes[name],
            names.buffer_dtypes.get(name, dtype),
            tuple(parts),
            tuple(names.file_tensors(name)),
            adapters.get(name),
            _inputs_first(names.model, name),
        )
        for name, parts in grouped.items()
    ]


def all_chunks(tensors: Sequence[TensorMeta], source: TensorSource, scale: float | None) -> TensorChunks:
    """Yield the chunks of all file tensors in sequence."""
    for tensor in tensors:
        for name, first_byte, part, _ in tensor_chunks(tensor, source, scale):
            yield name, first_byte, part


def tensor_chunks(
    tensor: TensorMeta, source: TensorSource, scale: float | None
) -> Iterator[tuple[str, int, torch.Tensor | None, bool]]:
    """Yield chunks of a model tensor's file tensors: name, byte offset, data, and whether it is the last chunk."""
    adapter = _adapter(tensor, source, scale)
    count = tensor.shape[0] if tensor.shape else 1
    split = tensor.file_tensors[0].sources > 1 and not tensor.stacked
    row = max(1, (tensor.entry(tensor.file_tensors[0]).nbytes * len(tensor.file_tensors)) // max(1, count))
    # A row of an [in, out] matrix is part of every output, so merging an adapter needs all rows.
    all_rows = split or (tensor.adapter is not None and tensor.inputs_first and len(tensor.shape) == 2)
    step = count if all_rows else max(1, CHUNK_BYTES // row)
    for first in range(0, count, step):
        last = min(first + step, count)
        rows = _rows(tensor, source, first, last, keep=tensor.adapter is not None)
        if rows is not None and adapter is not None:
            rows = merge_rows(rows, first, adapter)
        rows = rows.to(tensor.dtype) if rows is not None else None
        for file_tensor in tensor.file_tensors:
            if tensor.stacked and not first <= (file_tensor.index or 0) < last:
                continue
            first_byte = 0 if tensor.stacked or split else first * row
            yield (
                file_tensor.name,
                first_byte,
                _part(rows, tensor, file_tensor, first),
                tensor.stacked or split or last == count,
            )


def _part(rows: torch.Tensor | None, tensor: TensorMeta, file_tensor: FileTensor, first: int) -> torch.Tensor | None:
    """Return the part of some rows that belongs to a file tensor."""
    if rows is None:
        return None
    if tensor.stacked:
        rows = rows[(file_tensor.index or 0) - first]
    if file_tensor.sources > 1:
        width = tensor.shape[file_tensor.dim] // file_tensor.sources
        rows = rows.narrow(file_tensor.dim - int(tensor.stacked), file_tensor.source * width, width)
    return rows


def _rows(tensor: TensorMeta, source: TensorSource, first: int, last: int, keep: bool) -> torch.Tensor | None:
    """Assemble rows of a model tensor from stored tensors; `keep` leaves them in the stored dtype."""
    dtype = None if keep else tensor.dtype
    found: list[torch.Tensor | None] = []
    along = tensor.parts[0][1].dim
    for stored, location in tensor.parts:
        start, stop = first, last
        if along == 0 and len(tensor.parts) > 1:
            size = source.shapes[stored][0]
            start, stop = max(first - location.start, 0), min(last - location.start, size)
            if start >= stop:
                continue
        found.append(source.rows(stored, start, stop, dtype))
    pieces = [part for part in found if part is not None]
    if len(pieces) != len(found):
        return None
    rows = pieces[0] if len(pieces) == 1 else torch.cat(pieces, along)
    return rows.reshape(last - first, *tensor.shape[1:]) if tensor.shape else rows


def _adapter(tensor: TensorMeta, source: TensorSource, scale: float | None) -> Adapter | None:
    """Gather the full adapter of a tensor (it is small); None on ranks that do not write."""
    if tensor.adapter is None or scale is None:
        return None
    stacked = not tensor.name.endswith(".weight")
    parts = {part: [_all_rows(source, name) for name in names] for part, names in tensor.adapter.parts.items()}
    if any(one is None for those in parts.values() for one in those):
        return None
    stored_parts: Any = parts
    a, b = (join_part(stored_parts, part, stacked) for part in "AB")
    magnitude = join_part(stored_parts, "magnitude", stacked) if "magnitude" in parts else None
    return Adapter(a, b, scale, magnitude, tensor.inputs_first)


def _all_rows(source: TensorSource, name: str) -> torch.Tensor | None:
    return source.rows(name, 0, source.shapes[name][0])


def _inputs_first(model: nn.Module, name: str) -> bool:
    """Return whether a matrix is stored [in, out]: GPT-2's linear layers, and the experts of some families."""
    owner: Any = model.get_submodule(name.rpartition(".")[0])
    return bool(getattr(owner, "is_transposed", False)) or base_class(owner).__name__ == "Conv1D"
