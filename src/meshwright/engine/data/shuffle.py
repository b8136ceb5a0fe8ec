"""The order in which a corpus is gone through: a shuffle per epoch that needs no memory and knows no ranks."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt

from meshwright.engine.data.sampler import Corpus, Samples, stack

ROUNDS = 8
WORD = (1 << 64) - 1


class Shuffled:
    """Samples without an end: every epoch shows each sample of a corpus once, in an order of its own.

    The order is a function of the seed, the epoch and the size of the corpus: ranks, batch sizes and resumes do not
    enter into it.
    """

    def __init__(self, corpus: Corpus, seed: int) -> None:
        self.corpus, self.seed = corpus, seed
        self.in_order = bool(getattr(corpus, "in_order", False))

    def samples(self, numbers: Sequence[int]) -> Samples:
        """The samples with these numbers."""
        return stack([self.corpus.sample(self.index(number)) for number in numbers])

    def index(self, number: int) -> int:
        """The place in the corpus of the sample with this number."""
        size = len(self.corpus)
        epoch, place = divmod(number, size)
        return shuffled(place, size, _mix(self.seed * 0x9E3779B97F4A7C15 + epoch))


def shuffled(place: int, size: int, key: int) -> int:
    """Where a permutation of range(size), chosen by the key, sends a place.

    The range lies in a rectangle of about √size by √size. Each round moves one coordinate by an amount that depends on
    the other (a Feistel network over two radices), which is one to one; the few places of the rectangle that are
    outside the range are walked through until one inside comes.
    """
    columns = isqrt(size - 1) + 1
    rows = -(-size // columns)
    while True:
        row, column = divmod(place, columns)
        for turn in range(0, ROUNDS, 2):
            row = (row + (_mix(key + _mix(turn) + column) * rows >> 64)) % rows
            column = (column + (_mix(key + _mix(turn + 1) + row) * columns >> 64)) % columns
        place = row * columns + column
        if place < size:
            return place


def _mix(x: int) -> int:
    """64 bits that look random, one to one (the finaliser of SplitMix64)."""
    x = (x + 0x9E3779B97F4A7C15) & WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31)
