"""Days, GPU-hours and cost of a token budget, or the tokens of a number of days, with the step time's error band."""

from __future__ import annotations

from functools import partial
from math import ceil, floor, log2
from typing import Any

import msgspec

from meshwright import costs
from meshwright.display import duration, plural, short_number
from meshwright.planner.batch_rate import lr_of_batch
from meshwright.planner.divisors import divided_batch
from meshwright.planner.goodput import Goodput, goodput
from meshwright.planner.storage import storage_of
from meshwright.recipes.case import Case
from meshwright.rules.learning_rate import short_warmup

DAY, HOUR = 86400.0, 3600.0
GB_PER_GIB = 1.073741824
MANY_STEPS = 2_000_000
"""Optimizer steps above which the batch is small for the budget: published pretrainings took 0.1 to 1.2 million steps
(GPT-3 and Pythia 0.15, Llama 2 0.5, DeepSeek-V3 0.25, OLMo 2 7B 0.93, Llama 3 405B 1.2)."""
FEW_STEPS = 100_000  # the fewest of those: no larger batch is suggested that leaves fewer
USUAL_STEPS = 500_000
TOO_FEW_STEPS, ENOUGH_STEPS = 5_000, 20_000  # of a pretraining from scratch whose batch could be smaller
LARGE_BATCH, USUAL_BATCH = 2**20, 2**19  # tokens per step: less is never called large, or suggested
SAME_LENGTH = 0.01  # relative difference of steps that is only rounding
MAX_STEP_TOKENS = 16 * 2**20  # about the largest published
SAVE_GAIN = 0.002  # of the time: what another checkpoint interval must gain to be named


class Price(msgspec.Struct, frozen=True):
    """The price of one GPU for one hour; the currency is empty if none was named."""

    per_gpu_hour: float
    currency: str = ""


class Range(msgspec.Struct, frozen=True):
    """The ends of the error band: four of five comparable runs are within it."""

    low: float
    high: float


class Budget(msgspec.Struct, frozen=True):
    """What a number of tokens takes on one cluster."""

    tokens: float
    tokens_from: str  # requested, the recipe's steps, the epochs of a dataset, or a number of days
    steps: int
    tokens_per_step: int
    goodput: Goodput
    days: float
    days_band: Range
    gpu_hours: float
    gpu_hours_band: Range
    price: float | None = None
    currency: str = ""
    cost: float | None = None
    cost_band: Range | None = None
    notes: tuple[str, ...] = ()
    tokens_band: Range | None = None  # if the days are given


def goodput_of(case: Case, step_s: float, steps: int, every: int | None = None) -> Goodput:
    """Return the goodput of a run of these steps with the recipe's checkpoints, or with one every so many steps."""
    checkpoint = case.recipe.checkpoint
    every = checkpoint.save_every if every is None else every
    interval = min(every or steps, max(steps, 1)) * step_s
    found = partial(
        goodput, case.cluster.world, _saved_gb(case), interval, checkpoint.async_save, case.mtbf_hours,
        storage_gb_s=case.cluster.storage_gb_s,
    )  # fmt: skip
    without = found(spares=0).share if case.cluster.nodes > 1 else None
    return msgspec.structs.replace(found(), save_every=every, share_without_spares=without)


def _saved_gb(case: Case) -> float:
    """Return what a GPU writes of a checkpoint."""
    return storage_of(case).checkpoint_gib * GB_PER_GIB / case.cluster.world


def save_notes(case: Case, useful: Goodput, step_s: float, steps: int) -> tuple[str, ...]:
    """Return the checkpoint interval that trains a larger share of the time, if it is worth a change."""
    background = case.recipe.checkpoint.async_save
    best = goodput(
        case.cluster.world,
        _saved_gb(case),
        background=background,
        mtbf_hours=case.mtbf_hours,
        storage_gb_s=case.cluster.storage_gb_s,
    )
    every = min(_rounded(best.save_interval_s / step_s), max(steps, 1))
    other = goodput_of(case, step_s, steps, every)
    if case.benchmark or other.share < useful.share + SAVE_GAIN:
        return ()
    now = f"every {plural(useful.save_every, 'step')}" if useful.save_every else "only at the end"
    minutes = f"{every * step_s / 60:,.0f} minutes" if every * step_s >= 120 else f"{every * step_s:,.0f} seconds"
    return (
        f"a checkpoint {now} leaves {useful.share:.1%} of the time to training, one every {minutes} {other.share:.1%}: "
        f"add checkpoint.save_every={every}",
    )


