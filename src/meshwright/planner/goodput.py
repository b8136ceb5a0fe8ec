"""Goodput: the share of a long run spent on training, given GPU failures and checkpoint time."""

from __future__ import annotations

from math import erf, exp, expm1, sqrt

import msgspec

HOUR = 3600.0
GPU_HOURS = 60_000.0
SHARED_GPUS = 90_000.0
"""A GPU and its part of the node fail every GPU_HOURS. A run also fails with what all its GPUs share (network tiers,
storage, control software); with SHARED_GPUS GPUs that is as frequent as their own failures. The two follow from the
419 unexpected interruptions of Llama 3 405B in 54 days on 16,384 H100 (The Llama 3 Herd of Models, 2024, 3.3.4) and
from Meta's run on about 100,000 GPUs (arXiv 2602.00277), whose two effective training times imply a failure every 17
minutes. They also give the 10 failures in 55 days on 504 B200 of arXiv 2605.09370 (11) and BLOOM's 1 or 2 a week."""
MTBF_SOURCE = "Llama 3 405B: 419 interruptions in 54 days on 16,384 H100, and Meta's run on 100,000 GPUs"
DETECT_S = 120.0  # until a crash or a hang is noticed
RELAUNCH_S = 300.0  # until the node is replaced and all processes are started again
START_S_PER_GPU = 0.0018  # process groups and checks: a restart of 100,000 GPUs takes Meta's 10 minutes
STALL_S = 180.0  # of the other replicas while one leaves and comes back (arXiv 2602.00277)
REPLICA_INTERVAL_S = HOUR  # between checkpoints if a failure does not return to one
REPAIR_HOURS = 24.0  # that a failed node is away, assumed
NODE_SHARE = 289 / 419  # of the failures that take a node away: Llama 3 405B, table 5, without software and network
SAVE_GB_S = 1.0  # per GPU to shared storage
SAVE_TOTAL_GB_S = 2000.0  # of shared storage: Llama 3 405B, 3.3.1, sustained
HOST_GB_S = 5.0  # per GPU to host memory: what a checkpoint that is written in the background waits for
MIN_INTERVAL_S = 60.0
MIN_SHARE = 0.001  # below, a run never ends
MAX_FAILURES = 50.0  # per interval or restart, beyond which nothing is trained
MANY = 400.0  # mean of a Poisson distribution above which it is as good as normal


class Goodput(msgspec.Struct, frozen=True):
    """The effect of failures and checkpoints on a run."""

    share: float  # of the wall clock that is training
    failures_per_day: float
    save_interval_s: float  # of the run, or all of a shorter run
    save_s: float
    restart_s: float  # detection, replacement, start and load
    blocked_s: float = 0.0  # that training waits for one save; less than save_s if it is written in the background
    save_every: int | None = None  # steps; 0 saves only at the end
    mtbf_hours: float = GPU_HOURS  # mean hours between failures of one GPU in a run of this size
    mtbf_from: str = MTBF_SOURCE  # where they are from; requested if the user set them
    share_without_spares: float | None = None  # if a failed node is missing until it is repaired; None on one node
    repair_hours: float = REPAIR_HOURS  # that it is missing then, assumed
    storage_gb_s: float | None = None  # that all GPUs write together, if the cluster file has it


def best_interval_s(save_s: float, hours_between_failures: float) -> float:
    """Return the checkpoint interval that loses least time (Young 1974, Daly 2006): sqrt(2 × save × MTBF)."""
    return max(sqrt(2 * save_s * hours_between_failures * HOUR), MIN_INTERVAL_S)


def gpu_hours(gpus: float) -> float:
    """Return the mean hours between failures of one GPU in a run of this size."""
    return GPU_HOURS / (1 + gpus / SHARED_GPUS)


def save_seconds(
    gpus: int, state_gb_per_gpu: float, save_gb_s: float = SAVE_GB_S, storage_gb_s: float | None = None
) -> float:
    """Return how long a checkpoint takes to write: every GPU at its own speed, up to that of the storage."""
    return state_gb_per_gpu * max(1 / save_gb_s, gpus / (storage_gb_s or SAVE_TOTAL_GB_S))


def restart_seconds(gpus: float, load_s: float = 0.0) -> float:
    """Return the time from a failure until a run of this size trains again."""
    return DETECT_S + RELAUNCH_S + START_S_PER_GPU * gpus + load_s


