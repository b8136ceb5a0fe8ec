"""Conversations read as they come: nothing is indexed, nothing is shuffled, and a resume passes over what was read."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from meshwright.engine.data.conversations import conversation, fault
from meshwright.engine.data.files import FIELD, Row, Rows
from meshwright.engine.data.packing import alone
from meshwright.engine.data.sampler import Sample, Samples, stack
from meshwright.engine.data.sft_cache import Policy, fit
from meshwright.engine.data.templates import Template, Tokens
from meshwright.engine.metrics.jsonl import warn
from meshwright.errors import InputError

EMPTY = Tokens(np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.bool_))


class Streamed:
    """Sample n is row n, and after the last row the first comes again.

    Every rank reads the same rows and understands only its own. A row with nothing to learn is a sample in which
    nothing counts, so that the others keep their numbers.
    """

    in_order = True

    def __init__(
        self, rows: Rows, columns: Mapping[str, str], template: Template, policy: Policy, seq_length: int
    ) -> None:
        self.rows, self.columns, self.template, self.policy = rows, columns, template, policy
        self.seq_length = seq_length
        self.left_out = 0  # samples given out in which nothing counts
        self._turn = threading.Lock()
        self._size: int | None = None  # rows, once the end was seen
        self._began = self._next = 0  # the rows that reading began with and that come next
        self._reader: Iterator[tuple[str, Row]] | None = None

    def samples(self, numbers: Sequence[int]) -> Samples:
        """The samples with these numbers."""
        with self._turn:
            found = {number: self._row(number) for number in sorted(numbers)}
        return stack([self._sample(*found[number]) for number in numbers])

    def _sample(self, where: str, row: Row) -> Sample:
        talk = conversation(row, self.columns, where)
        reason = fault(talk, self.policy.train_on)
        tokens: Tokens | None = None
        if not reason:
            tokens = fit(self.template.tokens([talk], [where])[0], self.policy, where)
            reason = "the conversation is too long" if tokens is None else "no learnt token is left after cutting"
        if tokens is None or not tokens.learnt.any():
            self._note_left_out(where, reason)
            tokens = EMPTY
        return alone(tokens, self.seq_length)

    def _note_left_out(self, where: str, reason: str) -> None:
        """Says the first row that trains nothing, and then each time there are ten times as many."""
        self.left_out += 1
        if self.left_out in (1, 10, 100, 1000, 10_000, 100_000, 1_000_000):
            warn(
                f"{where}: {reason}; {self.left_out} row{'s' * (self.left_out > 1)} so far trained nothing on this rank"
            )

    def _row(self, number: int) -> tuple[str, Row]:
        if self._size is not None:
            number %= self._size
        if self._reader is None or number < self._next:
            self._reader, self._next, self._began = self.rows.read(number), number, number
        found = None
        while self._next <= number:
            found = next(self._reader, None)
            if found is None:
                self._note_end()
                return self._row(number)
            self._next += 1
        assert found is not None
        return found

    def _note_end(self) -> None:
        """The number of rows is known where reading came to the last one, not where it began behind it."""
        self._size = self._next if self._next > self._began else sum(1 for _ in self.rows)
        self._reader = None
        if self._size == 0:
            raise InputError("the data set has no rows", field=FIELD, value=self.rows.name)
