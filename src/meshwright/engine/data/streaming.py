"""Streams conversations: no index, no shuffle; a resume skips the rows already read."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

import numpy as np

from meshwright.engine.data.conversations import parse_conversation, untrainable_reason
from meshwright.engine.data.files import Row, Rows, no_rows
from meshwright.engine.data.packing import pad_sample
from meshwright.engine.data.sample_types import Sample, Samples, stack
from meshwright.engine.data.sft_cache import Policy, truncate
from meshwright.engine.data.templates import ChatTemplate, MaskedTokens
from meshwright.engine.metrics.jsonl import warn

EMPTY = MaskedTokens(np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.bool_))


class StreamedConversations:
    """Sample n is row n modulo the number of rows.

    Every rank reads all rows and parses only its own. A row without target tokens becomes an empty sample, so that
    the numbers of the other samples do not change.
    """

    in_order = True

    def __init__(
        self, rows: Rows, columns: Mapping[str, str], template: ChatTemplate, policy: Policy, seq_length: int
    ) -> None:
        self.rows, self.columns, self.template, self.policy = rows, columns, template, policy
        self.seq_length = seq_length
        self.skipped = 0  # samples without target tokens
        self._lock = threading.Lock()
        self._size: int | None = None  # number of rows, known after the first epoch
        self._start = self._next = 0  # the first row of this pass and the next row
        self._reader: Iterator[tuple[str, Row]] | None = None

    def samples(self, numbers: Sequence[int]) -> Samples:
        """Return the samples with these numbers."""
        with self._lock:
            found = {number: self._row(number) for number in sorted(numbers)}
        return stack([self._sample(*found[number]) for number in numbers])

    def epoch_size(self, limit: int) -> int:
        """Return the number of rows, or a number above `limit`: further rows are not read."""
        if self._size is None:
            rows = sum(1 for _ in islice(self.rows.read(), limit + 1))
            if rows > limit:
                return rows
            self._size = rows
        return self._size

    def _sample(self, where: str, row: Row) -> Sample:
        conversation = parse_conversation(row, self.columns, where)
        reason = untrainable_reason(conversation, self.policy.train_on)
        tokens: MaskedTokens | None = None
        if not reason:
            tokens = truncate(self.template.tokens([conversation], [where])[0], self.policy, where)
            reason = "the conversation is too long" if tokens is None else "no target token is left after truncation"
        if tokens is None or not tokens.loss_mask.any():
            self._warn_skipped(where, reason)
            tokens = EMPTY
        return pad_sample(tokens, self.seq_length)

    def _warn_skipped(self, where: str, reason: str) -> None:
        """Warn about the first row without target tokens, then at every power of ten."""
        self.skipped += 1
        if self.skipped in (1, 10, 100, 1000, 10_000, 100_000, 1_000_000):
            warn(f"{where}: {reason}; {self.skipped} row{'s' * (self.skipped > 1)} without target tokens so far")

    def _row(self, number: int) -> tuple[str, Row]:
        if self._size is not None:
            number %= self._size
        if self._reader is None or number < self._next:
            self._reader, self._next, self._start = self.rows.read(number), number, number
        found = None
        while self._next <= number:
            found = next(self._reader, None)
            if found is None:
                self._handle_end()
                return self._row(number)
            self._next += 1
        assert found is not None
        return found

    def _handle_end(self) -> None:
        """Record the number of rows; if reading started past the end, count them."""
        self._size = self._next if self._next > self._start else sum(1 for _ in self.rows)
        self._reader = None
        if self._size == 0:
            raise no_rows(self.rows.name)
