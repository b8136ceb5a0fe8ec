"""From step times to throughput: tokens/s/GPU, TFLOP/s/GPU, MFU and the expected end."""

from __future__ import annotations

from collections import deque
from statistics import median

import msgspec

from meshwright.costs.estimate import Estimate, to_dict
from meshwright.costs.flops import flops_per_token
from meshwright.costs.speeds import linear_precision, peak_flops
from meshwright.errors import InputError
from meshwright.recipes.case import Case

WINDOW = 20  # steps whose median stands for the speed of the run


class Constants(msgspec.Struct, frozen=True):
    """What does not change during a run, for turning seconds into throughput."""

    tokens_per_step: int  # of all ranks together
    flops_per_token: float  # model FLOPs, by the convention below
    world: int
    peak_flops: float | None = None  # of one GPU; None where the run is not on the GPU it was planned for
    mfu_convention: str = ""
    steps: int | None = None  # of the whole run
    estimate_step_s: float | None = None
    estimate_memory_gib: dict[str, float] = {}


class Speed(msgspec.Struct, frozen=True):
    """How fast the run is."""

    step_s: float
    tokens_per_s_per_gpu: float
    tflops_per_gpu: float
    mfu: float | None  # a share, 0.45 = 45 %; None without a GPU whose peak is known


def constants(case: Case, estimate: Estimate | None = None, on_gpu: bool = True) -> Constants:
    """The constants of a case, by the same FLOP and peak convention as its estimate."""
    told = to_dict(estimate) if estimate is not None else {}
    return Constants(
        tokens_per_step=case.global_batch_size * case.seq_length,
        flops_per_token=float(flops_per_token(case)),
        world=case.world,
        peak_flops=peak_flops(case, linear_precision(case)) if on_gpu else None,
        mfu_convention=told.get("mfu_convention", ""),
        steps=case.steps,
        estimate_step_s=told.get("step_s"),
        estimate_memory_gib=told.get("memory_gib", {}),
    )


class Meter:
    """Turns step times into throughput, of each step and of the run."""

    def __init__(self, constants: Constants, window: int = WINDOW) -> None:
        if min(constants.tokens_per_step, constants.world, window) < 1:
            raise InputError("tokens per step, ranks and window must be at least 1", field="metrics")
        self.constants = constants
        self._recent: deque[tuple[float, int]] = deque(maxlen=window)  # seconds and tokens
        self._steps = 0

    def add(self, step_s: float, tokens: int | None = None) -> Speed:
        """The speed of one step; tokens where they differ from the usual number."""
        if not step_s > 0:
            raise InputError("a step cannot take no time", field="step_s", value=step_s)
        count = self.constants.tokens_per_step if tokens is None else tokens
        if self._steps == 1:
            self._recent.clear()  # the first step compiles and warms up: it says nothing about the others
        self._steps += 1
        self._recent.append((step_s, count))
        return self._speed(step_s, count)

    @property
    def steady(self) -> Speed | None:
        """The speed of the median step of the window; None before the first step."""
        if not self._recent:
            return None
        return self._speed(median(s for s, _ in self._recent), median(tokens for _, tokens in self._recent))

    def remaining_s(self, step: int) -> float | None:
        """Seconds until the run ends, when this many steps are done."""
        steps, speed = self.constants.steps, self.steady
        return None if steps is None or speed is None else max(0, steps - step) * speed.step_s

    def _speed(self, step_s: float, tokens: float) -> Speed:
        known = self.constants
        per_gpu = tokens / step_s / known.world
        flops = per_gpu * known.flops_per_token
        return Speed(step_s, per_gpu, flops / 1e12, None if known.peak_flops is None else flops / known.peak_flops)
