"""How many samples and updates a user's own data gives: epochs, steps and notes."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable
from math import ceil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from meshwright import file_access
from meshwright.api.data_findings import NO_VALIDATION, UNUSED_ANSWERS, data_findings, names_a_file
from meshwright.api.paths import looks_like_path, several_files
from meshwright.api.row_bytes import file_sizes, row_count, rows_of
from meshwright.api.sample_lengths import (
    MAX_COUNTED_BYTES,
    on_engine,
    own_lengths,
    own_samples,
    stored_tokens,
    tokenized_with,
)
from meshwright.display import plural
from meshwright.planner.budget import Epochs
from meshwright.recipes.padding import padding_of
from meshwright.recipes.replacements import bytes_per_token
from meshwright.recipes.types import Engine, Recipe
from meshwright.rules import Finding
from meshwright.rules.repeated_data import ENOUGH_STEPS, FEW_STEPS, MANY_PASSES, USUAL_EPOCHS, usual_epochs

WINDOW_STEPS = 64  # in which the engine groups samples by length
OUR_ENGINE: Engine = "meshwright"
FEW_UPDATES, USUAL_UPDATES = 50, 100  # of a fine-tuning; with fewer, an adapter is hardly trained
SMALLEST_BATCH = 8  # that is recommended for more updates: gradients of fewer samples are noisy
BATCH = "train.global_batch_size"
FEW_UPDATES_RULE = "data.few-updates"


class _Counted(msgspec.Struct, frozen=True):
    """The samples of one pass over a dataset."""

    samples: int
    text: str  # the same in words
    packed_tokens: float = 0.0  # of all documents, if they are packed


def epochs_of(recipe: Recipe, engine: Engine = OUR_ENGINE) -> Epochs | None:
    """Return the samples that a recipe's epochs over a local file or folder have; None if they are not known."""
    epochs = recipe.train.epochs
    recipe = recipe if engine == OUR_ENGINE else on_engine(recipe, engine)
    counted = _count(recipe, engine) if epochs else None
    if counted is None:
        return None
    passes = f"{epochs:g} epoch{'s' if epochs != 1 else ''} of {recipe.data.dataset}"
    source = f"{passes}: {counted.text}"
    lengths = own_lengths(recipe) if counted.packed_tokens else None
    longest = 0 if lengths is None else ceil(lengths.max()) - 1  # the last token is a target only
    return Epochs(max(round(counted.samples * epochs), 1), source, counted.packed_tokens, longest)


def share_of_data(recipe: Recipe, engine: Engine = OUR_ENGINE) -> str:
    """Return how often the steps of a run pass over a local dataset, and the option for whole passes; empty if unknown.

    The steps of a recipe are those of its own data.
    """
    train = recipe.train
    counted = None if train.epochs or not looks_like_path(recipe.data.dataset) else _count(recipe, engine)
    if counted is None:
        return ""
    passes = train.steps * train.global_batch_size / counted.samples
    share = f"{passes:.3g} epochs" if passes > 1 else f"{passes:.0%}"
    each = plural(ceil(counted.samples / train.global_batch_size), "step")
    return (
        f"{plural(train.steps, 'step')} are {share} of {recipe.data.dataset} ({counted.text}): --epochs 1 "
        f"(train.epochs=1) is {each} of {plural(train.global_batch_size, 'sample')}"
    )


def epochs_beside(folder: Path | None, engine: Engine) -> Callable[[Recipe], Epochs | None]:
    """Return epochs_of for the recipe of another framework's file: its program starts in `folder`, as do its paths."""

    def count(recipe: Recipe) -> Epochs | None:
        return epochs_of(on_engine(with_data_beside(recipe, folder), engine))

    return count


def with_data_beside(recipe: Recipe, folder: Path | None) -> Recipe:
    """Return the recipe of a file in `folder` with a relative path of its data as this process opens it."""
    name = recipe.data.dataset
    if folder is None or not name or file_access.closed() or Path(name).expanduser().exists():
        return recipe
    own = os.path.relpath(os.path.realpath(folder / name)) if (folder / name).exists() else name
    return _trained_on(recipe, ",".join(several_files(name, folder)) or own)


