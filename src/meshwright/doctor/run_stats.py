"""A run as the doctor looks at it: the steps that show how it goes, and the estimate beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright import costs
from meshwright.doctor.finding import Finding
from meshwright.doctor.run import Fault, Run, Step
from meshwright.doctor.thresholds import limit
from meshwright.recipes.case import Case

SECTIONS = 5
CHUNK = 20_000  # windows of a running median at a time


class View:
    """A run, its case where that is known, and another run to hold it against where one is given."""

    def __init__(self, run: Run, case: Case | None = None, baseline: View | None = None) -> None:
        self.run, self.case, self.baseline = run, case, baseline
        self._found: dict[Any, tuple[Finding, ...]] = {}

    def finds(self, diagnosis: Callable[[View], Iterable[Finding]]) -> tuple[Finding, ...]:
        """What a diagnosis finds; worked out once, however many ask."""
        if diagnosis not in self._found:
            self._found[diagnosis] = tuple(diagnosis(self))
        return self._found[diagnosis]

    @cached_property
    def estimate(self) -> costs.Estimate | None:
        """The estimate of the case; None for runs without GPUs, which it says nothing of."""
        return costs.estimate(self.case) if self.case is not None and self.run.told.on_gpu else None

    @cached_property
    def steady(self) -> tuple[Step, ...]:
        """The steps that show how fast the run goes: all but those that warm up, after every start."""
        return tuple(step for attempt in self.run.attempts for step in _without_warm_up(attempt))

    @property
    def enough(self) -> bool:
        """Whether there are steps enough for a median."""
        return len(self.steady) >= limit("enough_steps")

    @property
    def enough_for_trends(self) -> bool:
        """Whether there are steps enough to see a direction."""
        return len(self.steady) >= limit("enough_for_trends")

    @cached_property
    def pace(self) -> float | None:
        """The median time for one unit of work."""
        return middle(step.pace for step in self.steady)

    @cached_property
    def tokens_per_s(self) -> float | None:
        """Tokens per second and GPU of the median step."""
        told = middle(step.tokens_per_s for step in self.steady)
        together = middle(step.all_tokens_per_s for step in self.steady)
        seconds, tokens, world = middle(step.seconds for step in self.steady), self._tokens, self._world
        if told is None and together is not None and world:
            return together / world
        if told is not None or seconds is None or not tokens or not world:
            return told
        return tokens / seconds / world

    @cached_property
    def step_s(self) -> float | None:
        """Seconds of the median step."""
        told = middle(step.seconds for step in self.steady)
        if told is not None or self.tokens_per_s is None or not self._tokens or not self._world:
            return told
        return self._tokens / self._world / self.tokens_per_s

    @cached_property
    def slower(self) -> float | None:
        """How many times the estimated step time the median step takes."""
        if self.estimate is None or self.tokens_per_s is None:
            return None
        return float(self.estimate.tokens_per_s_per_gpu) / self.tokens_per_s

    @property
    def estimated_step_s(self) -> float | None:
        """Seconds the estimate gives a step with as many tokens as this run's have."""
        return None if self.slower is None or self.step_s is None else self.step_s / self.slower

    @property
    def mfu(self) -> float | None:
        """The share of the GPU's peak that was used, by the estimate's convention; as logged where there is none."""
        if self.estimate is not None and self.slower is not None:
            return float(self.estimate.mfu) / self.slower
        return middle(step.mfu for step in self.steady)

    def part_s(self, name: str) -> float | None:
        """Median seconds of a part of the step; None where the log does not tell it."""
        return middle(step.parts_s.get(name) for step in self.steady)

    def part_share(self, name: str) -> float | None:
        """Median share of a part in its step."""
        shares = [s.parts_s[name] / s.seconds for s in self.steady if name in s.parts_s and s.seconds]
        return middle(shares)

    @cached_property
    def peak_gib(self) -> float | None:
        """The most memory that any step told."""
        told = [step.memory_gib for step in self.run.steps if step.memory_gib is not None]
        return max(told, default=None)

    @property
    def outside_torch_gib(self) -> float:
        """GiB of the estimate that the log's figure does not hold: torchtitan tells what torch reserves."""
        if self.estimate is None:
            return 0.0
        memory = self.estimate.memory
        return float(memory.overhead) - (float(memory.cache) if self.run.kind == "torchtitan" else 0.0)

    @property
    def estimated_peak_gib(self) -> float | None:
        """What the estimate gives for the figure that the log tells."""
        return None if self.estimate is None else float(self.estimate.memory.total) - self.outside_torch_gib

    @cached_property
    def fatal(self) -> tuple[Fault, ...]:
        """Faults that no step came after, in this log or in that of a later start."""
        run = self.run
        last = {run.file: run.steps[-1].line} if run.steps else {}
        return tuple(one for one in run.faults if one.file not in run.earlier and one.line > last.get(one.file, 0))

    @property
    def capacity_gib(self) -> float | None:
        """Memory of one GPU."""
        if self.case is not None:
            return float(self.case.capacity_gib)
        return self.run.told.capacity_gib

    @property
    def data_is_made_up(self) -> bool:
        """Whether there is nothing to learn from the data."""
        return self.run.told.mock_data

    def place(self, step: Step, words: str = "") -> str:
        """Where a step stands, as evidence names it."""
        return f"{step.file or self.run.file}:{step.line}" + (f" {words}" if words else "")

    @property
    def ends(self) -> tuple[str, ...]:
        """The first and last line that speeds are taken from."""
        rows = self.steady
        return tuple(dict.fromkeys(self.place(step) for step in (rows[0], rows[-1]))) if rows else ()

    @property
    def _tokens(self) -> int | None:
        if self.run.told.tokens_per_step:
            return self.run.told.tokens_per_step
        return int(self.case.global_batch_size * self.case.seq_length) if self.case is not None else None

    @property
    def _world(self) -> int | None:
        return self.run.told.world or (int(self.case.world) if self.case is not None else None)


