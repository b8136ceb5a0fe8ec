"""Faults to plant in a healthy story, the finding each must lead to, and the logs that can show it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.doctor.stories import OLD_OOM, OOM, TELLERS, One, Story

ALL = tuple(TELLERS)


@dataclass(frozen=True)
class Fault:
    """Something wrong, and how it must be found."""

    finding: str
    plant: Callable[[Story, random.Random], Story]
    told_by: tuple[str, ...] = ALL


def _rows(story: Story, change: Callable[[int, int, One], One]) -> Story:
    """The story with its only start's steps changed, each by its place and their number."""
    (rows,) = story.starts
    return replace(story, starts=(tuple(change(place, len(rows), one) for place, one in enumerate(rows)),))


def slow_data(story: Story, chance: random.Random) -> Story:
    share = chance.uniform(0.1, 0.6)
    return _rows(story, lambda i, n, one: replace(one, data_s=share * one.seconds))


def slow_network(story: Story, chance: random.Random) -> Story:
    share = chance.uniform(0.3, 0.6)
    return _rows(story, lambda i, n, one: replace(one, collectives_s=share * one.seconds))


def uneven(story: Story, chance: random.Random) -> Story:
    places = set(chance.sample(range(2, len(story.starts[0])), len(story.starts[0]) // 8))
    distances = {after - before for before, after in zip(sorted(places), sorted(places)[1:], strict=False)}
    if len(distances) == 1:  # regular by chance
        places.add(min({*range(2, len(story.starts[0]))} - places))
    times = chance.uniform(2.5, 6)
    return _rows(story, lambda i, n, one: replace(one, seconds=one.seconds * (times if i in places else 1)))


def periodic(story: Story, chance: random.Random) -> Story:
    every = chance.randint(4, 12)
    times = chance.uniform(2.5, 6)
    return _rows(story, lambda i, n, one: replace(one, seconds=one.seconds * (1 if one.step % every else times)))


def slowing(story: Story, chance: random.Random) -> Story:
    more = chance.uniform(0.3, 1.5)
    return _rows(story, lambda i, n, one: replace(one, seconds=one.seconds * (1 + more * i / n)))


def stragglers(story: Story, chance: random.Random) -> Story:
    apart = chance.uniform(1.4, 3)
    return _rows(story, lambda i, n, one: replace(one, ranks_apart=apart))


def out_of_memory(story: Story, chance: random.Random) -> Story:
    return replace(story, last_words=("Traceback (most recent call last):", chance.choice([OOM, OLD_OOM])))


def hang(story: Story, chance: random.Random) -> Story:
    words = "[rank3]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)"
    return replace(story, last_words=(words,))


def host_memory(story: Story, chance: random.Random) -> Story:
    return replace(story, last_words=("slurmstepd: error: Detected 1 oom_kill event in StepId=7.0",))


def disk_full(story: Story, chance: random.Random) -> Story:
    return replace(story, last_words=("OSError: [Errno 28] No space left on device",))


def growing(story: Story, chance: random.Random) -> Story:
    more = chance.uniform(4, 15)
    return _rows(story, lambda i, n, one: replace(one, memory_gib=60 + more * i / n))


def retries(story: Story, chance: random.Random) -> Story:
    return replace(story, retries=chance.randint(1, 50))


def nan(story: Story, chance: random.Random) -> Story:
    bad = chance.randint(1, 4)
    value = chance.choice([float("nan"), float("inf")])

    def change(i: int, n: int, one: One) -> One:
        return one if i < n - bad else replace(one, loss=value, grad_norm=value, bad=1)

    return _rows(story, change)


def spike(story: Story, chance: random.Random) -> Story:
    n = len(story.starts[0])
    at, times = chance.randint(n // 2, n - n // 5 - 3), chance.uniform(1.6, 3)
    return _rows(story, lambda i, n, one: replace(one, loss=one.loss * (times if i == at else 1)))


def diverging(story: Story, chance: random.Random) -> Story:
    more = chance.uniform(2, 8)
    begin = 0.6

    def change(i: int, n: int, one: One) -> One:
        return replace(one, loss=one.loss + max(0.0, more * (i / n - begin) / (1 - begin)))

    return _rows(story, change)


def flat(story: Story, chance: random.Random) -> Story:
    level = chance.uniform(1, 11)
    return _rows(story, lambda i, n, one: replace(one, loss=level * (1 + 0.001 * chance.uniform(-1, 1)), lr=3e-4))


def zero_rate(story: Story, chance: random.Random) -> Story:
    return replace(flat(story, chance).changed(lambda one: replace(one, lr=0.0)))


def gradients(story: Story, chance: random.Random) -> Story:
    times = chance.uniform(10, 100)
    return _rows(story, lambda i, n, one: replace(one, grad_norm=one.grad_norm * (times if i > 0.85 * n else 1)))


def scale(story: Story, chance: random.Random) -> Story:
    def change(i: int, n: int, one: One) -> One:
        low = i > 0.4 * n
        return replace(one, loss_scale=65536.0 / 2 ** min(14, max(0, i - int(0.4 * n))), skipped=int(low))

    return _rows(story, change)


def stalls(story: Story, chance: random.Random) -> Story:
    every = chance.randint(5, 15)
    times = chance.uniform(2, 6)
    return _rows(story, lambda i, n, one: replace(one, saved_s=0 if one.step % every else times * every / 5 * 2.0))


def restarts(story: Story, chance: random.Random) -> Story:
    (rows,) = story.starts
    cut, back = len(rows) // 2, chance.randint(8, 15)
    return replace(story, starts=(rows[:cut], rows[cut - back :]))


FAULTS = {
    "slow data": Fault("speed.slow-data", slow_data, ("own", "printed", "megatron", "torchtitan")),
    "slow network": Fault("speed.slow-network", slow_network, ("own", "megatron")),
    "uneven steps": Fault("speed.uneven-steps", uneven),
    "periodic steps": Fault("speed.periodic-steps", periodic),
    "slowing down": Fault("speed.slowing-down", slowing),
    "stragglers": Fault("speed.stragglers", stragglers, ("megatron",)),
    "out of memory": Fault("memory.out-of-memory", out_of_memory),
    "hang": Fault("run.failed-hang", hang),
    "host memory": Fault("run.failed-host-memory", host_memory),
    "disk full": Fault("run.failed-disk-full", disk_full),
    "growing memory": Fault("memory.growing", growing),
    "allocator retries": Fault("memory.only-just-fits", retries, ("megatron", "torchtitan")),
    "not a number": Fault("loss.not-a-number", nan),
    "spike": Fault("loss.spikes", spike),
    "diverging": Fault("loss.diverging", diverging),
    "flat": Fault("loss.flat", flat),
    "rate of zero": Fault("loss.flat", zero_rate),
    "growing gradients": Fault("loss.growing-gradients", gradients),
    "loss scale": Fault("loss.scale-collapsed", scale, ("megatron",)),
    "checkpoint stalls": Fault("run.checkpoint-stalls", stalls, ("own", "megatron", "torchtitan")),
    "restarts": Fault("run.restarts", restarts),
}
