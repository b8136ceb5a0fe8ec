"""Finite sets of samples for evaluation: each sample once, and padding without targets up to a full batch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.engine.data.blend import interleave
from meshwright.engine.data.length_grouping import WIDTH_MULTIPLE
from meshwright.engine.data.sample_types import Samples, Source
from meshwright.engine.data.shuffle import Shuffled, permute_index

MOCK_BATCHES = 32  # of generated data, which has no end
MAX_BATCHES = 256  # of a large validation set, unless train.eval_steps is set
GENERATED_SAMPLES = 256  # of generated data in a union with other data


class FiniteSource:
    """The first `size` samples of a source, each once; numbers from `size` on return samples without targets.

    Its losses are averaged over target tokens, whatever the training does: then the mean does not depend on how the
    samples are distributed over batches and ranks.

    With `step_size` (the samples of a step), conversations of similar length are put into the same step, which is as
    wide as its longest one: padding to data.seq_length would take most of the time of short ones. Loss and counts stay
    the same, because every token has the same weight and causal attention does not see what follows.
    """

    per_token = True

    def __init__(self, source: Any, size: int, step_size: int = 0) -> None:
        self.source, self.size, self.step_size = source, size, step_size
        self.in_order = bool(getattr(source, "in_order", False))
        self.lengths = _lengths(source, size) if step_size else None
        self.order = None if self.lengths is None else np.argsort(-self.lengths, kind="stable")  # the longest first

    def samples(self, numbers: Sequence[int]) -> Any:
        """Return the samples with these numbers, which belong to one step; each is read once."""
        real = [number for number in numbers if number < self.size]
        padding = real[-1] if real else self.size - 1
        chosen = [number if number < self.size else padding for number in numbers]
        unique = sorted(set(chosen))
        found = self.source.samples(unique if self.order is None else [int(self.order[number]) for number in unique])
        found = found.take([unique.index(number) for number in chosen], [number < self.size for number in numbers])
        return found if self.order is None else found.cut(self._width(numbers[0] // self.step_size, found.width))

    def _width(self, step: int, most: int) -> int:
        """Return the width of a step, the same on all ranks: that of its longest sample."""
        assert self.lengths is not None
        assert self.order is not None
        first = min(step * self.step_size, self.size - 1)
        longest = int(self.lengths[self.order[first]]) - 1  # the last token is a target only
        return min(-(-longest // WIDTH_MULTIPLE) * WIDTH_MULTIPLE, most)

    def valid(self, first: int, count: int) -> int:
        """Return how many of the numbers from `first` on are samples, not padding."""
        return max(0, min(count, self.size - first))


class Union:
    """All samples of several sources, each once per epoch, in one mixed order."""

    def __init__(self, sources: Sequence[Any], seed: int, limit: int = 1 << 62) -> None:
        self.sources, self.seed = sources, seed
        sizes = [known_size(source, limit) or GENERATED_SAMPLES for source in sources]
        self.ends = list(accumulate(sizes))
        self.in_order = any(getattr(source, "in_order", False) for source in sources)

    def epoch_size(self, limit: int) -> int:
        """Return the number of different samples."""
        return self.ends[-1]

    def samples(self, numbers: Sequence[int]) -> Samples:
        """Return the samples with these numbers."""
        total = self.ends[-1]
        rows: dict[int, list[int]] = {}
        places = [permute_index(number % total, total, self.seed) for number in numbers]
        for row, place in enumerate(places):
            rows.setdefault(bisect_right(self.ends, place), []).append(row)
        starts = [0, *self.ends]
        parts = [
            self.sources[which].samples([places[row] - starts[which] for row in where]) for which, where in rows.items()
        ]
        return interleave(parts, list(rows.values()))


def known_size(source: Source, limit: int) -> int | None:
    """Return the number of different samples of a source; None if its data is generated without end."""
    count = getattr(source, "epoch_size", None)
    return None if count is None else int(count(limit))


def _lengths(source: Any, size: int) -> NDArray[np.int64] | None:
    """Return the tokens of the first samples of a source; None if they are packed, streamed or generated."""
    corpus = source.corpus if isinstance(source, Shuffled) else None
    length = getattr(corpus, "length", None)
    return None if length is None else np.array([length(source.index(number)) for number in range(size)])


def whole_set(source: Any, batch: int, batches: int, cuts: bool = True) -> tuple[FiniteSource, int | None]:
    """Return the validation samples of a source and the number it has: all, or those of the first `batches`.

    With `batches` 0, at most MAX_BATCHES, and MOCK_BATCHES of generated data. `cuts` says whether steps of short
    samples may be narrower: every new width is compiled again.
    """
    limit = (batches or MAX_BATCHES) * batch
    size = known_size(source, limit)
    if size is None:
        return FiniteSource(source, (batches or MOCK_BATCHES) * batch), None
    return FiniteSource(source, min(size, limit), batch if cuts else 0), size
