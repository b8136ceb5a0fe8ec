"""How many tokens the samples of a user's own dataset have: counted with its tokenizer, else estimated by bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from meshwright import extras, file_access
from meshwright.errors import InputError
from meshwright.notes import no_notes
from meshwright.recipes.replacements import bytes_per_token
from meshwright.recipes.types import Data, Recipe

MAX_COUNTED_BYTES = 2**28  # larger files are not read for an answer that should be instant
MAX_TOKENIZED_BYTES = 2**24  # larger files are tokenized by samples and train only
T = TypeVar("T")


def own_lengths(recipe: Recipe) -> Any | None:
    """Return the tokens of every fine-tuning sample of a local dataset, truncated; None if they are not known."""
    data = recipe.data
    path = Path(data.dataset).expanduser()
    if recipe.goal == "pretrain" or data.images or data.blend or file_access.closed() or not path.exists():
        return None
    if not 0 < sum(file_sizes(path)) <= MAX_COUNTED_BYTES:
        return None
    counted = _token_lengths(recipe)
    if counted is not None:
        return counted
    lengths, most = untruncated_lengths(recipe), data.seq_length + 1
    if lengths is None:
        return None
    fitting = lengths[lengths <= most] if data.truncation == "drop" else np.minimum(lengths, most)
    return fitting if len(fitting) else None


def untruncated_lengths(recipe: Recipe) -> Any | None:
    """Return the tokens of every row by its bytes, however long; None if the rows are not known."""
    path = Path(recipe.data.dataset).expanduser()
    found = _lengths(str(path), recipe.data.split, sum(file_sizes(path)), path.stat().st_mtime_ns)
    return None if found is None else np.maximum(found / bytes_per_token(recipe), 1.0)


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


def _token_lengths(recipe: Recipe) -> Any | None:
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
def _tokenize(data: bytes, size: int, changed: int) -> Any | None:
    """Return the tokens of the samples of a dataset; small ones are tokenized now, and cached for train."""
    del changed  # part of the cache key
    from meshwright.engine.data.rendered import training_lengths

    recipe = Recipe(name="", model="", goal="sft", cluster="", data=msgspec.json.decode(data, type=Data))
    try:
        with no_notes():
            found = training_lengths(recipe, build=size <= MAX_TOKENIZED_BYTES)
    except InputError:  # data_findings has what is wrong with rows and tokenizers
        return None
    return found if found is not None and len(found) else None


@lru_cache(maxsize=8)
def _lengths(path: str, split: str, size: int, changed: int) -> Any | None:
    """Return the bytes of every row; lines of JSON are measured without being parsed."""
    del changed  # part of the cache key
    if path.endswith((".jsonl", ".ndjson")):
        ends = np.flatnonzero(np.frombuffer(Path(path).read_bytes(), dtype=np.uint8) == ord("\n"))
        lengths = np.diff(np.concatenate([[-1], ends, [] if len(ends) and ends[-1] == size - 1 else [size]]))
        first, end = _slice(split)
        lengths = lengths[lengths > len("{}")][first:end]
    else:
        rows = rows_of(Path(path), split, lambda found: [row for _, row in found])
        if rows is None:
            return None
        lengths = np.array([len(msgspec.json.encode(row, enc_hook=str)) for row in rows], dtype=float)
    return lengths if len(lengths) else None


def _slice(split: str) -> tuple[int, int | None]:
    """Return the rows of a split such as train[:100]; all of them if it has no valid slice."""
    from meshwright.engine.data.files import split_and_rows

    try:
        return split_and_rows(split)[1]
    except InputError:
        return 0, None


def rows_of(path: Path, split: str, read: Callable[[Any], T]) -> T | None:
    """Return what `read` makes of a dataset's rows; None if they cannot be read, which train reports."""
    from meshwright.engine.data.files import find_rows  # 30 ms that answers without a dataset save

    try:
        return read(find_rows(path, split))
    except InputError:
        return None


def row_count(rows: Any) -> int:
    found: int | None = rows.count()
    return sum(1 for _ in rows) if found is None else found


def file_sizes(path: Path) -> list[int]:
    return [one.stat().st_size for one in ([path] if path.is_file() else path.rglob("*")) if one.is_file()]
