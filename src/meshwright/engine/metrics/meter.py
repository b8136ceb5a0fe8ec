"""Turns step times into throughput: tokens/s/GPU, TFLOP/s/GPU, MFU and the remaining time."""

from __future__ import annotations

from collections import deque
from statistics import median

import msgspec

from meshwright.costs.estimate import Estimate, to_dict
from meshwright.costs.flops import flops_per_token
from meshwright.costs.speeds import linear_precision, peak_flops
from meshwright.errors import InputError
from meshwright.recipes.case import Case

WINDOW = 20  # steps over whose median the run's speed is reported


class Constants(msgspec.Struct, frozen=True):
    """The constants of a run that turn seconds into throughput."""

    tokens_per_step: int  # over all ranks
    flops_per_token: float  # model FLOPs, by the convention below
    world: int
    peak_flops: float | None = None  # of one GPU; None if the run is not on the GPU it was planned for
    mfu_convention: str = ""
    steps: int | None = None  # of the run
    samples_per_step: int = 0
    samples_per_epoch: int | None = None  # None if the data has no end, or was not counted
    total_samples: int | None = None  # of a run by epochs, whose last step may have fewer
    estimate_step_s: float | None = None
    estimate_memory_gib: dict[str, float] = {}


class Speed(msgspec.Struct, frozen=True):
    """The speed of a step or of the run."""

    step_s: float
    tokens_per_s_per_gpu: float
    tflops_per_gpu: float
    mfu: float | None  # a fraction, 0.45 = 45 %; None without a GPU of known peak


def constants(case: Case, estimate: Estimate | None = None, on_gpu: bool = True) -> Constants:
    """Return the constants of a case, with the same FLOP and peak conventions as its estimate."""
    estimated = to_dict(estimate) if estimate is not None else {}
    return Constants(
        tokens_per_step=case.global_batch_size * case.seq_length,
        flops_per_token=float(flops_per_token(case)),
        world=case.world,
        peak_flops=peak_flops(case, linear_precision(case)) if on_gpu else None,
        mfu_convention=estimated.get("mfu_convention", ""),
        steps=case.steps,
        samples_per_step=int(case.global_batch_size),
        estimate_step_s=estimated.get("step_s"),
        estimate_memory_gib=estimated.get("memory_gib", {}),
    )


class Meter:
    """Computes the throughput of each step and of the run."""

    def __init__(self, constants: Constants, window: int = WINDOW) -> None:
        if min(constants.tokens_per_step, constants.world, window) < 1:
            raise InputError("tokens per step, ranks and window must be at least 1", field="metrics")
        self.constants = constants
        self._recent: deque[tuple[float, int]] = deque(maxlen=window)  # seconds and tokens
        self._steps = 0

    def add(self, step_s: float, tokens: int | None = None) -> Speed:
        """Add a step and return its speed; `tokens` if they differ from the constant."""
        if not step_s > 0:
            raise InputError("step time must be positive", field="step_s", value=step_s)
        count = self.constants.tokens_per_step if tokens is None else tokens
        if self._steps == 1:
            self._recent.clear()  # the first step compiles and warms up
        self._steps += 1
        self._recent.append((step_s, count))
        return self._speed(step_s, count)

    @property
    def steady(self) -> Speed | None:
        """The speed of the window's median step; None before the first step."""
        if not self._recent:
            return None
        return self._speed(median(s for s, _ in self._recent), median(tokens for _, tokens in self._recent))

    def epoch(self, step: int) -> float | None:
        """Return the passes over the data after `step` completed steps."""
        run = self.constants
        seen = step * run.samples_per_step
        return min(seen, run.total_samples or seen) / run.samples_per_epoch if run.samples_per_epoch else None

    def remaining_s(self, step: int) -> float | None:
        """Return the seconds until the run ends after `step` completed steps.

        The first step of a process compiles and warms up: until the second, the estimate says more.
        """
        steps, speed = self.constants.steps, self.steady
        if steps is None or speed is None:
            return None
        step_s = self.constants.estimate_step_s if self._steps == 1 else None
        return max(0, steps - step) * (step_s or speed.step_s)

    def _speed(self, step_s: float, tokens: float) -> Speed:
        run = self.constants
        per_gpu = tokens / step_s / run.world
        flops = per_gpu * run.flops_per_token
        return Speed(step_s, per_gpu, flops / 1e12, None if run.peak_flops is None else flops / run.peak_flops)
