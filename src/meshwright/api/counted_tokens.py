"""Tokens of a step of unpacked samples: the Trainer pads a micro batch to its longest one, and logs no tokens."""

from __future__ import annotations

from pathlib import Path

import msgspec

from meshwright import doctor
from meshwright.api.dataset_length import sample_width, with_data_beside
from meshwright.doctor import Run
from meshwright.recipes import overrides as override
from meshwright.recipes.case import Case
from meshwright.recipes.padding import padding_of

LENGTH = "data.seq_length"
CLOSE = 0.1  # of the mean length of samples


def with_counted_tokens(run: Run, case: Case) -> tuple[Run, str]:
    """Return the run with the tokens of its steps as counted in its data, and a note; unchanged if they are stated."""
    if not doctor.RunStats(run, case).has_unknown_widths:
        return run, ""
    recipe = with_data_beside(case.recipe, Path(run.header.file).parent)
    width = sample_width(recipe, case.engine)
    padded = "the samples are not packed, and a micro batch is padded to its longest one"
    if width is None:
        length = f"{LENGTH}=N data.pad_to_max_length=true"
        return run, f"{padded}: the log does not state its tokens, so the speed is not compared; {length} compares it"
    step, one = round(int(case.global_batch_size) * width), round(width) if int(case.dp) == 1 else None
    header = msgspec.structs.replace(run.header, tokens_per_step=step, sample_tokens=one)
    note = f"{padded}: {width:,.0f} tokens on average, counted in {case.recipe.data.dataset}"
    return msgspec.structs.replace(run, header=header), note


def of_samples(run: Run, typed: Case, full: Case | None) -> tuple[Run, Case]:
    """Return the run and the case of its file, if the typed length is the mean of the samples that the log states.

    Steps are then timed at that length; the longest samples, which memory is for, are those of the file.
    """
    if full is None or typed.seq_length >= full.seq_length:
        return run, typed
    stats = doctor.RunStats(run, full)
    mean = (run.header.logged_tokens(stats.world) or 0) / int(full.global_batch_size)
    is_mean = abs(int(typed.seq_length) / mean - 1) < CLOSE if mean else False
    if not (is_mean and stats.has_short_samples and padding_of(full.recipe, full.engine).to == "micro_batch"):
        return run, typed
    header = msgspec.structs.replace(run.header, sample_tokens=int(typed.seq_length))
    return msgspec.structs.replace(run, header=header), full


def at_logged_length(run: Run, case: Case) -> Case:
    """Return the case with samples as long as those that ran, if they were shorter than the length of the recipe."""
    stats = doctor.RunStats(run, case)
    logged = run.header.logged_tokens(stats.world)
    if not stats.has_short_samples or not logged:
        return case
    tokens = max(round(logged / int(case.global_batch_size)), 1)
    return case.rebuild(override.change(case.recipe, {LENGTH: tokens})[0])
