"""Statistics of a run: steady-state steps and the estimate to compare them with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import product
from statistics import median
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright import costs
from meshwright.doctor.finding import Finding
from meshwright.doctor.hang import RankNames
from meshwright.doctor.run import CollectiveReport, Fault, Run, Step
from meshwright.doctor.thresholds import limit
from meshwright.errors import InputError
from meshwright.recipes import overrides as override
from meshwright.recipes.case import Case
from meshwright.recipes.format_override import format_override
from meshwright.recipes.padding import padding_of
from meshwright.recipes.types import field_value

SECTIONS = 5
OPEN_VALUES: dict[str, tuple[Any, ...]] = {
    "layout.recompute": ("none", "selective", "full"),
    "kernels.compile": (True, False),
}
"""Settings that change the step time and that few logs state, with their values."""
SAME_GPU = 0.95  # of a GPU's memory: torch sees slightly less than the driver reports
LENGTH = "data.seq_length"
FULL_SAMPLES = 0.9  # of batch × length: packed samples have more tokens
CHUNK = 20_000  # windows of a running median per batch, to bound memory


class OpenSettings(NamedTuple):
    """The slowest values of settings that a log does not state, and their step time over that of the estimate."""

    slowest: str  # overrides; empty if the log states all, or no value is slower
    ratio: float


class RunStats:
    """A run, its case if known, a baseline run if given, and the case's fields that are stated; None means all."""

    def __init__(
        self, run: Run, case: Case | None = None, baseline: RunStats | None = None, stated: frozenset[str] | None = None
    ) -> None:
        self.run, self.case, self.baseline, self.stated = run, case, baseline, stated
        self._found: dict[Any, tuple[Finding, ...]] = {}

    def findings_of(self, diagnosis: Callable[[RunStats], Iterable[Finding]]) -> tuple[Finding, ...]:
        """Return what a diagnosis finds, computed once."""
        if diagnosis not in self._found:
            self._found[diagnosis] = tuple(diagnosis(self))
        return self._found[diagnosis]

    def states(self, field: str) -> bool:
        """Return whether the run's value of a recipe field is known; other values are those of our recipe."""
        return self.case is not None and (self.stated is None or field in self.stated)

    @cached_property
    def estimate(self) -> costs.Estimate | None:
        """The estimate of the case, its speed at the length of samples that ran; None for runs without GPUs."""
        if self.case is None or not self.run.header.on_gpu:
            return None
        found = costs.estimate(self.timed(self.case))
        return msgspec.structs.replace(found, memory=costs.memory(self.case)) if self.sample_tokens else found

    def timed(self, case: Case) -> Case:
        """Return a case whose steps are timed: samples of the mean length; its memory is that of the longest one."""
        if self.sample_tokens is None:
            return case
        return case.rebuild(override.change(case.recipe, {LENGTH: self.sample_tokens})[0])

    @cached_property
    def steady(self) -> tuple[Step, ...]:
        """The steps that show the speed of the run: all except warm-up after every start."""
        return tuple(step for attempt in self.run.attempts for step in _without_warm_up(attempt))

    @property
    def enough(self) -> bool:
        """Whether there are enough steps for a median."""
        return len(self.steady) >= limit("enough_steps")

    @property
    def enough_for_trends(self) -> bool:
        """Whether there are enough steps for a trend."""
        return len(self.steady) >= limit("enough_for_trends")

    @cached_property
    def seconds_per_unit(self) -> float | None:
        """Median time per unit of work."""
        return median_of(step.seconds_per_unit for step in self.steady)

    @cached_property
    def tokens_per_s(self) -> float | None:
        """Tokens per second and GPU of the median step."""
        logged = median_of(step.tokens_per_s for step in self.steady)
        total = median_of(step.all_tokens_per_s for step in self.steady)
        seconds, tokens, world = median_of(step.seconds for step in self.steady), self._tokens, self.world
        if logged is None and total is not None and world:
            return total / world
        if logged is not None or seconds is None or not tokens or not world:
            return logged
        return tokens / seconds / world

    @cached_property
    def step_s(self) -> float | None:
        """Seconds of the median step."""
        logged = median_of(step.seconds for step in self.steady)
        tokens = self._tokens or (None if self.has_unknown_widths else self._assumed_tokens)
        if logged is not None or self.tokens_per_s is None or not tokens or not self.world:
            return logged
        return tokens / self.world / self.tokens_per_s

    @property
    def assumed_batch(self) -> str:
        """What the step time assumes, for its name: a batch that the log does not state, if it has no step times."""
        logged = any(step.seconds is not None for step in self.steady) or self.run.header.logged_tokens(self.world)
        stated = "train.global_batch_size" in self.run.header.overrides
        return (
            "" if logged or stated or self.case is None else f", computed for a batch of {self.case.global_batch_size}"
        )

    @cached_property
    def slower(self) -> float | None:
        """Measured over estimated time of the median step; None if the log leaves open how long samples are."""
        if self.estimate is None or self.tokens_per_s is None or self.has_unknown_widths:
            return None
        return float(self.estimate.tokens_per_s_per_gpu) / self.tokens_per_s

    @cached_property
    def open_settings(self) -> OpenSettings:
        """The slowest values of settings that change the step time and that the log leaves open."""
        case, estimate = self.case, self.estimate
        found = [OpenSettings("", 1.0)]
        if case is None or estimate is None:
            return found[0]
        left_open = {key: values for key, values in OPEN_VALUES.items() if not self.states(key)}
        for values in product(*left_open.values()):
            changes = {
                key: one for key, one in zip(left_open, values, strict=True) if field_value(case.recipe, key) != one
            }
            with suppress(InputError):  # a value that this model or engine does not have
                other = case.rebuild(override.change(case.recipe, changes)[0])
                ratio = float(costs.estimate(self.timed(other)).step_s) / float(estimate.step_s)
                found.append(OpenSettings(" ".join(format_override(*one) for one in changes.items()), ratio))
        return max(found, key=lambda one: one.ratio)

    @property
    def estimated_step_s(self) -> float | None:
        """Estimated seconds of a step with as many tokens as this run's."""
        return None if self.slower is None or self.step_s is None else self.step_s / self.slower

    @property
    def mfu(self) -> float | None:
        """MFU by the estimate's convention; as logged if there is no estimate, or no speed to compare with it."""
        if self.estimate is not None and self.slower is not None:
            return float(self.estimate.mfu) / self.slower
        return self.logged_mfu

    @cached_property
    def logged_mfu(self) -> float | None:
        """MFU as the log counts it: stated, or its TFLOP/s over the peak of the GPU."""
        stated = median_of(step.mfu for step in self.steady)
        if stated is not None or self.tflops is None or self.peak_flops is None:
            return stated
        return self.tflops * 1e12 / self.peak_flops

    @cached_property
    def tflops(self) -> float | None:
        """TFLOP/s of one GPU in the median step, as the log counts them."""
        return median_of(step.tflops for step in self.steady)

    @property
    def peak_flops(self) -> float | None:
        """Peak FLOP/s of one GPU in the precision that MFU refers to."""
        if self.estimate is None or not float(self.estimate.mfu):
            return None
        return float(self.estimate.tflops_per_gpu) * 1e12 / float(self.estimate.mfu)

    def part_s(self, name: str) -> float | None:
        """Return the median seconds of a part of the step; None if the log lacks it."""
        return median_of(step.parts_s.get(name) for step in self.steady)

    def part_share(self, name: str) -> float | None:
        """Return the median share of a part in its step."""
        shares = [s.parts_s[name] / s.seconds for s in self.steady if name in s.parts_s and s.seconds]
        return median_of(shares)

    @cached_property
    def peak_gib(self) -> float | None:
        """The highest memory logged for any step."""
        logged = [step.memory_gib for step in self.run.steps if step.memory_gib is not None]
        return max(logged, default=None)

    @property
    def outside_torch_gib(self) -> float:
        """GiB of the estimate that the log's figure excludes; torchtitan logs reserved memory."""
        if self.estimate is None:
            return 0.0
        memory = self.estimate.memory
        return float(memory.overhead) - (float(memory.cache) if self.run.kind == "torchtitan" else 0.0)

    @property
    def estimated_peak_gib(self) -> float | None:
        """The estimate of the memory figure that the log reports."""
        return None if self.estimate is None else float(self.estimate.memory.total) - self.outside_torch_gib

    @cached_property
    def beyond_estimate_gib(self) -> float:
        """GiB that the run needed beyond its estimate: every remedy is expected to need as much more."""
        if self.estimate is None:
            return 0.0
        needs = [fault.memory.needed for fault in self.fatal if fault.memory is not None]
        if self.peak_gib is not None and self.run.header.on_gpu:
            needs.append(self.peak_gib + self.outside_torch_gib)
        most = max((need for need in needs if need is not None), default=0.0)
        return round(max(0.0, most - float(self.estimate.memory.total)), 3)

    @cached_property
    def fatal(self) -> tuple[Fault, ...]:
        """Faults without a later step, in this log or in that of a later start."""
        return tuple(one for one in self.run.faults if self._is_after_steps(one))

    @cached_property
    def final_collectives(self) -> tuple[CollectiveReport, ...]:
        """What ranks report about the collective that the run ended in."""
        return tuple(one for one in self.run.collectives if self._is_after_steps(one))

    def _is_after_steps(self, one: Fault | CollectiveReport) -> bool:
        run = self.run
        last = {run.file: run.steps[-1].line} if run.steps else {}
        return one.file not in run.earlier and one.line > last.get(one.file, 0)

    @property
    def rank_names(self) -> RankNames:
        """Names of ranks with their hosts or nodes."""
        known = self.run.header.gpus_per_node if self.case is None else int(self.case.cluster.gpus_per_node)
        return RankNames(self.run.hosts, known)

    @property
    def capacity_gib(self) -> float | None:
        """Memory of one GPU."""
        if self.case is not None:
            return float(self.case.capacity_gib)
        return self.run.header.capacity_gib

    @cached_property
    def smaller_gpu_gib(self) -> float | None:
        """Memory of the GPUs that the log states, if they are smaller ones than those of the case."""
        stated = [one.memory.capacity for one in self.run.faults if one.memory is not None]
        known = [gib for gib in (self.run.header.capacity_gib, *stated) if gib]
        if self.case is None or not known or min(known) >= SAME_GPU * float(self.case.capacity_gib):
            return None
        return min(known)

    @property
    def uses_mock_data(self) -> bool:
        """Whether the data is synthetic, with nothing to learn."""
        return self.run.header.mock_data

    def location(self, step: Step, text: str = "") -> str:
        """Return file and line of a step."""
        return f"{step.file or self.run.file}:{step.line}" + (f" {text}" if text else "")

    @property
    def ends(self) -> tuple[str, ...]:
        """First and last line that speeds are computed from."""
        return self.ends_of(self.steady)

    def ends_of(self, rows: Sequence[Step]) -> tuple[str, ...]:
        """Return the first and last line of some steps."""
        return tuple(dict.fromkeys(self.location(step) for step in (rows[0], rows[-1]))) if rows else ()

    @property
    def _tokens(self) -> int | None:
        """Tokens of a step as far as they are known: a length or batch that the log leaves open gives no speed."""
        if logged := self.run.header.logged_tokens(self.world):
            return logged
        known = self.states("data.seq_length") and self.states("train.global_batch_size")
        return self._assumed_tokens if known and not self.has_unknown_widths else None

    @property
    def has_unknown_widths(self) -> bool:
        """Whether a micro batch is padded to its longest sample, and the log does not state the tokens.

        A rate that the Trainer logs counts padding, AutoModel's only the tokens of samples.
        """
        case, run = self.case, self.run
        if case is None or run.kind not in ("transformers", "automodel") or not run.header.file:
            return False
        rates = run.kind == "transformers" and any(one.tokens_per_s or one.all_tokens_per_s for one in run.steps)
        stated = rates or run.header.logged_tokens(self.world) is not None
        return not stated and padding_of(case.recipe, case.engine).to == "micro_batch"

    @property
    def has_short_samples(self) -> bool:
        """Whether samples are not packed and have fewer tokens than the length, by the tokens that the log states."""
        case, logged = self.case, self.run.header.logged_tokens(self.world)
        if case is None or logged is None or case.recipe.data.packing or case.goal == "pretrain":
            return False
        return bool(logged < FULL_SAMPLES * case.global_batch_size * case.seq_length)

    @cached_property
    def sample_tokens(self) -> int | None:
        """Tokens that short samples have on average, with their padding; None if that is not known.

        The tokens of a log may leave out the padding of micro batches: only samples that are alone in one have none.
        Ranks wait for the longest sample of all, so that a mean says little of several.
        """
        case, header = self.case, self.run.header
        if case is None or not self.has_short_samples or header.sample_tokens:
            return header.sample_tokens if self.has_short_samples else None
        alone = padding_of(case.recipe, case.engine).to == "micro_batch" and case.recipe.layout.micro_batch_size == 1
        alone = alone and int(case.dp) == 1
        return max(round((header.logged_tokens(self.world) or 0) / int(case.global_batch_size)), 1) if alone else None

    @property
    def has_unlike_samples(self) -> bool:
        """Whether samples are shorter than those of the estimate, and it is not known how long they are."""
        return self.has_short_samples and self.sample_tokens is None

    @property
    def comparable(self) -> bool:
        """Whether the estimate is for steps of as many tokens as those that ran."""
        return self.slower is not None and not self.has_unlike_samples

    @property
    def _assumed_tokens(self) -> int | None:
        return int(self.case.global_batch_size * self.case.seq_length) if self.case is not None else None

    @property
    def world(self) -> int | None:
        """The number of GPUs, from the log or the case."""
        return self.run.header.world or (int(self.case.world) if self.case is not None else None)


