"""Settings that the figures of a log imply: batch, sequence length, micro batch, number of GPUs."""

from __future__ import annotations

from math import ceil, prod
from statistics import median
from typing import NamedTuple

import msgspec

from meshwright.doctor.check_logged import implied_length
from meshwright.doctor.logged_settings import overridden_keys, states_length
from meshwright.doctor.run import Run
from meshwright.recipes.case import Case

CLOSE = 0.02  # error of a batch size that is computed from tokens per second and step times
ANY_BATCH = 32  # samples up to which every number is usual
ODD_PARTS = (1, 3, 5, 7, 9, 15)  # of usual batch sizes: 1024 = 1 × 2^10, 384 = 3 × 2^7
LEAST_STEPS = 5
FP32_BYTES = 4


def with_all_gpus(run: Run, case: Case) -> Run:
    """Return the run with the case's number of GPUs, and speeds per GPU, if its log has speeds per data rank only."""
    if not run.header.data_ranks or run.header.world is not None:
        return run
    world = int(case.world)
    steps = tuple(
        msgspec.structs.replace(one, tokens_per_s=one.all_tokens_per_s / world) if one.all_tokens_per_s else one
        for one in run.steps
    )
    return msgspec.structs.replace(run, steps=steps, header=msgspec.structs.replace(run.header, world=world))


def with_implied_length(run: Run, case: Case, extra: tuple[str, ...]) -> tuple[Run, str]:
    """Return the run with the sequence length that its TFLOP/s imply, and a note; unchanged if it is stated."""
    known = overridden_keys(extra) | run.header.file_fields
    if run.header.recipe is not None or "data.seq_length" in known or states_length(run):
        return run, ""
    found = implied_length(run, case)
    if found is None:
        return run, ""
    header = msgspec.structs.replace(
        run.header, seq_length=found.tokens, overrides={**run.header.overrides, "data.seq_length": found.tokens}
    )
    note = f"the log does not state the sequence length: {found.tokens} is computed from {found.source}"
    return msgspec.structs.replace(run, header=header), note


def with_implied_micro_batch(run: Run, case: Case, extra: tuple[str, ...]) -> tuple[Run, str]:
    """Return the run with the micro batch that a failed allocation of the logits implies, and a note.

    The loss converts logits to fp32: a request there is tokens × vocabulary × 4 bytes. Samples may be shorter than the
    sequence length, so that it is the least number of them. The log's own batch and the user's count more, and so does
    a larger one of the file.
    """
    known = overridden_keys(extra) | run.header.overrides.keys()
    wanted = [one.memory.wanted for one in run.faults if one.memory is not None and one.where == "logits"]
    size = max((one for one in wanted if one), default=0.0)
    layout, vocab = case.recipe.layout, case.model.vocab
    is_split = layout.tp * layout.cp != 1 or not vocab
    if not size or run.header.recipe is not None or "layout.micro_batch_size" in known or is_split:
        return run, ""
    tokens = size * 2**30 / (vocab * FP32_BYTES)
    samples = ceil(tokens / case.recipe.data.seq_length * (1 - CLOSE))
    before = layout.micro_batch_size
    if samples <= before:
        return run, ""
    implied = {"layout.micro_batch_size": samples}
    if "train.global_batch_size" not in known:
        implied["train.global_batch_size"] = case.recipe.train.global_batch_size // before * samples
    header = msgspec.structs.replace(run.header, overrides={**run.header.overrides, **implied})
    note = (
        f"layout.micro_batch_size={samples} is computed from the failed request in the loss: {size:.2f} GiB are "
        f"{round(tokens, -2):,.0f} tokens of {vocab:,} logits in fp32, and samples have up to "
        f"{case.recipe.data.seq_length:,} tokens; layout.micro_batch_size=N changes it"
    )
    return msgspec.structs.replace(run, header=header), note


class InferredBatch(NamedTuple):
    """The samples per step that a log's speeds imply, and the usual batch size that is close to it, if one is."""

    samples: float
    plausible: int | None


def inferred_batch(run: Run, world: int, length: int) -> InferredBatch | None:
    """Return the samples per step that a log's tokens, or tokens per second and step times, imply; None without."""
    if "train.global_batch_size" in run.header.overrides:
        return None
    rates = [(one.all_tokens_per_s or (one.tokens_per_s or 0.0) * world, one.seconds or 0.0) for one in run.steps[1:]]
    tokens = [rate * seconds for rate, seconds in rates if rate and seconds]
    logged = run.header.logged_tokens(world)
    if logged is None and len(tokens) < LEAST_STEPS:
        return None
    samples = (logged or median(tokens)) / length
    return InferredBatch(samples, _usual_batch(samples, _data_ranks(run, world)))


def source_of_batch(run: Run, world: int) -> str:
    """Return which figures of a log imply its batch."""
    tokens = run.header.logged_tokens(world)
    return "tokens per second and step times" if tokens is None else f"{tokens:,} tokens per step"


def _data_ranks(run: Run, world: int) -> int:
    """Return the number of which the batch is a multiple: the data-parallel ranks, if the log states its layout."""
    if not run.header.states_layout:
        return 1
    degrees = [int(run.header.overrides.get(f"layout.{name}", 1)) for name in ("tp", "pp", "cp")]
    return max(1, world // max(1, prod(degrees)))


def _usual_batch(samples: float, multiple_of: int) -> int | None:
    """Return the usual batch size closest to some samples; None if none is within the error of the log's figures."""
    if samples < 1 - CLOSE:
        return None
    nearest = max(1, round(samples))
    usual = {odd << shift for odd in ODD_PARTS for shift in range(24)}
    digits = 10 ** max(0, len(str(nearest)) - 2)
    usual |= {nearest} if nearest <= ANY_BATCH else {round(nearest / digits) * digits}  # 1200, 480
    close = [one for one in usual if one % multiple_of == 0 and abs(samples / one - 1) <= CLOSE]
    return min(close, key=lambda one: abs(samples / one - 1), default=None)