def _trained_on(recipe: Recipe, dataset: str) -> Recipe:
    return msgspec.structs.replace(recipe, data=msgspec.structs.replace(recipe.data, dataset=dataset))


def epochs_if_usual(recipe: Recipe, engine: Engine) -> Epochs | None:
    """Return the usual passes over the data of a run by steps: more updates than these repeat the samples."""
    train = msgspec.structs.replace(recipe.train, epochs=float(USUAL_EPOCHS))
    return epochs_of(msgspec.structs.replace(recipe, train=train), engine)


def batch_for_updates(
    recipe: Recipe, world: int, engine: Engine = OUR_ENGINE, by_steps: bool = False
) -> tuple[int, str] | None:
    """Return a batch that gives a fine-tuning enough updates of the user's data, and why; None if it has enough.

    `by_steps`: also that of a run by steps, which repeats the data often, in the usual epochs.
    """
    if recipe.goal == "pretrain" or recipe.benchmark:
        return None
    epochs, passes = epochs_of(recipe, engine), recipe.train.epochs
    if epochs is None and by_steps and _repeats_often(recipe):  # its steps are those of other data
        epochs, passes = epochs_if_usual(recipe, engine), float(USUAL_EPOCHS)
    now, least = recipe.train.global_batch_size, max(SMALLEST_BATCH, world)
    if epochs is None or updates_of(epochs, now) >= FEW_UPDATES:
        return None
    batch = now
    while batch % 2 == 0 and batch // 2 >= least and updates_of(epochs, batch) < USUAL_UPDATES:
        batch //= 2
    if batch == now:
        return None
    few = plural(updates_of(epochs, now), "update")
    return batch, (
        f"{now} samples per step leave only {few} in {passes:g} epoch{'s' * (passes != 1)} of {recipe.data.dataset}, "
        f"{batch} leave {updates_of(epochs, batch)}"
    )


def few_updates(recipe: Recipe, world: int, engine: Engine = OUR_ENGINE) -> tuple[Finding, ...]:
    """Return the advice for a fine-tuning of few updates, but those that the rule data.few-steps reports."""
    epochs = None if file_access.closed() else epochs_of(recipe, engine)
    found = batch_for_updates(recipe, world, engine) if epochs is not None else None
    if epochs is None or found is None:
        return ()
    updates = updates_of(epochs, recipe.train.global_batch_size)
    if updates < FEW_STEPS or updates <= min(recipe.train.epochs, ENOUGH_STEPS - 1):
        return ()
    return (Finding(FEW_UPDATES_RULE, "advice", BATCH, found[1], (f"{BATCH}={found[0]}",)),)


def _repeats_often(recipe: Recipe) -> bool:
    """Return whether a run by steps repeats the user's data more often than is of use."""
    counted = _count(recipe) if looks_like_path(recipe.data.dataset) and not file_access.closed() else None
    return counted is not None and recipe.train.steps * recipe.train.global_batch_size > MANY_PASSES * counted.samples


def updates_of(epochs: Epochs, batch: int) -> int:
    return ceil(epochs.samples / batch)


def sample_width(recipe: Recipe, engine: Engine = OUR_ENGINE) -> float | None:
    """Return the tokens per sample that steps of unequal width have on average; None if it is not known or constant.

    Samples are as wide as the longest one of their step or micro batch, where the engine pads to it.
    """
    padding = padding_of(recipe, engine)
    if padding.to not in ("step", "micro_batch"):
        return None
    lengths = own_lengths(recipe)
    if lengths is None:
        return None
    size = recipe.layout.micro_batch_size if padding.to == "micro_batch" else recipe.train.global_batch_size
    shuffled = np.random.default_rng(0).permutation(lengths)
    if len(shuffled) < size:
        shuffled = np.resize(shuffled, size)
    windows = np.split(shuffled, range(WINDOW_STEPS * size, len(shuffled), WINDOW_STEPS * size))
    if recipe.data.group_by_length:
        windows = [np.sort(window) for window in windows]
    widths = np.concatenate([np.maximum.reduceat(window, range(0, len(window), size)) for window in windows])
    rounded = np.ceil(widths / padding.multiple) * padding.multiple if padding.multiple > 1 else widths
    return float(np.minimum(rounded, recipe.data.seq_length).mean())


