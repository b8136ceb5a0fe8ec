"""How many tokens the samples of a user's own dataset have: counted with its tokenizer, else estimated by bytes."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from meshwright import extras, file_access
from meshwright.api.row_bytes import file_sizes, row_bytes, rows_at
from meshwright.errors import InputError
from meshwright.notes import no_notes
from meshwright.recipes.replacements import bytes_per_token
from meshwright.recipes.types import ENGINES, Data, Engine, Recipe

if TYPE_CHECKING:
    from collections.abc import Mapping

    from meshwright.engine.data.length_cache import TrainedLengths
    from meshwright.engine.data.row_errors import RowColumns

MAX_COUNTED_BYTES = 2**28  # larger files are not read for an answer that should be instant
MAX_TOKENIZED_BYTES = 2**24  # larger files are tokenized by samples and train only
MAX_PARSED = 2_000  # long rows that are parsed; of more, as many evenly spaced ones are a sample
SHOWN_ROWS = 5  # locations of rows that are left out


class OwnSamples(msgspec.Struct, frozen=True):
    """The samples of a dataset as training makes them, and the rows that it leaves out for their length."""

    lengths: Any  # tokens of every sample, truncated
    rows: int  # of the dataset
    dropped: int  # rows of which truncation leaves no answer, or that data.truncation=drop leaves out
    truncated: int  # rows that lose tokens and are trained on
    longest: int  # tokens of the longest row
    dropped_rows: tuple[str, ...] = ()  # locations of the first of those, and their tokens
    untrainable: int | None = None  # rows without target tokens; None if they were not counted
    tokenizer: str = ""  # that counted them; empty if they are estimated by bytes


def on_engine(recipe: Recipe, engine: Engine) -> Recipe:
    """Return a recipe whose samples are counted as an engine makes them: ours drops rows that lose their answers."""
    return recipe if recipe.engine == engine else msgspec.structs.replace(recipe, engine=engine)


def own_samples(recipe: Recipe) -> OwnSamples | None:
    """Return the fine-tuning samples of a local dataset; None if they are not known."""
    data = recipe.data
    path = Path(data.dataset).expanduser()
    if recipe.goal == "pretrain" or data.images or data.blend or file_access.closed() or not path.exists():
        return None
    if not 0 < sum(file_sizes(path)) <= MAX_COUNTED_BYTES:
        return None
    counted = _token_lengths(recipe)
    if counted is None:
        return _estimated(recipe)
    return OwnSamples(
        counted.lengths,
        counted.rows,
        counted.dropped,
        counted.truncated,
        counted.longest,
        counted.dropped_rows,
        counted.untrainable,
        _local_tokenizer(recipe),
    )


def own_lengths(recipe: Recipe) -> Any | None:
    """Return the tokens of every fine-tuning sample of a local dataset, truncated; None if they are not known."""
    found = own_samples(recipe)
    return None if found is None else found.lengths


def stored_tokens(path: Path) -> int | None:
    """Return the tokens of data that are tokenized already: a folder of shards, or Megatron's pair of files."""
    from meshwright.engine.data import megatron_files, shards

    prefix = megatron_files.megatron_prefix(path)
    try:
        if prefix is not None:
            return megatron_files.token_count(prefix)
        return shards.read_manifest(path).tokens if shards.is_shard_folder(path) else None
    except (InputError, OSError):  # train reports damaged files
        return None


def tokenized_with(recipe: Recipe) -> str:
    """Return the tokenizer that own_lengths counts with; empty if it estimates."""
    return _local_tokenizer(recipe) if _token_lengths(recipe) is not None else ""


def _estimated(recipe: Recipe) -> OwnSamples | None:
    """Return the samples by the bytes of their rows."""
    path, data = Path(recipe.data.dataset).expanduser(), recipe.data
    state = sum(file_sizes(path)), path.stat().st_mtime_ns
    found = row_bytes(str(path), data.split, *state)
    if found is None:
        return None
    lengths, most = np.maximum(found / bytes_per_token(recipe), 1.0), data.seq_length + 1
    long, lost = lengths > most, np.zeros(len(lengths), dtype=bool)
    places: tuple[str, ...] = ()
    if recipe.engine == ENGINES[0] or data.truncation == "drop":  # others train on rows whose answers are cut off
        numbers, places = _lost(msgspec.json.encode(data), bytes_per_token(recipe), *state)
        lost[numbers] = True
    kept, dropped = np.minimum(lengths[~lost], most), int(lost.sum())
    counts = len(lengths), dropped, int(long.sum()) - dropped, int(lengths.max())
    return OwnSamples(kept, *counts, places) if len(kept) else None


