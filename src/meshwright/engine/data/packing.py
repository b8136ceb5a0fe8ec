"""Packs conversations into samples of a fixed length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshwright.engine.data.sample_types import PAD, Sample
from meshwright.engine.data.sft_cache import TokenizedConversations
from meshwright.engine.data.templates import MaskedTokens


def pack(lengths: Sequence[int] | NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Pack documents into samples of `capacity` tokens by best-fit decreasing; a function of the lengths alone.

    Bit r of `free_bits` is set when some pack has exactly r tokens free, so the best fit is a shift and a bit scan
    instead of a search over packs.
    """
    packs: list[list[int]] = []
    packs_by_free: list[list[int]] = [[] for _ in range(capacity + 1)]
    free_bits = 0
    sizes = np.asarray(lengths)
    for index in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[index])
        fitting = free_bits >> size
        if fitting:
            free = size + (fitting & -fitting).bit_length() - 1
            number = packs_by_free[free].pop()
            if not packs_by_free[free]:
                free_bits &= ~(1 << free)
        else:
            free, number = capacity, len(packs)
            packs.append([])
        packs[number].append(index)
        packs_by_free[free - size].append(number)
        free_bits |= 1 << (free - size)
    return packs


def pack_sample(conversations: Sequence[MaskedTokens], seq_length: int) -> Sample:
    """Concatenate conversations into one sample; the padding is a document of its own outside the loss."""
    tokens = np.full(seq_length + 1, PAD, dtype=np.int64)
    loss_mask = np.zeros(seq_length + 1, dtype=np.bool_)
    documents = np.full(seq_length + 1, len(conversations), dtype=np.int64)
    start = 0
    for number, conversation in enumerate(conversations):
        part = slice(start, start + len(conversation.ids))
        tokens[part], loss_mask[part], documents[part] = conversation.ids, conversation.loss_mask, number
        loss_mask[start] = False  # the first token of a document has no context
        start = part.stop
    return Sample(tokens, loss_mask[1:], documents[:-1])


class PackedCorpus:
    """Conversations packed into samples of equal length, the same packs in every epoch."""

    def __init__(self, conversations: TokenizedConversations, indices: NDArray[np.int64], seq_length: int) -> None:
        self.conversations, self.indices, self.seq_length = conversations, indices, seq_length
        self.packs = pack(conversations.lengths[indices], seq_length + 1)

    def __len__(self) -> int:
        return len(self.packs)

    def sample(self, index: int) -> Sample:
        """Return one packed sample."""
        return pack_sample(
            [self.conversations.tokens(int(self.indices[one])) for one in self.packs[index]], self.seq_length
        )

    @property
    def efficiency(self) -> float:
        """Return the share of tokens that are not padding."""
        return float(self.conversations.lengths[self.indices].sum()) / (len(self.packs) * (self.seq_length + 1))


class PaddedCorpus:
    """One conversation per sample, padded to equal length."""

    def __init__(self, conversations: TokenizedConversations, indices: NDArray[np.int64], seq_length: int) -> None:
        self.conversations, self.indices, self.seq_length = conversations, indices, seq_length

    def __len__(self) -> int:
        return len(self.indices)

    def length(self, index: int) -> int:
        """Return the tokens of a sample without padding."""
        row = int(self.indices[index])
        return int(self.conversations.offsets[row + 1] - self.conversations.offsets[row])

    def sample(self, index: int) -> Sample:
        """Return one sample."""
        return pad_sample(self.conversations.tokens(int(self.indices[index])), self.seq_length)

    @property
    def efficiency(self) -> float:
        """Return the share of tokens that are not padding."""
        return float(self.conversations.lengths[self.indices].sum()) / (len(self.indices) * (self.seq_length + 1))


def pad_sample(conversation: MaskedTokens, seq_length: int) -> Sample:
    """Pad one conversation to a sample; causal attention needs no boundary before trailing padding."""
    tokens = np.full(seq_length + 1, PAD, dtype=np.int64)
    loss_mask = np.zeros(seq_length + 1, dtype=np.bool_)
    tokens[: len(conversation.ids)], loss_mask[: len(conversation.ids)] = conversation.ids, conversation.loss_mask
    return Sample(tokens, loss_mask[1:])
