"""How many samples the epochs of a user's own file have, counted without a tokenizer."""

from __future__ import annotations

import os
from math import ceil
from pathlib import Path

from meshwright import file_access
from meshwright.errors import InputError
from meshwright.planner.budget import Epochs
from meshwright.recipes.types import Recipe

BYTES_PER_TOKEN = 4.0  # of English text and JSON, with the tokenizers of current models
MAX_COUNTED_BYTES = 2**28  # larger files are not read for an answer that should be instant


def epochs_of(recipe: Recipe) -> Epochs | None:
    """Return the samples that a recipe's epochs over a local file or folder have; None if they are not known."""
    data, epochs = recipe.data, recipe.train.epochs
    if not epochs or data.blend or file_access.closed() or not os.path.exists(data.dataset):
        return None
    path = Path(data.dataset)
    sizes = [one.stat().st_size for one in ([path] if path.is_file() else path.rglob("*")) if one.is_file()]
    passes = f"{epochs:g} epoch{'s' if epochs != 1 else ''} of {data.dataset}"
    kept = 1 - data.validation_part
    if data.packing or recipe.goal == "pretrain":
        samples = max(ceil(kept * sum(sizes) / BYTES_PER_TOKEN / data.seq_length), 1)
        text = f"{passes}: about {samples:,} packed samples, at {BYTES_PER_TOKEN:g} bytes per token"
        return Epochs(max(round(samples * epochs), 1), text)
    rows = _rows(path, data.split) if sum(sizes) <= MAX_COUNTED_BYTES else None
    if not rows:
        return None
    samples = max(round(kept * rows), 1)
    return Epochs(
        max(round(samples * epochs), 1), f"{passes}: {samples:,} samples of at most {data.seq_length:,} tokens"
    )


def _rows(path: Path, split: str) -> int | None:
    from meshwright.engine.data.files import find_rows  # 30 ms that answers without a dataset save

    try:
        rows = find_rows(path, split)
        found = rows.count()
        return sum(1 for _ in rows) if found is None else found
    except InputError:  # the data is checked by train; a length that is not known is left out
        return None
