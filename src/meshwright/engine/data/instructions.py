"""The samples of fine-tuning: from a recipe's data set, or made up, packed, padded, grouped or streamed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshwright.engine.data.conversations import detect_columns
from meshwright.engine.data.dataset_registry import NAMED, columns_of, open_rows
from meshwright.engine.data.files import FIELD, Rows
from meshwright.engine.data.length_grouping import ByLength
from meshwright.engine.data.mock import HELD_OUT, Mock
from meshwright.engine.data.packing import Packed, Padded
from meshwright.engine.data.prompt_response import MockAnswers
from meshwright.engine.data.sampler import Sample, Source, nothing_held_out
from meshwright.engine.data.sft_cache import Policy, TokenizedConversations, tokenised
from meshwright.engine.data.shuffle import Shuffled
from meshwright.engine.data.streaming import Streamed
from meshwright.engine.data.templates import Template
from meshwright.engine.data.tokenizers import check_ids, load_tokenizer
from meshwright.engine.metrics.jsonl import log
from meshwright.errors import InputError
from meshwright.recipes.types import Recipe

MOCK = "mock"


def open_instructions(recipe: Recipe, vocab: int, pretrained: Path | None = None, held_out: bool = False) -> Source:
    """The samples that a recipe fine-tunes on, or those it is evaluated on."""
    _refuse_what_does_not_go_together(recipe)
    data, seed = recipe.data, recipe.train.seed
    if data.dataset == MOCK and recipe.benchmark:  # an upper bound: every place holds a token that counts
        return Mock(vocab, data.seq_length, seed + HELD_OUT * held_out)
    if data.dataset == MOCK:
        made_up = MockAnswers(vocab, data.seq_length, seed + HELD_OUT * held_out, data.packing)
        return _grouped(made_up, recipe) if data.group_by_length else made_up
    tokenizer = load_tokenizer(recipe, pretrained)
    check_ids(tokenizer, vocab)
    name, split = where_to_read(recipe, held_out)
    rows = open_rows(name, split, data.streaming)
    policy = Policy(data.train_on, data.truncation, data.seq_length + 1)
    given = columns_of(name, data.columns)
    if data.streaming:
        return _streamed(rows, given, Template(tokenizer, data.chat_template, data.train_on), policy, data.seq_length)
    talks = tokenised(rows, given, tokenizer, data.chat_template, policy, data.workers)
    part = 0.0 if data.validation else data.validation_part
    indices = split_by_content(talks, part, held_out)
    return _arranged(recipe, talks, indices, held_out)


def split_by_content(talks: TokenizedConversations, part: float, held_out: bool) -> NDArray[np.int64]:
    """The conversations that are held out, or the others; equal ones are always on the same side."""
    if part == 0:
        return np.arange(len(talks))
    outside = np.asarray(talks.hashes) < np.uint64(min(int(part * 2**64), 2**64 - 1))
    indices = np.flatnonzero(outside == held_out)
    if not len(indices):
        side = "evaluated on" if held_out else "trained on"
        raise InputError(
            f"of {len(talks)} conversations none is left to be {side}", field="data.validation_part", value=part
        )
    return indices


class InOrder:
    """A shuffled corpus whose samples tell their lengths by number."""

    def __init__(self, corpus: Padded, seed: int) -> None:
        self.corpus, self.order = corpus, Shuffled(corpus, seed)

    def length(self, number: int) -> int:
        """Tokens of a sample before it is filled up."""
        return self.corpus.length(self.order.index(number))

    def sample(self, number: int) -> Sample:
        """The sample with this number."""
        return self.corpus.sample(self.order.index(number))


def _arranged(recipe: Recipe, talks: TokenizedConversations, indices: NDArray[np.int64], held_out: bool) -> Source:
    data, seed = recipe.data, recipe.train.seed
    corpus = (Packed if data.packing else Padded)(talks, indices, data.seq_length)
    what = "evaluated on" if held_out else "trained on"
    said = [
        *talks.told.lines(),
        f"{len(indices)} conversations are {what}, in {len(corpus)} samples of {data.seq_length}",
    ]
    if data.group_by_length and isinstance(corpus, Padded):
        tell(recipe, [*said, "samples of like length share a step"])
        return _grouped(InOrder(corpus, seed), recipe)
    tell(recipe, [*said, f"{corpus.share:.1%} of their tokens are real, the rest is padding"])
    return Shuffled(corpus, seed)


def _grouped(inner: MockAnswers | InOrder, recipe: Recipe) -> ByLength:
    return ByLength(inner, recipe.train.global_batch_size, recipe.train.seed, recipe.data.seq_length)


def _streamed(rows: Rows, given: dict[str, str], template: Template, policy: Policy, seq_length: int) -> Streamed:
    first = next(iter(rows), None)
    if first is None:
        raise InputError("the data set has no rows", field=FIELD, value=rows.name)
    return Streamed(rows, detect_columns(first[1], given, rows.name), template, policy, seq_length)


def where_to_read(recipe: Recipe, held_out: bool) -> tuple[str, str]:
    """The data set and the split of it to read."""
    data = recipe.data
    known = NAMED.get(data.dataset)
    inside = data.validation_part > 0 or bool(data.validation) or bool(known and known.held_out)
    if recipe.train.eval_every and not inside:
        raise nothing_held_out(recipe)
    if not held_out or (data.validation_part > 0 and not data.validation):
        return data.dataset, data.split
    if not data.validation:
        return data.dataset, known.held_out if known else data.split
    is_set = Path(data.validation).expanduser().exists() or data.validation in NAMED or "/" in data.validation
    if not is_set:
        return data.dataset, data.validation
    return data.validation, "train" if Path(data.validation).expanduser().is_file() else data.split


def _refuse_what_does_not_go_together(recipe: Recipe) -> None:
    data = recipe.data
    if data.group_by_length and data.packing:
        raise _both("packed samples are all of one length", "data.group_by_length", "data.packing=false")
    for needed, why, fix in (
        (recipe.layout.pp > 1, "pipelines need", "layout.pp=1"),
        (recipe.layout.cp > 1, "context parallelism needs", "layout.cp=1"),
        (recipe.kernels.cuda_graphs != "none", "CUDA graphs need", "kernels.cuda_graphs=none"),
    ):
        if data.group_by_length and needed:
            reason = f"{why} samples of one length, so that grouping would save nothing"
            raise _both(reason, "data.group_by_length", fix)
    if data.streaming and (data.packing or data.group_by_length):
        which = "packing" if data.packing else "group_by_length"
        raise _both("lengths are not known before they are read", "data.streaming", f"data.{which}=false")
    if data.streaming and data.validation_part > 0 and not data.validation:
        raise _both(
            "a part of the samples is held out by what is in them, which is not known before they are read",
            "data.streaming",
            "data.validation_part=0 data.validation=FILE, FOLDER or split",
        )


def _both(reason: str, field: str, fix: str) -> InputError:
    return InputError(reason, field=field, value=True, fix=(f"{field}=false", fix))


def tell(recipe: Recipe, lines: Sequence[str]) -> None:
    """Says on stderr, once for all ranks and evaluations, what was found in the data."""
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        _tell_once(f"{recipe.data.dataset}: {'; '.join(lines)}")


@lru_cache(maxsize=64)
def _tell_once(text: str) -> None:
    log(text)
