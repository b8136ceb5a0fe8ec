"""Diagnosis of validation losses: overfitting, and other rises after the best one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from statistics import median
from typing import NamedTuple

import numpy as np

from meshwright.doctor import loss, remedies
from meshwright.doctor.finding import Evidence, Figure, Finding, Remedy
from meshwright.doctor.run import Validation
from meshwright.doctor.run_stats import RunStats, deviation, median_of
from meshwright.doctor.thresholds import limit, share

MANY = 8  # validations from which their noise is known
FAR = 3  # times the limit above the best validation: no noise, whether or not every later one is higher
LEAST_AFTER = 2  # validations after the best
NEAR = 10  # training lines whose median is compared with another time's


def overfitting(stats: RunStats) -> Iterator[Finding]:
    """The validation loss rises while the training loss falls."""
    for one in _rises(stats):
        if one.trained is not None and _falls(one.trained):
            at_best, at_end = one.trained
            text = f"while the training loss fell from {at_best:.4g} to {at_end:.4g}"
            yield _finding(stats, "loss.overfitting", one, text)
            return


def rising(stats: RunStats) -> Iterator[Finding]:
    """The validation loss rises while the training loss stays where it is or is not logged."""
    found = _rises(stats)
    if any(one.trained is not None and _falls(one.trained) for one in found):
        return  # overfitting
    if any(stats.findings_of(one) for one in (loss.not_a_number, loss.diverging, loss.diverged)):
        return  # the training loss rises too, which is reported
    for one in found[:1]:
        text = "; the training loss is not logged beside it"
        if one.trained is not None:
            text = f"while the training loss went from {one.trained[0]:.4g} to {one.trained[1]:.4g}"
        yield _finding(stats, "loss.validation-rises", one, text)


class _Rise(NamedTuple):
    """Validations of a dataset that rise after their best one."""

    rows: Sequence[Validation]
    best: Validation
    trained: tuple[float, float] | None  # the training loss at the best validation and at the end, if logged


def _rises(stats: RunStats) -> list[_Rise]:
    return [one for _, rows in _by_dataset(stats) if (one := _rise(stats, rows)) is not None]


def _falls(trained: tuple[float, float]) -> bool:
    return trained[1] < trained[0] * (1 - share("flat_drop"))


def _finding(stats: RunStats, id_: str, one: _Rise, text: str) -> Finding:
    best, last = one.best, one.rows[-1]
    of = f" on {best.name}" if best.name else ""
    rise = Evidence(
        "rise of the validation loss", round(last.loss / best.loss - 1, 4), "", share("overfitting"), "limit"
    )
    trained = (
        ()
        if one.trained is None
        else (
            Evidence(
                "training loss at the end",
                round(one.trained[1], 4),
                "",
                round(one.trained[0], 4),
                "at the best validation",
            ),
        )
    )
    return Finding(
        id=id_,
        severity="warning",
        message=f"the validation loss{of} rose from {best.loss:.4g} in step {best.step:,} to {last.loss:.4g} in "
        f"step {last.step:,}{'' if text.startswith(';') else ' '}{text}",
        steps=(best.step, last.step),
        lines=tuple(f"{row.file or stats.run.file}:{row.line}" for row in (best, last)),
        evidence=(rise, *trained),
        remedies=tuple(_remedies(stats, best)),
    )


def figures(stats: RunStats) -> Iterator[Figure]:
    """Yield the best and the last validation loss; of several datasets, those of the first."""
    rows = next((rows for _, rows in _by_dataset(stats)), [])
    if rows:
        best = min(rows, key=lambda one: one.loss)
        yield Figure(f"best validation loss, step {best.step:,}", "", best.loss)
        yield Figure(f"last validation loss, step {rows[-1].step:,}", "", rows[-1].loss)


def best_validation(stats: RunStats) -> Validation | None:
    """Return the validation with the lowest loss, of several datasets that of the first; None if there is no other."""
    rows = next((rows for _, rows in _by_dataset(stats)), [])
    return min(rows, key=lambda one: one.loss) if len(rows) > 1 else None


def _by_dataset(stats: RunStats) -> list[tuple[str, list[Validation]]]:
    """Return the finite validation losses of every dataset, in order of steps."""
    finite = [one for one in stats.run.validations if math.isfinite(one.loss)]
    ordered = sorted(finite, key=lambda one: (one.name, one.step))
    return [(name, list(rows)) for name, rows in groupby(ordered, key=lambda one: one.name)]


def _rise(stats: RunStats, rows: Sequence[Validation]) -> _Rise | None:
    """Return validations that rise after their best one; None if they do not, or only by their noise."""
    if len(rows) < limit("validations"):
        return None
    place = min(range(len(rows)), key=lambda index: rows[index].loss)
    best, after = rows[place], [one.loss for one in rows[place + 1 :]]
    if len(after) < LEAST_AFTER or best.loss <= 0:
        return None
    end = after[-max(LEAST_AFTER, len(after) // 3) :]
    if min(end) <= best.loss or median(end) <= best.loss * (1 + share("overfitting")) or not _certain(rows, best, end):
        return None
    is_far = min(end) > best.loss * (1 + FAR * share("overfitting"))
    if len(rows) < MANY and not is_far and any(later <= earlier for earlier, later in pairwise(after)):
        return None
    return _Rise(rows, best, _training_losses(stats, best.step))


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
    around, end = median_of(one for _, one in near[:count]), median_of(one for _, one in losses[-count:])
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
    else:
        yield remedies.advice("fewer epochs, or early stopping", why="the training went on after its best validation")
    yield remedies.advice("more or more varied training data", why="samples that are seen often are memorized")
    yield remedies.other_rate(stats, 0.5, "smaller updates memorize later")