def _without_warm_up(attempt: Sequence[Step]) -> Sequence[Step]:
    """The steps of one start without the first line, and without those after it that are as slow as it."""
    timed = [step for step in attempt if step.pace is not None]
    if len(timed) < 2:
        return timed
    rest = timed[1:]
    usual = median(float(step.pace or 0.0) for step in rest)
    dropped = 0
    while (
        dropped < min(limit("warm_up_most"), len(rest) // 2)
        and (rest[dropped].pace or 0.0) > limit("warm_up_slower") * usual
    ):
        dropped += 1
    return rest[dropped:]


def span(steps: Sequence[Step]) -> tuple[int, int] | None:
    """The first and last of some steps."""
    return (steps[0].first, steps[-1].step) if steps else None


def middle(values: Iterable[float | None]) -> float | None:
    """The median of those that are told and finite; None of none."""
    told = [value for value in values if value is not None and math.isfinite(value)]
    return median(told) if told else None


def sections(values: Sequence[Any], of: Callable[[Any], float | None], count: int = SECTIONS) -> list[float]:
    """Medians of equal sections of a sequence, in order; those that tell nothing are left out."""
    size = len(values) / count
    cut = [values[round(size * i) : round(size * (i + 1))] for i in range(count)]
    found = [middle(of(value) for value in part) for part in cut]
    return [value for value in found if value is not None]


def deviation(values: Sequence[float] | NDArray[np.float64]) -> float:
    """The spread of values around their median, as a standard deviation that outliers do not move."""
    held = np.asarray(values, dtype=float)
    return float(1.4826 * np.median(np.abs(held - np.median(held))))


def running_median(values: NDArray[np.float64], before: int, behind: int) -> NDArray[np.float64]:
    """The median of every value's neighbours: so many before it, itself and so many behind, fewer at the ends."""
    count, whole = len(values), before + 1 + behind
    found = np.empty(count)
    if count >= whole:
        windows = np.lib.stride_tricks.sliding_window_view(values, whole)
        for begin in range(0, len(windows), CHUNK):  # a median copies what it looks at
            found[before + begin : before + begin + CHUNK][: len(windows) - begin] = np.median(
                windows[begin : begin + CHUNK], axis=1
            )
    ends = range(count) if count < whole else (*range(before), *range(count - behind, count))
    for place in ends:
        found[place] = np.median(values[max(0, place - before) : place + behind + 1])
    return found
