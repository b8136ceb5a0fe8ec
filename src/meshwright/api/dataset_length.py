"""How many samples a user's own file has, counted without a tokenizer."""

from __future__ import annotations

import os
from math import ceil
from pathlib import Path

import msgspec

from meshwright import file_access
from meshwright.api.paths import looks_like_path
from meshwright.errors import InputError
from meshwright.planner.budget import Epochs
from meshwright.recipes.types import Recipe

BYTES_PER_TOKEN = 4.0  # of English text and JSON, with the tokenizers of current models
MAX_COUNTED_BYTES = 2**28  # larger files are not read for an answer that should be instant
MANY_PASSES = 5  # as train warns
USUAL_EPOCHS = 3


class _Counted(msgspec.Struct, frozen=True):
    """The samples of one pass over a dataset."""

    samples: int
    text: str  # the same in words


def epochs_of(recipe: Recipe) -> Epochs | None:
    """Return the samples that a recipe's epochs over a local file or folder have; None if they are not known."""
    epochs = recipe.train.epochs
    counted = _count(recipe) if epochs else None
    if counted is None:
        return None
    passes = f"{epochs:g} epoch{'s' if epochs != 1 else ''} of {recipe.data.dataset}"
    return Epochs(max(round(counted.samples * epochs), 1), f"{passes}: {counted.text}")


def dataset_notes(recipe: Recipe) -> tuple[str, ...]:
    """Return how many samples the user's dataset has and how often the run repeats them, or that it is not here."""
    name, train = recipe.data.dataset, recipe.train
    if recipe.data.blend or file_access.closed() or not looks_like_path(name):
        return ()
    if not os.path.exists(Path(name).expanduser()):
        return (f"{name} is not on this machine: it was not counted, and train needs it where it runs",)
    counted = _count(recipe)
    if counted is None or train.epochs:
        return ()
    passes = train.steps * train.global_batch_size / counted.samples
    if passes <= MANY_PASSES:
        return (f"{name}: {counted.text}",)
    fewer = max(1, ceil(USUAL_EPOCHS * counted.samples / train.global_batch_size))
    return (
        f"{name}: {counted.text}; train.steps={train.steps} with {train.global_batch_size} samples each repeat them "
        f"{passes:,.0f} times: train.epochs={USUAL_EPOCHS} or train.steps={fewer}",
    )


def _count(recipe: Recipe) -> _Counted | None:
    """Return the samples of a local file or folder; None if they are not known."""
    data = recipe.data
    path = Path(data.dataset).expanduser()
    if data.blend or file_access.closed() or not path.exists():
        return None
    sizes = [one.stat().st_size for one in ([path] if path.is_file() else path.rglob("*")) if one.is_file()]
    kept = 1 - data.validation_part
    if data.packing or recipe.goal == "pretrain":
        samples = max(ceil(kept * sum(sizes) / BYTES_PER_TOKEN / data.seq_length), 1)
        shown = f"{samples:,} packed sample{'s' * (samples != 1)}"
        return _Counted(samples, f"about {shown}, at {BYTES_PER_TOKEN:g} bytes per token")
    rows = _rows(path, data.split) if sum(sizes) <= MAX_COUNTED_BYTES else None
    if not rows:
        return None
    samples = max(round(kept * rows), 1)
    return _Counted(samples, f"{samples:,} sample{'s' * (samples != 1)} of at most {data.seq_length:,} tokens")


def _rows(path: Path, split: str) -> int | None:
    from meshwright.engine.data.files import find_rows  # 30 ms that answers without a dataset save

    try:
        rows = find_rows(path, split)
        found = rows.count()
        return sum(1 for _ in rows) if found is None else found
    except InputError:  # the data is checked by train; a length that is not known is left out
        return None
