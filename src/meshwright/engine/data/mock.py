"""Made-up samples: a function of the seed and the sample's number, so that any layout and any resume sees the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.engine.data.sampler import Samples

HELD_OUT = 1 << 20  # added to the seed of made-up samples that are only evaluated on
NOISE = 0.1  # part of the tokens that follow no pattern
TYPICAL = (256, 129)  # tokens of documents in turn: rows of like length are then filled up by a third


class Mock:
    """Sequences that count upwards from a random token, with noise: a model can learn them, so that its loss falls."""

    def __init__(self, vocab: int, seq_length: int, seed: int) -> None:
        self.vocab, self.seq_length, self.seed = vocab, seq_length, seed

    def samples(self, numbers: Sequence[int]) -> Samples:
        """The samples with these numbers."""
        tokens = np.stack([self._sample(number) for number in numbers])
        return Samples(tokens, np.ones((len(numbers), self.seq_length), dtype=bool))

    def _sample(self, number: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        random = np.random.Generator(np.random.Philox(key=[self.seed, number]))
        length = self.seq_length + 1
        counted = (random.integers(self.vocab) + np.arange(length)) % self.vocab
        noise = random.integers(self.vocab, size=length)
        return np.where(random.random(length) < NOISE, noise, counted)


def typical_documents(samples: int, width: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """The numbers of the documents that each token belongs to, [samples, width], for documents of typical lengths."""
    pairs = -(-width // sum(TYPICAL))
    numbers = np.repeat(np.arange(2 * pairs), TYPICAL * pairs)[:width]
    return np.tile(numbers, (samples, 1))
