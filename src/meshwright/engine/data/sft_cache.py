"""Cache of tokenized conversations: built once, memory-mapped by every rank and every later run."""

from __future__ import annotations

import hashlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.engine.data.cache import cache_folder, cache_lock, cache_not_writable
from meshwright.engine.data.conversations import (
    detect_columns,
    missing_column,
    parse_conversation,
    untrainable_reason,
    unused_names,
)
from meshwright.engine.data.files import FIELD, Row, Rows
from meshwright.engine.data.row_errors import (
    MAX_ERRORS,
    SHOWN_ERRORS,
    Plain,
    RowColumns,
    changes_settings,
    detects_columns,
    joined,
    plain,
)
from meshwright.engine.data.templates import ChatTemplate, MaskedTokens
from meshwright.engine.data.tokenization_stats import TokenizationStats, needed_length, total_stats
from meshwright.engine.data.tokenizers import load_tokenizer
from meshwright.engine.data.workers import map_in_order, worker_pool
from meshwright.engine.fsync import atomic_folder
from meshwright.errors import InputError
from meshwright.recipes.types import Data

CACHE_VERSION = 8  # increment when the files or the tokens of the same text change
STATS = "stats.json"  # written last: its presence marks a complete cache folder
CHUNK = 256  # rows tokenized together
PARALLEL_ROWS = 20_000  # rows from which worker processes pay off


