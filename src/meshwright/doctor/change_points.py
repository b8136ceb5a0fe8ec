"""Finds where the level of a noisy series changes, by the best piecewise constant fit in absolute error.

Medians and absolute errors ignore single slow steps and periodic ones, such as checkpoints: only a change of most lines
of a section counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MOST_BINS = 100  # lines are grouped into so many bins at most: the fit takes cubic time
SIGMAS = 7.0  # of a difference of two medians: positions are searched, so 3 would be random
MEDIAN_ERROR = 1.2533  # standard error of a median over that of a mean, for normal noise
Floats = NDArray[np.float64]


class Level(NamedTuple):
    """A section of a series with one level: its first index, the index after its last, and its median."""

    start: int
    end: int
    value: float


class Trend(NamedTuple):
    """A straight line through a series: its value at the start and the end, and its mean absolute error."""

    start: float
    end: float
    error: float


class Hinge(NamedTuple):
    """A series that is level to an index and then follows a straight line: level, value at the end, mean error."""

    onset: int
    level: float
    end: float
    error: float


def levels(values: Sequence[float] | Floats, shortest: int, least: float) -> list[Level]:
    """Return the sections of a positive series whose medians differ by a factor of at least 1 + `least` and noise."""
    logs = np.log(np.asarray(values, dtype=float))
    if len(logs) < 2 * shortest or not _varies(logs, shortest, least):
        return [Level(0, len(logs), _median(values))]
    size, edges, binned = _bins(logs)
    cuts = [int(edges[one]) for one in _best_cuts(binned, max(2, math.ceil(shortest / size)))]
    cuts = _merged(logs, [0, *cuts, len(logs)], least)
    cuts = _without_short(_refined(logs, cuts, max(size, shortest)), shortest)
    cuts = _merged(logs, cuts, least)
    return [Level(a, b, _median(values[a:b])) for a, b in pairwise(cuts)]


def trend(values: Sequence[float] | Floats) -> Trend:
    """Return the robust straight line (median of slopes) through the logarithm of a series, back in its unit."""
    logs = np.log(np.asarray(values, dtype=float))
    third = max(1, len(logs) // 3)
    places = np.arange(len(logs), dtype=float)
    apart = len(logs) - third
    slope = float(np.median((logs[apart:] - logs[:third]) / apart))
    offset = float(np.median(logs - slope * places))
    error = float(np.mean(np.abs(logs - offset - slope * places)))
    return Trend(math.exp(offset), math.exp(offset + slope * (len(logs) - 1)), error)


def hinge(values: Sequence[float] | Floats) -> Hinge:
    """Return the best fit of a level and a straight line from its end on; an onset of 0 is a line throughout."""
    array = np.asarray(values, dtype=float)
    _, edges, binned = _bins(array)
    places = (edges[:-1] + edges[1:] - 1) / 2
    after = np.maximum(places - edges[:-1, None], 0.0)  # a row per onset
    middle = after.mean(axis=1)
    apart = after - middle[:, None]
    spread = (apart * apart).sum(axis=1)
    slopes = np.divide(apart @ binned, spread, out=np.zeros(len(spread)), where=spread > 0)
    starts = binned.mean() - slopes * middle
    errors = np.abs(binned - starts[:, None] - slopes[:, None] * after).mean(axis=1)
    best = int(np.argmin(errors))
    onset, level, slope = int(edges[best]), float(starts[best]), float(slopes[best])
    rest = len(array) - 1 - onset
    fitted = level + slope * np.maximum(np.arange(len(array)) - onset, 0)
    return Hinge(onset, level, level + slope * rest, float(np.mean(np.abs(array - fitted))))


def _bins(values: Floats) -> tuple[int, NDArray[np.int64], Floats]:
    """Return the size of bins, their edges and their medians."""
    size = math.ceil(len(values) / MOST_BINS)
    edges = np.unique([*range(0, len(values), size), len(values)])
    whole = len(values) // size * size
    medians = np.median(values[:whole].reshape(-1, size), axis=1)
    return size, edges, np.append(medians, np.median(values[whole:])) if whole < len(values) else medians


def error_of(values: Sequence[float] | Floats, found: Sequence[Level]) -> float:
    """Return the mean absolute error of the logarithm of a series around its levels."""
    logs = np.log(np.asarray(values, dtype=float))
    return float(sum(np.abs(logs[a:b] - math.log(value)).sum() for a, b, value in found) / len(logs))


def _varies(logs: Floats, shortest: int, least: float) -> bool:
    """Return whether windows differ at all by nearly that much: most runs do not, and need no fit."""
    size = max(1, len(logs) // (4 * MOST_BINS))  # of long logs, some windows are enough
    windows = np.median(np.lib.stride_tricks.sliding_window_view(logs, shortest)[::size], axis=1)
    return float(windows.max() - windows.min()) > 0.8 * math.log1p(least)


def _best_cuts(values: Floats, shortest: int) -> list[int]:
    """Return where the series is cut in the best fit; every cut has to gain more than noise would."""
    count = len(values)
    costs = np.full((count + 1, count + 1), np.inf)
    for length in range(shortest, count + 1):
        windows = np.lib.stride_tricks.sliding_window_view(values, length)
        middle = np.median(windows, axis=1)
        starts = np.arange(count - length + 1)
        costs[starts, starts + length] = np.abs(windows - middle[:, None]).sum(axis=1)
    penalty = 3.0 * max(_noise(values), 1e-6) * math.log(max(count, 3))
    best, before = np.full(count + 1, np.inf), np.zeros(count + 1, dtype=int)
    best[0] = -penalty
    for end in range(shortest, count + 1):
        totals = best[:end] + costs[:end, end] + penalty
        before[end] = int(np.argmin(totals))
        best[end] = totals[before[end]]
    cuts, end = [], int(before[count])
    while end > 0:
        cuts.append(end)
        end = int(before[end])
    return cuts[::-1]


def _merged(logs: Floats, cuts: list[int], least: float) -> list[int]:
    """Remove the cuts between sections that differ too little, the least different first."""
    while len(cuts) > 2:
        middles = [float(np.median(logs[a:b])) for a, b in pairwise(cuts)]
        noise = _section_noise(logs, cuts, middles)
        ratios = []
        for index in range(1, len(cuts) - 1):
            sizes = (cuts[index] - cuts[index - 1], cuts[index + 1] - cuts[index])
            needed = max(math.log1p(least), SIGMAS * MEDIAN_ERROR * noise * math.sqrt(sum(1 / one for one in sizes)))
            ratios.append(abs(middles[index] - middles[index - 1]) / needed)
        worst = int(np.argmin(ratios))
        if ratios[worst] >= 1:
            break
        cuts = [*cuts[: worst + 1], *cuts[worst + 2 :]]
    return cuts


def _refined(logs: Floats, cuts: list[int], reach: int) -> list[int]:
    """Move every cut to the line where it fits best: bins are wider than lines."""
    found = list(cuts)
    for index in range(1, len(cuts) - 1):
        low, high = max(found[index - 1] + 1, cuts[index] - reach), min(cuts[index + 1] - 1, cuts[index] + reach)
        before, after = np.median(logs[found[index - 1] : cuts[index]]), np.median(logs[cuts[index] : cuts[index + 1]])
        part = logs[low:high]
        gain = np.concatenate(([0.0], np.cumsum(np.abs(part - before) - np.abs(part - after))))
        found[index] = low + int(np.argmin(gain))
    return found


def _without_short(cuts: list[int], shortest: int) -> list[int]:
    """Remove sections that became too short, together with both their cuts inside the series."""
    short = [index for index in range(len(cuts) - 1) if cuts[index + 1] - cuts[index] < shortest]
    gone = {one for index in short for one in (index, index + 1)} - {0, len(cuts) - 1}
    return [cut for index, cut in enumerate(cuts) if index not in gone]


def _section_noise(logs: Floats, cuts: Sequence[int], middles: Sequence[float]) -> float:
    """Return the noise within sections; slow waves count more, because their medians vary more."""
    rest = np.concatenate([logs[a:b] - m for (a, b), m in zip(pairwise(cuts), middles, strict=True)])
    typical = float(1.4826 * np.median(np.abs(rest)))
    clipped = np.clip(rest, -4 * typical, 4 * typical)
    spread = float(np.mean(clipped**2))
    follows = float(np.mean(clipped[1:] * clipped[:-1])) / spread if spread else 0.0
    follows = min(max(follows, 0.0), 0.95)
    return typical * math.sqrt((1 + follows) / (1 - follows))


def _noise(values: Floats) -> float:
    """Return the noise between neighbors, which a change of level does not raise."""
    apart = np.diff(values)
    return float(1.4826 * np.median(np.abs(apart - np.median(apart))) / math.sqrt(2)) if len(apart) else 0.0


def _median(values: Sequence[float] | Floats) -> float:
    return float(np.median(np.asarray(values, dtype=float)))
