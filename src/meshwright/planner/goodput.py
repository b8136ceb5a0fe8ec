"""Goodput: the share of a long run spent on training, given GPU failures and checkpoint time."""

from __future__ import annotations

from math import sqrt

import msgspec

HOUR = 3600.0
FAILURES_PER_GPU_HOUR = 419 / (54 * 24 * 16384)
"""Llama 3 405B saw 419 unexpected interruptions in 54 days on 16,384 H100 (The Llama 3 Herd of Models, 2024, 3.3.4)."""
RESTART_S = 600.0  # detect, replace the node, restart and load: minutes if a scheduler automates it
SAVE_GB_S = 1.0  # per GPU to shared storage, blocking
MIN_INTERVAL_S = 60.0


class Goodput(msgspec.Struct, frozen=True):
    """The effect of failures and checkpoints on a run."""

    share: float  # of the wall clock that is training
    failures_per_day: float
    save_interval_s: float
    save_s: float
    restart_s: float


def best_interval_s(save_s: float, hours_between_failures: float) -> float:
    """Return the checkpoint interval that loses least time (Young 1974, Daly 2006): sqrt(2 × save × MTBF)."""
    return max(sqrt(2 * save_s * hours_between_failures * HOUR), MIN_INTERVAL_S)


def goodput(
    gpus: int,
    state_gb_per_gpu: float,
    failures_per_gpu_hour: float = FAILURES_PER_GPU_HOUR,
    restart_s: float = RESTART_S,
    save_gb_s: float = SAVE_GB_S,
) -> Goodput:
    """Return the goodput: each failure costs a restart and half an interval, each interval one save."""
    per_hour = gpus * failures_per_gpu_hour
    save_s = state_gb_per_gpu / save_gb_s
    interval = best_interval_s(save_s, 1 / per_hour)
    lost = per_hour / HOUR * (restart_s + interval / 2)
    share = max(1 - lost, 0.0) / (1 + save_s / interval)
    return Goodput(share, 24 * per_hour, interval, save_s, restart_s)
