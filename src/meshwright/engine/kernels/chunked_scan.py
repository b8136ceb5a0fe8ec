"""Scans in blocks of chunks: what the state-space and delta-rule kernels share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from meshwright.engine.kernels.cross_entropy import upcast
from meshwright.engine.kernels.device_caps import is_dry


@dataclass(frozen=True)
class Plan:
    """The blocks of a scan: some rows (samples) and a number of chunks each."""

    rows: int  # in total
    tokens: int
    chunk: int
    block_rows: int
    block_tokens: int

    @property
    def blocks(self) -> int:
        """Number of blocks along the sequence."""
        return -(-self.tokens // self.block_tokens)

    def of_rows(self) -> list[slice]:
        """Return the rows of each block."""
        return slices(self.rows, self.block_rows)

    def along(self) -> list[slice]:
        """Return the tokens of each block."""
        return slices(self.tokens, self.block_tokens)


def slices(total: int, step: int) -> list[slice]:
    """Split a range into slices of at most `step`."""
    return [slice(i, min(i + step, total)) for i in range(0, total, step)]


def block_plan(rows: int, tokens: int, chunk: int, chunk_bytes: int, max_bytes: int) -> Plan:
    """Return blocks of at most `max_bytes` for chunks of `chunk_bytes` per row.

    Long blocks come before many rows, because a state is saved per block.
    """
    chunk = min(chunk, tokens)
    chunks = max(1, min(max_bytes // chunk_bytes, -(-tokens // chunk)))
    return Plan(rows, tokens, chunk, max(1, min(rows, max_bytes // (chunk_bytes * chunks))), chunks * chunk)


def first_and_last(items: list[Any]) -> list[Any]:
    """Return the first and the last item: a dry run executes only these of equal blocks."""
    return items if len(items) < 3 else [items[0], items[-1]]


@torch.library.custom_op("meshwright::left_out", mutates_args=(), schema="(Tensor x, int flop) -> ()")
def left_out(x: Tensor, flop: int) -> None:
    """Account for the FLOPs of blocks that a dry run skips."""


@left_out.register_fake
def _(x: Tensor, flop: int) -> None:
    return None


@register_flop_formula(torch.ops.meshwright.left_out)
def _left_out_flop(x: Any, flop: int, **_: Any) -> int:
    return flop


def executed_blocks(
    blocks: Plan, like: Tensor, flop: Callable[[slice, slice, bool], int]
) -> list[tuple[slice, list[tuple[int, slice]]]]:
    """Return the numbered blocks of each group of rows; in a dry run only the first and last, the others are equal.

    `flop` counts the FLOPs of a block of rows and tokens, in a real run or as a dry run executes it.
    """
    row_blocks, token_blocks = blocks.of_rows(), list(enumerate(blocks.along()))
    if not is_dry(like):
        return [(rows, token_blocks) for rows in row_blocks]
    kept_rows, kept_tokens = first_and_last(row_blocks), first_and_last(token_blocks)
    total = sum(flop(rows, tokens, False) for rows in row_blocks for _, tokens in token_blocks)
    skipped = total - sum(flop(rows, tokens, True) for rows in kept_rows for _, tokens in kept_tokens)
    if skipped:
        left_out(like, skipped)
    return [(rows, kept_tokens) for rows in kept_rows]


def empty_states(starts: Tensor, rows: slice) -> Tensor:
    """Return zero states before the first block of some rows; `starts` [rows, blocks, ...] has the later ones."""
    return starts.new_zeros(rows.stop - rows.start, *starts.shape[2:])


def bmm_fp32(left: Tensor, right: Tensor) -> Tensor:
    """Batched matrix product with fp32 accumulation and output."""
    batch = left.shape[:-2]
    a, b = left.flatten(0, -3), right.flatten(0, -3)
    out = torch.bmm(a, b) if left.dtype == upcast(left).dtype else torch.bmm(a, b, out_dtype=torch.float32)
    return torch.unflatten(out, 0, batch)


def suffix_sum(values: Tensor) -> Tensor:
    """Return for each token the sum over itself and the later tokens of its chunk, in fp64."""
    return values.double().flip(-1).cumsum(-1).flip(-1)


def crossing_sums(matrix: Tensor) -> Tensor:
    """Return for every token of a chunk but the first the sum of matrix entries (row >= token, column < token).

    These are the pairs whose decay spans that token. Only entries of [..., t, t] below the diagonal count; the matrix
    is overwritten.
    """
    return matrix.cumsum_(-1).tril_(-1).sum(-2, dtype=torch.float64)[..., :-1]
