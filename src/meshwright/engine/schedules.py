"""The learning rate of every optimizer step, as plain arithmetic.

Steps count from 0, so the last of `steps` is steps - 1. The warm-up rises linearly and reaches the peak at step
`warmup_steps`; its first step has a learning rate above zero. The decay starts there, reaches `min_lr` at step
`decay_steps` (0: the last step) and stays there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from meshwright.recipes.types import WSD_DECAY_SHARE, Schedule

# The remaining fraction of peak - min_lr at a progress of the decay between 0 and 1.
SHAPES: Mapping[str, Callable[[float], float]] = {
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
    "linear": lambda progress: 1 - progress,
    "rex": lambda progress: (1 - progress) / (1 - progress / 2),  # Chen et al., arXiv 2107.04197
}


# wsd stays at the peak and then decays; by default over the last fifth of the steps between warm-up and decay end, by
# one minus the square root of the progress (the best shape in Hägele et al., arXiv 2405.18392).
WSD_SHAPES: Mapping[str, Callable[[float], float]] = {
    "minus_sqrt": lambda progress: 1 - math.sqrt(progress),
    "linear": SHAPES["linear"],
    "cosine": SHAPES["cosine"],
    "exponential": lambda progress: 2 * 0.5**progress - 1,  # as Megatron-LM
    "sqrt": lambda progress: math.sqrt(1 - progress),  # as KempnerForge
}


def learning_rate(schedule: Schedule, peak: float, steps: int, step: int) -> float:
    """Return the learning rate of step `step` (from 0) out of `steps`; min_lr is capped at the peak."""
    warmup = schedule.warmup_steps
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    end = schedule.decay_steps or steps - 1
    floor = min(schedule.min_lr, peak)
    if schedule.name == "constant":
        return peak
    if schedule.name == "inverse_sqrt":
        # The decay does not depend on the length of the run, so it may end above min_lr.
        first = warmup + 1
        return max(floor, peak * math.sqrt(first / max(first, min(step, end) + 1)))
    shape, start = SHAPES.get(schedule.name), float(warmup)
    if shape is None:
        length = schedule.wsd_decay_steps or WSD_DECAY_SHARE * (end - warmup)
        shape, start = WSD_SHAPES[schedule.wsd_decay_style], max(start, end - length)
    return floor + (peak - floor) * shape(_progress(step, start, end))


def _progress(step: int, start: float, end: int) -> float:
    if step <= start:
        return 0.0
    return 1.0 if step >= end else (step - start) / (end - start)
