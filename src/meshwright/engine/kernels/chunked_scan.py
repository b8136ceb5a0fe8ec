"""Sequences worked through in blocks of chunks: what the scans of state-space and delta-rule layers share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from meshwright.engine.kernels.cross_entropy import wide
from meshwright.engine.kernels.device_caps import is_dry


@dataclass(frozen=True)
class Plan:
    """How a scan is worked through: blocks of some rows and of whole chunks."""

    rows: int  # of all
    tokens: int
    chunk: int
    block_rows: int
    block_tokens: int

    @property
    def blocks(self) -> int:
        """Blocks along the sequence."""
        return -(-self.tokens // self.block_tokens)

    def of_rows(self) -> list[slice]:
        """The rows that go together."""
        return parts(self.rows, self.block_rows)

    def along(self) -> list[slice]:
        """The tokens of each block."""
        return parts(self.tokens, self.block_tokens)


def parts(whole: int, step: int) -> list[slice]:
    """So many things, `step` at a time."""
    return [slice(i, min(i + step, whole)) for i in range(0, whole, step)]


def plan_of(rows: int, tokens: int, chunk: int, each: int, most: int) -> Plan:
    """Blocks whose chunks, of `each` bytes in a row, take `most` bytes. Long blocks before many rows: fewer states."""
    chunk = min(chunk, tokens)
    chunks = max(1, min(most // each, -(-tokens // chunk)))
    return Plan(rows, tokens, chunk, max(1, min(rows, most // (each * chunks))), chunks * chunk)


def ends(every: list[Any]) -> list[Any]:
    """The first and the last: what a dry run carries out of things that are alike."""
    return every if len(every) < 3 else [every[0], every[-1]]


@torch.library.custom_op("meshwright::left_out", mutates_args=(), schema="(Tensor x, int flop) -> ()")
def left_out(x: Tensor, flop: int) -> None:
    """Stands for blocks that a dry run leaves out."""


@left_out.register_fake
def _(x: Tensor, flop: int) -> None:
    return None


@register_flop_formula(torch.ops.meshwright.left_out)
def _left_out_flop(x: Any, flop: int, **_: Any) -> int:
    return flop


def carried_out(
    blocks: Plan, like: Tensor, flop: Callable[[slice, slice, bool], int]
) -> list[tuple[slice, list[tuple[int, slice]]]]:
    """The blocks of each group of rows, numbered. In a dry run the first and last alone: those between are alike.

    `flop` counts the floating-point operations of a block of rows and tokens, as it is or as a dry run carries it out.
    """
    every, along = blocks.of_rows(), list(enumerate(blocks.along()))
    if not is_dry(like):
        return [(rows, along) for rows in every]
    rows, outer = ends(every), ends(along)
    whole = sum(flop(part, tokens, False) for part in every for _, tokens in along)
    rest = whole - sum(flop(part, tokens, True) for part in rows for _, tokens in outer)
    if rest:
        left_out(like, rest)
    return [(part, outer) for part in rows]


def empty_states(starts: Tensor, rows: slice) -> Tensor:
    """The states before the first block of some rows, whose later ones `starts` [rows, blocks, ...] holds."""
    return starts.new_zeros(rows.stop - rows.start, *starts.shape[2:])


def product(left: Tensor, right: Tensor) -> Tensor:
    """Products of many matrices, with sums in fp32."""
    many = left.shape[:-2]
    a, b = left.flatten(0, -3), right.flatten(0, -3)
    made = torch.bmm(a, b) if left.dtype == wide(left).dtype else torch.bmm(a, b, out_dtype=torch.float32)
    return torch.unflatten(made, 0, many)


def until_end(numbers: Tensor) -> Tensor:
    """The sum of a token's number and those behind it in its chunk, in fp64."""
    return numbers.double().flip(-1).cumsum(-1).flip(-1)


def crossing(matrix: Tensor) -> Tensor:
    """For every token of a chunk but the first: the sum of what it and those behind it see of those before it.

    The matrix [..., t, t] counts below its diagonal only; it is used up.
    """
    return matrix.cumsum_(-1).tril_(-1).sum(-2, dtype=torch.float64)[..., :-1]
