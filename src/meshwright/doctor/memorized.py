"""Losses that show what the data is: samples that repeat, and labels that the weights know nothing about."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from meshwright.display import plural
from meshwright.doctor import loss, remedies
from meshwright.doctor.finding import Evidence, Finding, Remedy
from meshwright.doctor.loss_curve import finite_losses
from meshwright.doctor.run import Step, Validation
from meshwright.doctor.run_stats import RunStats, deviation
from meshwright.doctor.thresholds import limit, share
from meshwright.doctor.validation import best_validation

LARGEST_VOCABULARY = 300_000  # of the models in use; without a model, a loss above its logarithm is above any other's
FEWEST_LINES, MOST_LINES = 3, 20  # on either side of an epoch's edge
EDGE = 1e-9  # an epoch of 1.0 is the end of the first one
TAIL = 3  # a third of the lines
NEAR_EDGE = 0.03  # of an epoch: a validation there is one at its end
FINE_TUNING = ("sft", "peft")


class Drop(NamedTuple):
    """A fall of the loss from one epoch to the next."""

    epoch: int
    end: int  # last step of the epoch
    first: Step
    before: float
    after: float


def repeated_data(stats: RunStats) -> Iterator[Finding]:
    """The loss drops at the edge of an epoch: the samples repeat, and the model remembers them."""
    if _is_explained(stats):
        return
    drops = list(_drops(stats))
    best = best_validation(stats)
    if not drops or (best is not None and best.step > drops[-1].end + NEAR_EDGE * _epoch_steps(stats)):
        return  # what is learned beyond the samples still improves after the last edge
    one = max(drops, key=lambda drop: drop.before / drop.after)
    more = f", and at {plural(len(drops) - 1, 'more edge')}" if len(drops) > 1 else ""
    yield Finding(
        id="loss.repeated-data",
        severity="warning",
        message=f"the loss drops from {one.before:.4g} to {one.after:.4g} where epoch {one.epoch} ends, at step "
        f"{one.end:,}{more}: the same samples come again, and the model remembers them",
        steps=(drops[0].first.first, drops[-1].first.step),
        lines=tuple(stats.location(drop.first) for drop in drops[:3]),
        evidence=(Evidence("drop", round(1 - one.after / one.before, 4), "of the loss", share("epoch_drop"), "limit"),),
        remedies=tuple(_remedies(stats, one, best)),
    )


def _remedies(stats: RunStats, drop: Drop, best: Validation | None) -> Iterator[Remedy]:
    """Yield what ends the training earlier: where the validation loss is lowest, if the log has one."""
    if best is None:
        yield remedies.advice(f"end after epoch {drop.epoch}", why="later epochs memorize; a validation loss shows it")
    else:
        epochs = best.step / _epoch_steps(stats)
        whole = round(epochs) >= 1 and abs(epochs - round(epochs)) < NEAR_EDGE
        where = f"step {best.step:,}" if stats.run.numbered else f"the validation in line {best.line}"
        where = f"epoch {round(epochs)}" if whole else where
        yield remedies.advice(f"end after {where}", why="it has the lowest validation loss; later epochs memorize")
    yield remedies.advice("remove duplicates from the data", why="a sample that is there twice is memorized sooner")
    if best is None:
        yield remedies.advice("evaluate on samples that are not trained on", why="shows what is learned beyond them")


def _epoch_steps(stats: RunStats) -> float:
    """Return the steps of an epoch, by the last record with both."""
    last = next(step for step in reversed(stats.run.steps) if step.epoch)
    return last.step / (last.epoch or 1.0)


def _drops(stats: RunStats) -> Iterator[Drop]:
    rows = [step for step in stats.run.steps if step.epoch is not None and step.loss and math.isfinite(step.loss)]
    numbers = [math.floor((step.epoch or 0.0) - EDGE) for step in rows]
    edges = [index for index in range(1, len(rows)) if numbers[index] > numbers[index - 1]]
    noise = deviation(np.diff([step.loss or 0.0 for step in rows])) / math.sqrt(2) if len(rows) > 2 else 0.0
    for place, edge in enumerate(edges):
        begin = edges[place - 1] if place else 0
        end = edges[place + 1] if place + 1 < len(edges) else len(rows)
        size = min(MOST_LINES, (edge - begin) // 2, end - edge)
        if size < FEWEST_LINES:
            continue
        earlier, before, after = (
            median(float(step.loss or 0.0) for step in rows[a:b])
            for a, b in ((edge - 2 * size, edge - size), (edge - size, edge), (edge, edge + size))
        )
        usual = 2 * max(0.0, earlier - before)  # what it falls anyway
        certain = limit("epoch_sigmas") * noise / math.sqrt(size)
        if before - after > max(usual + share("epoch_drop") * before, certain):
            row = rows[edge]
            epoch = max(1, numbers[edge] if row.epoch != int(row.epoch or 0) else numbers[edge] + 1)
            end = min(max(round(epoch * _epoch_steps(stats)), rows[edge - 1].step), row.step - 1)
            yield Drop(epoch, end, row, before, after)


def random_guess(stats: RunStats) -> Iterator[Finding]:
    """The loss stays above that of guessing, or a fine-tuning starts there: other weights or labels than assumed."""
    rows = finite_losses(stats)
    if len(rows) < limit("enough_for_trends") or _is_explained(stats):
        return
    case = stats.case
    vocabulary = int(case.vocab) if case is not None and case.vocab else LARGEST_VOCABULARY
    guess = math.log(vocabulary)
    tail = _median(rows[-max(FEWEST_LINES, len(rows) // TAIL) :])
    if tail > guess * (1 + share("above_guessing")):
        whose = f"ln({vocabulary:,}) = {guess:.4g}" + ("" if case is not None else ", of the largest vocabulary in use")
        yield _finding(stats, rows, f"the loss stays at {tail:.4g}, above that of guessing ({whose})", tail, guess)
        return
    first = _median(rows[:FEWEST_LINES])
    if case is not None and case.goal in FINE_TUNING and first > share("random_start") * guess:
        text = f"the loss starts at {first:.4g}, as with random weights (ln({vocabulary:,}) = {guess:.4g})"
        yield _finding(stats, rows, text, first, guess)


def _finding(stats: RunStats, rows: Sequence[Step], text: str, value: float, guess: float) -> Finding:
    return Finding(
        id="loss.random-guess",
        severity="error",
        message=f"{text}: the weights do not fit the data. The tokenizer is of another model, labels are shifted, the "
        "checkpoint was not loaded, or the loss is a sum and not a mean",
        steps=(rows[0].first, rows[-1].step),
        lines=(stats.location(rows[0]), stats.location(rows[-1])),
        evidence=(Evidence("loss", round(value, 4), "", round(guess, 4), "of guessing"),),
        remedies=tuple(_checks()),
    )


def _checks() -> Iterator[Remedy]:
    yield remedies.advice(
        "compare the tokenizer's vocabulary with the model's", why="ids of another tokenizer are noise"
    )
    yield remedies.advice("decode one batch: inputs, labels and mask", why="shows shifted or masked labels at once")
    yield remedies.advice(
        "look for missing and unexpected keys where the checkpoint is loaded", why="skipped weights stay random"
    )


def _is_explained(stats: RunStats) -> bool:
    """Return whether the loss is NaN or diverges, which says more."""
    return any(stats.findings_of(one) for one in (loss.not_a_number, loss.diverging, loss.diverged))


def _median(rows: Sequence[Step]) -> float:
    return median(float(step.loss or 0.0) for step in rows)