def dataset_notes(recipe: Recipe, dp: int) -> tuple[str, ...]:
    """Return how many samples the user's dataset has and how often the run repeats them, or that it is not here."""
    name = recipe.data.dataset
    if recipe.data.blend or file_access.closed() or not names_a_file(name):
        return ()
    found = tuple(one for one in data_findings(recipe) if one.rule != NO_VALIDATION)
    if found:  # errors and missing validation data are findings of the plan
        missing = tuple(
            f"{one.message}: {shlex.join(one.fix)}" if one.rule == UNUSED_ANSWERS else one.message
            for one in found
            if one.severity != "error"
        )
        of_data = any(one.field.startswith("data.dataset") or one.severity == "error" for one in found)
        return missing if of_data else (*missing, *_delimiter_notes(recipe), *_count_notes(recipe, dp))
    return (*_delimiter_notes(recipe), *_count_notes(recipe, dp))


def _delimiter_notes(recipe: Recipe) -> Iterable[str]:
    path = Path(recipe.data.dataset).expanduser()
    found = rows_of(path, recipe.data.split, lambda rows: rows.format_for(recipe.goal))
    return (found,) if found else ()


def _count_notes(recipe: Recipe, dp: int) -> tuple[str, ...]:
    """Return how many samples the user's dataset has and how often the run repeats them."""
    name, train = recipe.data.dataset, recipe.train
    counted = _count(recipe)
    if counted is None:
        return ()
    if train.epochs:
        repeated = f"{name}: train.epochs={train.epochs:g} repeats {counted.text} {train.epochs:g} times"
        advice = f"more than {MANY_PASSES} epochs mostly memorize the data: train.epochs={USUAL_EPOCHS}"
        return (f"{repeated}; {advice}",) if train.epochs > MANY_PASSES else ()
    passes = train.steps * train.global_batch_size / counted.samples
    if passes <= MANY_PASSES:
        return (f"{name}: {counted.text}",)
    fields, steps = usual_epochs(int(counted.samples), train.global_batch_size, recipe.layout.micro_batch_size, dp)
    usual = " ".join(f"{key}={value}" for key, value in fields.items())
    taken = f": {plural(steps, 'step')}" if len(fields) > 1 else ""
    return (
        f"{name}: {counted.text}; train.steps={train.steps} with {plural(train.global_batch_size, 'sample')} each "
        f"repeat them {passes:,.0f} times; {usual} is usual{taken}",
    )


