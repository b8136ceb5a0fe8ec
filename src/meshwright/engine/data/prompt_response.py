"""Mock conversations as tokens: prompts outside the loss, learnable answers, varying lengths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.engine.data.packing import pack_sample, pad_sample
from meshwright.engine.data.sample_types import Sample, Samples, stack
from meshwright.engine.data.templates import MaskedTokens

MIN_SHARE = 1 / 8  # minimum share of a sample that a conversation fills
PROMPT_SHARE = (0.1, 0.5)  # minimum and maximum share of a conversation that is prompt


class MockConversations:
    """Conversations whose answers count up from the last token of a random prompt."""

    def __init__(self, vocab: int, seq_length: int, seed: int, packing: bool = False) -> None:
        self.vocab, self.seq_length, self.seed, self.packing = vocab, seq_length, seed, packing
        self.min_tokens = min(max(4, int(seq_length * MIN_SHARE)), seq_length + 1)

    def samples(self, numbers: Sequence[int]) -> Samples:
        """Return the samples with these numbers."""
        return stack([self.sample(number) for number in numbers])

    def sample(self, number: int) -> Sample:
        """Return one sample: a conversation or, with packing, as many as fit."""
        random = self._random(number)
        if not self.packing:
            return pad_sample(self._conversation(random, self._length(random, self.seq_length + 1)), self.seq_length)
        conversations, capacity = [], self.seq_length + 1
        while capacity >= self.min_tokens:
            conversations.append(self._conversation(random, self._length(random, capacity)))
            capacity -= len(conversations[-1].ids)
        return pack_sample(conversations, self.seq_length)

    def length(self, number: int) -> int:
        """Return the tokens of a sample's only conversation."""
        return self._length(self._random(number), self.seq_length + 1)

    def _random(self, number: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=[self.seed, number]))

    def _length(self, random: np.random.Generator, capacity: int) -> int:
        return int(random.integers(self.min_tokens, capacity + 1))

    def _conversation(self, random: np.random.Generator, length: int) -> MaskedTokens:
        prompt_tokens = max(1, int(length * random.uniform(*PROMPT_SHARE)))
        prompt = random.integers(self.vocab, size=prompt_tokens)
        answer = (prompt[-1] + 1 + np.arange(length - prompt_tokens)) % self.vocab
        return MaskedTokens(np.concatenate([prompt, answer]).astype(np.int32), np.arange(length) >= prompt_tokens)
