"""Mock samples: a function of the seed and the sample number alone, so every layout and every resume sees the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.engine.data.sample_types import Samples

VALIDATION_SEED_OFFSET = 1 << 20  # added to the seed of mock validation samples
NOISE_SHARE = 0.1  # share of tokens that are random
TYPICAL_LENGTHS = (256, 129)  # alternating document lengths: padding documents to equal rows then costs a third


class Mock:
    """Sequences that count up from a random token, with noise: learnable, so the loss falls."""

    def __init__(self, vocab: int, seq_length: int, seed: int) -> None:
        self.vocab, self.seq_length, self.seed = vocab, seq_length, seed

    def samples(self, numbers: Sequence[int]) -> Samples:
        """Return the samples with these numbers."""
        tokens = np.stack([self._sample(number) for number in numbers])
        return Samples(tokens, np.ones((len(numbers), self.seq_length), dtype=bool))

    def _sample(self, number: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        random = np.random.Generator(np.random.Philox(key=[self.seed, number]))
        length = self.seq_length + 1
        sequence = (random.integers(self.vocab) + np.arange(length)) % self.vocab
        noise = random.integers(self.vocab, size=length)
        return np.where(random.random(length) < NOISE_SHARE, noise, sequence)


def typical_documents(samples: int, width: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Return the document id of each token, [samples, width], for documents of typical lengths."""
    pairs = -(-width // sum(TYPICAL_LENGTHS))
    numbers = np.repeat(np.arange(2 * pairs), TYPICAL_LENGTHS * pairs)[:width]
    return np.tile(numbers, (samples, 1))
