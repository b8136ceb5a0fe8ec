"""JSON records of a training's own logger, one per line, with a step and a loss under a usual name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright import json_text
from meshwright.doctor.formats.steps import Steps
from meshwright.doctor.formats.text import Line, of_one_rank, positive, tokens_between
from meshwright.doctor.run import Run, RunHeader

LOOKED_FOR = 'JSON lines with a step and a loss, such as {"step": 10, "loss": …, "lr": …}'
HINTS = ('"',)
MARKS = re.compile(r"(?!)")  # nothing else shows that a log is of this kind
STEP = re.compile(r"^\s*\{(?=.*\"[\w/]*(?:step|iter|iteration)\"\s*:)(?=.*\"[\w/]*loss\w*\"\s*:).*\}\s*$")

NAMES: Mapping[str, tuple[str, ...]] = {
    "step": ("step", "global_step", "iteration", "iter", "_step", "trainer_global_step"),
    "total": ("total_steps", "max_steps", "num_steps"),
    "loss": ("loss", "training_loss", "loss_train", "lm_loss"),
    "validation": ("val_loss", "eval_loss", "valid_loss", "validation_loss", "loss_val", "loss_eval"),
    "lr": ("lr", "learning_rate"),
    "grad_norm": ("grad_norm", "gradnorm", "gradient_norm", "grad_norm_total"),
    "seconds": ("step_time", "step_time_s", "step_s", "time_per_step", "iter_time", "seconds_per_step", "sec_per_step"),
    "milliseconds": ("step_time_ms", "iter_time_ms", "time_per_step_ms"),
    "tokens_per_s": ("tokens_per_s_per_gpu", "tokens_per_sec_per_gpu", "tokens_per_second_per_gpu", "tps_per_gpu"),
    "all_tokens_per_s": ("tokens_per_s", "tokens_per_sec", "tokens_per_second", "tok_s", "tps"),
    "total_tokens": ("tokens_seen", "total_tokens", "num_tokens", "consumed_tokens", "num_input_tokens_seen"),
    "memory_gib": ("memory_gib", "mem_gib", "peak_memory_gib", "max_memory_gib"),
    "mfu": ("mfu",),
    "at_s": ("_timestamp", "timestamp", "time"),
}
FIGURES = {name: figure for figure, names in NAMES.items() for name in names}
SPEEDS = ("seconds", "tokens_per_s", "all_tokens_per_s")
FIRST_TIME = 1e9  # a smaller number is a duration, not a time


def read(lines: Sequence[Line], path: str) -> Run:
    """Read the JSON records of a run."""
    steps, total = Steps(), None
    tokens: list[tuple[int, float]] = []
    for line, found in of_one_rank(lines, STEP, HINTS):
        figures = {} if found is None else _figures(line.text)
        step = figures.pop("step", None)
        if step is None:
            continue
        total = int(figures.pop("total", 0)) or total
        if (seen := figures.pop("total_tokens", None)) is not None:
            tokens.append((int(step), seen))
        if "validation" in figures:
            steps.validated(int(step), figures.pop("validation"), line.number)
        if "loss" in figures:
            steps.add(int(step), line.number, **figures)
    return Run(
        kind="json",
        path=path,
        file=path,
        steps=steps.all(),
        starts=tuple(steps.starts),
        validations=steps.validations,
        header=RunHeader(total_steps=total, tokens_per_step=tokens_between(tokens)),
    )


def as_share(mfu: float) -> float:
    """Return an MFU as a share; loggers also write it in percent."""
    return mfu / 100 if mfu > 1 else mfu


def _figures(text: str) -> dict[str, float]:
    """Return the known figures of a record; names of a group (train/loss) and with other separators are understood."""
    try:
        record: Any = json_text.loads(text)  # also reads NaN, which is not valid JSON
    except ValueError:
        return {}
    found: dict[str, float] = {}
    for key, value in record.items() if isinstance(record, dict) else ():
        name = re.sub(r"[/ .-]+", "_", key.lower())
        figure = FIGURES.get(name) or FIGURES.get(name.removeprefix("train_").removeprefix("training_"))
        if figure is not None and isinstance(value, int | float) and not isinstance(value, bool):
            found.setdefault(figure, float(value))
    if "milliseconds" in found:
        found.setdefault("seconds", found.pop("milliseconds") / 1000)
    if "mfu" in found:
        found["mfu"] = as_share(found["mfu"])
    if found.get("at_s", FIRST_TIME) < FIRST_TIME:
        del found["at_s"]
    return {name: value for name, value in found.items() if name not in SPEEDS or positive(str(value))}