def _rounded(steps: float) -> int:
    """Return a number of steps with two digits."""
    return max(int(float(f"{steps:.1e}")), 1)


class Epochs(msgspec.Struct, frozen=True):
    """The samples of a recipe's epochs, and where their number is from."""

    samples: int
    source: str
    packed_tokens: float = 0.0  # of one epoch, if documents are packed
    longest: int = 0  # tokens of the longest document; 0 if not known

    def counted(self, case: Case) -> Case:
        """Return the case with these samples."""
        return case.with_samples(self.samples, self.packed_tokens, self.longest)


def budget(
    case: Case,
    estimate: costs.Estimate,
    tokens: float | None,
    price: Price | None = None,
    epochs: Epochs | None = None,
    width: float | None = None,
    days: float | None = None,
    advises_saves: bool = True,
    is_deadline: bool = False,
) -> Budget | None:
    """Return days and cost of a token budget, or the tokens of these days; None if failures leave no time to train.

    Without a budget, it is that of the recipe's epochs or steps; with `is_deadline`, the days are theirs. `width` are
    the tokens per sample that steps of grouped lengths have on average; others are padded to the sequence length.
    """
    if tokens is None and days is None and epochs is None and case.recipe.train.epochs:
        return None
    per_step = step_tokens(case, width)
    step_s = per_step / (float(_at_width(case, estimate, width).tokens_per_s_per_gpu) * case.cluster.world)
    if tokens is None and days is not None and not is_deadline:
        return _within(case, estimate, days, step_s, per_step, price, advises_saves)
    steps = ceil(epochs.samples / case.global_batch_size) if epochs is not None else case.steps
    total = tokens if tokens is not None else float(steps * per_step)
    steps = ceil(total / per_step)
    useful = goodput_of(case, step_s, steps)
    if useful.share <= 0:
        return None
    taken = total / per_step * step_s / (useful.share * DAY)
    source = "requested" if tokens is not None else epochs.source if epochs else "the recipe's steps"
    notes = (*steps_notes(case, tokens, width), *batch_notes(case, tokens)) if tokens is not None else ()
    factor = 1 + estimate.band.step_pct / 100
    deadline: tuple[str, ...] = ()
    if days is not None and taken <= days:
        deadline = _met(taken, days, factor)
    elif days is not None:
        deadline = _late(taken, days, _within(case, estimate, days, step_s, per_step))
    return Budget(
        tokens=total,
        tokens_from=source,
        steps=steps,
        tokens_per_step=per_step,
        goodput=useful,
        notes=(*deadline, *notes, *(save_notes(case, useful, step_s, steps) if advises_saves else ())),
        **_spent(case, taken, price, factor),
    )


def step_tokens(case: Case, width: float | None = None) -> int:
    """Return the tokens of a step."""
    return round(float(case.global_batch_size * (width or case.seq_length)))


def _within(
    case: Case,
    estimate: costs.Estimate,
    days: float,
    step_s: float,
    per_step: int,
    price: Price | None = None,
    advises_saves: bool = True,
) -> Budget | None:
    """Return the tokens that these days train; None if failures leave no time to train."""
    useful = goodput_of(case, step_s, ceil(days * DAY / step_s))
    if useful.share <= 0:
        return None
    steps = int(days * DAY * useful.share / step_s)
    total, factor = float(steps * per_step), 1 + estimate.band.step_pct / 100
    few = () if steps else (f"{days:g} days are less than one step of {step_s:,.0f} seconds",)
    return Budget(
        tokens=total,
        tokens_from=f"what {days:g} days train",
        tokens_band=_range(total, factor),
        steps=steps,
        tokens_per_step=per_step,
        goodput=useful,
        notes=(
            *few,
            *(batch_notes(case, total) if steps else ()),
            *(save_notes(case, useful, step_s, steps) if advises_saves else ()),
        ),
        **_spent(case, days, price, 1.0),
    )


def _met(taken: float, days: float, factor: float) -> tuple[str, ...]:
    """Return that a deadline is met, and whether it also is at the upper end of the estimate."""
    late = taken * factor
    sure = "also" if late <= days else "but not"
    upper = f"{sure} at the upper end of the estimate, {duration(late, days)}"
    return (f"--days {days:g} is met: {duration(taken, days)}; {upper}",)


def _late(taken: float, days: float, within: Budget | None) -> tuple[str, ...]:
    """Return that a deadline is missed, and the tokens that would meet it."""
    fits = (
        ""
        if within is None
        else f": in these days {within.tokens / 1e9:,.4g}B tokens fit ({plural(within.steps, 'step')})"
    )
    return (
        f"{duration(taken, days)} are more than --days {days:g}{fits}; meshwright size finds the GPUs for the deadline",
    )


