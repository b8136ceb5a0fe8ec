"""Several sources as one: which sample comes from which source, by arithmetic on the sample's number alone.

The sources are put into a tree, the two lightest joined first (as Huffman's code does). At a fork whose left side has
the share p of its weight, the first m samples that come to the fork give round(m × p) to the left and the rest to the
right. So the source of a number, and how many samples that source gave before, follow from a few divisions of whole
numbers, for any number, in any order, on any rank; each source's own numbers come one after the other.

At every number, each source has given its exact share of the samples so far to within 1/2 where two sources are
blended, and to within 2 however many there are (the worst seen is 1.2): a fork adds at most 1/2 and passes on at most
2/3 of the error of the one above to a fork below it (in such a tree no fork has more than 2/3 of the weight of the one
above).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
from numpy.typing import NDArray

from meshwright.engine.data.sampler import Samples, Source
from meshwright.errors import InputError

UNITS = 1 << 40  # weights become whole numbers of this many parts, so that every machine divides alike


@dataclass(frozen=True)
class _Fork:
    left: _Fork | int  # another fork, or the place of a source
    right: _Fork | int
    left_weight: int
    weight: int

    def to_left(self, samples: int) -> int:
        """How many of the first samples go left: their share, rounded half up."""
        return (2 * samples * self.left_weight + self.weight) // (2 * self.weight)


class Shares:
    """Deals numbers out to sources by their weights."""

    def __init__(self, weights: Sequence[float]) -> None:
        units = _units(weights)
        order = count()
        heap: list[tuple[int, int, _Fork | int]] = [(unit, next(order), i) for i, unit in enumerate(units) if unit]
        heapq.heapify(heap)
        while len(heap) > 1:
            (light, _, left), (heavy, _, right) = heapq.heappop(heap), heapq.heappop(heap)
            heapq.heappush(heap, (light + heavy, next(order), _Fork(left, right, light, light + heavy)))
        self.sources = len(units)
        self._root = heap[0][2]

    def source(self, number: int) -> tuple[int, int]:
        """The source of the sample with this number, and how many samples that source gave before."""
        node = self._root
        while isinstance(node, _Fork):
            before = node.to_left(number)
            if node.to_left(number + 1) > before:
                node, number = node.left, before
            else:
                node, number = node.right, number - before
        return node, number

    def given(self, samples: int) -> list[int]:
        """How many of the first samples each source gives."""
        found = [0] * self.sources
        left = [(self._root, samples)]
        while left:
            node, part = left.pop()
            if isinstance(node, _Fork):
                to_left = node.to_left(part)
                left += [(node.left, to_left), (node.right, part - to_left)]
            else:
                found[node] = part
        return found


def tempered(weights: Mapping[str, float], temperature: float, field: str = "data.blend") -> dict[str, float]:
    """Weights that add up to 1, evened out by a temperature: each to the power of 1 / temperature."""
    for name, weight in weights.items():
        if not 0 <= weight < float("inf"):
            raise InputError("a weight is a number of at least 0", field=f"{field}.{name}", value=weight)
    if not sum(weights.values()):
        raise InputError("at least one source needs a weight above 0", field=field, value=dict(weights))
    top = max(weights.values())
    powers = {name: (weight / top) ** (1 / temperature) if weight else 0.0 for name, weight in weights.items()}
    return {name: power / sum(powers.values()) for name, power in powers.items()}


class Blend:
    """Samples of several sources in the proportion of their weights; from one sample on, of other weights."""

    def __init__(
        self,
        sources: Sequence[Source],
        weights: Sequence[float],
        anneal_weights: Sequence[float] | None = None,
        anneal_from: int | None = None,
    ) -> None:
        """`anneal_from` is the first sample that is drawn by `anneal_weights`; sources go on where they were."""
        self.sources = sources
        self.shares = Shares(weights)
        self.anneal_from = anneal_from if anneal_weights is not None else None
        self.anneal_shares = Shares(anneal_weights) if anneal_weights is not None else None
        self.before_annealing = self.shares.given(anneal_from) if anneal_from is not None else []
        self.in_order = any(getattr(source, "in_order", False) for source in sources)

    def source(self, number: int) -> tuple[int, int]:
        """The source of the sample with this number, and the number it has there."""
        if self.anneal_from is None or self.anneal_shares is None or number < self.anneal_from:
            return self.shares.source(number)
        which, after = self.anneal_shares.source(number - self.anneal_from)
        return which, self.before_annealing[which] + after

    def samples(self, numbers: Sequence[int]) -> Samples:
        """The samples with these numbers."""
        drawn = [self.source(number) for number in numbers]
        places: dict[int, list[int]] = {}
        for place, (which, _) in enumerate(drawn):
            places.setdefault(which, []).append(place)
        parts = {which: self.sources[which].samples([drawn[p][1] for p in at]) for which, at in places.items()}
        return _interleaved(list(parts.values()), list(places.values()))


def _interleaved(parts: list[Samples], places: list[list[int]]) -> Samples:
    """The samples of several sources in the places that they were drawn for."""
    if len(parts) == 1:
        return parts[0]
    widths = {part.width for part in parts}
    if len(widths) > 1:
        raise ValueError(f"the sources of a blend give samples of different widths: {sorted(widths)}")
    if any(part.documents is not None for part in parts):
        parts = [_with_documents(part) for part in parts]
    order = np.argsort(np.concatenate([np.array(at) for at in places]))
    documents = [part.documents for part in parts if part.documents is not None]
    return Samples(
        np.concatenate([part.tokens for part in parts])[order],
        np.concatenate([part.counted for part in parts])[order],
        np.concatenate(documents)[order] if documents else None,
        {name: np.concatenate([part.whole[name] for part in parts])[order] for name in parts[0].whole},
    )


def _with_documents(samples: Samples) -> Samples:
    if samples.documents is not None:
        return samples
    one: NDArray[np.int64] = np.zeros(samples.counted.shape, dtype=np.int64)
    return replace(samples, documents=one)


def _units(weights: Sequence[float]) -> list[int]:
    whole = sum(weights)
    return [max(round(weight / whole * UNITS), 1) if weight else 0 for weight in weights]
