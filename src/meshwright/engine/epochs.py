"""Training by epochs: the number of steps that passes over the data take, and how often a run repeats its data."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from typing import Any

import msgspec

from meshwright.display import plural
from meshwright.engine.data.finite import FiniteSource, known_size
from meshwright.engine.metrics.jsonl import log
from meshwright.errors import InputError
from meshwright.recipes.overrides import change
from meshwright.recipes.types import Recipe
from meshwright.rules.learning_rate import is_long_warmup, short_warmup
from meshwright.rules.repeated_data import MANY_PASSES, usual_epochs, validation_interval

MOST_SAMPLES = 1 << 62


class EndedSource(FiniteSource):
    """The samples of all epochs; the last step is filled up with samples without targets."""

    def __init__(self, source: Any, size: int, per_token: bool) -> None:
        super().__init__(source, size)
        self.per_token = per_token


def with_steps(recipe: Recipe, open_source: Callable[[], Any], shown: bool) -> tuple[Recipe, int | None]:
    """Return the recipe with the steps of its epochs in place of the epochs, and the samples they have."""
    epochs, batch = recipe.train.epochs, recipe.train.global_batch_size
    if not epochs:
        return recipe, None
    with _no_tokenizer_threads():  # they would not survive the fork into ranks
        size = known_size(open_source(), MOST_SAMPLES)
    if not size:
        raise InputError("the data has no end, so it has no epochs", field="train.epochs", value=epochs,
                         fix=("train.steps=N without train.epochs",))  # fmt: skip
    total = max(1, round(epochs * size))
    steps = ceil(total / batch)
    if shown:
        rest = f", {total % batch} in the last" if total % batch else ""
        length = f"{plural(total, 'sample')} in {plural(steps, 'step')} of {batch}{rest}"
        log(f"train.epochs={epochs:g}: {plural(size, 'sample')} per epoch, {length}")
    train = msgspec.structs.replace(recipe.train, steps=steps, epochs=0.0)
    return msgspec.structs.replace(recipe, train=train), total


def with_epoch_intervals(recipe: Recipe, epochs: float, fields: Sequence[str], shown: bool) -> Recipe:
    """Return a recipe whose steps were counted with these intervals set to the steps of one epoch."""
    if not fields:
        return recipe
    each = max(1, ceil(recipe.train.steps / max(epochs, 1.0)))
    if shown:
        log(" ".join(f"{field}={each}" for field in fields) + ": once per epoch, as the script states")
    return change(recipe, dict.fromkeys(fields, each))[0]


def with_short_warmup(recipe: Recipe, shown: bool) -> Recipe:
    """Return a recipe whose steps were counted with a warmup that they have room for."""
    warmup, steps = recipe.schedule.warmup_steps, recipe.train.steps
    if not is_long_warmup(warmup, steps):
        return recipe
    short = short_warmup(steps)
    if shown:
        why = f"the recipe's were for a longer run than {plural(steps, 'step')}"
        log(f"schedule.warmup_steps {warmup} → {short}: {why}; schedule.warmup_steps=N sets them")
    return msgspec.structs.replace(recipe, schedule=msgspec.structs.replace(recipe.schedule, warmup_steps=short))


def with_validations(recipe: Recipe, shown: bool) -> Recipe:
    """Return a recipe whose validation data is used a few times, if it does not state how often."""
    data, train = recipe.data, recipe.train
    if train.eval_every or train.epochs or not (data.validation or data.validation_part):
        return recipe
    every = validation_interval(train.steps)
    if shown:
        times = f"{plural(ceil(train.steps / every), 'validation')} in {plural(train.steps, 'step')}"
        log(f"train.eval_every 0 → {every}: {times}; train.eval_every=0 turns them off")
    return msgspec.structs.replace(recipe, train=msgspec.structs.replace(train, eval_every=every))


def repeats(recipe: Recipe, samples_per_epoch: int) -> float:
    """Return how often a run passes over its data."""
    return recipe.train.steps * recipe.train.global_batch_size / samples_per_epoch


def repeat_warning(recipe: Recipe, samples_per_epoch: int | None, dp: int) -> str:
    """Return the warning for a run that repeats its data many times; empty if it does not."""
    if not samples_per_epoch or (passes := repeats(recipe, samples_per_epoch)) <= MANY_PASSES:
        return ""
    steps, batch = recipe.train.steps, recipe.train.global_batch_size
    usual, fewer = usual_epochs(samples_per_epoch, batch, recipe.layout.micro_batch_size, dp)
    first = " ".join(f"{key}={value}" for key, value in usual.items())
    return (
        f"train.steps={steps} with {plural(batch, 'sample')} each repeat the {plural(samples_per_epoch, 'sample')} of "
        f"{' + '.join(recipe.data.blend) or recipe.data.dataset} {passes:,.0f} times; "
        f"fix: {first}" + (f" or train.steps={fewer}" if len(usual) == 1 else f", {plural(fewer, 'step')}")
    )


@contextmanager
def _no_tokenizer_threads() -> Iterator[None]:
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before
