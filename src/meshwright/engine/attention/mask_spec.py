"""What one attention computes besides softmax(qk): scale, causality, window, softcap; and which blocks it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from meshwright.engine.attention.cp_layout import Span

BlockKind = Literal["full", "causal", "partial"]
# Document ids of the queries and of the keys, [batch, tokens] each: a query sees keys of its own document only.
Documents = tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class AttentionSpec:
    """The scores' scale and softcap and who sees whom: key k is seen from q when k <= q and q - k < window."""

    scale: float
    causal: bool = True
    window: int | None = None
    softcap: float | None = None

    def over(self, seq_length: int) -> AttentionSpec:
        """The same terms without a window that no token of the sequence can feel."""
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


def visible_blocks(queries: Sequence[Span], keys: Sequence[Span], terms: AttentionSpec) -> list[Block]:
    """The blocks in which some query sees some key; those that nobody sees are left out."""
    found = []
    for query in queries:
        for key in keys:
            kind = _block_kind(query, key, terms)
            if kind is not None:
                found.append(Block(query, key, kind))
    return found


def merged_blocks(queries: Sequence[Span], keys: Sequence[Span], terms: AttentionSpec) -> list[Block]:
    """As `blocks`, with neighbouring fully visible ones joined: fewer and larger kernel calls.

    A joined block's spans lie together on the rank but not in the sequence, so it can only be computed without a mask.
    """
    if terms.causal and terms.window is None and tuple(queries) == tuple(keys):
        # Spans are held in the order of the sequence, so the mask of the whole is an ordinary triangle.
        return [Block(_joined(queries), _joined(keys), "causal")]
    found = visible_blocks(queries, keys, terms)
    wide = _join_full([(block.query, block.key) for block in found if block.kind == "full"])
    rest = [block for block in found if block.kind != "full"]
    return [Block(query, key, "full") for query, key in wide] + rest


def tiles(block: Block, terms: AttentionSpec, rows: int) -> list[Block]:
    """The block in strips of at most `rows` queries, each with only the keys that its window and causality reach."""
    strips = []
    for start in range(0, block.query.length, rows):
        query = _part(block.query, start, min(start + rows, block.query.length))
        low, high = 0, block.key.length
        if terms.causal:
            high = min(high, query.end - block.key.position)
        if terms.window is not None:
            low = max(low, query.position - terms.window + 1 - block.key.position)
        if low < high:
            strips.append(Block(query, _part(block.key, low, high), block.kind))
    return strips


def visibility(
    block: Block, terms: AttentionSpec, documents: Documents, device: torch.device, groups: Tensor | None = None
) -> Tensor | None:
    """True where a query of the block sees a key, [batch or 1, queries, keys]; None when all see all.

    `groups` [batch, tokens] are the images of all tokens, -1 for text: within an image causality does not count.
    """
    seen = None
    if documents is not None:
        seen = documents[0][:, block.rows, None] == documents[1][:, None, block.columns]
    if block.kind != "full":
        near = _in_reach(block, terms, device, groups)
        seen = near if seen is None else seen & near
    return seen


def _in_reach(block: Block, terms: AttentionSpec, device: torch.device, groups: Tensor | None) -> Tensor:
    query = torch.arange(block.query.position, block.query.end, device=device)[:, None]
    key = torch.arange(block.key.position, block.key.end, device=device)
    reach = torch.ones(1, block.query.length, block.key.length, dtype=torch.bool, device=device)
    if terms.causal:
        reach = reach & (key <= query)
    if groups is not None:
        own, other = groups[:, block.rows, None], groups[:, None, block.columns]
        reach = reach | ((own == other) & (own >= 0))
    if terms.window is not None:
        reach = reach & (query - key < terms.window)
    return reach


def _block_kind(query: Span, key: Span, terms: AttentionSpec) -> BlockKind | None:
    if terms.causal and key.position >= query.end:
        return None
    if terms.window is not None and query.position - (key.end - 1) >= terms.window:
        return None
    near = terms.window is None or query.end - 1 - key.position < terms.window
    if near and (not terms.causal or key.end - 1 <= query.position):
        return "full"
    same = (query.position, query.length) == (key.position, key.length)
    return "causal" if near and same else "partial"


def _part(span: Span, start: int, stop: int) -> Span:
    return Span(span.position + start, span.offset + start, stop - start)


def _joined(spans: Sequence[Span]) -> Span:
    return Span(spans[0].position, spans[0].offset, sum(span.length for span in spans))


def _join_full(pairs: list[tuple[Span, Span]]) -> list[tuple[Span, Span]]:
    """Joins pairs of spans along keys, then along queries, where they lie side by side on the rank."""
    by_key: list[tuple[Span, Span]] = []
    for query, key in pairs:
        if by_key and by_key[-1][0] == query and _side_by_side(by_key[-1][1], key):
            by_key[-1] = (query, _joined([by_key[-1][1], key]))
        else:
            by_key.append((query, key))
    by_query: list[tuple[Span, Span]] = []
    for query, key in by_key:
        if by_query and by_query[-1][1] == key and _side_by_side(by_query[-1][0], query):
            by_query[-1] = (_joined([by_query[-1][0], query]), key)
        else:
            by_query.append((query, key))
    return by_query


def _side_by_side(left: Span, right: Span) -> bool:
    return left.offset + left.length == right.offset
