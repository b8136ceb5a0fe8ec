"""Statistics of tokenized conversations: how many are used, truncated and dropped, and which length fits them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import reduce

import msgspec

from meshwright.engine.data.row_errors import SHOWN_ERRORS

MOST_ROWS = 0.9  # share of the conversations that a suggested length fits


def needed_length(tokens: int) -> int:
    """Return the power of two that data.seq_length needs for so many tokens; the last one is a target only."""
    return 1 << max(tokens - 2, 0).bit_length()


class TokenizationStats(msgspec.Struct, frozen=True):
    """Statistics of the tokenized rows."""

    rows: int = 0
    kept: int = 0
    tokens: int = 0
    target_tokens: int = 0  # tokens in the loss
    max_length: int = 0  # tokens, before truncation
    lengths: dict[int, int] = {}  # rows by the power of two that data.seq_length needs for them
    truncated: int = 0  # rows that lost tokens, also those of no_targets
    too_long: int = 0  # rows dropped for their length
    no_targets: int = 0  # rows dropped because truncation left no target token
    untrainable: int = 0  # rows dropped because they have no target tokens
    untrainable_rows: list[str] = []  # locations and reasons of the first of those
    cut_rows: list[str] = []  # locations and tokens of the first rows dropped for their length
    duplicates: int = 0  # conversations with the tokens of an earlier one
    columns: dict[str, str] = {}  # of at least one row
    unused_columns: list[str] = []  # of at least one row
    mask_source: str = ""  # how answers were located, see ChatTemplate.mask_source

    @property
    def used_truncated(self) -> int:
        """Return the rows that lost tokens and are trained on."""
        return max(0, self.truncated - self.no_targets)

    @property
    def dropped_rows(self) -> list[str]:
        """Return the locations and reasons of the first dropped rows."""
        reason = "longer than a sample" if self.too_long else "truncation leaves none of its answers"
        return [*self.untrainable_rows, *(f"{one}, {reason}" for one in self.cut_rows)]

    def fitting(self) -> tuple[int, float, int]:
        """Return a data.seq_length that fits most conversations whole, their share, and one that fits all."""
        total, fitted = sum(self.lengths.values()), 0
        for length, rows in sorted(self.lengths.items()):
            fitted += rows
            if fitted >= MOST_ROWS * total:
                return length, fitted / total, max(self.lengths)
        return needed_length(self.max_length), 1.0, needed_length(self.max_length)

    def lines(self) -> list[str]:
        """Return the statistics as log lines."""
        parts = ", ".join(f"{part} from {column}" for part, column in self.columns.items())
        dropped, first = self.too_long + self.no_targets + self.untrainable, "".join(self.untrainable_rows[:1])
        lines = [
            f"{self.kept} of {self.rows} conversations, {self.tokens} tokens, {self.target_tokens} of them in the loss "
            f"({parts}; {self.mask_source})"
        ]
        if self.duplicates:
            lines.append(f"{self.duplicates} repeated")
        if self.truncated:
            lines.append(f"{self.used_truncated} of them truncated (the longest row has {self.max_length} tokens)")
        if dropped:
            reasons = [
                f"{self.too_long} too long" * (self.too_long > 0),
                f"{self.no_targets} without target tokens after truncation" * (self.no_targets > 0),
                f"{self.untrainable} without target tokens, first {first}" * (self.untrainable > 0),
            ]
            lines.append(f"{dropped} dropped: {'; '.join(reason for reason in reasons if reason)}")
        return lines


COUNTS = (
    *("rows", "kept", "tokens", "target_tokens", "truncated", "too_long", "no_targets", "untrainable"),
    "duplicates",
)


def total_stats(parts: Sequence[TokenizationStats]) -> TokenizationStats:
    """Return the statistics of several parts together."""
    return reduce(_sum, parts, TokenizationStats())


def _sum(a: TokenizationStats, b: TokenizationStats) -> TokenizationStats:
    counts = {name: getattr(a, name) + getattr(b, name) for name in COUNTS}
    return TokenizationStats(
        **counts,
        columns={**a.columns, **b.columns},
        unused_columns=sorted({*a.unused_columns, *b.unused_columns}),
        max_length=max(a.max_length, b.max_length),
        lengths=Counter(a.lengths) + Counter(b.lengths),
        untrainable_rows=[*a.untrainable_rows, *b.untrainable_rows][:SHOWN_ERRORS],
        cut_rows=[*a.cut_rows, *b.cut_rows][:SHOWN_ERRORS],
    )
