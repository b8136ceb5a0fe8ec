"""Measures of the curves of loss and gradient norm: level, noise, jumps, where they rise or fall."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise
from statistics import median

import numpy as np
from numpy.typing import NDArray

from meshwright.doctor.finding import Evidence
from meshwright.doctor.run import Step
from meshwright.doctor.run_stats import RunStats, deviation, median_of, running_median
from meshwright.doctor.thresholds import limit, share

WINDOW = 50  # lines of a running median
MIN_LINES = 10  # minimum of lines for it
JUST_BEFORE = 5  # lines of the level from which the loss jumps
TAIL = 0.1  # share of the lines that counts as the end of a run
FIT_VARIANCE = 12.0  # of the fall of a line fitted to n losses: this times their variance over n


def stretches_above(rows: Sequence[Step], level: float) -> list[list[Step]]:
    """Return the unbroken stretches of lines whose loss is above a level."""
    parts = groupby(rows, key=lambda step: loss_of(step) > level)
    return [list(part) for above, part in parts if above]


def level_at_start(rows: Sequence[Step]) -> float:
    """Return the loss at the start: the median of the first lines, or the first one if it is above their noise."""
    level, first = median(map(loss_of, rows[: tail_lines(rows)])), loss_of(rows[0])
    return first if first > level + limit("unmoved_sigmas") * noise_of(rows) else level


def before_nan(stats: RunStats) -> list[Step]:
    """Return the steps with a finite loss before the first NaN."""
    bad = next((step.step for step in stats.run.steps if is_not_finite(stats, step)), None)
    return [step for step in finite_losses(stats) if bad is None or step.step < bad]


def falls(rows: Sequence[Step], by: float) -> bool:
    """Return whether the losses fall by more than this and than their noise."""
    error = noise_of(rows) * math.sqrt(FIT_VARIANCE / len(rows))
    return _fitted_fall(rows) > max(by, limit("unmoved_sigmas") * error)


def _fitted_fall(rows: Sequence[Step]) -> float:
    """Return how far a line that is fitted to the losses falls from the first line of a log to the last."""
    slope = float(np.polyfit(np.arange(len(rows)), losses_of(rows), 1)[0])
    return -slope * (len(rows) - 1)


def is_not_finite(stats: RunStats, step: Step) -> bool:
    """Return whether a step is NaN or infinite; in fp16 gradients overflow regularly and the loss scale adapts."""
    if (step.loss_scale or 1.0) > 1.0:
        return bool(step.bad) or (step.loss is not None and not math.isfinite(step.loss))
    return not step.is_finite


def finite_losses(stats: RunStats) -> list[Step]:
    """Return the steps with a finite loss; a repeated step counts as in the latest start."""
    found: dict[int, Step] = {}
    for step in stats.run.steps:
        if step.loss is not None and math.isfinite(step.loss):
            found[step.step] = step
    return [found[number] for number in sorted(found)]


def with_finite_loss(rows: Sequence[Step]) -> list[Step]:
    return [step for step in rows if step.loss is not None and math.isfinite(step.loss)]


def climb(rows: Sequence[Step]) -> Step | None:
    """Return the step with the lowest loss if the lines after it climb without a break, far above it; else None.

    A log of few lines has no noise to compare with: every line must be above the one before.
    """
    rows = with_finite_loss(rows)
    if not rows:
        return None
    lowest = min(range(len(rows)), key=lambda at: (loss_of(rows[at]), -at))
    losses = [loss_of(step) for step in rows[lowest:]]
    is_climbing = all(later > earlier for earlier, later in pairwise(losses))
    if not is_climbing or len(losses) <= limit("climb_lines") or losses[0] <= 0:
        return None
    least = max(limit("climb_factor") * losses[0], (1 + share("diverged_share")) * loss_of(rows[0]))
    return rows[lowest] if losses[-1] >= least else None


def climbs(stats: RunStats) -> bool:
    """Return whether the loss of a log of few lines climbs without a break."""
    return climb(finite_losses(stats)) is not None


def rising_since(rows: Sequence[Step], now: float | None = None) -> Step | None:
    """Return the last step at the old level if the loss, by default the last one, is far above it; else None."""
    rows = with_finite_loss(rows)
    if len(rows) < 2 * MIN_LINES:
        return climb(rows)
    best, noise = best_level(rows), noise_of(rows)
    now = loss_of(rows[-1]) if now is None else now
    if now <= best + share("diverging_share") * abs(best) or now <= best + limit("spike_sigmas") * noise:
        return None
    return max((step for step in rows if loss_of(step) <= best + 3 * noise), key=lambda step: step.step)


def norm_jumps(rows: Sequence[Step]) -> tuple[Evidence, ...]:
    """Return how often the gradient norm jumped above the lines before, and where first."""
    logged = [step for step in rows if step.grad_norm is not None and math.isfinite(step.grad_norm)]
    if len(logged) < 2 * MIN_LINES:
        return ()
    norms = np.array([step.grad_norm for step in logged], dtype=float)
    usual = running_median(norms, WINDOW - 1, 0)
    high = [i for i in range(MIN_LINES, len(norms)) if norms[i] > limit("norm_jump") * usual[i - 1] > 0]
    jumps = [group[0] for group in grouped([logged[i] for i in high])]
    if not jumps:
        return ()
    where = f"jumps of the gradient norm before it, the first in step {jumps[0].step} to {jumps[0].grad_norm:.4g}"
    return (Evidence(where, float(len(jumps)), "", 0.0, "limit"),)


def loss_of(step: Step) -> float:
    return step.loss if step.loss is not None else math.nan


def tail_lines(rows: Sequence[Step]) -> int:
    return max(3, round(TAIL * len(rows)))


def losses_of(rows: Sequence[Step]) -> NDArray[np.float64]:
    return np.array([loss_of(step) for step in rows], dtype=float)


def noise_of(rows: Sequence[Step]) -> float:
    """Return the noise of the loss between lines."""
    return deviation(np.diff(losses_of(rows))) / math.sqrt(2) if len(rows) > 1 else 0.0


def best_level(rows: Sequence[Step]) -> float:
    """Return the lowest running median of the loss."""
    size = max(3, min(WINDOW, tail_lines(rows)))
    return float(running_median(losses_of(rows), size - 1, 0)[size - 1 :].min())


def loss_jumps(rows: Sequence[Step]) -> list[tuple[Step, float]]:
    """Return steps whose loss stands out from the lines before, with the level of those.

    The level is the median of the last lines: that of a long window lags behind a falling loss. Where those are part of
    the jump themselves, the long window's is lower.
    """
    losses = losses_of(rows)
    before = np.minimum(*(running_median(losses, size - 1, 0)[MIN_LINES - 1 : -1] for size in (WINDOW, JUST_BEFORE)))
    typical = np.concatenate(([np.inf] * MIN_LINES, before))[: len(losses)]
    height = losses - typical
    above = (height > limit("spike_sigmas") * noise_of(rows)) & (height > share("spike_share") * np.abs(typical))
    return [(rows[index], float(typical[index])) for index in np.flatnonzero(above).tolist()]


def recovered_jumps(
    rows: Sequence[Step], jumps: Sequence[tuple[Step, float]], ends_well: bool
) -> list[tuple[Step, float]]:
    """Return the jumps after which the loss came back; the run-up to a NaN or to divergence is no jump."""
    kept: list[tuple[Step, float]] = []
    by_step = {step.step: typical for step, typical in jumps}
    numbers = [step.step for step in rows]
    lowest = list(accumulate((loss_of(step) for step in reversed(rows)), min))[::-1]  # from every line to the end
    for group in grouped([step for step, _ in jumps]):
        level = by_step[group[0].step]
        after = bisect_right(numbers, group[-1].step)
        height = max(loss_of(step) for step in group) - level
        ended = after == len(rows)
        if (ended and ends_well) or (not ended and lowest[after] <= level + 0.5 * height):
            kept += [(step, by_step[step.step]) for step in group]
    return kept


def grouped(steps: Sequence[Step]) -> list[list[Step]]:
    """Group steps that follow each other closely into one jump."""
    groups: list[list[Step]] = []
    for step in steps:
        if groups and step.step - groups[-1][-1].step <= MIN_LINES * step.covers:
            groups[-1].append(step)
        else:
            groups.append([step])
    return groups


def last_norm(rows: Sequence[Step]) -> Step | None:
    """Return the last step with a finite gradient norm."""
    return next((one for one in reversed(rows) if one.grad_norm is not None and math.isfinite(one.grad_norm)), None)


def typical_norm(rows: Sequence[Step]) -> str:
    return f"median {median_of(step.grad_norm for step in rows) or 0.0:.4g}"


def norm_evidence(rows: Sequence[Step]) -> tuple[Evidence, ...]:
    """Return the last gradient norm of the log beside its median."""
    last, typical = last_norm(rows), median_of(step.grad_norm for step in rows)
    if last is None or last.grad_norm is None or typical is None:
        return ()
    return (Evidence(f"gradient norm in step {last.step}", last.grad_norm, "", round(typical, 6), "median"),)


def norm_growth(rows: Sequence[Step]) -> float | None:
    """Return the final gradient norm over its median; None if the log has too few."""
    norms = [step.grad_norm for step in rows if step.grad_norm is not None and math.isfinite(step.grad_norm)]
    if len(norms) < 2 * MIN_LINES:
        return None
    typical, end = median_of(norms), median_of(norms[-max(3, round(TAIL * len(norms))) :])
    return end / typical if typical and end is not None else None
