"""Blends several sources deterministically: the sample number alone determines the source.

The sources form a Huffman tree (the two lightest are merged first). At a node whose left child has the share p of the
weight, round(m × p) of the first m samples go left and the rest go right. The source of a sample, and how many samples
that source contributed before, follow from a few integer divisions: random access, on any rank, without state.
Each source is read in order of its own sample numbers.

At every sample number, each source has contributed its exact share to within 1/2 for two sources and to within 2 for
any number of sources (worst observed: 1.2). A node adds at most 1/2 and passes at most 2/3 of its parent's error on,
because no child node of this tree has more than 2/3 of its parent's weight.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
from numpy.typing import NDArray

from meshwright.engine.data.sample_types import Samples, Source
from meshwright.errors import InputError

WEIGHT_UNITS = 1 << 40  # integer weights: floats could round differently across machines


@dataclass(frozen=True)
class _Node:
    pending: _Node | int  # another node, or the index of a source
    right: _Node | int
    left_weight: int
    weight: int

    def to_left(self, samples: int) -> int:
        """Return how many of the first `samples` go left (round half up)."""
        return (2 * samples * self.left_weight + self.weight) // (2 * self.weight)


class BlendSchedule:
    """Assigns sample numbers to sources in proportion to their weights."""

    def __init__(self, weights: Sequence[float]) -> None:
        units = _integer_weights(weights)
        order = count()
        heap: list[tuple[int, int, _Node | int]] = [(unit, next(order), i) for i, unit in enumerate(units) if unit]
        heapq.heapify(heap)
        while len(heap) > 1:
            (light, _, pending), (heavy, _, right) = heapq.heappop(heap), heapq.heappop(heap)
            heapq.heappush(heap, (light + heavy, next(order), _Node(pending, right, light, light + heavy)))
        self.sources = len(units)
        self._root = heap[0][2]

    def source(self, number: int) -> tuple[int, int]:
        """Return the source of a sample and how many samples that source contributed before it."""
        node = self._root
        while isinstance(node, _Node):
            before = node.to_left(number)
            if node.to_left(number + 1) > before:
                node, number = node.pending, before
            else:
                node, number = node.right, number - before
        return node, number

    def counts(self, samples: int) -> list[int]:
        """Return how many of the first `samples` each source contributes."""
        found = [0] * self.sources
        pending = [(self._root, samples)]
        while pending:
            node, part = pending.pop()
            if isinstance(node, _Node):
                to_left = node.to_left(part)
                pending += [(node.pending, to_left), (node.right, part - to_left)]
            else:
                found[node] = part
        return found


def apply_temperature(weights: Mapping[str, float], temperature: float, field: str = "data.blend") -> dict[str, float]:
    """Raise weights to the power 1 / temperature and normalize them to sum to 1."""
    for name, weight in weights.items():
        if not 0 <= weight < float("inf"):
            raise InputError("a blend weight must be finite and at least 0", field=f"{field}.{name}", value=weight)
    if not sum(weights.values()):
        raise InputError("at least one blend weight must be above 0", field=field, value=dict(weights))
    top = max(weights.values())
    powers = {name: (weight / top) ** (1 / temperature) if weight else 0.0 for name, weight in weights.items()}
    return {name: power / sum(powers.values()) for name, power in powers.items()}


class Blend:
    """Samples of several sources in proportion to their weights, with an optional second set of annealing weights."""

    def __init__(
        self,
        sources: Sequence[Source],
        weights: Sequence[float],
        anneal_weights: Sequence[float] | None = None,
        anneal_from: int | None = None,
    ) -> None:
        """`anneal_from` is the first sample drawn with `anneal_weights`; sources continue where they were."""
        self.sources = sources
        self.schedule = BlendSchedule(weights)
        self.anneal_from = anneal_from if anneal_weights is not None else None
        self.anneal_schedule = BlendSchedule(anneal_weights) if anneal_weights is not None else None
        self.counts_before_anneal = self.schedule.counts(anneal_from) if anneal_from is not None else []
        self.in_order = any(getattr(source, "in_order", False) for source in sources)

    def source(self, number: int) -> tuple[int, int]:
        """Return the source of a sample and the sample's number within that source."""
        if self.anneal_from is None or self.anneal_schedule is None or number < self.anneal_from:
            return self.schedule.source(number)
        which, after = self.anneal_schedule.source(number - self.anneal_from)
        return which, self.counts_before_anneal[which] + after

    def samples(self, numbers: Sequence[int]) -> Samples:
        """Return the samples with these numbers."""
        assigned = [self.source(number) for number in numbers]
        rows: dict[int, list[int]] = {}
        for row, (which, _) in enumerate(assigned):
            rows.setdefault(which, []).append(row)
        parts = [self.sources[which].samples([assigned[row][1] for row in where]) for which, where in rows.items()]
        return interleave(parts, list(rows.values()))


def interleave(parts: list[Samples], rows: list[list[int]]) -> Samples:
    """Merge the samples of several sources back into request order."""
    if len(parts) == 1:
        return parts[0]
    widths = {part.width for part in parts}
    if len(widths) > 1:
        raise ValueError(f"the sources of a blend return samples of different widths: {sorted(widths)}")
    if any(part.documents is not None for part in parts):
        parts = [_with_documents(part) for part in parts]
    order = np.argsort(np.concatenate([np.array(where) for where in rows]))
    documents = [part.documents for part in parts if part.documents is not None]
    return Samples(
        np.concatenate([part.tokens for part in parts])[order],
        np.concatenate([part.loss_mask for part in parts])[order],
        np.concatenate(documents)[order] if documents else None,
        {name: np.concatenate([part.extras[name] for part in parts])[order] for name in parts[0].extras},
    )


def _with_documents(samples: Samples) -> Samples:
    if samples.documents is not None:
        return samples
    single: NDArray[np.int64] = np.zeros(samples.loss_mask.shape, dtype=np.int64)
    return replace(samples, documents=single)


def _integer_weights(weights: Sequence[float]) -> list[int]:
    total = sum(weights)
    return [max(round(weight / total * WEIGHT_UNITS), 1) if weight else 0 for weight in weights]
