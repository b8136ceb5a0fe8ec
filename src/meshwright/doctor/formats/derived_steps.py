"""Steps of a log that numbers its records only by epoch, as the Trainer does without a progress bar.

The Trainer logs every logging_steps and rounds what it prints: epochs to 2 decimals (4 digits since transformers 5),
its final rate to 3 decimals. One integer of steps between two records usually fits all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

ROUND = (1000, 500, 250, 200, 100, 50, 25, 20, 10, 5, 2, 1)
"""Usual values of logging_steps, and what they are multiples of; if several values fit, the roundest is assumed."""
DIGITS = 4  # significant digits of the numbers that transformers 5 prints


class Range(NamedTuple):
    """The values that a rounded number may have had."""

    low: float
    high: float


class Derived(NamedTuple):
    """The step of every record, the steps between two of them, and whether no other number of steps fits."""

    steps: tuple[int, ...]
    every: int
    sure: bool


def range_of(value: float, decimals: int) -> Range:
    """Return what a value that was rounded to some decimals, and perhaps to 4 digits as well, may have been."""
    error = 0.5 * 10.0**-decimals
    if value and len(f"{abs(value):.12g}".replace(".", "").strip("0")) <= DIGITS:
        error = max(error, 0.5 * 10.0 ** (math.floor(math.log10(abs(value))) - DIGITS + 1))
    return Range(max(0.0, value - error), value + error)


def total_of(runtime: float, rate: float) -> Range:
    """Return the steps of a run from its seconds and the rounded steps per second."""
    seconds, speed = range_of(runtime, 4), range_of(rate, 3)
    return Range(math.ceil(seconds.low * speed.low - 1e-6), math.floor(seconds.high * speed.high + 1e-6))


def per_epoch(total: Range, epochs: float) -> Range:
    """Return the steps of an epoch from those of the run and the epochs at its end."""
    spread = _epoch(epochs, (epochs,))
    return Range(total.low / spread.high, total.high / max(spread.low, 1e-9))


def derive(epochs: Sequence[float], per_epoch: Range) -> Derived | None:
    """Return the steps of records by their epochs and the steps of an epoch; None if the epochs do not rise."""
    stretches = _rising(epochs)
    start, end = max(stretches, key=lambda one: one[1] - one[0])
    first = start + 1 if end - start > 2 else start  # the first record may be an extra one of step 1
    between = end - 1 - first
    a, b = _epoch(epochs[first], epochs), _epoch(epochs[end - 1], epochs)
    if between < 1 or b.high <= a.low:
        return None
    low = max(1.0, (b.low - a.high) * per_epoch.low / between)
    high = (b.high - a.low) * per_epoch.high / between
    fits = range(math.ceil(low - 1e-6), math.floor(high + 1e-6) + 1)
    apart = _slope(epochs[first:end])
    if apart <= 0:
        return None
    middle = max(1.0, apart * sum(per_epoch) / 2)
    if len(fits):
        divisor = next(one for one in ROUND if fits[-1] // one * one >= fits[0])
        every = min((n for n in fits if n % divisor == 0), key=lambda n: abs(n - middle))
    else:
        every = round(middle)
    steps: list[int] = []
    for start, end in stretches:
        steps += _of_stretch(epochs[start:end], every, apart)
    return Derived(tuple(steps), every, len(fits) == 1)


def _of_stretch(epochs: Sequence[float], every: int, apart: float) -> list[int]:
    """Return the steps of records that follow each other, some epochs apart: multiples of logging_steps.

    The first record is left out where their place is averaged: logging_first_step adds one of step 1.
    """
    later = range(1, len(epochs)) if len(epochs) > 1 else range(1)
    start = round(sum(epochs[place] / apart - place for place in later) / len(later))
    steps = [every * (max(int(every == 1), start) + place) for place in range(len(epochs))]
    return [steps[0] or 1, *steps[1:]]


def _slope(epochs: Sequence[float]) -> float:
    """Return the epochs from one record to the next, by least squares: single ones are rounded."""
    center, mean = (len(epochs) - 1) / 2, sum(epochs) / len(epochs)
    spread = sum((place - center) ** 2 for place in range(len(epochs)))
    return sum((place - center) * (epoch - mean) for place, epoch in enumerate(epochs)) / spread


def _rising(epochs: Sequence[float]) -> list[tuple[int, int]]:
    """Return the first and the end index of each stretch whose epochs do not fall: a restart logs some again."""
    cuts = [0, *(at for at in range(1, len(epochs)) if epochs[at] < epochs[at - 1]), len(epochs)]
    return list(pairwise(cuts))


def _epoch(value: float, among: Sequence[float]) -> Range:
    """Return what an epoch may have been; those of a log with many digits are exact."""
    decimals = max(len(f"{one:.12f}".rstrip("0").partition(".")[2]) for one in among)
    if decimals > DIGITS + 2:
        return Range(value, value)
    return range_of(value, 2 if decimals <= 2 else DIGITS)