@lru_cache(maxsize=8)
def _lost(settings: bytes, per_token: float, size: int, changed: int) -> tuple[Any, tuple[str, ...]]:
    """Return the numbers of the rows that training leaves out for their length, and where the first ones are."""
    data = msgspec.json.decode(settings, type=Data)
    path = str(Path(data.dataset).expanduser())
    found = row_bytes(path, data.split, size, changed)
    assert found is not None  # the rows were measured
    lengths = np.maximum(found / per_token, 1.0)
    long = np.flatnonzero(lengths > data.seq_length + 1)
    if not len(long) or data.truncation == "refuse" or (data.truncation != "drop" and data.train_on == "all"):
        return long[:0], ()
    chosen = np.linspace(0, len(long) - 1, min(len(long), MAX_PARSED)).round().astype(int)
    rows = rows_at(path, data.split, long[chosen].tolist())
    if data.truncation == "drop":
        lost, numbers = [True] * len(chosen), long
    else:
        from meshwright.engine.data.row_errors import RowColumns, detects_columns

        columns = RowColumns(_columns(data, path), detects_columns(data.columns))
        lost = [
            _loses_answers(data, *one, columns, float(lengths[i])) for one, i in zip(rows, long[chosen], strict=True)
        ]
        numbers = long[np.array(lost)[np.searchsorted(chosen, np.arange(len(long)), "right") - 1]]
    found = [
        f"{where}: about {lengths[i]:,.0f} tokens"
        for (where, _), i, gone in zip(rows, long[chosen], lost, strict=True)
        if gone
    ]
    return numbers, tuple(found[:SHOWN_ROWS])


def _columns(data: Data, path: str) -> Mapping[str, str]:
    """Return the columns of a dataset's first row; none if they match no conversation, which train reports."""
    from meshwright.engine.data.conversations import detect_columns

    try:
        return detect_columns(rows_at(path, data.split, [0])[0][1], data.columns, path)
    except (InputError, IndexError, TypeError):
        return {}


def _loses_answers(data: Data, where: str, row: Any, columns: RowColumns, tokens: float) -> bool:
    """Return whether truncation leaves none of a row's answers: the tokens of a message are its part of the row's."""
    from meshwright.engine.data.conversations import answers_in_loss, parse_conversation, untrainable_reason

    try:
        found = parse_conversation(row, columns.of(row), where)
    except (InputError, TypeError, AttributeError):  # train reports the row
        return False
    if not found.messages or untrainable_reason(found, data.train_on):
        return False
    sizes = [len(msgspec.json.encode(message, enc_hook=str)) for message in found.messages]
    ends = np.cumsum(sizes) * tokens / sum(sizes)
    trained = [message in answers_in_loss(found, data.train_on) for message in found.messages]
    most = data.seq_length + 1
    if data.truncation == "start":
        return bool(ends[trained].max() <= tokens - most)
    return bool((ends - np.array(sizes) * tokens / sum(sizes))[trained].min() >= most)


def _local_tokenizer(recipe: Recipe) -> str:
    """Return the name of a recipe's tokenizer if it is on this machine and can be loaded; else empty."""
    if recipe.data.streaming or any(map(extras.missing, ("transformers", "jinja2"))):
        return ""
    from meshwright.engine.data.tokenizers import local_folder, tokenizer_name

    try:
        name = tokenizer_name(recipe) or ""
    except InputError:
        return ""
    return name if name and local_folder(name) is not None else ""


def _token_lengths(recipe: Recipe) -> TrainedLengths | None:
    """Return the tokens of the samples as train makes them; None without a tokenizer, or if train refuses the rows."""
    data, path = recipe.data, Path(recipe.data.dataset).expanduser()
    if recipe.goal == "pretrain" or data.images or data.blend or file_access.closed() or not path.exists():
        return None
    name = _local_tokenizer(recipe)
    if not name:
        return None
    sizes = file_sizes(path)
    counted = msgspec.structs.replace(data, tokenizer=name, workers=1)
    return _tokenize(msgspec.json.encode(counted), sum(sizes), path.stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _tokenize(settings: bytes, size: int, changed: int) -> TrainedLengths | None:
    """Return the tokens of the samples of a dataset; small ones are tokenized now, and cached for train."""
    del changed  # part of the cache key
    from meshwright.engine.data.files import find_rows
    from meshwright.engine.data.length_cache import cached_lengths
    from meshwright.engine.data.tokenizers import local_folder

    data = msgspec.json.decode(settings, type=Data)
    folder = local_folder(data.tokenizer)
    assert folder is not None  # the name is of a local tokenizer

    def count() -> TrainedLengths | None:
        from meshwright.engine.data.rendered import training_lengths

        recipe = Recipe(name="", model="", goal="sft", cluster="", data=data)
        return training_lengths(recipe, build=size <= MAX_TOKENIZED_BYTES)

    try:
        with no_notes():
            rows = find_rows(Path(data.dataset).expanduser(), data.split, data.dataset)
            found = cached_lengths(rows, data, folder, count)
    except (InputError, OSError):  # data_findings has what is wrong with rows and tokenizers
        return None
    return found if found is not None and len(found.lengths) else None
