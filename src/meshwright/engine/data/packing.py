"""Several conversations in one sample: which ones go together, and where each begins and ends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshwright.engine.data.sampler import PAD, Sample
from meshwright.engine.data.sft_cache import TokenizedConversations
from meshwright.engine.data.templates import Tokens


def pack(lengths: Sequence[int] | NDArray[np.int64], room: int) -> list[list[int]]:
    """Which of the documents share a sample with room for so many tokens: the longest first, each where it fits best.

    A function of the lengths alone. The samples that have room left are found by a number whose bit r is set when
    some sample has room for exactly r more tokens.
    """
    packs: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(room + 1)]
    rooms = 0
    sizes = np.asarray(lengths)
    for index in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[index])
        fitting = rooms >> size
        if fitting:
            left = size + (fitting & -fitting).bit_length() - 1
            number = with_room[left].pop()
            if not with_room[left]:
                rooms &= ~(1 << left)
        else:
            left, number = room, len(packs)
            packs.append([])
        packs[number].append(index)
        with_room[left - size].append(number)
        rooms |= 1 << (left - size)
    return packs


def joined(talks: Sequence[Tokens], seq_length: int) -> Sample:
    """One sample of whole conversations; what is left of it is a document of its own in which nothing counts."""
    tokens = np.full(seq_length + 1, PAD, dtype=np.int64)
    learnt = np.zeros(seq_length + 1, dtype=np.bool_)
    documents = np.full(seq_length + 1, len(talks), dtype=np.int64)
    begin = 0
    for number, talk in enumerate(talks):
        part = slice(begin, begin + len(talk.ids))
        tokens[part], learnt[part], documents[part] = talk.ids, talk.learnt, number
        learnt[begin] = False  # nothing of its document comes before it
        begin = part.stop
    return Sample(tokens, learnt[1:], documents[:-1])


class Packed:
    """Conversations packed into samples of one length, the same in every epoch."""

    def __init__(self, talks: TokenizedConversations, indices: NDArray[np.int64], seq_length: int) -> None:
        self.talks, self.indices, self.seq_length = talks, indices, seq_length
        self.packs = pack(talks.lengths[indices], seq_length + 1)

    def __len__(self) -> int:
        return len(self.packs)

    def sample(self, index: int) -> Sample:
        """One packed sample."""
        return joined([self.talks.tokens(int(self.indices[one])) for one in self.packs[index]], self.seq_length)

    @property
    def share(self) -> float:
        """The part of the samples' tokens that are not padding."""
        return float(self.talks.lengths[self.indices].sum()) / (len(self.packs) * (self.seq_length + 1))


class Padded:
    """One conversation in each sample, filled up to one length."""

    def __init__(self, talks: TokenizedConversations, indices: NDArray[np.int64], seq_length: int) -> None:
        self.talks, self.indices, self.seq_length = talks, indices, seq_length

    def __len__(self) -> int:
        return len(self.indices)

    def length(self, index: int) -> int:
        """Tokens of a sample before it is filled up."""
        place = int(self.indices[index])
        return int(self.talks.offsets[place + 1] - self.talks.offsets[place])

    def sample(self, index: int) -> Sample:
        """One sample."""
        return alone(self.talks.tokens(int(self.indices[index])), self.seq_length)

    @property
    def share(self) -> float:
        """The part of the samples' tokens that are not padding."""
        return float(self.talks.lengths[self.indices].sum()) / (len(self.indices) * (self.seq_length + 1))


def alone(talk: Tokens, seq_length: int) -> Sample:
    """One conversation as a sample; causal attention needs no border between it and the padding behind it."""
    tokens = np.full(seq_length + 1, PAD, dtype=np.int64)
    learnt = np.zeros(seq_length + 1, dtype=np.bool_)
    tokens[: len(talk.ids)], learnt[: len(talk.ids)] = talk.ids, talk.learnt
    return Sample(tokens, learnt[1:])
