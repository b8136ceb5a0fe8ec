"""The mask and score options of an attention (scale, causality, window, softcap), and which blocks they leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from meshwright.engine.attention.cp_layout import Span

BlockKind = Literal["full", "causal", "partial"]
# Document ids of the queries and of the keys, [batch, tokens] each: a query attends to its own document only.
Documents = tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class AttentionSpec:
    """Scale and softcap of the scores, and the mask: query q attends to key k if k <= q and q - k < window."""

    scale: float
    causal: bool = True
    window: int | None = None
    softcap: float | None = None

    def for_length(self, seq_length: int) -> AttentionSpec:
        """Return the spec without a window that is at least as long as the sequence."""
        return replace(self, window=None) if self.window is not None and self.window >= seq_length else self


@dataclass(frozen=True)
class Block:
    """A rectangle of the score matrix: a run of queries against a run of keys."""

    query: Span
    key: Span
    kind: BlockKind

    @property
    def rows(self) -> slice:
        return slice(self.query.offset, self.query.offset + self.query.length)

    @property
    def columns(self) -> slice:
        return slice(self.key.offset, self.key.offset + self.key.length)


def shares_heads(query: Tensor, key: Tensor) -> bool:
    """Whether several query heads share a key head.

    In a compiled layer with symbolic sizes a comparison is a symbol, which torch's attention refuses; a branch is not.
    """
    if query.shape[1] == key.shape[1]:  # noqa: SIM103
        return False
    return True


def visible_blocks(queries: Sequence[Span], keys: Sequence[Span], spec: AttentionSpec) -> list[Block]:
    """Return the blocks that are not fully masked."""
    pairs = ((query, key, _block_kind(query, key, spec)) for query in queries for key in keys)
    return [Block(query, key, kind) for query, key, kind in pairs if kind is not None]


def merged_blocks(queries: Sequence[Span], keys: Sequence[Span], spec: AttentionSpec) -> list[Block]:
    """Return the visible blocks with neighboring unmasked ones merged: fewer and larger kernel calls.

    The spans of a merged block are adjacent on the rank but not in the sequence, so it must not need a mask.
    """
    if spec.causal and spec.window is None and tuple(queries) == tuple(keys):
        # Local spans are in sequence order, so the mask of all of them together is an ordinary triangle.
        return [Block(_merged(queries), _merged(keys), "causal")]
    found = visible_blocks(queries, keys, spec)
    wide = _merge_full([(block.query, block.key) for block in found if block.kind == "full"])
    rest = [block for block in found if block.kind != "full"]
    return [Block(query, key, "full") for query, key in wide] + rest


def tiles(block: Block, spec: AttentionSpec, rows: int) -> list[Block]:
    """Split a block into strips of at most `rows` queries, each with only the keys inside its mask."""
    strips = []
    for start in range(0, block.query.length, rows):
        query = _part(block.query, start, min(start + rows, block.query.length))
        low, high = 0, block.key.length
        if spec.causal:
            high = min(high, query.end - block.key.position)
        if spec.window is not None:
            low = max(low, query.position - spec.window + 1 - block.key.position)
        if low < high:
            strips.append(Block(query, _part(block.key, low, high), block.kind))
    return strips


def visibility(
    block: Block, spec: AttentionSpec, documents: Documents, device: torch.device, groups: Tensor | None = None
) -> Tensor | None:
    """Return the mask of a block, [batch or 1, queries, keys], True where a query attends to a key; None if all do.

    `groups` [batch, tokens] are the images of all tokens, -1 for text: causality does not apply within an image.
    """
    mask = None
    if documents is not None:
        mask = documents[0][:, block.rows, None] == documents[1][:, None, block.columns]
    if block.kind != "full":
        by_position = _position_mask(block, spec, device, groups)
        mask = by_position if mask is None else mask & by_position
    return mask


def _position_mask(block: Block, spec: AttentionSpec, device: torch.device, groups: Tensor | None) -> Tensor:
    query = torch.arange(block.query.position, block.query.end, device=device)[:, None]
    key = torch.arange(block.key.position, block.key.end, device=device)
    mask = torch.ones(1, block.query.length, block.key.length, dtype=torch.bool, device=device)
    if spec.causal:
        mask = mask & (key <= query)
    if groups is not None:
        query_image, key_image = groups[:, block.rows, None], groups[:, None, block.columns]
        mask = mask | ((query_image == key_image) & (query_image >= 0))
    if spec.window is not None:
        mask = mask & (query - key < spec.window)
    return mask


def _block_kind(query: Span, key: Span, spec: AttentionSpec) -> BlockKind | None:
    if spec.causal and key.position >= query.end:
        return None
    if spec.window is not None and query.position - (key.end - 1) >= spec.window:
        return None
    near = spec.window is None or query.end - 1 - key.position < spec.window
    if near and (not spec.causal or key.end - 1 <= query.position):
        return "full"
    same = (query.position, query.length) == (key.position, key.length)
    return "causal" if near and same else "partial"


def _part(span: Span, start: int, stop: int) -> Span:
    return Span(span.position + start, span.offset + start, stop - start)


def _merged(spans: Sequence[Span]) -> Span:
    return Span(spans[0].position, spans[0].offset, sum(span.length for span in spans))


def _merge_full(pairs: list[tuple[Span, Span]]) -> list[tuple[Span, Span]]:
    """Merge pairs of spans along keys, then along queries, where they are adjacent on the rank."""
    by_key: list[tuple[Span, Span]] = []
    for query, key in pairs:
        if by_key and by_key[-1][0] == query and _adjacent(by_key[-1][1], key):
            by_key[-1] = (query, _merged([by_key[-1][1], key]))
        else:
            by_key.append((query, key))
    by_query: list[tuple[Span, Span]] = []
    for query, key in by_key:
        if by_query and by_query[-1][1] == key and _adjacent(by_query[-1][0], query):
            by_query[-1] = (_merged([by_query[-1][0], query]), key)
        else:
            by_query.append((query, key))
    return by_query


def _adjacent(left: Span, right: Span) -> bool:
    return left.offset + left.length == right.offset
