"""A loss that does not move because the learning rate is far below the usual one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from statistics import median

import numpy as np

from meshwright.display import plural
from meshwright.doctor import remedies
from meshwright.doctor.advised_rate import LR
from meshwright.doctor.finding import Evidence, Finding, Remedy
from meshwright.doctor.logged_rate import OtherRate, rate_unlike_file
from meshwright.doctor.run import Step
from meshwright.doctor.run_stats import RunStats, deviation
from meshwright.doctor.thresholds import limit, share
from meshwright.rules.learning_rate import USUAL_RATES, usual_rate

TAIL = 0.2  # share of the lines that counts as the beginning or the end
SGD = "sgd"  # whose rates have no usual size


def unmoved(stats: RunStats, rows: Sequence[Step]) -> Finding | None:
    """Return the finding for a loss that stays where it starts at a tiny learning rate; None if either is not so."""
    rate, usual = _rate(stats, rows), min(USUAL_RATES.values())
    if stats.case is not None:
        usual = usual_rate(stats.case)
        if stats.case.optimizer_name == SGD:
            return None
    if not rate or rate * limit("tiny_rate") > usual:
        return None
    first, last, noise, size = _ends(rows)
    if abs(first - last) > max(share("flat_drop") * abs(first), limit("unmoved_sigmas") * noise / math.sqrt(size)):
        return None
    validated = _validations(stats)
    if validated is None:
        return None
    return Finding(
        id="loss.flat",
        severity="warning",
        message=f"the loss does not move: {first:.4g} in the first and {last:.4g} in the last {plural(size, 'line')} "
        f"of {plural(rows[-1].step - rows[0].first + 1, 'step')}{validated}. The learning rate {rate:.2g} is too "
        f"small: about {usual:g} is usual",
        steps=(rows[0].first, rows[-1].step),
        lines=(stats.location(rows[0]), stats.location(rows[-1])),
        evidence=(
            Evidence("learning rate", rate, "", usual, "usual"),
            Evidence("change of the loss", round(last - first, 6), "", round(noise, 6), "noise between lines"),
        ),
        remedies=(_usual(stats, usual),),
    )


def _ends(rows: Sequence[Step]) -> tuple[float, float, float, int]:
    """Return the loss at the beginning and at the end, the noise between lines, and the lines of either end."""
    losses = [step.loss for step in rows if step.loss is not None]
    size = max(3, round(TAIL * len(losses)))
    return median(losses[:size]), median(losses[-size:]), deviation(np.diff(losses)) / math.sqrt(2), size


def is_plateau(stats: RunStats, rows: Sequence[Step]) -> bool:
    """Return whether the loss moves by no more than its noise while several validations stay where they start."""
    validated = _validated(stats)
    if not any(len(losses) >= limit("validations") for losses in validated):
        return False
    if any(max(losses) - min(losses) > share("flat_validation") * abs(max(losses)) for losses in validated):
        return False
    first, last, noise, size = _ends(rows)
    return abs(first - last) <= limit("unmoved_sigmas") * noise / math.sqrt(size)


def validation_falls(stats: RunStats) -> bool:
    """Return whether a validation loss ends below where it starts."""
    return any(losses[0] - losses[-1] > share("flat_validation") * abs(losses[0]) for losses in _validated(stats))


def _validated(stats: RunStats) -> list[list[float]]:
    """Return the validation losses of each dataset."""
    groups = groupby(sorted(stats.run.validations, key=lambda one: one.name), key=lambda one: one.name)
    return [[one.loss for one in group] for _, group in groups]


def too_small(rates: Sequence[float], stats: RunStats) -> tuple[str, Remedy] | None:
    """Return that the highest rate of a run is far below the usual one, and the usual one; None if it is not."""
    usual = usual_rate(stats.case) if stats.case is not None else min(USUAL_RATES.values())
    highest = max(rates, default=0.0)
    if not highest or highest * limit("small_rate") > usual:
        return None
    return f"the learning rate {highest:.2g} is small: about {usual:g} is usual", _usual(stats, usual)


def _rate(stats: RunStats, rows: Sequence[Step]) -> float:
    """Return the peak learning rate of a run: its recipe's, else the highest of a log that is past the warm-up."""
    if stats.case is not None and stats.states("optimizer.lr"):
        return float(stats.case.recipe.optimizer.lr)
    rates = [step.lr for step in rows if step.lr is not None]
    still_rises = len(rates) > 1 and rates[-1] == max(rates) > rates[0]
    return 0.0 if still_rises else max(rates, default=0.0)


def _validations(stats: RunStats) -> str | None:
    """Return that the validation loss does not move either; empty without one, None if it does."""
    found = sorted((one for one in stats.run.validations if math.isfinite(one.loss)), key=lambda one: one.name)
    texts = []
    for _, rows in groupby(found, key=lambda one: one.name):
        losses = [one.loss for one in rows]
        low, high = min(losses), max(losses)
        if high - low > share("flat_drop") * abs(high):
            return None
        values = f"{low:.4f}" if f"{low:.4f}" == f"{high:.4f}" else f"between {low:.4f} and {high:.4f}"
        texts.append(f"; the validation loss is {values} in {plural(len(losses), 'evaluation')}")
    return texts[0] if texts else ""


def stated_rate(stats: RunStats, rate: OtherRate) -> Remedy:
    """Return the learning rate of the file or recipe, as the first thing to try: the run had another one."""
    values, why = {LR: rate.stated}, f"the first suspect: {rate.text}"
    if stats.run.header.file:
        return remedies.advice(f"train with the {rate.stated:.3g} of {rate.source}", why=why)
    return remedies.contract(stats, values, why)


def _usual(stats: RunStats, usual: float) -> Remedy:
    """Return the usual rate; that of the user's file if the log has a lower one."""
    other = rate_unlike_file(stats)
    if other is not None and other.logged < other.stated:
        return stated_rate(stats, other)
    if stats.case is None:
        rates = ", ".join(f"{rate:g} for {goal}" for goal, rate in USUAL_RATES.items())
        return remedies.advice(f"a usual learning rate: {rates}", why="updates that change the weights")
    return remedies.contract(stats, {"optimizer.lr": usual}, "updates that change the weights")
