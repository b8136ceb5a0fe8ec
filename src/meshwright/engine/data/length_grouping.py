"""Samples of like length in one step, which is as wide as its longest."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np

from meshwright.engine.data.sampler import Sample, Samples, stack
from meshwright.engine.data.shuffle import shuffled

STEPS = 64  # steps whose samples are sorted by length together
MULTIPLE = 64  # widths are rounded up to this: few widths for a compiler, and whole tiles


class Measured(Protocol):
    """Samples without an end by number, whose lengths are known before they are made."""

    def length(self, number: int) -> int:
        """Tokens of a sample without padding."""

    def sample(self, number: int) -> Sample:
        """The sample, filled up to the longest width there is."""


class ByLength:
    """Deals samples out so that those of a step are of like length.

    The samples of `STEPS` steps are sorted by length and cut into steps, which come in a shuffled order. Every sample
    comes exactly as often as without; ranks do not enter into it, the number of samples in a step does.
    """

    def __init__(self, inner: Measured, step_size: int, seed: int, longest: int) -> None:
        self.inner, self.step_size, self.seed, self.longest = inner, step_size, seed, longest
        self._window = lru_cache(maxsize=4)(self._sorted)

    def samples(self, numbers: Sequence[int]) -> Samples:
        """The samples with these numbers, which must be of one step."""
        steps = {number // self.step_size for number in numbers}
        if len(steps) != 1:
            raise ValueError(f"samples of {len(steps)} steps asked for at once")
        members, width = self._step(steps.pop())
        made = [self.inner.sample(members[number % self.step_size]) for number in numbers]
        return stack([Sample(one.tokens[: width + 1], one.counted[:width]) for one in made])

    def _step(self, step: int) -> tuple[list[int], int]:
        """The numbers of a step's samples in the order without grouping, and the step's width."""
        window, place = divmod(step, STEPS)
        members, longest = self._window(window)[place]
        needed = -(-(longest - 1) // MULTIPLE) * MULTIPLE
        return members, min(needed, self.longest)

    def _sorted(self, window: int) -> list[tuple[list[int], int]]:
        size = STEPS * self.step_size
        numbers = range(window * size, (window + 1) * size)
        lengths = np.array([self.inner.length(number) for number in numbers])
        order = np.argsort(lengths, kind="stable").reshape(STEPS, self.step_size)
        key = self.seed * 0x9E3779B97F4A7C15 + window
        steps = [order[shuffled(place, STEPS, key)] for place in range(STEPS)]
        return [([window * size + int(i) for i in step], int(lengths[step].max())) for step in steps]
