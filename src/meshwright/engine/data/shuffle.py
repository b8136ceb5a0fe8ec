"""A stateless per-epoch shuffle that is independent of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt

from meshwright.engine.data.sample_types import Corpus, Samples, stack

ROUNDS = 8
WORD = (1 << 64) - 1


class Shuffled:
    """An endless source: every epoch visits each sample of a corpus once, in its own order.

    The order depends on the seed, the epoch and the size of the corpus, not on ranks, batch sizes or resumes.
    """

    def __init__(self, corpus: Corpus, seed: int) -> None:
        self.corpus, self.seed = corpus, seed
        self.in_order = bool(getattr(corpus, "in_order", False))

    def samples(self, numbers: Sequence[int]) -> Samples:
        """Return the samples with these numbers."""
        return stack([self.corpus.sample(self.index(number)) for number in numbers])

    def epoch_size(self, limit: int) -> int:
        """Return the number of different samples."""
        return len(self.corpus)

    def index(self, number: int) -> int:
        """Return the corpus index of the sample with this number."""
        size = len(self.corpus)
        epoch, position = divmod(number, size)
        return permute_index(position, size, _mix(self.seed * 0x9E3779B97F4A7C15 + epoch))


def permute_index(position: int, size: int, key: int) -> int:
    """Apply the keyed permutation of range(size) to a position.

    The range is laid out in a rectangle of about √size by √size. Each round shifts one coordinate by an amount that
    depends on the other (a Feistel network over two radices), which is a bijection. The few positions of the rectangle
    outside the range are permuted again until they land inside (cycle walking).
    """
    columns = isqrt(size - 1) + 1
    rows = -(-size // columns)
    while True:
        row, column = divmod(position, columns)
        for round_ in range(0, ROUNDS, 2):
            row = (row + (_mix(key + _mix(round_) + column) * rows >> 64)) % rows
            column = (column + (_mix(key + _mix(round_ + 1) + row) * columns >> 64)) % columns
        position = row * columns + column
        if position < size:
            return position


def _mix(x: int) -> int:
    """Mix 64 bits bijectively (the SplitMix64 finalizer)."""
    x = (x + 0x9E3779B97F4A7C15) & WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31)
