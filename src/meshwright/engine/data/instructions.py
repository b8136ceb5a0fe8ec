"""Fine-tuning data: conversations of a dataset or mock ones; packed, padded, grouped by length or streamed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from math import floor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshwright.display import plural
from meshwright.engine.data.conversations import detect_columns, note_unused_columns, unused_names
from meshwright.engine.data.dataset_registry import dataset_columns, open_rows
from meshwright.engine.data.files import Rows, longest_suffix
from meshwright.engine.data.length_grouping import LengthGrouped
from meshwright.engine.data.mock import VALIDATION_SEED_OFFSET, Mock
from meshwright.engine.data.packing import PackedCorpus, PaddedCorpus
from meshwright.engine.data.prompt_response import MockConversations
from meshwright.engine.data.registered import REGISTRY
from meshwright.engine.data.sample_types import Sample, Source, no_validation_data
from meshwright.engine.data.sft_cache import Policy, TokenizedConversations, tokenize_conversations
from meshwright.engine.data.shuffle import Shuffled
from meshwright.engine.data.streaming import StreamedConversations
from meshwright.engine.data.templates import ChatTemplate
from meshwright.engine.data.tokenization_stats import TokenizationStats
from meshwright.engine.data.tokenizers import check_ids, load_tokenizer
from meshwright.engine.data.unused_answers import unused_answers
from meshwright.engine.metrics.jsonl import log, warn
from meshwright.errors import InputError
from meshwright.recipes.types import Data, Recipe

MOCK = "mock"
FEW_TRUNCATED = 0.02  # share of conversations that may be too long without a warning
LITTLE_PADDING = 0.8  # share of real tokens above which packing saves little


def open_instructions(recipe: Recipe, vocab: int, pretrained: Path | None = None, held_out: bool = False) -> Source:
    """Open the fine-tuning samples of a recipe, or its held-out ones."""
    _check_compatible_settings(recipe)
    data, seed = recipe.data, recipe.train.seed
    generated = data.dataset == MOCK and not (held_out and data.validation)
    if generated and recipe.benchmark:  # an upper bound: no padding, every token in the loss
        return Mock(vocab, data.seq_length, seed + VALIDATION_SEED_OFFSET * held_out)
    if generated:
        mock = MockConversations(vocab, data.seq_length, seed + VALIDATION_SEED_OFFSET * held_out, data.packing)
        return _group_by_length(mock, recipe) if data.group_by_length and not held_out else mock
    tokenizer = load_tokenizer(recipe, pretrained)
    check_ids(tokenizer, vocab)
    name, split = dataset_and_split(recipe, held_out)
    with naming_validation(recipe, held_out):
        rows = open_rows(name, split, data.streaming)
    policy = Policy.of(data)
    columns = dataset_columns(name, data.columns)
    if data.streaming:
        return _open_stream(rows, columns, policy.template(tokenizer, data.chat_template), policy, data.seq_length)
    conversations = tokenize_conversations(rows, columns, tokenizer, data.chat_template, policy, data.workers)
    share = 0.0 if data.validation else data.validation_part
    indices = split_by_content(conversations, share, held_out)
    return _build_source(recipe, name, conversations, indices, held_out)


@contextmanager
def naming_validation(recipe: Recipe, held_out: bool) -> Iterator[None]:
    """Name data.validation in errors of opening it, in place of data.dataset and data.split."""
    try:
        yield
    except InputError as error:
        if not (held_out and recipe.data.validation) or error.field not in ("data.dataset", "data.split"):
            raise
        fixes = [str(one).replace(f"{error.field}=", "data.validation=") for one in error.fix]
        kept = [one for one in fixes if one not in ("data.validation=train", "--dataset mock")]
        raise InputError(
            error.reason, field="data.validation", value=recipe.data.validation, fix=(*kept, "data.validation_part=0.1")
        ) from None


def split_by_content(conversations: TokenizedConversations, share: float, held_out: bool) -> NDArray[np.int64]:
    """Return the held-out conversations or the others; identical conversations are always on the same side.

    The conversations with the smallest hashes are held out: as many as the share says, but for identical ones.
    """
    if share == 0:
        return np.arange(len(conversations))
    hashes = np.asarray(conversations.hashes)
    count = min(max(round(share * len(hashes)), 1), len(hashes))
    is_held_out = hashes <= np.partition(hashes, count - 1)[count - 1]
    indices = np.flatnonzero(is_held_out == held_out)
    if not len(indices):
        side = "evaluate on" if held_out else "train on"
        raise InputError(
            f"none of the {len(conversations)} conversations is left to {side}",
            field="data.validation_part",
            value=share,
            fix=(f"data.validation_part={0.1 if held_out else 0.02}", "data.validation=FILE, FOLDER or split"),
        )
    return indices


class ShuffledWithLengths:
    """A shuffled corpus with sample lengths by number."""

    def __init__(self, corpus: PaddedCorpus, seed: int) -> None:
        self.corpus, self.order = corpus, Shuffled(corpus, seed)

    def epoch_size(self, limit: int) -> int:
        """Return the number of different samples."""
        return len(self.corpus)

    def length(self, number: int) -> int:
        """Return the tokens of a sample without padding."""
        return self.corpus.length(self.order.index(number))

    def sample(self, number: int) -> Sample:
        """Return the sample with this number."""
        return self.corpus.sample(self.order.index(number))


def _build_source(
    recipe: Recipe, name: str, conversations: TokenizedConversations, indices: NDArray[np.int64], held_out: bool
) -> Source:
    data, seed = recipe.data, recipe.train.seed
    if name not in REGISTRY:  # whose other columns are known not to matter
        answers = warn_of_unused_answers(name, conversations.stats, data)
        note_unused_columns(name, set(conversations.stats.unused_columns) - {answers})
    warn_of_truncation(name, conversations.stats, data)
    corpus = (PackedCorpus if data.packing else PaddedCorpus)(conversations, indices, data.seq_length)
    purpose = "used for validation" if held_out else "used for training"
    lines = [
        *conversations.stats.lines(),
        f"{plural(len(indices), 'conversation')} {purpose}, in {plural(len(corpus), 'sample')} of "
        f"{data.seq_length} tokens",
    ]
    # Grouping reorders the samples of several epochs together, so held-out samples would not be used once each.
    if data.group_by_length and isinstance(corpus, PaddedCorpus) and not held_out:
        log_dataset_stats(name, [*lines, "samples are grouped by length"])
        return _group_by_length(ShuffledWithLengths(corpus, seed), recipe)
    advice = "" if held_out else _advice(data, corpus)  # held-out samples are not trained on
    log_dataset_stats(name, [*lines, f"{corpus.efficiency:.1%} of their tokens are not padding{advice}"])
    return Shuffled(corpus, seed)


def warn_of_unused_answers(name: str, stats: TokenizationStats, data: Data) -> str:
    """Warn of a column of labels or answers beside the texts that are trained on, and return it; empty if none is."""
    found = unused_answers(data.columns, stats.columns, stats.unused_columns)
    if found is None:
        return ""
    _on_rank_0(warn, f"{name}: {found.message}")
    return found.column


def warn_of_truncation(name: str, stats: TokenizationStats, data: Data) -> None:
    """Warn of many conversations that do not fit into a sample."""
    cut, dropped = stats.used_truncated, stats.too_long + stats.no_targets
    if cut + dropped <= FEW_TRUNCATED * stats.rows:
        return
    verbs = {"truncated": cut, "dropped": dropped}
    counts = [f"{count} {'is' if count == 1 else 'are'} {verb}" * (count > 0) for verb, count in verbs.items()]
    what = f"of {stats.rows} conversations {' and '.join(filter(None, counts))}"
    most, share, all_ = stats.fitting()
    fits = "fits all" if most == all_ else f"fits {floor(100 * share)}% of the conversations, {all_} all"
    longer = f"they are longer than data.seq_length={data.seq_length}"
    _on_rank_0(warn, f"{name}: {what}: {longer}; data.seq_length={most} {fits}")


def _advice(data: Data, corpus: PackedCorpus | PaddedCorpus) -> str:
    """Return how to compute on less padding; empty if packing would save little."""
    if isinstance(corpus, PackedCorpus) or corpus.efficiency > LITTLE_PADDING:
        return ""
    packed = max(1, round(len(corpus) * corpus.efficiency))
    return (
        f"; data.packing=true trains them in about {plural(packed, 'sample')}, {1 / corpus.efficiency:.1f} times faster"
    )


def _group_by_length(inner: MockConversations | ShuffledWithLengths, recipe: Recipe) -> LengthGrouped:
    return LengthGrouped(inner, recipe.train.global_batch_size, recipe.train.seed, recipe.data.seq_length)


def _open_stream(
    rows: Rows, columns: dict[str, str], template: ChatTemplate, policy: Policy, seq_length: int
) -> StreamedConversations:

    first = rows.first()
    used = detect_columns(first, columns, rows.name)
    note_unused_columns(rows.name, unused_names(first, used))
    return StreamedConversations(rows, used, template, policy, seq_length)


def dataset_and_split(recipe: Recipe, held_out: bool) -> tuple[str, str]:
    """Return the dataset and the split to read."""
    data = recipe.data
    known = REGISTRY.get(data.dataset)
    has_validation = data.validation_part > 0 or bool(data.validation) or bool(known and known.held_out)
    if recipe.train.eval_every and not has_validation:
        raise no_validation_data(recipe)
    if not held_out or (data.validation_part > 0 and not data.validation):
        return data.dataset, data.split
    if not data.validation:
        return data.dataset, known.held_out if known else data.split
    if not names_a_dataset(data.validation):
        return data.dataset, data.validation
    return data.validation, "train" if Path(data.validation).expanduser().is_file() else data.split


def names_a_dataset(validation: str) -> bool:
    """Return whether data.validation names a dataset; otherwise it is a split of data.dataset."""
    path = Path(validation).expanduser()
    return path.exists() or validation in REGISTRY or "/" in validation or bool(longest_suffix(path))


def _check_compatible_settings(recipe: Recipe) -> None:
    data = recipe.data
    if data.group_by_length and data.packing:
        raise _incompatible("packed samples all have the same length", "data.group_by_length", "data.packing=false")
    for needed, why, fix in (
        (recipe.layout.pp > 1, "pipelines need", "layout.pp=1"),
        (recipe.layout.cp > 1, "context parallelism needs", "layout.cp=1"),
    ):
        if data.group_by_length and needed:
            reason = f"{why} samples of equal length, so grouping by length would save nothing"
            raise _incompatible(reason, "data.group_by_length", fix)
    if data.streaming and (data.packing or data.group_by_length):
        which = "packing" if data.packing else "group_by_length"
        raise _incompatible(
            "streaming does not know sample lengths in advance", "data.streaming", f"data.{which}=false"
        )
    if data.streaming and data.validation_part > 0 and not data.validation:
        raise _incompatible(
            "validation_part selects samples by their content, which streaming does not know in advance",
            "data.streaming",
            "data.validation_part=0 data.validation=FILE, FOLDER or split",
        )


def _incompatible(reason: str, field: str, fix: str) -> InputError:
    return InputError(reason, field=field, value=True, fix=(f"{field}=false", fix))


def log_dataset_stats(name: str, lines: Sequence[str]) -> None:
    """Log dataset statistics to stderr once, on rank 0."""
    _on_rank_0(log, f"{name}: {'; '.join(lines)}")


def _on_rank_0(write: Callable[[str], None], text: str) -> None:
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        _once(write, text)


@lru_cache(maxsize=64)
def _once(write: Callable[[str], None], text: str) -> None:
    write(text)
