"""Groups samples of similar length into steps; a step is as wide as its longest sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np

from meshwright.engine.data.sample_types import Sample, Samples, stack
from meshwright.engine.data.shuffle import permute_index

WINDOW_STEPS = 64  # number of steps whose samples are sorted by length together
WIDTH_MULTIPLE = 64  # widths are rounded up: fewer shapes to compile, and full tiles


class SizedSource(Protocol):
    """An endless source whose sample lengths are known in advance."""

    def length(self, number: int) -> int:
        """Return the tokens of a sample without padding."""

    def sample(self, number: int) -> Sample:
        """Return the sample, padded to the maximum width."""


class LengthGrouped:
    """Reorders samples so that those of one step have similar lengths.

    The samples of `WINDOW_STEPS` steps are sorted by length and split into steps, which are then shuffled. Each sample
    is seen exactly as often as without grouping. The order depends on the global batch size but not on the ranks.
    """

    def __init__(self, inner: SizedSource, step_size: int, seed: int, max_width: int) -> None:
        self.inner, self.step_size, self.seed, self.max_width = inner, step_size, seed, max_width
        self._window = lru_cache(maxsize=4)(self._sorted)

    def samples(self, numbers: Sequence[int]) -> Samples:
        """Return the samples with these numbers, which must belong to one step."""
        steps = {number // self.step_size for number in numbers}
        if len(steps) != 1:
            raise ValueError(f"samples of {len(steps)} steps requested together, not of one")
        members, width = self._step(steps.pop())
        rows = [self.inner.sample(members[number % self.step_size]) for number in numbers]
        return stack([Sample(one.tokens[: width + 1], one.loss_mask[:width]) for one in rows])

    @property
    def epoch_size(self) -> Callable[[int], int]:
        """Return the function that counts the different samples, if the data is finite."""
        found: Callable[[int], int] = self.inner.epoch_size  # type: ignore[attr-defined]  # mock data has none
        return found

    def _step(self, step: int) -> tuple[list[int], int]:
        """Return the ungrouped numbers of a step's samples, and the step's width."""
        window, offset = divmod(step, WINDOW_STEPS)
        members, max_width = self._window(window)[offset]
        needed = -(-(max_width - 1) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
        return members, min(needed, self.max_width)

    def _sorted(self, window: int) -> list[tuple[list[int], int]]:
        size = WINDOW_STEPS * self.step_size
        numbers = range(window * size, (window + 1) * size)
        lengths = np.array([self.inner.length(number) for number in numbers])
        order = np.argsort(lengths, kind="stable").reshape(WINDOW_STEPS, self.step_size)
        key = self.seed * 0x9E3779B97F4A7C15 + window
        steps = [order[permute_index(offset, WINDOW_STEPS, key)] for offset in range(WINDOW_STEPS)]
        return [([window * size + int(i) for i in step], int(lengths[step].max())) for step in steps]
