"""What of which tensor of a model's files comes next: stored tensors put together, a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.engine.hf_io.barriers import Emitted
from meshwright.engine.hf_io.gather import Source
from meshwright.engine.hf_io.layout_map import Place, Shape, places
from meshwright.engine.hf_io.merge import Adapter, AdapterNames, adapters_in, joined, merge_rows
from meshwright.engine.hf_io.name_map import Block, Described
from meshwright.engine.hf_io.shards import Entry
from meshwright.engine.patching import base_class

CHUNK = 1 << 27  # bytes gathered at once


@dataclass(frozen=True)
class TensorMeta:
    """A tensor of the model: the stored tensors that make it, and the tensors of the files that it becomes."""

    name: str
    shape: Shape
    dtype: torch.dtype  # in the files
    parts: tuple[tuple[str, Place], ...]
    blocks: tuple[Block, ...]
    adapter: AdapterNames | None = None
    inputs_first: bool = False  # a matrix that is stored [in, out]

    @property
    def stacked(self) -> bool:
        return self.blocks[0].index is not None

    def entry(self, block: Block) -> Entry:
        """A tensor of the files."""
        shape = list(self.shape)
        if block.sources > 1:
            shape[block.dim] //= block.sources
        return Entry(block.name, self.dtype, tuple(shape[1:] if self.stacked else shape))


def wholes_in(source: Source, described: Described, dtype: torch.dtype, scale: float | None) -> list[TensorMeta]:
    """The model's tensors that a source holds, in its order."""
    grouped: dict[str, list[tuple[str, Place]]] = {}
    found = places(source.shapes, described.shapes, described.tied)
    for stored, place in found.items():
        if stored not in described.tied:
            grouped.setdefault(place.name, []).append((stored, place))
    adapters = adapters_in(source.shapes) if scale is not None else {}
    return [
        TensorMeta(
            name,
            described.shapes[name],
            described.kept.get(name, dtype),
            tuple(parts),
            tuple(described.spread(name)),
            adapters.get(name),
            _inputs_first(described.model, name),
        )
        for name, parts in grouped.items()
    ]


def all_emitted(wholes: Sequence[TensorMeta], source: Source, scale: float | None) -> Emitted:
    """What all tensors of the files are made of, one after the other."""
    for whole in wholes:
        for name, first_byte, part, _ in emitted(whole, source, scale):
            yield name, first_byte, part


def emitted(
    whole: TensorMeta, source: Source, scale: float | None
) -> Iterator[tuple[str, int, torch.Tensor | None, bool]]:
    """What of which tensor of the files comes next: its name, how far into it, the numbers, and whether it is done."""
    adapter = _adapter(whole, source, scale)
    count = whole.shape[0] if whole.shape else 1
    split = whole.blocks[0].sources > 1 and not whole.stacked
    row = max(1, (whole.entry(whole.blocks[0]).nbytes * len(whole.blocks)) // max(1, count))
    # A row of a matrix [in, out] is a part of every output: an adapter needs them all.
    together = split or (whole.adapter is not None and whole.inputs_first and len(whole.shape) == 2)
    step = count if together else max(1, CHUNK // row)
    for first in range(0, count, step):
        last = min(first + step, count)
        rows = _rows(whole, source, first, last, keep=whole.adapter is not None)
        if rows is not None and adapter is not None:
            rows = merge_rows(rows, first, adapter)
        rows = rows.to(whole.dtype) if rows is not None else None
        for block in whole.blocks:
            if whole.stacked and not first <= (block.index or 0) < last:
                continue
            at = 0 if whole.stacked or split else first * row
            yield block.name, at, _part(rows, whole, block, first), whole.stacked or split or last == count


def _part(rows: torch.Tensor | None, whole: TensorMeta, block: Block, first: int) -> torch.Tensor | None:
    """What a tensor of the files has of some rows."""
    if rows is None:
        return None
    if whole.stacked:
        rows = rows[(block.index or 0) - first]
    if block.sources > 1:
        width = whole.shape[block.dim] // block.sources
        rows = rows.narrow(block.dim - int(whole.stacked), block.source * width, width)
    return rows


def _rows(whole: TensorMeta, source: Source, first: int, last: int, keep: bool) -> torch.Tensor | None:
    """Some rows of a tensor of the model, put together from what is stored; `keep`: in the stored format."""
    kind = None if keep else whole.dtype
    found: list[torch.Tensor | None] = []
    along = whole.parts[0][1].dim
    for stored, place in whole.parts:
        start, stop = first, last
        if along == 0 and len(whole.parts) > 1:
            size = source.shapes[stored][0]
            start, stop = max(first - place.start, 0), min(last - place.start, size)
            if start >= stop:
                continue
        found.append(source.rows(stored, start, stop, kind))
    have = [part for part in found if part is not None]
    if len(have) != len(found):
        return None
    rows = have[0] if len(have) == 1 else torch.cat(have, along)
    return rows.reshape(last - first, *whole.shape[1:]) if whole.shape else rows


def _adapter(whole: TensorMeta, source: Source, scale: float | None) -> Adapter | None:
    """The adapter of a tensor, gathered whole: it is small. On ranks that do not write, an empty one."""
    if whole.adapter is None or scale is None:
        return None
    stacked = not whole.name.endswith(".weight")
    parts = {part: [_all_rows(source, name) for name in names] for part, names in whole.adapter.parts.items()}
    if any(one is None for those in parts.values() for one in those):
        return None
    told: Any = parts
    a, b = (joined(told, part, stacked) for part in "AB")
    magnitude = joined(told, "magnitude", stacked) if "magnitude" in parts else None
    return Adapter(a, b, scale, magnitude, whole.inputs_first)


def _all_rows(source: Source, name: str) -> torch.Tensor | None:
    return source.rows(name, 0, source.shapes[name][0])


def _inputs_first(model: nn.Module, name: str) -> bool:
    """Whether a matrix is stored [in, out]: GPT-2's linear layers, and the experts of some families."""
    owner: Any = model.get_submodule(name.rpartition(".")[0])
    return bool(getattr(owner, "is_transposed", False)) or base_class(owner).__name__ == "Conv1D"