def _count(recipe: Recipe, engine: Engine = OUR_ENGINE) -> _Counted | None:
    """Return the samples of a local file or folder; None if they are not known."""
    data = recipe.data
    path = Path(data.dataset).expanduser()
    if data.blend:
        return None
    stored = None if file_access.closed() or recipe.goal != "pretrain" else stored_tokens(path)
    if stored is not None:
        tokens = (1 - data.validation_part) * stored
        samples = max(int(tokens - 1) // data.seq_length, 1)  # the last token is a target only
        rest = ", without the part that is held out" if data.validation_part else ""
        return _Counted(samples, f"{stored:,} tokens, {_packed(samples)}{rest}", tokens)
    if file_access.closed() or not path.exists():
        published = _published_count(recipe)
        return published if published or file_access.closed() else _count_of_several(recipe, engine)
    sizes = file_sizes(path)
    kept = 1 - data.validation_part
    lengths, name = own_lengths(recipe), tokenized_with(recipe)
    if recipe.goal == "pretrain" or (data.packing and lengths is None):
        tokens = kept * sum(sizes) / bytes_per_token(recipe)
        samples = max(ceil(tokens / data.seq_length), 1)
        return _Counted(samples, f"about {_packed(samples)}, at {bytes_per_token(recipe):g} bytes per token", tokens)
    if data.packing and lengths is not None:
        from meshwright.engine.data.packing import pack

        used = lengths if name else _part(lengths, kept)
        samples = len(pack(np.ceil(used).astype(np.int64), data.seq_length + 1))
        how = f"{_packed(samples)}, counted with {name}" if name else _estimated(recipe, samples)
        return _Counted(samples, how, float(used.sum()))
    countable = lengths is None and sum(sizes) <= MAX_COUNTED_BYTES
    rows = rows_of(path, data.split, row_count) if countable else None if lengths is None else len(lengths)
    if not rows:
        return None
    samples = rows if name else max(round(kept * rows), 1)
    shown = f"{samples:,} sample{'s' * (samples != 1)}"
    if lengths is None:
        return _Counted(samples, f"{shown} of at most {data.seq_length:,} tokens")
    mean = float(np.minimum(lengths, data.seq_length).mean())
    width = sample_width(recipe, engine)
    how = f"padded to {data.seq_length:,}"
    if width and padding_of(recipe, engine).to == "micro_batch":
        how = f"padded to the longest of a micro batch, {width:,.0f} on average"
        if recipe.layout.micro_batch_size == 1:
            how = "not padded in micro batches of one sample"
    elif width:
        how = f"in steps of {width:,.0f} on average"
    return _Counted(samples, f"{shown} of about {mean:,.0f} tokens, {how}")


def _published_count(recipe: Recipe) -> _Counted | None:
    """Return the samples of a registered dataset that is not on this machine; None if its card publishes none."""
    from meshwright.engine.data.registered import registered_dataset

    data = recipe.data
    found = registered_dataset(data.dataset)
    if found is None or not found.samples or data.split != "train":
        return None
    kept = 1 - data.validation_part
    if recipe.goal != "pretrain" and not data.packing:
        samples = max(round(kept * found.samples), 1)
        return _Counted(samples, f"{samples:,} samples of {found.hub_id}, as published")
    if not found.text_bytes:
        return None
    tokens = kept * found.text_bytes / bytes_per_token(recipe)
    samples = max(ceil(tokens / data.seq_length), 1)
    how = f"about {_packed(samples)} of {found.hub_id}, at {bytes_per_token(recipe):g} bytes per token"
    return _Counted(samples, how, tokens)


def _count_of_several(recipe: Recipe, engine: Engine) -> _Counted | None:
    """Return the samples of all files that a dataset lists; None if it lists none, or one is not known."""
    parts = several_files(recipe.data.dataset)
    counts = [_count(_trained_on(recipe, part), engine) for part in parts]
    known = [one for one in counts if one is not None]
    if not known or len(known) < len(counts):
        return None
    samples = sum(one.samples for one in known)
    shown = f"about {_packed(samples)}" if recipe.data.packing else plural(samples, "sample")
    return _Counted(samples, f"{shown} of {len(parts)} files", sum(one.packed_tokens for one in known))


def _packed(samples: int) -> str:
    return f"{samples:,} packed sample{'s' * (samples != 1)}"


def _estimated(recipe: Recipe, samples: int) -> str:
    """Return a number of packed samples that was counted without the tokenizer, in words."""
    text = f"about {_packed(samples)}, at {bytes_per_token(recipe):g} bytes per token"
    found = own_samples(recipe)
    counts = {} if found is None else {"cut": found.truncated, "dropped": found.dropped}
    parts = [f"{count:,} {done}" for done, count in counts.items() if count]
    if not parts:
        return text
    rows = plural(sum(counts.values()), "row")
    done = next(one for one, count in counts.items() if count) if len(parts) == 1 else f"({', '.join(parts)})"
    return f"{text}, {rows} longer than data.seq_length={recipe.data.seq_length} {done}"


def _part(lengths: Any, share: float) -> Any:
    """Return a share of the samples, drawn at random."""
    if share == 1:
        return lengths
    return np.random.default_rng(0).permutation(lengths)[: max(round(share * len(lengths)), 1)]
