"""How often a run may pass over its data and validates, and the batch with which few samples are enough updates."""

from __future__ import annotations

from math import ceil

MANY_PASSES = 5  # more than this over the same samples memorizes them
USUAL_EPOCHS = 3
FEW_STEPS = 4  # of all epochs; below it, training ends before the optimizer's moments mean anything
ENOUGH_STEPS = 10
VALIDATIONS = 5  # of a run whose validation data is named, but not how often it is used


def validation_interval(steps: int) -> int:
    """Return train.eval_every for about VALIDATIONS validations in so many steps."""
    return max(1, steps // VALIDATIONS)


def smaller_batches(samples: int, unit: int) -> list[int]:
    """Return batches that make ENOUGH_STEPS of the samples, the largest first; else the smallest there is, one unit."""
    most = samples // ENOUGH_STEPS // unit
    return [unit * n for n in dict.fromkeys((1 << (max(most, 1).bit_length() - 1), max(most, 1), 1))]


def usual_epochs(samples: int, batch: int, micro: int, dp: int) -> tuple[dict[str, int], int]:
    """Return the fields that pass over the samples as often as is usual, with a smaller batch where these would be too
    few updates, and the steps that they take."""
    total = USUAL_EPOCHS * samples
    fields = {"train.epochs": USUAL_EPOCHS}
    if ceil(total / batch) < FEW_STEPS:
        whole = micro * dp * ENOUGH_STEPS <= total
        batch = smaller_batches(total, micro * dp if whole else dp)[0]
        fields |= {"train.global_batch_size": batch} | ({} if whole else {"layout.micro_batch_size": 1})
    return fields, max(1, ceil(total / batch))
