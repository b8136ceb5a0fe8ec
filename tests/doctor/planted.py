"""Faults to plant in a healthy run, the finding each must lead to, and the formats that show it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.doctor.fake_runs import LOG_WRITERS, OLD_OOM, OOM, FakeRun, FakeStep

ALL = tuple(LOG_WRITERS)


@dataclass(frozen=True)
class Fault:
    """A fault and the finding it must lead to."""

    finding: str
    plant: Callable[[FakeRun, random.Random], FakeRun]
    visible_in: tuple[str, ...] = ALL


def _rows(fake_run: FakeRun, change: Callable[[int, int, FakeStep], FakeStep]) -> FakeRun:
    """Return the run with the steps of its only start changed, each by its index and their number."""
    (rows,) = fake_run.starts
    return replace(fake_run, starts=(tuple(change(place, len(rows), one) for place, one in enumerate(rows)),))


def slow_data(fake_run: FakeRun, rng: random.Random) -> FakeRun:
    share = rng.uniform(0.1, 0.6)
    return _rows(fake_run, lambda i, n, one: replace(one, data_s=share * one.seconds))


def slow_network(fake_run: FakeRun, rng: random.Random) -> FakeRun:
    share = rng.uniform(0.3, 0.6)
    return _rows(fake_run, lambda i, n, one: replace(one, collectives_s=share * one.seconds))


def _scattered(count: int, rng: random.Random) -> set[int]:
    """Return an eighth of the steps, never four within eight steps: that would be a slow stretch."""
    while True:
        places = sorted(rng.sample(range(2, count), count // 8))
        if all(last - first > 8 for first, last in zip(places, places[3:], strict=False)):
            return set(places)


def uneven(fake_run: FakeRun, rng: random.Random) -> FakeRun:
    places = _scattered(len(fake_run.starts[0]), rng)
    distances = {after - before for before, after in zip(sorted(places), sorted(places)[1:], strict=False)}
    if len(distances) == 1:  # regular at random
        places.add(min({*range(2, len(fake_run.starts[0]))} - places))
    times = rng.uniform(2.5, 6)
    return _rows(fake_run, lambda i, n, one: replace(one, seconds=one.seconds * (times if i in places else 1)))


def periodic(fake_run: FakeRun, rng: random.Random) -> FakeRun:
    every = rng.randint(4, 12)
    times = rng.uniform(2.5, 6)
    return _rows(fake_run, lambda i, n, one: replace(one, seconds=one.seconds * (1 if one.step % every else times)))


def slowing(fake_run: FakeRun, rng: random.Random) -> FakeRun:
    more = rng.uniform(0.3, 1.5)
    return _rows(fake_run, lambda i, n, one: replace(one, seconds=one.seconds * (1 + more * i / n)))


def shifted(fake_run: FakeRun, rng: random.Random) -> FakeRun:
    at, more = rng.uniform(0.2, 0.85), rng.uniform(0.15, 1.0)
    return _rows(fake_run, lambda i, n, one: replace(one, seconds=one.seconds * (1 + more * (i > at * n))))


def stragglers(fake_run: FakeRun, rng: random.Random) -> FakeRun:
    apart = rng.uniform(1.4, 3)
    return _rows(fake_run, lambda i, n, one: replace(one, ranks_apart=apart))


def out_of_memory(fake_run: FakeRun, rng: random.Random) -> FakeRun:
    return replace(fake_run, final_lines=("Traceback (most recent call last):", rng.choice([OOM, OLD_OOM])))


def hang(fake_run: FakeRun, rng: random.Random) -> FakeRun:
    words = "[rank3]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)"
    return replace(fake_run, final_lines=(words,))


def host_memory(fake_run: FakeRun, rng: random.Random) -> FakeRun:
    return replace(fake_run, final_lines=("slurmstepd: error: Detected 1 oom_kill event in StepId=7.0",))


def disk_full(fake_run: FakeRun, rng: random.Random) -> FakeRun:
    return replace(fake_run, final_lines=("OSError: [Errno 28] No space left on device",))


def growing(fake_run: FakeRun, rng: random.Random) -> FakeRun:
    more = rng.uniform(4, 15)
    return _rows(fake_run, lambda i, n, one: replace(one, memory_gib=60 + more * i / n))


def growing_late(fake_run: FakeRun, rng: random.Random) -> FakeRun:
    more, onset = rng.uniform(6, 15), rng.uniform(0.3, 0.7)
    return _rows(fake_run, lambda i, n, one: replace(one, memory_gib=60 + more * max(0.0, i / n - onset)))


def jumped(fake_run: FakeRun, rng: random.Random) -> FakeRun:
    factor, at = rng.uniform(1.15, 1.4), rng.uniform(0.3, 0.8)
    return _rows(fake_run, lambda i, n, one: replace(one, memory_gib=52 * (factor if i > at * n else 1.0)))


def overfitting(fake_run: FakeRun, rng: random.Random) -> FakeRun:
    best = rng.uniform(0.3, 0.6)

    def change(i: int, n: int, one: FakeStep) -> FakeStep:
        held_out = 2.8 + 2 * max(0.0, best - i / n) + 0.8 * max(0.0, i / n - best) + rng.gauss(0, 0.003)
        return replace(one, loss=one.loss - 0.6 * i / n, validation=held_out if i % 10 == 9 else None)

    return _rows(fake_run, change)


def retries(fake_run: FakeRun, rng: random.Random) -> FakeRun:
    return replace(fake_run, retries=rng.randint(1, 50))


def nan(fake_run: FakeRun, rng: random.Random) -> FakeRun:
    bad = rng.randint(1, 4)
    value = rng.choice([float("nan"), float("inf")])

    def change(i: int, n: int, one: FakeStep) -> FakeStep:
        return one if i < n - bad else replace(one, loss=value, grad_norm=value, bad=1)

    return _rows(fake_run, change)


def spike(fake_run: FakeRun, rng: random.Random) -> FakeRun:
    n = len(fake_run.starts[0])
    at, times = rng.randint(n // 2, n - n // 5 - 3), rng.uniform(1.6, 3)
    return _rows(fake_run, lambda i, n, one: replace(one, loss=one.loss * (times if i == at else 1)))


def diverging(fake_run: FakeRun, rng: random.Random) -> FakeRun:
    more = rng.uniform(2, 8)
    begin = 0.6

    def change(i: int, n: int, one: FakeStep) -> FakeStep:
        return replace(one, loss=one.loss + max(0.0, more * (i / n - begin) / (1 - begin)))

    return _rows(fake_run, change)


def diverged(fake_run: FakeRun, rng: random.Random) -> FakeRun:
    level = fake_run.starts[0][0].loss * rng.uniform(2, 3)
    return _rows(fake_run, lambda i, n, one: replace(one, loss=level if 0.1 < i / n < 0.5 else one.loss))


def flat(fake_run: FakeRun, rng: random.Random) -> FakeRun:
    level = rng.uniform(1, 11)
    return _rows(fake_run, lambda i, n, one: replace(one, loss=level * (1 + 0.001 * rng.uniform(-1, 1)), lr=3e-4))


def zero_rate(fake_run: FakeRun, rng: random.Random) -> FakeRun:
    return replace(flat(fake_run, rng).changed(lambda one: replace(one, lr=0.0)))


def gradients(fake_run: FakeRun, rng: random.Random) -> FakeRun:
    times = rng.uniform(10, 100)
    return _rows(fake_run, lambda i, n, one: replace(one, grad_norm=one.grad_norm * (times if i > 0.85 * n else 1)))


def scale(fake_run: FakeRun, rng: random.Random) -> FakeRun:
    def change(i: int, n: int, one: FakeStep) -> FakeStep:
        low = i > 0.4 * n
        return replace(one, loss_scale=65536.0 / 2 ** min(14, max(0, i - int(0.4 * n))), skipped=int(low))

    return _rows(fake_run, change)


def stalls(fake_run: FakeRun, rng: random.Random) -> FakeRun:
    every = rng.randint(5, 15)
    times = rng.uniform(2, 6)
    return _rows(fake_run, lambda i, n, one: replace(one, saved_s=0 if one.step % every else times * every / 5 * 2.0))


def restarts(fake_run: FakeRun, rng: random.Random) -> FakeRun:
    (rows,) = fake_run.starts
    cut, back = len(rows) // 2, rng.randint(8, 15)
    return replace(fake_run, starts=(rows[:cut], rows[cut - back :]))


FAULTS = {
    "slow data": Fault("speed.slow-data", slow_data, ("own", "printed", "megatron", "torchtitan")),
    "slow network": Fault("speed.slow-network", slow_network, ("own", "megatron")),
    "uneven steps": Fault("speed.uneven-steps", uneven),
    "periodic steps": Fault("speed.periodic-steps", periodic),
    "slowing down": Fault("speed.slowing-down", slowing),
    "sustained slowdown": Fault("speed.sustained-slowdown", shifted),
    "stragglers": Fault("speed.stragglers", stragglers, ("megatron",)),
    "out of memory": Fault("memory.out-of-memory", out_of_memory),
    "hang": Fault("run.failed-hang", hang),
    "host memory": Fault("run.failed-host-memory", host_memory),
    "disk full": Fault("run.failed-disk-full", disk_full),
    "growing memory": Fault("memory.growing", growing),
    "memory that grows late": Fault("memory.growing", growing_late),
    "memory that jumps": Fault("memory.jumped", jumped),
    "overfitting": Fault(
        "loss.overfitting", overfitting, ("own", "printed", "megatron", "torchtitan", "automodel", "kempnerforge")
    ),
    "allocator retries": Fault("memory.only-just-fits", retries, ("megatron", "torchtitan")),
    "not a number": Fault("loss.not-a-number", nan),
    "spike": Fault("loss.spikes", spike),
    "diverging": Fault("loss.diverging", diverging),
    "diverged": Fault("loss.diverged", diverged),
    "flat": Fault("loss.flat", flat),
    "rate of zero": Fault("loss.flat", zero_rate),
    "growing gradients": Fault("loss.growing-gradients", gradients),
    "loss scale": Fault("loss.scale-collapsed", scale, ("megatron",)),
    "checkpoint stalls": Fault("run.checkpoint-stalls", stalls, ("own", "megatron", "torchtitan")),
    "restarts": Fault("run.restarts", restarts),
}
