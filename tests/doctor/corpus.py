"""Labelled logs: healthy runs and runs with one trouble each, in every format that shows it.

A log is drawn with a seed. Thresholds were set on the seeds of `TUNED`; `HELD_OUT` was only ever reported.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from tests.doctor import endings
from tests.doctor.fake_runs import FakeRun, FakeStep
from tests.doctor.framework_logs import WRITERS

TUNED, HELD_OUT = (1, 2), (1001, 1002, 1003)

Build = Callable[[random.Random], FakeRun]

MEGATRON = ("megatron_now", "megatron_minmax", "bridge")
TRAINERS = ("trainer", "trainer_old", "trainer_state", "axolotl", "swift", "swift_json", "factory_json")
PRETRAIN = ("torchtitan_now", "megatron_now", "bridge", "nemo", "automodel_now", "kempnerforge", "own")
EVERY = (*PRETRAIN, "axolotl", "trainer", "swift")


@dataclass(frozen=True)
class Label:
    """What the doctor must say about a log."""

    main: str = ""  # the first finding; empty for a healthy run
    instead: tuple[str, ...] = ()  # first findings that are as right
    also: tuple[str, ...] = ()  # further findings that are right too
    says: tuple[str, ...] = ()  # in the message or the remedies of the first finding, or in a note
    not_said: tuple[str, ...] = ()


@dataclass(frozen=True)
class Entry:
    """One kind of run, the formats it is written in, and its label."""

    name: str
    build: Build
    label: Label
    writers: tuple[str, ...]
    says_there: dict[str, tuple[str, ...]] | None = None  # what is also said in some formats
    model: str = ""  # passed with --model
    gpus: str = ""
    goal: str = ""
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Log:
    """A log of the corpus."""

    entry: Entry
    writer: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.entry.name}, {self.writer}, {self.seed}"

    @property
    def text(self) -> str:
        rng = random.Random(f"{self.entry.name}:{self.writer}:{self.seed}")
        return WRITERS[self.writer](self.entry.build(rng))

    @property
    def label(self) -> Label:
        more = (self.entry.says_there or {}).get(self.writer, ())
        return replace(self.entry.label, says=(*self.entry.label.says, *more))


# Healthy runs


def pretraining(
    rng: random.Random,
    steps: int | None = None,
    log_every: int | None = None,
    world: int = 8,
    floor: float | None = None,
    noise: float = 0.01,
) -> FakeRun:
    """Return a pretraining: loss from ln(vocabulary) down a power law, linear warm-up, cosine decay."""
    steps = steps or rng.randint(120, 320)
    every = log_every or 1
    seconds, start = rng.uniform(1.5, 9.0), math.log(rng.choice([32_000, 50_257, 128_256])) + rng.uniform(0, 0.4)
    floor = floor if floor is not None else rng.uniform(1.9, 2.6)
    warmup, peak, memory = (
        max(5, steps * every // rng.randint(10, 25)),
        rng.choice([1e-4, 3e-4, 6e-4]),
        rng.uniform(48, 72),
    )
    loss_noise = rng.uniform(0.006, 0.03)
    pace = rng.uniform(15, 60) * every
    rows = []
    for line in range(1, steps + 1):
        step = line * every
        rows.append(
            FakeStep(
                step=step,
                seconds=seconds * ((6 / every + 1) if line == 1 else 1 + noise * rng.gauss(0, 1)),
                loss=floor + (start - floor) / (1 + step / pace) ** 0.9 + loss_noise * rng.gauss(0, 1),
                grad_norm=(0.4 + 3 * math.exp(-step / pace)) * (1 + 0.12 * rng.uniform(-1, 1)),
                lr=_rate(step, steps * every, warmup, peak),
                memory_gib=memory + (0.0 if line == 1 else 0.7),
                data_s=0.003 * seconds,
            )
        )
    return FakeRun(
        (tuple(rows),), world=world, total=steps * every, warmup=warmup, log_every=every, base_s=seconds, samples=64
    )


def _rate(step: int, total: int, warmup: int, peak: float) -> float:
    if step <= warmup:
        return peak * step / warmup
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup))))


def tuning(rng: random.Random, lines: int | None = None, epochs: int = 2, log_every: int | None = None) -> FakeRun:
    """Return a fine-tuning: a noisy loss that falls by a third, linear decay."""
    lines, every = lines or rng.randint(40, 120), log_every or rng.choice([5, 10])
    seconds, first = rng.uniform(2, 8), rng.uniform(1.1, 1.9)
    peak, memory, noise = rng.choice([1e-5, 2e-5, 2e-4]), rng.uniform(30, 70), rng.uniform(0.02, 0.06)
    rows = []
    for line in range(1, lines + 1):
        rate = peak * min(line / max(2, lines // 20), 1 - (line - 1) / lines)
        rows.append(
            FakeStep(
                step=line * every,
                seconds=seconds * (1.6 if line == 1 else 1 + 0.02 * rng.gauss(0, 1)),
                loss=first * (0.72 + 0.28 * math.exp(-line / (0.25 * lines))) + noise * rng.gauss(0, 1),
                grad_norm=rng.uniform(0.5, 1.2) + 2 * math.exp(-line / 4),
                lr=rate,
                memory_gib=memory,
                epoch=round(epochs * line / lines, 2),
            )
        )
    return FakeRun((tuple(rows),), total=lines * every, log_every=every, base_s=seconds, samples=32, seq_length=2048)


def rows(run: FakeRun, change: Callable[[int, int, FakeStep], FakeStep]) -> FakeRun:
    """Return the run with every line of its last start changed, by its index and their number."""
    *before, last = run.starts
    return replace(run, starts=(*before, tuple(change(i, len(last), one) for i, one in enumerate(last))))


def either(rng: random.Random) -> FakeRun:
    """Return a pretraining or a fine-tuning."""
    return pretraining(rng) if rng.random() < 0.5 else tuning(rng)


def short(rng: random.Random) -> FakeRun:
    return pretraining(rng, steps=rng.randint(3, 15))


def long_warmup(rng: random.Random) -> FakeRun:
    run = pretraining(rng)
    return rows(run, lambda i, n, one: replace(one, lr=3e-4 * (i + 1) / n, loss=one.loss + 0.6 * (1 - i / n)))


def step_decay(rng: random.Random) -> FakeRun:
    """The rate falls to a tenth in steps, and the loss with it."""
    run = pretraining(rng, steps=240)

    def change(i: int, n: int, one: FakeStep) -> FakeStep:
        part = 3 * i // n
        return replace(one, lr=3e-4 * 0.3**part, loss=one.loss - 0.12 * part)

    return rows(run, change)


def wsd(rng: random.Random) -> FakeRun:
    """A constant rate that decays at the end, where the loss falls faster."""
    run = pretraining(rng, steps=260)

    def change(i: int, n: int, one: FakeStep) -> FakeStep:
        late = max(0.0, i / n - 0.8) / 0.2
        return replace(one, lr=min(1.0, (i + 1) / 15) * 3e-4 * (1 - 0.99 * late), loss=one.loss - 0.2 * late)

    return rows(run, change)


def restarted(rng: random.Random) -> FakeRun:
    """Stopped and resumed from its last checkpoint, once."""
    run = pretraining(rng, steps=240)
    (only,) = run.starts
    cut = rng.randint(100, 160)
    again = replace(only[cut], seconds=7 * only[cut].seconds)
    return replace(run, starts=(only[:cut], (again, *only[cut + 1 :])))


def curriculum(rng: random.Random) -> FakeRun:
    """Another data mix from a step on: the loss has another level."""
    run = pretraining(rng, steps=260)
    at, by = rng.uniform(0.4, 0.7), rng.choice([-0.25, -0.15, 0.08, 0.12])
    return rows(run, lambda i, n, one: replace(one, loss=one.loss + (by if i > at * n else 0)))


def batch_ramp(rng: random.Random) -> FakeRun:
    """The batch grows, and a step takes longer with it."""
    run = pretraining(rng, steps=240)

    def change(i: int, n: int, one: FakeStep) -> FakeStep:
        samples = 16 * 2 ** min(2, 3 * i // n)
        return replace(one, samples=samples, seconds=one.seconds * samples / 64)

    return rows(run, change)


def saves(rng: random.Random) -> FakeRun:
    """Checkpoints that cost about one per cent."""
    run, every = pretraining(rng, steps=240), rng.randint(40, 60)

    def change(i: int, n: int, one: FakeStep) -> FakeStep:
        saved = (i + 1) % every == 0
        waited = i and i % every == 0
        return replace(one, saved_s=0.4 * run.base_s * saved, waited_s=0.4 * run.base_s * bool(waited))

    return rows(run, change)


def evaluated(rng: random.Random) -> FakeRun:
    """Evaluations every so many lines; the loss on other data follows the training loss."""
    run = either(rng)

    def change(i: int, n: int, one: FakeStep) -> FakeStep:
        near = [row.loss for row in run.starts[0][max(0, i - 9) : i + 1]]
        held_out = sum(near) / len(near) * (1.02 + 0.003 * rng.gauss(0, 1))
        return replace(one, validation=held_out if (i + 1) % 10 == 0 else None)

    return rows(run, change)


def experts(rng: random.Random) -> FakeRun:
    """A mixture of experts: a balancing loss, step times that vary by a few per cent."""
    run = pretraining(rng)
    return rows(
        run,
        lambda i, n, one: replace(
            one, aux_loss=1.0 + 0.4 * math.exp(-i / 20), seconds=one.seconds * (1 + 0.03 * rng.uniform(-1, 1))
        ),
    )


def continued(rng: random.Random) -> FakeRun:
    """Continued pretraining: the loss starts low and hardly falls."""
    run = pretraining(rng, floor=1.9)
    first = rng.uniform(1.7, 2.2)
    return rows(run, lambda i, n, one: replace(one, loss=first - 0.08 * i / n + 0.015 * rng.gauss(0, 1), grad_norm=0.6))


def noisy_tuning(rng: random.Random) -> FakeRun:
    """Fine-tuning with small batches: the loss varies by a fifth."""
    run = tuning(rng)
    return rows(run, lambda i, n, one: replace(one, loss=one.loss * (1 + 0.13 * rng.gauss(0, 1) / 1.5)))


def one_pause(rng: random.Random) -> FakeRun:
    """One step waits, once."""
    run = pretraining(rng)
    at = rng.randrange(30, 100)
    return rows(run, lambda i, n, one: replace(one, seconds=one.seconds * (5 if i == at else 1)))


def every_tenth(rng: random.Random) -> FakeRun:
    return pretraining(rng, steps=rng.randint(60, 150), log_every=10)


def other_lengths(rng: random.Random) -> FakeRun:
    """Batches of different lengths: step times vary by a few per cent."""
    run = tuning(rng)
    return rows(run, lambda i, n, one: replace(one, seconds=one.seconds * (1 + 0.06 * rng.uniform(-1, 1))))


def peak_norms(rng: random.Random) -> FakeRun:
    """Single high gradient norms that clipping takes care of."""
    run = pretraining(rng)
    places = set(rng.sample(range(40, 115), 3))
    return rows(run, lambda i, n, one: replace(one, grad_norm=one.grad_norm * (4 if i in places else 1)))


def scaled(rng: random.Random) -> FakeRun:
    """fp16: the loss scale grows and skips a step now and then."""
    run = pretraining(rng, steps=280)

    def change(i: int, n: int, one: FakeStep) -> FakeStep:
        skips = i in (0, 1, n // 2)
        return replace(one, loss_scale=2.0 ** min(16, 12 + i // 60), skipped=int(skips))

    return rows(run, change)


def fp8_run(rng: random.Random) -> FakeRun:
    return replace(pretraining(rng), fp8=True)


def warm_recompiles(rng: random.Random) -> FakeRun:
    """torch.compile compiles again in the first steps, which is normal."""
    run = pretraining(rng)
    return rows(run, lambda i, n, one: replace(one, lines=endings.recompiled(i + 1) if i in (0, 1) else ()))


def sharded(rng: random.Random) -> FakeRun:
    """Tensor and pipeline parallelism."""
    return replace(pretraining(rng, world=16), tp=2, pp=2)


def epochs(rng: random.Random) -> FakeRun:
    """Three epochs of varied data: the loss falls a little at every edge."""
    run = tuning(rng, lines=90, epochs=3)
    return rows(run, lambda i, n, one: replace(one, loss=one.loss * (1 - 0.02 * int(3 * i / n))))


HEALTHY = (
    Entry("pretraining", pretraining, Label(), (*EVERY, "nemo_bar", "swift_megatron")),
    Entry("fine-tuning", tuning, Label(), TRAINERS),
    Entry("short run", short, Label(), ("torchtitan_now", "megatron_now", "trainer", "nemo")),
    Entry("long warm-up", long_warmup, Label(), ("torchtitan_now", "megatron_now", "nemo")),
    Entry("rate in steps", step_decay, Label(), ("megatron_now", "automodel_now")),
    Entry("warm-up, constant, decay", wsd, Label(), ("megatron_now", "automodel_now")),
    Entry("one restart", restarted, Label(), ("torchtitan_now", "megatron_now", "automodel_now")),
    Entry("curriculum", curriculum, Label(), ("torchtitan_now", "megatron_now", "nemo")),
    Entry("growing batch", batch_ramp, Label(), ("megatron_now", "megatron_minmax")),
    Entry("cheap checkpoints", saves, Label(), ("torchtitan_now", "megatron_minmax", "megatron_all")),
    Entry(
        "evaluations",
        evaluated,
        Label(),
        ("torchtitan_now", "megatron_now", "automodel_now", "trainer", "axolotl", "swift"),
    ),
    Entry("mixture of experts", experts, Label(), ("megatron_now", "megatron_minmax", "bridge", "automodel_now")),
    Entry("continued pretraining", continued, Label(), ("megatron_now", "torchtitan_now", "trainer_state")),
    Entry("noisy fine-tuning", noisy_tuning, Label(), ("trainer", "axolotl", "automodel_now", "factory_json")),
    Entry("one pause", one_pause, Label(), ("torchtitan_now", "megatron_now", "nemo")),
    Entry("every tenth step", every_tenth, Label(), ("torchtitan_now", "megatron_now", "trainer")),
    Entry("lengths vary", other_lengths, Label(), ("trainer", "automodel_now")),
    Entry("clipped norms", peak_norms, Label(), ("torchtitan_now", "megatron_now")),
    Entry("growing loss scale", scaled, Label(), ("megatron_now",)),
    Entry("fp8", fp8_run, Label(), ("torchtitan_now",)),
    Entry("compiles twice", warm_recompiles, Label(), ("torchtitan_now", "automodel_now")),
    Entry("tensor and pipeline parallel", sharded, Label(), ("torchtitan_now", "megatron_all", "automodel_now")),
    Entry("three epochs", epochs, Label(), ("trainer", "axolotl", "automodel_now")),
)


# Troubles


def spike(rng: random.Random) -> FakeRun:
    run = pretraining(rng)
    at, times, width = rng.uniform(0.45, 0.75), rng.uniform(1.5, 2.6), rng.randint(1, 4)

    def change(i: int, n: int, one: FakeStep) -> FakeStep:
        near = 0 <= i - int(at * n) < width
        return replace(one, loss=one.loss * (times if near else 1), grad_norm=one.grad_norm * (8 if near else 1))

    return rows(run, change)


def diverging(rng: random.Random) -> FakeRun:
    run, begin, more = pretraining(rng), rng.uniform(0.5, 0.75), rng.uniform(1.5, 5)
    level = run.starts[0][int(begin * len(run.starts[0]))].loss

    def change(i: int, n: int, one: FakeStep) -> FakeStep:
        late = max(0.0, i / n - begin) / (1 - begin)
        loss = level + more * late + 0.02 * rng.gauss(0, 1) if late else one.loss
        return replace(one, loss=loss, grad_norm=one.grad_norm * (1 + 9 * late))

    return rows(run, change)


def nan(rng: random.Random) -> FakeRun:
    run, at = pretraining(rng), rng.uniform(0.5, 0.95)
    bad = float("nan")

    def change(i: int, n: int, one: FakeStep) -> FakeStep:
        return replace(one, loss=bad, grad_norm=bad, bad=1) if i >= at * n else one

    return rows(run, change)


def hidden_nan(rng: random.Random) -> FakeRun:
    """The Trainer logs a NaN loss as 0."""
    run, at = tuning(rng), rng.uniform(0.2, 0.7)
    bad = float("nan")
    return rows(run, lambda i, n, one: replace(one, loss=bad, grad_norm=bad) if i >= at * n else one)


def zero_gradient(rng: random.Random) -> FakeRun:
    run, at = pretraining(rng), rng.uniform(0.3, 0.7)
    (only,) = run.starts
    level = only[int(at * len(only))].loss
    return rows(
        run, lambda i, n, one: replace(one, grad_norm=0.0, loss=level + 0.01 * rng.gauss(0, 1)) if i > at * n else one
    )


def no_warmup(rng: random.Random) -> FakeRun:
    """The rate starts at its peak, and the loss rises within the first steps."""
    run, onset, level = replace(pretraining(rng), warmup=0), rng.randint(4, 18), rng.uniform(1.5, 4)
    peak = rng.choice([1e-3, 3e-3])

    def change(i: int, n: int, one: FakeStep) -> FakeStep:
        first = run.starts[0][0].loss
        up = level * (1 - math.exp(-max(0, i - onset) / 12))
        loss = first + up + 0.05 * rng.gauss(0, 1) if i > onset else one.loss
        return replace(one, lr=peak * (1 - 0.2 * i / n), loss=loss, grad_norm=one.grad_norm * (6 if i > onset else 1))

    return rows(run, change)


def ended(build: Build, lines: Callable[[random.Random], tuple[str, ...]]) -> Build:
    """Return a run that ends early with these lines."""

    def made(rng: random.Random) -> FakeRun:
        run = build(rng)
        cut = int(len(run.starts[0]) * rng.uniform(0.3, 0.9))
        return replace(run, starts=(run.starts[0][: max(cut, 2)],), final_lines=lines(rng))

    return made


def at_start(lines: Callable[[random.Random], tuple[str, ...]]) -> Build:
    """Return a run that ends in its first steps with these lines."""

    def made(rng: random.Random) -> FakeRun:
        run = pretraining(rng)
        return replace(run, starts=(run.starts[0][:1],), final_lines=lines(rng))

    return made


LATE = 5


def slow_rank(rng: random.Random) -> FakeRun:
    apart = rng.uniform(1.45, 2.2)
    run = replace(pretraining(rng), slow_rank=LATE)
    return rows(run, lambda i, n, one: replace(one, ranks_apart=apart))


def slow_network(rng: random.Random) -> FakeRun:
    share = rng.uniform(0.32, 0.55)
    return rows(pretraining(rng), lambda i, n, one: replace(one, collectives_s=share * one.seconds))


def slow_data(rng: random.Random) -> FakeRun:
    share = rng.uniform(0.12, 0.5)
    return rows(pretraining(rng), lambda i, n, one: replace(one, data_s=share * one.seconds))


def data_stalls(rng: random.Random) -> FakeRun:
    """Random steps wait for data, in a log without timers; the others run at full speed."""
    run = pretraining(rng)
    n = len(run.starts[0])
    places = set[int]()
    while len(places) < n // 9:
        place = rng.randrange(15, n)
        if sum(abs(place - one) < 9 for one in places) < 2:
            places.add(place)
    return rows(run, lambda i, n, one: replace(one, seconds=one.seconds * (rng.uniform(2, 7) if i in places else 1)))


def slower_since(rng: random.Random) -> FakeRun:
    at, more = rng.uniform(0.3, 0.75), rng.uniform(0.2, 0.8)
    return rows(pretraining(rng), lambda i, n, one: replace(one, seconds=one.seconds * (1 + more * (i > at * n))))


def checkpoint_stalls(rng: random.Random) -> FakeRun:
    run, every, part = pretraining(rng, steps=200), rng.randint(10, 25), rng.uniform(0.12, 0.4)

    def change(i: int, n: int, one: FakeStep) -> FakeStep:
        long = part * every * run.base_s
        return replace(
            one, saved_s=long if (i + 1) % every == 0 else 0.0, waited_s=long if i and i % every == 0 else 0.0
        )

    return rows(run, change)


def silent_stalls(rng: random.Random) -> FakeRun:
    """Every so many lines one takes longer, and no line says why."""
    run, every, times = pretraining(rng, steps=200), rng.randint(8, 20), rng.uniform(2.5, 6)
    return rows(run, lambda i, n, one: replace(one, seconds=one.seconds * (times if (i + 1) % every == 0 else 1)))


def recompiles(rng: random.Random) -> FakeRun:
    """Shapes change, torch.compile compiles again and again and then gives up."""
    run = pretraining(rng, steps=140)
    places = sorted(rng.sample(range(8, 100), 8))

    def change(i: int, n: int, one: FakeStep) -> FakeStep:
        if i not in places:
            return one
        lines = endings.RECOMPILE_LIMIT if i == places[-1] else endings.recompiled(places.index(i) + 1)
        return replace(one, seconds=one.seconds * rng.uniform(4, 9), lines=lines)

    return rows(run, change)


def above_guessing(rng: random.Random) -> FakeRun:
    """Labels of another tokenizer: the loss stays above that of guessing."""
    level = rng.uniform(13.2, 16)
    run = pretraining(rng, steps=160)
    return rows(run, lambda i, n, one: replace(one, loss=level - 0.25 * i / n + 0.05 * rng.gauss(0, 1)))


def random_start(rng: random.Random) -> FakeRun:
    """Fine-tuning that starts as if its weights were random."""
    run = tuning(rng, lines=60)
    speed = 1.0 / run.base_s  # 65,536 tokens of an 8B model at 40 % MFU of 8 H100: nothing is wrong with the speed
    return rows(
        replace(run, base_s=1.0),
        lambda i, n, one: replace(one, seconds=one.seconds * speed, loss=11.6 - 3.5 * i / n + 0.1 * rng.gauss(0, 1)),
    )


def repeated(rng: random.Random) -> FakeRun:
    """The same samples again: the loss drops at every edge of an epoch."""
    run, drop = tuning(rng, lines=90, epochs=3), rng.uniform(0.22, 0.45)

    def change(i: int, n: int, one: FakeStep) -> FakeStep:
        noise = one.loss * 0.015 * rng.gauss(0, 1)
        return replace(one, loss=(1.5 - 0.1 * (3 * i / n % 1)) * (1 - drop) ** int(one.epoch - 1e-9) + noise)

    return rows(run, change)


def scale_collapse(rng: random.Random) -> FakeRun:
    run, at = pretraining(rng, steps=150), rng.uniform(0.3, 0.5)

    def change(i: int, n: int, one: FakeStep) -> FakeStep:
        down = max(0, i - int(at * n))
        return replace(one, loss_scale=65536.0 / 2 ** min(15, down), skipped=int(down > 0))

    return rows(run, change)


def leak(rng: random.Random) -> FakeRun:
    more = rng.uniform(4, 12)
    return rows(pretraining(rng), lambda i, n, one: replace(one, memory_gib=50 + more * i / n))


def overfit(rng: random.Random) -> FakeRun:
    run, best = tuning(rng, lines=100, epochs=4), rng.uniform(0.3, 0.5)

    def change(i: int, n: int, one: FakeStep) -> FakeStep:
        held_out = 1.5 + 0.6 * max(0.0, best - i / n) + 0.5 * max(0.0, i / n - best) + rng.gauss(0, 0.004)
        return replace(one, loss=one.loss * (1 - 0.4 * i / n), validation=held_out if (i + 1) % 10 == 0 else None)

    return rows(run, change)


def tiny_rate(rng: random.Random) -> FakeRun:
    run = pretraining(rng, steps=220)
    return rows(run, lambda i, n, one: replace(one, lr=0.0, loss=10.9 + 0.01 * rng.gauss(0, 1)))


def wide_layout(rng: random.Random) -> FakeRun:
    """A small model cut over all GPUs of a node: far behind the best plan, although as fast as its own estimate."""
    from tests.doctor.fake_runs import case

    from meshwright import costs

    made = case("llama3_8b_pretrain_config", "8xH100", "torchtitan", "layout.tp=8")
    seconds = float(costs.estimate(made).step_s)
    run = replace(
        pretraining(rng, steps=80), world=8, tp=8, model="llama3 8B", seq_length=int(made.seq_length),
        samples=int(made.global_batch_size),
    )  # fmt: skip
    slower = rng.uniform(0.95, 1.05)
    peak = float(costs.estimate(made).memory.total) - 2
    return rows(
        replace(run, base_s=seconds),
        lambda i, n, one: replace(one, seconds=seconds * slower * one.seconds / run.base_s, memory_gib=peak),
    )


def _oom(where: str, version: str) -> Callable[[random.Random], tuple[str, ...]]:
    return lambda rng: endings.out_of_memory(rng, where, version)


WATCHDOG = "run.failed-hang"
OOM_SAYS = {
    "axolotl": ("micro_batch_size: 1", "gradient_checkpointing: true"),
    "trainer": ("per_device_train_batch_size: 1", "gradient_checkpointing: true"),
    "torchtitan_now": ("local_batch_size",),
    "megatron_now": ("--micro-batch-size 1", "--recompute-granularity"),
}
RATE_SAYS = {  # the trouble begins long after the warm-up
    "axolotl": ("learning_rate: ",),
    "trainer": ("learning_rate: ",),
    "torchtitan_now": ("optimizer.lr",),
    "megatron_now": ("--lr ",),
    "automodel_now": ("optimizer.lr",),
}
WARMUP_SAYS = {
    "axolotl": ("warmup_",),
    "trainer": ("warmup_",),
    "torchtitan_now": ("lr_scheduler.warmup_steps",),
    "megatron_now": ("--lr-warmup-",),
    "automodel_now": ("lr_warmup_steps",),
}

TROUBLES = (
    Entry("loss spike", spike, Label("loss.spikes"), (*PRETRAIN, "nemo_bar", "swift_megatron")),
    Entry("divergence", diverging, Label("loss.diverging"), EVERY, RATE_SAYS),
    Entry(
        "NaN", nan, Label("loss.not-a-number"), ("torchtitan_now", "megatron_now", "bridge", "nemo", "automodel_now")
    ),
    Entry(
        "NaN that is logged as 0",
        hidden_nan,
        Label("loss.not-a-number", says=("logs a NaN loss as 0",)),
        TRAINERS,
        RATE_SAYS,
    ),
    Entry("zero gradients", zero_gradient, Label("loss.zero-gradients"), ("torchtitan_now", "megatron_now", "axolotl")),
    Entry(
        "no warm-up",
        no_warmup,
        Label("loss.diverging", ("loss.diverged",), says=("no warm-up",)),
        ("torchtitan_now", "megatron_now", "nemo", "automodel_now", "trainer", "axolotl"),
        WARMUP_SAYS,
    ),
    Entry(
        "out of memory, activations",
        ended(pretraining, _oom("activations", "2.6")),
        Label("memory.out-of-memory", says=("forward or backward",)),
        EVERY,
        OOM_SAYS,
    ),
    Entry(
        "out of memory, loss",
        at_start(_oom("logits", "2.4")),
        Label("memory.out-of-memory", says=("in the loss",)),
        ("torchtitan_now", "axolotl"),
    ),
    Entry(
        "out of memory, optimizer",
        at_start(_oom("optimizer", "2.9")),
        Label("memory.out-of-memory", says=("in the optimizer",)),
        ("torchtitan_now", "megatron_now"),
    ),
    Entry(
        "out of memory, collective",
        ended(pretraining, _oom("buffers", "2.6")),
        Label("memory.out-of-memory", says=("in a collective",)),
        ("torchtitan_now",),
    ),
    Entry(
        "out of memory, loading",
        at_start(_oom("weights", "1.13")),
        Label("memory.out-of-memory", says=("loading weights",)),
        ("trainer", "automodel_now"),
    ),
    Entry(
        "fragmentation",
        ended(pretraining, endings.fragmented),
        Label("memory.out-of-memory", says=("expandable_segments:True",)),
        ("torchtitan_now", "megatron_now", "axolotl"),
    ),
    Entry(
        "timeout, rank behind",
        ended(pretraining, lambda rng: endings.timeout(rng, LATE, 8)),
        Label(WATCHDOG, says=(f"Rank {LATE} ", "behind")),
        ("torchtitan_now", "megatron_now", "automodel_now", "axolotl"),
    ),
    Entry(
        "timeout, torch 2.4",
        ended(pretraining, lambda rng: endings.timeout(rng, LATE, 8, "2.4")),
        Label(WATCHDOG, says=(f"Rank {LATE} ",)),
        ("torchtitan_now", "nemo"),
    ),
    Entry(
        "timeout, silent rank",
        ended(pretraining, lambda rng: endings.silent(rng, LATE, 8)),
        Label(WATCHDOG, says=(f"Rank {LATE} ",)),
        ("torchtitan_now", "megatron_now"),
    ),
    Entry(
        "timeout, flight recorder",
        ended(pretraining, lambda rng: endings.flight_recorder(LATE)),
        Label(WATCHDOG, says=(f"Rank {LATE} ",)),
        ("torchtitan_now", "megatron_now"),
    ),
    Entry(
        "hang of the watchdog",
        ended(pretraining, endings.heartbeat),
        Label(WATCHDOG),
        ("torchtitan_now", "megatron_now"),
    ),
    Entry(
        "slow rank",
        slow_rank,
        Label("speed.stragglers", not_said=("speed.slow-network",)),
        ("megatron_minmax", "megatron_all", "megatron_straggler"),
        {"megatron_all": (f"rank {LATE}",), "megatron_straggler": (f"rank {LATE}",)},
    ),
    Entry(
        "slow network",
        slow_network,
        Label("speed.slow-network", not_said=("speed.stragglers",)),
        ("megatron_minmax", "megatron_all", "own"),
    ),
    Entry("slow data", slow_data, Label("speed.slow-data"), ("megatron_minmax", "megatron_all", "megatron_max", "own")),
    Entry(
        "data stalls without timers",
        data_stalls,
        Label("speed.uneven-steps", says=("data",)),
        ("torchtitan_now", "megatron_now", "bridge", "nemo", "automodel_now"),
    ),
    Entry("slower since a step", slower_since, Label("speed.sustained-slowdown"), (*PRETRAIN, "nemo_bar")),
    Entry(
        "long checkpoints",
        checkpoint_stalls,
        Label("run.checkpoint-stalls"),
        ("torchtitan_now", "megatron_minmax", "megatron_all"),
    ),
    Entry(
        "periodic stalls",
        silent_stalls,
        Label("speed.periodic-steps", says=("checkpoint",)),
        ("torchtitan_now", "bridge", "nemo", "automodel_now"),
    ),
    Entry(
        "wrong layout",
        wide_layout,
        Label("speed.better-layout", also=("speed.low-mfu",), says=("tp=8",)),
        ("torchtitan_now",),
    ),
    Entry(
        "compiles again and again",
        recompiles,
        Label("speed.recompiles", also=("speed.uneven-steps",)),
        ("torchtitan_now", "automodel_now"),
    ),
    Entry(
        "disk full",
        ended(pretraining, lambda rng: endings.DISK_FULL),
        Label("run.failed-disk-full"),
        ("torchtitan_now", "axolotl", "nemo"),
    ),
    Entry(
        "preempted",
        ended(pretraining, lambda rng: endings.slurm("preemption")),
        Label("run.failed-preemption"),
        ("torchtitan_now", "megatron_now", "trainer"),
    ),
    Entry(
        "ended by SIGTERM",
        ended(pretraining, lambda rng: endings.SIGTERM),
        Label("run.failed-terminated", says=("SIGTERM",)),
        ("torchtitan_now", "axolotl", "automodel_now"),
    ),
    Entry(
        "time limit",
        ended(pretraining, lambda rng: endings.slurm("time")),
        Label("run.failed-time-limit"),
        ("megatron_now", "nemo"),
    ),
    Entry(
        "node failure",
        ended(pretraining, lambda rng: endings.slurm("node")),
        Label("run.failed-node-failure"),
        ("megatron_now", "torchtitan_now"),
    ),
    Entry(
        "host memory",
        ended(pretraining, lambda rng: endings.slurm("oom")),
        Label("run.failed-host-memory"),
        ("axolotl", "torchtitan_now"),
    ),
    Entry(
        "another tokenizer",
        above_guessing,
        Label("loss.random-guess"),
        ("torchtitan_now", "megatron_now", "trainer", "nemo"),
    ),
    Entry(
        "weights not loaded",
        random_start,
        Label("loss.random-guess"),
        ("trainer", "axolotl"),
        None,
        "llama3_8b",
        "8xH100",
        "sft",
    ),
    Entry("repeated samples", repeated, Label("loss.repeated-data"), ("trainer", "axolotl", "automodel_now", "swift")),
    Entry("loss scale collapses", scale_collapse, Label("loss.scale-collapsed"), ("megatron_now", "trainer_deepspeed")),
    Entry(
        "loss scale at its minimum",
        ended(tuning, lambda rng: endings.SCALE_AT_MINIMUM),
        Label("loss.scale-collapsed"),
        ("trainer_deepspeed",),
    ),
    Entry("memory leak", leak, Label("memory.growing"), ("torchtitan_now", "automodel_now", "axolotl")),
    Entry(
        "overfitting",
        overfit,
        Label("loss.overfitting"),
        ("trainer", "axolotl", "swift", "swift_json", "factory_json", "trainer_state"),
    ),
    Entry("rate of zero", tiny_rate, Label("loss.flat"), ("megatron_now", "automodel_now", "trainer")),
)


def logs(seeds: tuple[int, ...] = TUNED) -> Iterator[Log]:
    """Yield every log of the corpus, drawn with each seed."""
    for entry in (*HEALTHY, *TROUBLES):
        for writer in entry.writers:
            yield from (Log(entry, writer, seed) for seed in seeds)