def _without_warm_up(attempt: Sequence[Step]) -> Sequence[Step]:
    """Return the steps of one start without the first line and those after it that are as slow."""
    timed = [step for step in attempt if step.seconds_per_unit is not None]
    if len(timed) < 2:
        return timed
    rest = timed[1:]
    typical = median(float(step.seconds_per_unit or 0.0) for step in rest)
    dropped = 0
    while (
        dropped < min(limit("warm_up_most"), len(rest) // 2)
        and (rest[dropped].seconds_per_unit or 0.0) > limit("warm_up_slower") * typical
    ):
        dropped += 1
    return rest[dropped:]


def span(steps: Sequence[Step]) -> tuple[int, int] | None:
    """Return the first and last of some steps."""
    return (steps[0].first, steps[-1].step) if steps else None


def median_of(values: Iterable[float | None]) -> float | None:
    """Return the median of the finite values; None if there are none."""
    logged = [value for value in values if value is not None and math.isfinite(value)]
    return median(logged) if logged else None


def sections(values: Sequence[Any], of: Callable[[Any], float | None], count: int = SECTIONS) -> list[float]:
    """Return the medians of equal sections of a sequence, in order; empty ones are left out."""
    size = len(values) / count
    parts = [values[round(size * i) : round(size * (i + 1))] for i in range(count)]
    found = [median_of(of(value) for value in part) for part in parts]
    return [value for value in found if value is not None]


def deviation(values: Sequence[float] | NDArray[np.float64]) -> float:
    """Return a standard deviation that is robust to outliers (scaled median absolute deviation)."""
    array = np.asarray(values, dtype=float)
    return float(1.4826 * np.median(np.abs(array - np.median(array))))


def running_median(values: NDArray[np.float64], before: int, behind: int) -> NDArray[np.float64]:
    """Return the median of every value and its neighbors in a window, truncated at the ends."""
    count, window = len(values), before + 1 + behind
    found = np.empty(count)
    if count >= window:
        windows = np.lib.stride_tricks.sliding_window_view(values, window)
        for start in range(0, len(windows), CHUNK):  # np.median copies its input
            found[before + start : before + start + CHUNK][: len(windows) - start] = np.median(
                windows[start : start + CHUNK], axis=1
            )
    ends = range(count) if count < window else (*range(before), *range(count - behind, count))
    for index in ends:
        found[index] = np.median(values[max(0, index - before) : index + behind + 1])
    return found
