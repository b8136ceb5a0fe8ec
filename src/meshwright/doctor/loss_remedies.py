"""Remedies for a loss that diverges or jumps: what stabilizes training."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.doctor import remedies
from meshwright.doctor.advised_rate import FAR_TOO_HIGH, LR, advised_rate
from meshwright.doctor.finding import Remedy
from meshwright.doctor.logged_rate import suspect_rate
from meshwright.doctor.run import LogFormat, Step
from meshwright.doctor.run_stats import RunStats, median_of
from meshwright.doctor.small_rate import stated_rate
from meshwright.doctor.thresholds import limit
from meshwright.recipes.format_override import format_override
from meshwright.rules.learning_rate import USUAL_RATES

CLIPPED: tuple[LogFormat, ...] = ("megatron", "nemo", "torchtitan", "automodel", "kempnerforge", "transformers")
"""Logs of trainers that clip gradients at 1.0 unless they are configured otherwise."""

HALF = 0.5
SHORT_WARMUP = 100  # steps, below which no longer warmup is advised
SMALLEST_SHARE = 0.1
"""The loss of the first steps is noise: less than a tenth of the rate is not advised because of it."""


def _usual_rate(stats: RunStats) -> Remedy | None:
    """Return the fix of a rule that finds the learning rate too high; half of such a rate would be too high as well."""
    if stats.case is None or not stats.states(LR):
        return _usual_logged_rate(stats)
    rate = stats.case.recipe.optimizer.lr
    _, cause = advised_rate(stats, rate, FAR_TOO_HIGH)
    if not cause:
        usual, cause = advised_rate(stats, rate)
        is_far = bool(cause) and rate >= limit("far_above_usual") * usual
        cause = f"{rate:.3g} is {rate / usual:.3g} times the usual rate: {cause}" if is_far else ""
    return remedies.other_rate(stats, 1.0, cause) if cause else None


def _usual_logged_rate(stats: RunStats) -> Remedy | None:
    """Return a usual rate if a log without a recipe shows one that is far above those of every goal."""
    highest = max((step.lr for step in stats.run.steps if step.lr), default=0.0)
    if highest < limit("far_above_usual") * max(USUAL_RATES.values()):
        return None
    usual = f"{stats.case.goal}" if stats.case is not None else ""
    rate = USUAL_RATES[usual] if usual else median_of(list(USUAL_RATES.values()))
    listed = ", ".join(f"{one:g} for {goal}" for goal, one in USUAL_RATES.items())
    why = f"{highest:g} is far above every usual learning rate: {listed}"
    return Remedy(try_=(format_override(LR, rate),), what="contract", why=why)


def _lower_rate(stats: RunStats, rising: Step | None) -> Remedy:
    """Return half the rate that ran, or less: the highest rate before the loss rises, if that is in the warm-up."""
    ran = remedies.rate_that_ran(stats)
    before = [step.lr for step in stats.run.steps if step.lr and rising is not None and step.step <= rising.step]
    share = max(before) / ran if ran and before else 1.0
    if rising is None or share >= HALF:
        return remedies.other_rate(stats, HALF, "smaller updates")
    why = f"smaller updates: the loss rises from step {rising.step}, when the rate is {max(before):.3g}"
    return remedies.other_rate(stats, max(share, SMALLEST_SHARE), why)


def _longer_warmup(stats: RunStats, onset: int | None) -> Iterator[Remedy]:
    """Yield a longer warmup, unless the trouble begins when the rate had long been the same with it."""
    ran = remedies.warmup_that_ran(stats) or remedies.rising_steps(stats.run)
    longer = max(SHORT_WARMUP, 2 * ran)
    if ran and onset is not None and onset > limit("after_warmup") * longer:
        return
    words = "a longer schedule.warmup_steps"
    yield remedies.other_warmup(stats, lambda steps: max(SHORT_WARMUP, 2 * steps), words, "slower warm-up")


def stabilizing_remedies(stats: RunStats, rising: Step | None = None, onset: int | None = None) -> Iterator[Remedy]:
    """Yield remedies that stabilize training: first the rate if it is far too high, else what keeps the experiment.

    The loss rises from `rising` on, or the trouble begins at step `onset`.
    """
    onset = onset if rising is None else rising.step
    recipe = stats.case.recipe if stats.case is not None else None
    which = "an earlier checkpoint" if rising is None else f"a checkpoint before step {rising.step}"
    why = "skips the batch that caused it" if rising is None else "the loss rises from there; later ones are damaged"
    suspect = suspect_rate(stats)
    if suspect is not None:
        yield stated_rate(stats, suspect)
    if recipe is not None and recipe.precision.compute == "fp16":  # overflows are its usual end: before other batches
        yield remedies.contract(stats, {"precision.compute": "bf16"}, "bf16 has the range of fp32")
    usual = None if suspect else _usual_rate(stats)  # then the rate is the cause, whatever the samples are
    lower = usual or _lower_rate(stats, rising)
    if usual is not None:
        yield usual
    if not stats.run.steps or stats.run.steps[0].is_finite:  # else there is no checkpoint from before it
        yield remedies.advice(f"resume from {which} with other samples", why=why)
    if recipe is None:
        if usual is None:
            yield lower
        yield from _longer_warmup(stats, onset)
        if stats.run.kind not in CLIPPED:
            why = "limits the effect of outlier gradients"
            yield Remedy(try_=("optimizer.clip_grad=1.0",), what="contract", why=why)
        return
    if not 0 < recipe.optimizer.clip_grad <= 1:
        yield remedies.contract(stats, {"optimizer.clip_grad": 1.0}, "limits the effect of outlier gradients")
    if usual is None and suspect is None:
        yield lower
    yield from _longer_warmup(stats, onset)
    if recipe.precision.matmul != "same":
        yield remedies.contract(stats, {"precision.matmul": "same"}, "8-bit matmuls round more")
    if not recipe.train.z_loss and recipe.goal == "pretrain":
        drift = remedies.contract(stats, {"train.z_loss": 1e-4}, "keeps the logits from drifting")
        if drift.there or stats.run.kind not in CLIPPED:  # few frameworks have this loss
            yield drift
