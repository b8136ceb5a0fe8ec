"""Renders the first conversations of a dataset as training sees them: context tokens, and tokens in the loss."""

from __future__ import annotations

from itertools import islice
from typing import Any

import msgspec
import numpy as np

from meshwright.engine.data.conversations import detect_columns, parse_conversation, untrainable_reason
from meshwright.engine.data.dataset_registry import dataset_columns, open_rows
from meshwright.engine.data.instructions import split_by_content, warn_of_truncation, warn_of_unused_answers
from meshwright.engine.data.length_cache import TrainedLengths
from meshwright.engine.data.packing import PackedCorpus, PaddedCorpus
from meshwright.engine.data.row_errors import RowColumns, detects_columns
from meshwright.engine.data.sft_cache import Policy, has_tokens, tokenize_conversations, truncate
from meshwright.engine.data.templates import ChatTemplate, MaskedTokens
from meshwright.engine.data.tokenization_stats import TokenizationStats
from meshwright.engine.data.tokenizers import load_tokenizer
from meshwright.recipes.types import Recipe


class Span(msgspec.Struct, frozen=True):
    """Consecutive tokens of a conversation that are all in the loss, or all not."""

    text: str
    tokens: int
    in_loss: bool


class Rendered(msgspec.Struct, frozen=True):
    """A conversation as tokens."""

    where: str
    tokens: int
    target_tokens: int
    truncated_tokens: int  # that data.truncation removes
    spans: tuple[Span, ...]
    dropped: str = ""  # why the conversation is not trained on


class RenderedData(msgspec.Struct, frozen=True):
    """The first conversations of a dataset, and the statistics of all."""

    tokenizer: str
    mask_source: str
    stats: TokenizationStats
    samples: int  # per epoch, packed or padded
    real_tokens: float  # share of the tokens that is not padding
    rendered: tuple[Rendered, ...]


def training_lengths(recipe: Recipe, build: bool) -> TrainedLengths | None:
    """Return the tokens of every conversation that is trained on, and what is left out; None if not tokenized before.

    With `build`, they are tokenized, and cached for the run itself.
    """
    data, tokenizer = recipe.data, load_tokenizer(recipe)
    policy = Policy.of(data)
    rows, columns = open_rows(data.dataset, data.split), dataset_columns(data.dataset, data.columns)
    if not build and not has_tokens(rows, columns, tokenizer, data.chat_template, policy):
        return None
    found = tokenize_conversations(rows, columns, tokenizer, data.chat_template, policy, data.workers)
    stats = found.stats
    kept = found.lengths[split_by_content(found, 0.0 if data.validation else data.validation_part, False)]
    return TrainedLengths(
        tokens=kept.astype(np.int64).tobytes(),
        rows=stats.rows,
        truncated=stats.used_truncated,
        dropped=stats.too_long + stats.no_targets,
        untrainable=stats.untrainable,
        longest=stats.max_length,
        dropped_rows=tuple(stats.cut_rows),
    )


def render(recipe: Recipe, count: int) -> RenderedData:
    """Render the first `count` conversations of a recipe's training data; statistics are of all of them."""
    data = recipe.data
    tokenizer = load_tokenizer(recipe)
    template = Policy.of(data).template(tokenizer, data.chat_template)
    rows = open_rows(data.dataset, data.split)
    configured = dataset_columns(data.dataset, data.columns)
    policy = Policy.of(data)
    found = tokenize_conversations(rows, configured, tokenizer, data.chat_template, policy, data.workers)
    warn_of_unused_answers(data.dataset, found.stats, data)
    warn_of_truncation(data.dataset, found.stats, data)
    indices = split_by_content(found, 0.0 if data.validation else data.validation_part, False)
    corpus = (PackedCorpus if data.packing else PaddedCorpus)(found, indices, data.seq_length)
    columns = RowColumns(detect_columns(rows.first(), configured, rows.name), detects_columns(configured))
    shown = tuple(
        _rendered(template, policy, where, parse_conversation(row, columns.of(row), where))
        for where, row in islice(rows, count)
    )
    name = data.tokenizer or str(tokenizer.name_or_path)
    return RenderedData(name, template.mask_source, found.stats, len(corpus), float(corpus.efficiency), shown)


def _rendered(template: ChatTemplate, policy: Policy, where: str, conversation: Any) -> Rendered:
    if reason := untrainable_reason(conversation, policy.train_on):
        return Rendered(where, 0, 0, 0, (), reason)
    [full] = template.tokens([conversation], [where])
    kept = truncate(full, policy, where)
    if kept is None:
        return Rendered(where, len(full.ids), 0, len(full.ids), (), f"has {len(full.ids)} tokens (data.truncation)")
    trained = int(kept.loss_mask.sum())
    dropped = "" if trained else "truncation left no token in the loss"
    spans = tuple(_spans(template.tokenizer, kept))
    return Rendered(where, len(kept.ids), trained, len(full.ids) - len(kept.ids), spans, dropped)


def _spans(tokenizer: Any, tokens: MaskedTokens) -> list[Span]:
    """Return the runs of tokens with and without loss, as text."""
    ends = [*(np.flatnonzero(np.diff(tokens.loss_mask)) + 1).tolist(), len(tokens.ids)]
    starts = [0, *ends[:-1]]
    return [
        Span(
            tokenizer.decode(tokens.ids[start:end].tolist(), clean_up_tokenization_spaces=False),
            end - start,
            bool(tokens.loss_mask[start]),
        )
        for start, end in zip(starts, ends, strict=True)
    ]