def _spent(case: Case, days: float, price: Price | None, factor: float) -> dict[str, Any]:
    """Return the fields of a budget for these days: GPU-hours and cost, each with its range."""
    hours = days * 24 * case.cluster.world
    cost = None if price is None else hours * price.per_gpu_hour
    return {
        "days": days,
        "days_band": _range(days, factor),
        "gpu_hours": hours,
        "gpu_hours_band": _range(hours, factor),
        "price": None if price is None else price.per_gpu_hour,
        "currency": "" if price is None else price.currency,
        "cost": cost,
        "cost_band": None if cost is None else _range(cost, factor),
    }


def _at_width(case: Case, estimate: costs.Estimate, width: float | None) -> costs.Estimate:
    """Return the estimate of steps that are narrower than the sequence length: small matrices use a GPU less well."""
    if width is None or width >= case.seq_length:
        return estimate
    data = msgspec.structs.replace(case.recipe.data, seq_length=ceil(width))
    return costs.estimate(case.rebuild(msgspec.structs.replace(case.recipe, data=data)))


def _range(value: float, factor: float) -> Range:
    return Range(value / factor, value * factor)


def steps_notes(case: Case, tokens: float, width: float | None = None) -> tuple[str, ...]:
    """Return which steps train the budget if the run has another length."""
    per_step, train = step_tokens(case, width), case.recipe.train
    steps = ceil(tokens / per_step)
    if tokens < per_step or (not train.epochs and abs(train.steps - steps) <= SAME_LENGTH * steps):
        return ()
    if train.epochs:
        length = f"{train.epochs:g} epoch{'s' if train.epochs != 1 else ''}"
        return (f"the run lasts {length}: write train.steps={steps} instead of train.epochs to train these tokens",)
    return (f"the recipe trains for {plural(train.steps, 'step')}: add train.steps={steps} to train these tokens",)


def batch_notes(case: Case, tokens: float) -> tuple[str, ...]:
    """Return what the recipe's batch means for this budget: too many steps, or fewer than its warmup."""
    per_step = int(case.global_batch_size * case.seq_length)
    steps = ceil(tokens / per_step)
    if tokens < per_step:
        count = f"{tokens:,.0f}"
        counted = case.recipe.train.epochs  # of a dataset: nobody typed the number
        hint = "a smaller train.global_batch_size makes steps of them" if counted else f"write {count}B for billions"
        return (f"{count} tokens are less than one step of {per_step:,}; {hint}",)
    if steps > MANY_STEPS:
        wanted = min(2 ** ceil(log2(tokens / USUAL_STEPS)), MAX_STEP_TOKENS)
        return (_batch_note(case, tokens, "small", "published runs take 0.1 to 1.2 million", wanted),)
    if steps <= case.warmup_steps:
        return (
            f"{short_number(tokens)} tokens are {plural(steps, 'step')} of {per_step:,} tokens, fewer than the "
            f"recipe's warmup of {case.warmup_steps:,}: set schedule.warmup_steps={short_warmup(steps)} or a "
            "smaller batch",
        )
    if case.goal == "pretrain" and not case.recipe.checkpoint.pretrained:
        wanted = max(2 ** floor(log2(tokens / ENOUGH_STEPS)), USUAL_BATCH)
        if steps < TOO_FEW_STEPS and per_step > max(LARGE_BATCH, wanted):
            return (_batch_note(case, tokens, "large", "a smaller batch learns more from so few tokens", wanted),)
    return ()


def _batch_note(case: Case, tokens: float, size: str, why: str, wanted: int) -> str:
    """Return that a batch is small or large for a budget, and one of about the wanted tokens with its learning rate."""
    per_step = int(case.global_batch_size * case.seq_length)
    batch = divided_batch(max(wanted // int(case.seq_length), 1), case.cluster.world)
    other, steps = batch * int(case.seq_length), ceil(tokens / per_step)
    now, lr = float(case.lr), lr_of_batch(case, batch)
    rate = f"lr {now:g} stays" if lr == now else f"lr {now:g} with sqrt scaling"
    words = f"train.global_batch_size={batch}" + ("" if lr == now else f" optimizer.lr={lr:g}")
    return (
        f"the recipe's batch of {per_step:,} tokens is {size} for {short_number(tokens)} tokens: "
        f"{plural(steps, 'step')}; {why}. Speed per GPU and cost change with it: try "
        f"{words} ({other:,} tokens, {plural(ceil(tokens / other), 'step')}; {rate})"
    )
