"""Goodput: the share of a long run spent on training, given GPU failures and checkpoint time."""

from __future__ import annotations

from math import expm1, sqrt

import msgspec

HOUR = 3600.0
MTBF_HOURS = 54 * 24 * 16384 / 419
"""Mean hours between failures of one GPU: Llama 3 405B saw 419 unexpected interruptions in 54 days on 16,384 H100
(The Llama 3 Herd of Models, 2024, 3.3.4)."""
MTBF_SOURCE = "Llama 3 405B: 419 interruptions in 54 days on 16,384 H100"
RESTART_S = 600.0  # detect, replace the node, restart and load: minutes if a scheduler automates it
SAVE_GB_S = 1.0  # per GPU to shared storage
HOST_GB_S = 5.0  # per GPU to host memory: what a checkpoint that is written in the background waits for
MIN_INTERVAL_S = 60.0
MIN_SHARE = 0.001  # below, a run never ends
MAX_FAILURES = 50.0  # per interval, beyond which nothing is trained


class Goodput(msgspec.Struct, frozen=True):
    """The effect of failures and checkpoints on a run."""

    share: float  # of the wall clock that is training
    failures_per_day: float
    save_interval_s: float  # of the run, or all of a shorter run
    save_s: float
    restart_s: float
    save_every: int | None = None  # steps; 0 saves only at the end
    mtbf_hours: float = MTBF_HOURS  # mean hours between failures of one GPU
    mtbf_from: str = MTBF_SOURCE  # where they are from; requested if the user set them


def best_interval_s(save_s: float, hours_between_failures: float) -> float:
    """Return the checkpoint interval that loses least time (Young 1974, Daly 2006): sqrt(2 × save × MTBF)."""
    return max(sqrt(2 * save_s * hours_between_failures * HOUR), MIN_INTERVAL_S)


def goodput(
    gpus: int,
    state_gb_per_gpu: float,
    interval_s: float | None = None,
    background: bool = False,
    mtbf_hours: float | None = None,
    restart_s: float = RESTART_S,
    save_gb_s: float = SAVE_GB_S,
) -> Goodput:
    """Return the goodput at a checkpoint interval, else at the best one.

    Each interval takes one save, and is repeated after a failure and its restart: the expected time of Daly 2006, which
    also holds for intervals with more than one failure. A save in the background waits for the copy to host memory.
    `mtbf_hours` are the mean hours between failures of one GPU, by default those of MTBF_SOURCE.
    """
    hours, source = (MTBF_HOURS, MTBF_SOURCE) if mtbf_hours is None else (mtbf_hours, "requested")
    per_hour = gpus / hours
    save_s = state_gb_per_gpu / save_gb_s
    waits_s = state_gb_per_gpu / HOST_GB_S if background else save_s
    interval = interval_s or max(best_interval_s(waits_s, 1 / per_hour), save_s if background else 0.0)
    if background:
        waits_s = max(waits_s, save_s - interval)  # for the checkpoint before
    rate = per_hour / HOUR
    spent = (1 / rate + restart_s) * expm1(min(rate * (interval + waits_s), MAX_FAILURES))
    share = interval / spent
    trained = share if share >= MIN_SHARE else 0.0
    return Goodput(trained, 24 * per_hour, interval, save_s, restart_s, mtbf_hours=hours, mtbf_from=source)
