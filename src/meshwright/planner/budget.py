"""Days, GPU-hours and cost of a token budget, with the error band of the step time."""

from __future__ import annotations

from math import ceil, log2

import msgspec

from meshwright import costs
from meshwright.planner.divisors import divided_batch
from meshwright.planner.goodput import Goodput, goodput
from meshwright.recipes.case import Case

DAY, HOUR = 86400.0, 3600.0
GB_PER_GIB = 1.073741824
MANY_STEPS = 2_000_000
"""Optimizer steps above which the batch is small for the budget: published pretrainings took 0.1 to 1.2 million steps
(GPT-3 and Pythia 0.15, Llama 2 0.5, DeepSeek-V3 0.25, OLMo 2 7B 0.93, Llama 3 405B 1.2)."""
USUAL_STEPS = 500_000
SAME_LENGTH = 0.01  # relative difference of steps that is only rounding
MAX_STEP_TOKENS = 16 * 2**20  # about the largest published


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
    tokens_from: str  # requested, the recipe's steps, or the epochs of a dataset
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


def goodput_of(case: Case, estimate: costs.Estimate) -> Goodput:
    """Return the goodput of a case: its state is what a checkpoint writes."""
    return goodput(case.cluster.world, float(estimate.memory.weights + estimate.memory.optimizer) * GB_PER_GIB)


class Epochs(msgspec.Struct, frozen=True):
    """The samples of a recipe's epochs, and where their number is from."""

    samples: int
    source: str


def budget(
    case: Case,
    estimate: costs.Estimate,
    tokens: float | None,
    price: Price | None = None,
    epochs: Epochs | None = None,
    width: float | None = None,
) -> Budget | None:
    """Return days and cost of a token budget; None if failures leave no time to train.

    Without a budget, it is that of the recipe's epochs or steps. `width` are the tokens per sample that steps of
    grouped lengths have on average; others are padded to the sequence length.
    """
    per_step = round(case.global_batch_size * (width or case.seq_length))
    useful = goodput_of(case, estimate)
    if useful.share <= 0 or (tokens is None and epochs is None and case.recipe.train.epochs):
        return None
    steps = ceil(epochs.samples / case.global_batch_size) if epochs is not None else case.steps
    total = tokens if tokens is not None else float(steps * per_step)
    speed = float(_at_width(case, estimate, width).tokens_per_s_per_gpu)
    days = total / (speed * case.cluster.world * useful.share * DAY)
    factor = 1 + estimate.band.step_pct / 100
    hours = days * 24 * case.cluster.world
    cost = None if price is None else hours * price.per_gpu_hour
    return Budget(
        tokens=total,
        tokens_from="requested" if tokens is not None else epochs.source if epochs else "the recipe's steps",
        steps=ceil(total / per_step),
        tokens_per_step=per_step,
        goodput=useful,
        days=days,
        days_band=_range(days, factor),
        gpu_hours=hours,
        gpu_hours_band=_range(hours, factor),
        price=None if price is None else price.per_gpu_hour,
        currency="" if price is None else price.currency,
        cost=cost,
        cost_band=None if cost is None else _range(cost, factor),
        notes=(*steps_notes(case, tokens), *batch_notes(case, tokens)) if tokens is not None else (),
    )


def _at_width(case: Case, estimate: costs.Estimate, width: float | None) -> costs.Estimate:
    """Return the estimate of steps that are narrower than the sequence length: small matrices use a GPU less well."""
    if width is None or width >= case.seq_length:
        return estimate
    data = msgspec.structs.replace(case.recipe.data, seq_length=ceil(width))
    return costs.estimate(case.rebuild(msgspec.structs.replace(case.recipe, data=data)))


def _range(value: float, factor: float) -> Range:
    return Range(value / factor, value * factor)


def steps_notes(case: Case, tokens: float) -> tuple[str, ...]:
    """Return which steps train the budget if the recipe has another length; a budget changes no recipe."""
    per_step, train = int(case.global_batch_size * case.seq_length), case.recipe.train
    steps = ceil(tokens / per_step)
    if tokens < per_step or (not train.epochs and abs(train.steps - steps) <= SAME_LENGTH * steps):
        return ()
    if train.epochs:
        length = f"{train.epochs:g} epoch{'s' if train.epochs != 1 else ''}"
        return (f"the run lasts {length}: write train.steps={steps} instead of train.epochs to train these tokens",)
    return (f"the recipe trains for {train.steps:,} steps: add train.steps={steps} to train these tokens",)


def batch_notes(case: Case, tokens: float) -> tuple[str, ...]:
    """Return what the recipe's batch means for this budget: too many steps, or fewer than its warmup."""
    per_step = int(case.global_batch_size * case.seq_length)
    steps = ceil(tokens / per_step)
    if tokens < per_step:
        count = f"{tokens:,.0f}"
        return (f"{count} tokens are less than one step of {per_step:,}; write {count}B for billions",)
    if steps > MANY_STEPS:
        return (_small_batch_note(case, tokens, steps),)
    if steps <= case.warmup_steps:
        return (
            f"{tokens:.3g} tokens are {steps:,} steps of {per_step:,} tokens, fewer than the recipe's warmup of "
            f"{case.warmup_steps:,}: set schedule.warmup_steps={max(steps // 20, 1)} or a smaller batch",
        )
    return ()


def _small_batch_note(case: Case, tokens: float, steps: int) -> str:
    per_step = int(case.global_batch_size * case.seq_length)
    wanted = min(2 ** ceil(log2(tokens / USUAL_STEPS)), MAX_STEP_TOKENS)
    batch = divided_batch(max(wanted // int(case.seq_length), 1), case.cluster.world)
    return (
        f"the recipe's batch of {per_step:,} tokens is small for {tokens:.3g} tokens: {steps:,} steps; published runs "
        f"take 0.1 to 1.2 million. Speed per GPU and cost change with it: try train.global_batch_size={batch} "
        f"({batch * int(case.seq_length):,} tokens, {ceil(tokens / (batch * int(case.seq_length))):,} steps)"
    )
