"""Micro batches per step that keep the global batch of a changed layout, where a config states them instead of it."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import prod
from typing import Any

from meshwright.frameworks.framework import Framework
from meshwright.frameworks.types import Settings, as_int
from meshwright.recipes.key_maps import config_keys
from meshwright.recipes.types import Recipe, field_value

MICRO_BATCH = "layout.micro_batch_size"
MODEL_AXES = ("layout.tp", "layout.pp", "layout.cp")


def accumulation_after(steps: int, before: Recipe, after: Recipe, axes: Sequence[str] = MODEL_AXES) -> Fraction:
    """Return the micro batches per step of a changed recipe on the same GPUs; `axes` share the samples of a rank."""

    def rounds(one: Recipe) -> Fraction:  # times the number of GPUs
        shared = prod(int(field_value(one, axis)) for axis in axes)
        return Fraction(one.train.global_batch_size * shared, one.layout.micro_batch_size)

    return steps * rounds(after) / rounds(before)


def kept_accumulation(theirs: Framework, stated: Settings, before: Recipe, after: Recipe) -> dict[str, Any] | None:
    """Return the framework's setting that gives a changed recipe its global batch; None if no number of steps does.

    Empty if the framework states the batch itself, or if the steps stay.
    """
    key = theirs.accumulation_key
    if not key:
        return {}
    steps = as_int(stated.get(key)) or int(config_keys(theirs.key_map)[key].default)
    axes = [field for field in theirs.batch_follows if field != MICRO_BATCH]
    wanted = accumulation_after(steps, before, after, axes)
    if wanted == steps:
        return {}
    return {key: int(wanted)} if wanted >= 1 and wanted.denominator == 1 else None
