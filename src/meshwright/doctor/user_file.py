"""Compares the figures of a log with the file that the user names as what ran; the file's values are not replaced."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from meshwright.doctor import remedies
from meshwright.doctor.assumed_settings import ADAPTERS
from meshwright.doctor.check_logged import fits_length, implied_length
from meshwright.doctor.finding import Evidence, Finding
from meshwright.doctor.implied_settings import inferred_batch, source_of_batch
from meshwright.doctor.logged_rate import OtherRate, rate_unlike_file
from meshwright.doctor.logged_settings import text_of_differences
from meshwright.doctor.run_stats import RunStats
from meshwright.recipes import overrides as override

CLOSE_BATCH = 0.1  # tokens per second are rounded, and checkpoints lengthen some steps
LENGTH, BATCH = "data.seq_length", "train.global_batch_size"


def differing_file(stats: RunStats) -> Iterator[Finding]:
    """The log states or shows settings that are not those of the file that the user names."""
    case, header = stats.case, stats.run.header
    if case is None or not header.file:
        return
    if header.file_differences:
        yield _stated_otherwise(stats)
    length = int(case.seq_length)
    if LENGTH in header.file_fields and header.seq_length is None and LENGTH not in header.overrides:
        found = implied_length(stats.run, case)
        if found is not None and found.tokens != length and not fits_length(stats.run, case):
            yield _finding(stats, LENGTH, "a sequence length", found.tokens, length, found.source)
            length = found.tokens
    batch, implied = int(case.global_batch_size), inferred_batch(stats.run, int(case.world), length)
    if BATCH in header.file_fields and implied is not None and abs(implied.samples / batch - 1) > CLOSE_BATCH:
        fitting = implied.plausible or implied.samples
        if implied.samples > batch or not stats.has_short_samples:
            yield _finding(stats, BATCH, "a global batch", fitting, batch, source_of_batch(stats.run, int(case.world)))
    if (rate := rate_unlike_file(stats)) is not None:
        yield _other_rate(stats, rate)
    yield from _other_weights(stats)


def _other_weights(stats: RunStats) -> Iterator[Finding]:
    """Yield that a log is of adapters and the file of all weights, or the other way round, by the trained parameters.

    With FSDP1 the Trainer counts those of one rank's shards.
    """
    case, header = stats.case, stats.run.header
    trained, ranks = header.trainable_parameters, header.data_ranks or header.world or 1
    if case is None or trained is None or case.recipe.train.freeze:
        return
    total, of_adapters = case.model.params.total, case.goal == "peft"
    if of_adapters == (trained * ranks < ADAPTERS * total) or (of_adapters and trained < ADAPTERS * total):
        return
    logged, stated = ("all weights", "adapters") if of_adapters else ("adapters", "all weights")
    yield Finding(
        id="run.differs-from-file",
        severity="warning",
        message=f"the log trains {trained:,} parameters of {total / 1e9:.3g}B, as a training of {logged} does; "
        f"{header.file} trains {stated}: it is not what ran",
        lines=stats.ends,
        evidence=(Evidence("trained parameters", float(trained), "", float(total), "of the model"),),
        remedies=(remedies.advice("name the file of this run with --recipe", why="memory and speed are of this file"),),
    )


def _stated_otherwise(stats: RunStats) -> Finding:
    header = stats.run.header
    whose = "the file's" if header.recipe is not None else "the log's"
    numbers = [one for one in header.file_differences if _is_number(one.logged) and _is_number(one.stated)]
    return Finding(
        id="run.differs-from-file",
        severity="warning",
        message=f"{text_of_differences(stats.run)}. The estimate is for {whose} values: one of them is not what ran",
        lines=stats.ends,
        evidence=tuple(
            Evidence(f"{one.name} in the log", float(one.logged), "", float(one.stated), "in the file")
            for one in numbers
        ),
        remedies=(
            remedies.advice(
                "name the file of this run with --recipe",
                why="a typed value, a later edit or another file replaced these settings",
            ),
        ),
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _other_rate(stats: RunStats, rate: OtherRate) -> Finding:
    return Finding(
        id="run.differs-from-file",
        severity="warning",
        message=f"the learning rate reaches {rate.text}: one of them is not what ran",
        lines=stats.ends,
        evidence=(Evidence("peak learning rate", rate.logged, "", rate.stated, "in the file"),),
        remedies=(
            remedies.advice(
                f"compare the command of the run with {rate.source}", why="a typed value or another file replaced it"
            ),
        ),
    )


def _finding(stats: RunStats, field: str, name: str, fitting: float, stated: int, source: str) -> Finding:
    file, key = stats.run.header.file, field.partition(".")[2]
    shown = f"{fitting:.4g}" if isinstance(fitting, float) else str(fitting)
    gpus = () if stats.case is None else ("--gpus", stats.case.cluster.argument)
    typed = override.merged(stats.run.header.typed, (f"{field}={shown}",))
    options = (word for pair in stats.run.header.options.items() for word in pair)
    words = ("meshwright", "doctor", stats.run.path, "--recipe", file, *gpus, *options, *typed)
    return Finding(
        id="run.differs-from-file",
        severity="warning",
        message=f"the log's {source} fit {name} of {shown}; {file} says {stated}. The estimate is for {stated}, as "
        "in the file: one of them is not what ran",
        lines=stats.ends,
        evidence=(Evidence(f"{key} by the log", fitting, "", float(stated), "in the file"),),
        remedies=(
            remedies.advice(shlex.join(words), why="if the log is right")
            if not isinstance(fitting, float)
            else remedies.advice("check that the file and the log are of the same run"),
        ),
    )