def goodput(
    gpus: int,
    state_gb_per_gpu: float,
    interval_s: float | None = None,
    background: bool = False,
    mtbf_hours: float | None = None,
    restart_s: float | None = None,
    save_gb_s: float = SAVE_GB_S,
    spares: int | None = None,
    replicas: int = 1,
    stall_s: float = STALL_S,
    storage_gb_s: float | None = None,
) -> Goodput:
    """Return the goodput at a checkpoint interval, else at the best one.

    Each interval takes one save, and is repeated after a failure and its restart: the expected time of Daly 2006, which
    also holds for intervals with more than one failure. A save in the background waits for the copy to host memory.
    `mtbf_hours` are the mean hours between failures of one GPU, by default those of MTBF_SOURCE; `storage_gb_s` is what
    all GPUs together write to the storage, by default SAVE_TOTAL_GB_S.

    With `replicas` above 1, only the replica with the failure restarts: the others wait for `stall_s`, go on without
    it, and no work is lost. `spares` are nodes beside the run; None if a replacement is always at hand.
    """
    hours, source = (gpu_hours(gpus), MTBF_SOURCE) if mtbf_hours is None else (mtbf_hours, "requested")
    per_hour = gpus / hours
    rate = per_hour / HOUR
    save_s = save_seconds(gpus, state_gb_per_gpu, save_gb_s, storage_gb_s)
    waits_s = state_gb_per_gpu / HOST_GB_S if background else save_s
    tolerant = replicas > 1
    usual = REPLICA_INTERVAL_S if tolerant else best_interval_s(waits_s, 1 / per_hour)
    interval = interval_s or max(usual, save_s if background else 0.0)
    if background:
        waits_s = max(waits_s, save_s - interval)  # for the checkpoint before
    away = in_repair(24 * per_hour)
    if tolerant:
        restart = restart_seconds(gpus / replicas, save_s) if restart_s is None else restart_s
        running = 1 / (1 + rate * with_failures(stall_s, rate))
        present = 1 / (1 + rate * restart / replicas) * _present(away, spares, replicas)
        share = interval / (interval + waits_s) * running * present
    else:
        restart = restart_seconds(gpus, save_s) if restart_s is None else restart_s
        repeated = expm1(min(rate * (interval + waits_s), MAX_FAILURES))
        share = interval / ((1 / rate + with_failures(restart, rate)) * repeated)
        share *= 1.0 if spares is None else enough(away, spares)
    trained = share if share >= MIN_SHARE else 0.0
    found = Goodput(trained, 24 * per_hour, interval, save_s, restart, waits_s, mtbf_hours=hours, mtbf_from=source)
    return msgspec.structs.replace(found, storage_gb_s=storage_gb_s)


def with_failures(restart_s: float, rate: float) -> float:
    """Return the expected time of a restart that is repeated if something fails meanwhile.

    A failure during a restart shows when the ranks first communicate, at its end: it costs the whole restart.
    """
    return restart_s * exp(min(rate * restart_s, MAX_FAILURES))


def in_repair(failures_per_day: float) -> float:
    """Return how many nodes are in repair on average."""
    return failures_per_day * NODE_SHARE * REPAIR_HOURS / 24


def enough(away: float, spares: int) -> float:
    """Return the share of time in which no more nodes are away than there are spares, if `away` are on average."""
    if away > MANY:
        return 0.5 * (1 + erf((spares + 0.5 - away) / sqrt(2 * away)))
    shares = _below(away)
    return shares[min(spares, len(shares) - 1)]


def best_spares(away: float, nodes: int) -> int:
    """Return the number of spare nodes with the most training per node, spares included."""
    if away > MANY:
        return min(round(away + 3 * sqrt(away)), nodes)
    shares = _below(away)[: nodes + 1]
    return max(range(len(shares)), key=lambda count: shares[count] * nodes / (nodes + count))


def _below(mean: float) -> list[float]:
    """Return the cumulative Poisson probabilities of 0, 1, 2 … up to where they are 1."""
    term = total = exp(-mean)
    found = [total]
    while len(found) <= mean or term > 1e-15:
        term *= mean / len(found)
        total += term
        found.append(min(total, 1.0))
    return found


def _present(away: float, spares: int | None, replicas: int) -> float:
    """Return the share of replicas whose nodes are all there; each missing node stops at most one replica."""
    if spares is None:
        return 1.0
    missing = max(away - spares, 0.0) if away > MANY else sum(1 - share for share in _below(away)[spares:])
    return max(1 - missing / replicas, 0.0)
