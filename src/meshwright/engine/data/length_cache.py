"""Cache of the sample lengths of a dataset, by the state of its files: reading it loads no tokenizer."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import msgspec
import numpy as np

from meshwright.engine.data.cache import cache_folder
from meshwright.engine.data.files import Rows
from meshwright.recipes.types import Data
from meshwright.version import VERSION

LENGTH_CACHE_VERSION = 1  # increment when the same files give other lengths


class TrainedLengths(msgspec.Struct, frozen=True):
    """The tokens of every conversation that is trained on, truncated, and how many rows are left out."""

    tokens: bytes  # of int64
    rows: int
    truncated: int  # rows that lost tokens and are trained on
    dropped: int  # rows left out for their length
    untrainable: int  # rows left out because they have no target tokens
    longest: int  # tokens, before truncation
    dropped_rows: tuple[str, ...] = ()  # locations of the first rows left out for their length, and their tokens

    @property
    def lengths(self) -> np.ndarray:
        """Return the lengths as an array."""
        return np.frombuffer(self.tokens, dtype=np.int64)


def cached_lengths(
    rows: Rows, data: Data, tokenizer: Path, count: Callable[[], TrainedLengths | None]
) -> TrainedLengths | None:
    """Return the lengths of rows from the cache, else those that `count` finds; a cache that fails is not used."""
    path = cache_folder() / "lengths" / f"{_key(rows, data, tokenizer)}.msgpack"
    with suppress(OSError, msgspec.DecodeError):
        return msgspec.msgpack.decode(path.read_bytes(), type=TrainedLengths)
    found = count()
    if found is not None:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(f".partial-{os.getpid()}")
            partial.write_bytes(msgspec.msgpack.encode(found))
            partial.replace(path)
    return found


def _key(rows: Rows, data: Data, tokenizer: Path) -> str:
    """Return a key of everything that the lengths depend on: the state of the files, the settings and the versions."""
    template = Path(data.chat_template).expanduser()
    files = [path for path in tokenizer.iterdir() if path.is_file()] + [template] * (data.chat_template != "")
    states = sorted(_state(path) for path in files)
    versions = [LENGTH_CACHE_VERSION, VERSION, version("transformers")]
    parts = [rows.state(), states, msgspec.to_builtins(data), versions]
    return hashlib.blake2b(msgspec.json.encode(parts, order="deterministic"), digest_size=16).hexdigest()


def _state(path: Path) -> list[object]:
    if not path.exists():
        return [str(path)]
    found = path.stat()
    return [str(path.resolve()), found.st_size, found.st_mtime_ns]
