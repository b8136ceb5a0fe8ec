"""Diagnosis of validation losses: overfitting."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from statistics import median

import numpy as np

from meshwright.doctor import remedies
from meshwright.doctor.finding import Evidence, Figure, Finding, Remedy
from meshwright.doctor.run import Validation
from meshwright.doctor.run_stats import RunStats, deviation, median_of
from meshwright.doctor.thresholds import limit, share

MANY = 8  # validations from which their noise is known
LEAST_AFTER = 2  # validations after the best
NEAR = 10  # training lines whose median is compared with another time's


def overfitting(stats: RunStats) -> Iterator[Finding]:
    """The validation loss rises while the training loss falls."""
    found = [one for _, rows in _by_dataset(stats) if (one := _overfit(stats, rows)) is not None]
    for rows, best, trained in found[:1]:
        last, at_best, at_end = rows[-1], trained[0], trained[1]
        of = f" on {best.name}" if best.name else ""
        yield Finding(
            id="loss.overfitting",
            severity="warning",
            message=f"the validation loss{of} rose from {best.loss:.4g} in step {best.step:,} to {last.loss:.4g} in "
            f"step {last.step:,} while the training loss fell from {at_best:.4g} to {at_end:.4g}",
            steps=(best.step, last.step),
            lines=tuple(f"{one.file or stats.run.file}:{one.line}" for one in (best, last)),
            evidence=(
                Evidence(
                    "rise of the validation loss",
                    round(last.loss / best.loss - 1, 4),
                    "",
                    share("overfitting"),
                    "limit",
                ),
                Evidence("training loss at the end", round(at_end, 4), "", round(at_best, 4), "at the best validation"),
            ),
            remedies=tuple(_remedies(stats, best)),
        )


def figures(stats: RunStats) -> Iterator[Figure]:
    """Yield the best and the last validation loss; of several datasets, those of the first."""
    rows = next((rows for _, rows in _by_dataset(stats)), [])
    if rows:
        best = min(rows, key=lambda one: one.loss)
        yield Figure(f"best validation loss, step {best.step:,}", "", best.loss)
        yield Figure(f"last validation loss, step {rows[-1].step:,}", "", rows[-1].loss)


def _by_dataset(stats: RunStats) -> list[tuple[str, list[Validation]]]:
    """Return the finite validation losses of every dataset, in order of steps."""
    finite = [one for one in stats.run.validations if math.isfinite(one.loss)]
    ordered = sorted(finite, key=lambda one: (one.name, one.step))
    return [(name, list(rows)) for name, rows in groupby(ordered, key=lambda one: one.name)]


def _overfit(
    stats: RunStats, rows: Sequence[Validation]
) -> tuple[Sequence[Validation], Validation, tuple[float, float]] | None:
    """Return validations that rise after their best one while training improves, the best, and both training losses."""
    if len(rows) < limit("validations"):
        return None
    place = min(range(len(rows)), key=lambda index: rows[index].loss)
    best, after = rows[place], [one.loss for one in rows[place + 1 :]]
    if len(after) < LEAST_AFTER or best.loss <= 0:
        return None
    end = after[-max(LEAST_AFTER, len(after) // 3) :]
    if min(end) <= best.loss or median(end) <= best.loss * (1 + share("overfitting")) or not _certain(rows, best, end):
        return None
    if len(rows) < MANY and any(later <= earlier for earlier, later in pairwise(after)):
        return None
    trained = _training_losses(stats, best.step)
    if trained is None or trained[1] >= trained[0] * (1 - share("flat_drop")):
        return None
    return rows, best, trained


def _certain(rows: Sequence[Validation], best: Validation, end: Sequence[float]) -> bool:
    """Return whether a rise is above the noise: second differences, in which a trend does not count."""
    if len(rows) < MANY:
        return True
    noise = deviation(np.diff([one.loss for one in rows], 2)) / math.sqrt(6)
    return median(end) - best.loss > limit("overfitting_sigmas") * noise


def _training_losses(stats: RunStats, step: int) -> tuple[float, float] | None:
    """Return the median training loss around a step and at the end; None if the log lacks them."""
    losses = [(one.step, one.loss) for one in stats.run.steps if one.loss is not None and math.isfinite(one.loss)]
    near = sorted(losses, key=lambda one: abs(one[0] - step))[:NEAR]
    count = max(1, min(NEAR, sum(number > step for number, _ in losses) // 2))
    around, end = median_of(loss for _, loss in near[:count]), median_of(loss for _, loss in losses[-count:])
    return None if around is None or end is None or losses[-1][0] <= step else (around, end)


def _remedies(stats: RunStats, best: Validation) -> Iterator[Remedy]:
    which = f"step {best.step:,}" if stats.run.numbered else f"the validation in line {best.line}"
    yield remedies.advice(f"use the checkpoint of {which}", why="it has the lowest validation loss")
    if (
        stats.run.numbered
        and stats.case is not None
        and stats.case.recipe.train.steps
        and stats.case.recipe.train.steps > best.step > 0
    ):
        yield remedies.contract(stats, {"train.steps": best.step}, "ends where the validation loss is lowest")
    yield remedies.advice("more or more varied training data", why="samples that are seen often are memorized")
    yield remedies.other_rate(stats, 0.5, "smaller updates memorize later")
