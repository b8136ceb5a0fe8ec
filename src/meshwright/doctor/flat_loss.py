"""A loss that does not decrease, and why."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median

from meshwright.display import plural
from meshwright.doctor import loss, remedies
from meshwright.doctor.finding import Evidence, Finding, Remedy
from meshwright.doctor.loss_curve import (
    FIT_VARIANCE,
    MIN_LINES,
    TAIL,
    before_nan,
    falls,
    level_at_start,
    loss_of,
    noise_of,
    tail_lines,
)
from meshwright.doctor.run import Step
from meshwright.doctor.run_stats import RunStats
from meshwright.doctor.small_rate import SGD, is_plateau, too_small, unmoved, validation_falls
from meshwright.doctor.thresholds import limit, share


def flat(stats: RunStats) -> Iterator[Finding]:
    """The loss does not decrease."""
    rows = before_nan(stats)
    if stats.uses_mock_data or len(rows) < MIN_LINES or any(map(stats.findings_of, (loss.diverged, loss.diverging))):
        return
    if all(step.loss == 0 for step in rows):
        yield from _all_zero(stats, rows)
        return
    if (still := unmoved(stats, rows)) is not None:
        yield still
        return
    rates = [step.lr for step in rows if step.lr is not None]
    steps_covered = rows[-1].step - rows[0].first + 1
    always_zero = _is_always_zero(rates)
    if not always_zero and flat_needs(stats):
        return
    plateau = is_plateau(stats, rows)
    first, last = level_at_start(rows), median(map(loss_of, rows[-tail_lines(rows) :]))
    fallen = (first - last) / abs(first) if first else 0.0
    if not always_zero and (fallen >= share("flat_drop") or last > first * (1 + share("diverging_share"))):
        return
    is_short = steps_covered < limit("flat_steps") and not plateau
    if not always_zero and is_short and (falls(rows, share("flat_drop") * abs(first) / 10) or validation_falls(stats)):
        return  # it learns slowly: a short log need not show more
    if not always_zero and _starts_trained(stats, first):
        return  # continued pretraining: at this loss, a slow decrease is normal
    text, fixes = _why_flat(stats, rates, always_zero)
    yield Finding(
        id="loss.flat",
        severity="warning",
        message=f"the loss went from {first:.4g} to {last:.4g} in "
        + plural(steps_covered, "step" if stats.run.numbered else "log line")
        + (", and the validation loss does not move either" if plateau else "")
        + f": {text}",
        steps=(rows[0].first, rows[-1].step),
        lines=(stats.location(rows[0]), stats.location(rows[-1])),
        evidence=(
            Evidence("decrease", round(fallen, 4), "of the first loss", share("flat_drop"), "limit"),
            *(() if not rates else (Evidence("final learning rate", rates[-1]),)),
        ),
        remedies=fixes,
    )


def _all_zero(stats: RunStats, rows: Sequence[Step]) -> Iterator[Finding]:
    """Yield that a loss is exactly 0 from the start; a log with gradient norms shows by them whether it learns."""
    if any(step.grad_norm is not None for step in rows):
        return  # of 0: loss.zero-gradients; of others: the loss of GRPO and its like is 0 at first
    yield Finding(
        id="loss.flat",
        severity="error",
        message=f"the loss is exactly 0 in all {plural(len(rows), 'log line')}: no token is in the loss (every label "
        "is masked), or it is NaN, which transformers' Trainer logs as 0",
        steps=(rows[0].first, rows[-1].step),
        lines=(stats.location(rows[0]), stats.location(rows[-1])),
        evidence=(Evidence("lines with a loss of 0", float(len(rows)), "", float(len(rows)), "lines"),),
        remedies=(
            remedies.advice("inspect labels and loss masks of a few samples", why="masked tokens have no loss: a chat "
                "template without the marks of the answers, or answers that the length cuts off"),
            remedies.advice("log NaN as NaN: logging_nan_inf_filter: false", why="shows whether the loss is NaN"),
        ),
    )  # fmt: skip


def flat_needs(stats: RunStats) -> str:
    """Return what a log lacks to show that its loss does not decrease; empty if it shows whether it does."""
    rows = before_nan(stats)
    rates = [step.lr for step in rows if step.lr is not None]
    if len(rows) < limit("enough_for_trends"):
        return "" if _is_always_zero(rates) else f"the loss in at least {limit('enough_for_trends'):.0f} step lines"
    first = level_at_start(rows)
    visible, noise = share("flat_drop") * abs(first), noise_of(rows)
    if _is_always_zero(rates) or is_plateau(stats, rows) or falls(rows, visible):
        return ""
    if rows[0].first > MIN_LINES:
        return f"the log from the first step on: it starts at step {rows[0].first:,}"
    steps_covered = rows[-1].step - rows[0].first + 1
    is_short = steps_covered < limit("flat_steps")
    if is_short and (_epochs_covered(rows) < limit("flat_epochs") or _is_rising(rates)):
        found = plural(steps_covered, "step") if stats.run.numbered else f"{len(rows):,} lines without step numbers"
        return f"{limit('flat_steps'):.0f} steps, or half an epoch after the warm-up: the log has {found}"
    lines = FIT_VARIANCE * (noise / visible) ** 2 if is_short and visible else 0.0
    if noise > visible * math.sqrt(tail_lines(rows)) or len(rows) < lines:
        least = max(lines, (noise / visible) ** 2 / TAIL) if visible else 0.0
        drop = f"a decrease of {share('flat_drop'):.0%} is lost in the noise of the loss ({noise:.2g} between lines)"
        return f"about {math.ceil(max(least, len(rows) + 1)):,} step lines: in {len(rows):,}, {drop}"
    return ""


def _is_always_zero(rates: Sequence[float]) -> bool:
    return len(rates) >= MIN_LINES and all(rate == 0 for rate in rates)


def _is_rising(rates: Sequence[float]) -> bool:
    """Return whether the learning rate is still in its warm-up at the end of a log."""
    return len(rates) >= MIN_LINES and rates[-1] > rates[0] and rates[-1] == max(rates)


def _epochs_covered(rows: Sequence[Step]) -> float:
    """Return the epochs between the first and the last line; 0 if the log has none."""
    epochs = [step.epoch for step in rows if step.epoch is not None]
    return epochs[-1] - epochs[0] if epochs else 0.0


def _starts_trained(stats: RunStats, first: float) -> bool:
    """Return whether a pretraining starts far below the loss of random weights, which is ln(vocabulary)."""
    if stats.case is None or stats.case.goal != "pretrain" or not stats.case.vocab:
        return False
    return first < share("trained_start") * math.log(float(stats.case.vocab))


def _why_flat(stats: RunStats, rates: Sequence[float], always_zero: bool) -> tuple[str, tuple[Remedy, ...]]:
    recipe = stats.case.recipe if stats.case is not None else None
    if always_zero:
        why = "the learning rate is zero in every step"
        if recipe is None or not stats.states("optimizer.lr") or not recipe.optimizer.lr:
            return why, (remedies.advice("an optimizer.lr above zero", why="a nonzero learning rate"),)
        return why, (remedies.contract(stats, {"optimizer.lr": recipe.optimizer.lr}, "a nonzero learning rate"),)
    if _is_rising(rates):
        why = f"the learning rate is still in warm-up ({rates[-1]:.2g})"
        earlier = remedies.other_warmup(
            stats,
            lambda steps: max(1, min(steps // 4, stats.run.last_step)),
            "a shorter schedule.warmup_steps",
            "reaches the peak learning rate earlier",
        )
        return why, (earlier,)
    small = None if recipe is not None and recipe.optimizer.name == SGD else too_small(rates, stats)
    why, rate = small or ("the model does not learn", remedies.other_rate(stats, 3.0, "larger updates"))
    return why, (
        rate,
        remedies.advice("inspect labels and loss masks of a few samples", why="masked tokens have no gradient"),
        remedies.advice(
            "check that the optimizer has the weights and none are frozen", why="frozen weights do not change"
        ),
    )
