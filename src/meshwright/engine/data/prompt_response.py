"""Made-up conversations in token space: prompts that do not count, answers that can be learnt, lengths that vary."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.engine.data.packing import alone, joined
from meshwright.engine.data.sampler import Sample, Samples, stack
from meshwright.engine.data.templates import Tokens

SHORTEST = 1 / 8  # of a sample: the least a conversation takes of it
PROMPT = (0.1, 0.5)  # of a conversation: the least and the most that is prompt


class MockAnswers:
    """Conversations whose answers count upwards from the last token of a random prompt."""

    def __init__(self, vocab: int, seq_length: int, seed: int, packing: bool = False) -> None:
        self.vocab, self.seq_length, self.seed, self.packing = vocab, seq_length, seed, packing
        self.least = min(max(4, int(seq_length * SHORTEST)), seq_length + 1)

    def samples(self, numbers: Sequence[int]) -> Samples:
        """The samples with these numbers."""
        return stack([self.sample(number) for number in numbers])

    def sample(self, number: int) -> Sample:
        """One sample: a conversation, or as many as there is room for."""
        random = self._random(number)
        if not self.packing:
            return alone(self._talk(random, self._length(random, self.seq_length + 1)), self.seq_length)
        talks, room = [], self.seq_length + 1
        while room >= self.least:
            talks.append(self._talk(random, self._length(random, room)))
            room -= len(talks[-1].ids)
        return joined(talks, self.seq_length)

    def length(self, number: int) -> int:
        """Tokens of a sample's only conversation."""
        return self._length(self._random(number), self.seq_length + 1)

    def _random(self, number: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=[self.seed, number]))

    def _length(self, random: np.random.Generator, room: int) -> int:
        return int(random.integers(self.least, room + 1))

    def _talk(self, random: np.random.Generator, length: int) -> Tokens:
        asked = max(1, int(length * random.uniform(*PROMPT)))
        prompt = random.integers(self.vocab, size=asked)
        answer = (prompt[-1] + 1 + np.arange(length - asked)) % self.vocab
        return Tokens(np.concatenate([prompt, answer]).astype(np.int32), np.arange(length) >= asked)