class Policy(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which tokens are in the loss, where system messages go, and what happens to conversations that are too long."""

    train_on: str
    truncation: str
    max_tokens: int  # per sample
    merge_system: bool = False

    @classmethod
    def of(cls, data: Data) -> Policy:
        """Return the policy of a recipe's data."""
        return cls(data.train_on, data.truncation, data.seq_length + 1, data.merge_system)

    def template(self, tokenizer: Any, file: str) -> ChatTemplate:
        """Return the chat template of a file, or of the tokenizer, that renders conversations by this policy."""
        return ChatTemplate(tokenizer, file, self.train_on, self.merge_system)  # type: ignore[arg-type]  # checked by the recipe


@dataclass(frozen=True)
class TokenizedConversations:
    """Tokenized conversations by index."""

    ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    offsets: NDArray[np.int64]  # [n + 1]
    hashes: NDArray[np.uint64]  # of the tokens: equal for equal conversations
    stats: TokenizationStats

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return the tokens of each conversation."""
        return np.diff(self.offsets)

    def tokens(self, index: int) -> MaskedTokens:
        """Return one conversation."""
        part = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return MaskedTokens(self.ids[part], self.loss_mask[part])


def tokenize_conversations(
    rows: Rows, columns: Mapping[str, str], tokenizer: Any, chat_template: str, policy: Policy, workers: int
) -> TokenizedConversations:
    """Return the tokenized rows; the first process of a node builds the cache, the others wait for it."""
    template, folder = _template_and_folder(rows, columns, tokenizer, chat_template, policy)
    if not (folder / STATS).is_file():
        with cache_lock(folder):
            if not (folder / STATS).is_file():
                _build(folder, rows, columns, template, chat_template, policy, workers)
    return _load(folder)


def has_tokens(rows: Rows, columns: Mapping[str, str], tokenizer: Any, chat_template: str, policy: Policy) -> bool:
    """Return whether these rows are in the cache."""
    return (_template_and_folder(rows, columns, tokenizer, chat_template, policy)[1] / STATS).is_file()


def _template_and_folder(
    rows: Rows, columns: Mapping[str, str], tokenizer: Any, chat_template: str, policy: Policy
) -> tuple[ChatTemplate, Path]:
    template = policy.template(tokenizer, chat_template)
    return template, cache_folder() / "conversations" / _key(rows, columns, template, policy)


def _key(rows: Rows, columns: Mapping[str, str], template: ChatTemplate, policy: Policy) -> str:
    tokenizer = template.tokenizer
    parts = [CACHE_VERSION, rows.state(), dict(columns), tokenizer.special_tokens_map, template.text, policy]
    digest = hashlib.blake2b(msgspec.json.encode(parts, order="deterministic"), digest_size=16)
    digest.update(tokenizer.backend_tokenizer.to_str().encode())
    return digest.hexdigest()


def _build(
    folder: Path,
    rows: Rows,
    columns: Mapping[str, str],
    template: ChatTemplate,
    chat_template: str,
    policy: Policy,
    workers: int,
) -> None:
    first, configured = rows.first(), columns
    columns = detect_columns(first, columns, rows.name)
    count = rows.count()
    name = template.tokenizer.name_or_path
    detects = detects_columns(configured)
    tokenize_rows = _RowTokenizer(template, columns, policy, detects)
    parallel = workers > 1 and (count or 0) >= PARALLEL_ROWS and Path(name).is_dir()
    worker_args = (name, chat_template, tuple(columns.items()), policy, detects)
    try:
        processes = worker_pool(min(workers, os.cpu_count() or 1)) if parallel else nullcontext(None)
        with atomic_folder(folder) as partial_folder:
            with processes as pool, _progress(count) as advance:
                bad: list[Plain] = []
                chunks = _chunks(rows, bad)
                results = _results(pool, tokenize_rows, worker_args, chunks, workers)
                stats = _write(partial_folder, results, advance, bad)
            for key, column in configured.items():
                if column and key in columns and key not in stats.columns:
                    raise missing_column(key, column, list(first))
            if not stats.kept:
                detail = f"; {stats.lines()[-1]}" if stats.rows else ""
                reason = f"none of its {stats.rows} rows has target tokens{detail}"
                cut = stats.no_targets + stats.too_long > 0
                most, _, all_ = stats.fitting()
                fix = [f"data.seq_length={length}" for length in dict.fromkeys((most, all_))] if cut else []
                raise InputError(reason, field=FIELD, value=rows.name, fix=fix)
            stats = msgspec.structs.replace(stats, mask_source=template.mask_source)
            (partial_folder / STATS).write_bytes(msgspec.json.encode(stats))
    except OSError as error:
        raise cache_not_writable(folder, error) from None


Chunk = list[tuple[str, Row]]


class ChunkResult(msgspec.Struct, frozen=True):
    """The tokenized rows of a chunk."""

    samples: list[MaskedTokens]
    stats: TokenizationStats
    errors: list[Plain] = []


class _RowTokenizer:
    """Tokenizes chunks of rows."""

    def __init__(
        self, template: ChatTemplate, columns: Mapping[str, str], policy: Policy, detects: bool = False
    ) -> None:
        self.template, self.policy = template, policy
        self._columns = RowColumns(columns, detects).of

    def __call__(self, chunk: Chunk) -> ChunkResult:
        try:
            return self._samples(chunk)
        except InputError as error:
            return _failed(chunk, [error])

    def _samples(self, chunk: Chunk) -> ChunkResult:
        rendered, locations, untrainable = [], [], []
        errors: list[InputError] = []
        for where, row in chunk:
            try:
                conversation = parse_conversation(row, self._columns(row), where)
                reason = untrainable_reason(conversation, self.policy.train_on)
                if reason:
                    untrainable.append(f"{where}: {reason}")
                    continue
                rendered.append(self.template.render_masked(conversation, where))
            except InputError as error:
                errors.append(error)
                if changes_settings(error.fix):  # it would be repeated for every row
                    break
                continue
            locations.append(where)
        if errors:
            return _failed(chunk, errors)
        full = self.template.encode(rendered) if rendered else []
        fitted = [truncate(one, self.policy, where) for one, where in zip(full, locations, strict=True)]
        cut = [
            f"{where}: {len(original.ids)} tokens"
            for where, one, original in zip(locations, fitted, full, strict=True)
            if one is None or not one.loss_mask.any()
        ]
        kept = [one for one in fitted if one is not None and one.loss_mask.any()]
        stats = TokenizationStats(
            rows=len(chunk),
            kept=len(kept),
            tokens=sum(len(one.ids) for one in kept),
            target_tokens=sum(int(one.loss_mask.sum()) for one in kept),
            max_length=max((len(one.ids) for one in full), default=0),
            lengths=Counter(needed_length(len(one.ids)) for one in full),
            truncated=sum(
                one is not None and len(one.ids) < len(original.ids) for one, original in zip(fitted, full, strict=True)
            ),
            too_long=sum(one is None for one in fitted),
            no_targets=sum(one is not None and not one.loss_mask.any() for one in fitted),
            untrainable=len(untrainable),
            columns={key: name for _, row in chunk for key, name in self._columns(row).items() if name in row},
            unused_columns=sorted({name for _, row in chunk for name in unused_names(row, self._columns(row))}),
            untrainable_rows=untrainable[:SHOWN_ERRORS],
            cut_rows=cut[:SHOWN_ERRORS],
        )
        return ChunkResult(kept, stats)


def _failed(chunk: Chunk, errors: list[InputError]) -> ChunkResult:
    """Return the result of a chunk with rows that cannot be used."""
    return ChunkResult([], TokenizationStats(rows=len(chunk)), [plain(error) for error in errors])


def truncate(tokens: MaskedTokens, policy: Policy, where: str) -> MaskedTokens | None:
    """Truncate a conversation to the sample length as data.truncation says; return None if it is dropped."""
    max_tokens = policy.max_tokens
    if len(tokens.ids) <= max_tokens:
        return tokens
    if policy.truncation == "drop":
        return None
    if policy.truncation == "refuse":
        raise too_long(where, len(tokens.ids), max_tokens)
    if policy.truncation == "end":
        return MaskedTokens(tokens.ids[:max_tokens], tokens.loss_mask[:max_tokens])
    loss_mask = tokens.loss_mask[-max_tokens:].copy()
    loss_mask[0] = False  # the first token has no context
    return MaskedTokens(tokens.ids[-max_tokens:], loss_mask)


def too_long(where: str, tokens: int, max_tokens: int) -> InputError:
    """Return the error for a conversation longer than a sample with data.truncation=refuse."""
    return InputError(
        f"{where}: the conversation has {tokens} tokens, a sample fits {max_tokens}",
        field="data.truncation",
        value="refuse",
        fix=(f"data.seq_length={tokens - 1}", "data.truncation=end", "data.truncation=drop"),
    )


def _chunks(rows: Rows, bad: list[Plain]) -> Iterator[Chunk]:
    """Yield the rows that can be parsed; the others are added to `bad`."""
    source = rows.read(bad=lambda error: bad.append(plain(error)))
    while chunk := list(islice(source, CHUNK)):
        yield chunk


WorkerArgs = tuple[str, str, tuple[tuple[str, str], ...], Policy, bool]


@lru_cache(maxsize=1)
def _worker_tokenizer(worker_args: WorkerArgs) -> _RowTokenizer:
    """Return the row tokenizer of a worker process, created on its first chunk."""
    name, chat_template, columns, policy, detects = worker_args
    template = policy.template(load_tokenizer(name), chat_template)
    return _RowTokenizer(template, dict(columns), policy, detects)


def _tokenize_chunk(worker_args: WorkerArgs, chunk: Chunk) -> ChunkResult:
    return _worker_tokenizer(worker_args)(chunk)


def _results(
    pool: ProcessPoolExecutor | None,
    tokenize_rows: _RowTokenizer,
    worker_args: WorkerArgs,
    chunks: Iterator[Chunk],
    workers: int,
) -> Iterator[ChunkResult]:
    if pool is None:
        return map(tokenize_rows, chunks)
    return (result for _, result in map_in_order(pool, partial(_tokenize_chunk, worker_args), chunks, 3 * workers))


def _write(
    folder: Path, results: Iterator[ChunkResult], advance: Callable[[int], None], bad: list[Plain]
) -> TokenizationStats:
    stats, lengths, hashes = TokenizationStats(), [0], []
    errors: list[Plain] = []
    with (folder / "ids.bin").open("wb") as ids, (folder / "loss_mask.bin").open("wb") as loss_mask:
        for result in results:
            errors += result.errors
            if len(errors) + len(bad) > MAX_ERRORS:
                break
            for sample in result.samples:
                ids.write(sample.ids.tobytes())
                loss_mask.write(sample.loss_mask.tobytes())
                lengths.append(len(sample.ids))
                hashes.append(int.from_bytes(hashlib.blake2b(sample.ids.tobytes(), digest_size=8).digest(), "little"))
            stats = total_stats((stats, result.stats))
            advance(result.stats.rows)
    if errors or bad:
        raise joined([*errors, *bad], stats.rows + len(bad))
    np.save(folder / "offsets.npy", np.cumsum(np.array(lengths, dtype=np.int64)), allow_pickle=False)
    np.save(folder / "hashes.npy", np.array(hashes, dtype=np.uint64), allow_pickle=False)
    return msgspec.structs.replace(stats, duplicates=len(hashes) - len(set(hashes)))


def _load(folder: Path) -> TokenizedConversations:
    try:
        stats = msgspec.json.decode((folder / STATS).read_bytes(), type=TokenizationStats)
        offsets = np.load(folder / "offsets.npy", mmap_mode="r", allow_pickle=False)
        hashes = np.load(folder / "hashes.npy", mmap_mode="r", allow_pickle=False)
        ids = np.memmap(folder / "ids.bin", dtype=np.int32, mode="r")
        loss_mask = np.memmap(folder / "loss_mask.bin", dtype=np.bool_, mode="r")
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise _corrupt(folder, str(error)) from None
    if not len(ids) == len(loss_mask) == int(offsets[-1]) == stats.tokens or len(hashes) != stats.kept:
        raise _corrupt(folder, "its files are inconsistent")
    return TokenizedConversations(ids, loss_mask, offsets, hashes, stats)


def _corrupt(folder: Path, reason: str) -> InputError:
    return InputError(
        f"the tokenized data cannot be read: {reason}", field="MESHWRIGHT_CACHE", value=folder, fix=(f"rm -r {folder}",)
    )


@contextmanager
def _progress(total: int | None) -> Iterator[Callable[[int], None]]:
    """Show a progress bar if stderr is a terminal."""
    if not sys.stderr.isatty() or (total or PARALLEL_ROWS) < CHUNK:
        yield lambda rows: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns: Sequence[Any] = (TextColumn("tokenizing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda rows: bar.advance(task, rows)
