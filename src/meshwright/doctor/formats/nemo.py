"""Logs of NeMo 2: `Training epoch 0, iteration 9/99 | … | reduced_train_loss: …` lines, or a progress bar with them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from meshwright.doctor.formats.steps import Steps
from meshwright.doctor.formats.text import NUMBER, Line, number, of_one_rank, positive
from meshwright.doctor.run import Run, RunHeader

LOOKED_FOR = "`Training epoch 0, iteration 9/99 | lr: … | reduced_train_loss: …` of NeMo"
HINTS = ("reduced_train_loss",)
MARKS = re.compile(r"nemo[./]lightning|nemo\.collections|\[NeMo [A-Z] ")
STEP = re.compile(
    r"Training epoch (\d+), iteration (\d+)/(\d+) \|.*\breduced_train_loss: "
    r"|Epoch (\d+): .{0,40}\| (\d+)/(\d+) \[.*\breduced_train_loss="
)
FIELD = re.compile(rf"([\w./-]+(?: in s)?)[:=] ?({NUMBER})(?=[ ,|\]]|$)", re.IGNORECASE)
NAMES = {
    "reduced_train_loss": "loss",
    "lr": "lr",
    "grad_norm": "grad_norm",
    "train_step_timing in s": "seconds",
    "global_batch_size": "samples",
    "tokens_per_sec_per_gpu": "tokens_per_s",
    "TFLOPS_per_GPU": "tflops",
}
WHOLE = ("samples",)
ABOVE_ZERO = ("seconds", "tokens_per_s", "tflops", "samples")


def read(lines: Sequence[Line], path: str) -> Run:
    """Read a run of NeMo; it counts iterations from 0, and its progress bar counts those that are done."""
    steps, total, validation, samples = Steps(), None, None, None
    for line, found in of_one_rank(lines, STEP, HINTS):
        if found is None:
            continue
        epoch, done, count, printed = _position(found)
        figures = {name: value for name, text in FIELD.findall(line.text) if (value := number(text)) is not None}
        step = int(figures["global_step"]) + 1 if "global_step" in figures else done
        total = count if printed or total is None else max(total, count)
        steps.add(step, line.number, epoch=epoch, **_known(figures))
        samples = figures.get("global_batch_size", samples)
        if "val_loss" in figures and figures["val_loss"] != validation:  # repeated until the next one
            validation = figures["val_loss"]
            steps.validated(step, validation, line.number)
    return Run(
        kind="nemo",
        path=path,
        file=path,
        steps=steps.all(),
        starts=tuple(steps.starts),
        validations=steps.validations,
        header=RunHeader(total_steps=total, overrides={"train.global_batch_size": int(samples)} if samples else {}),
    )


def _position(found: re.Match[str]) -> tuple[int, int, int, bool]:
    """Return the epoch, the completed steps, all steps, and whether a line of the printer says so."""
    if found[1] is not None:
        return int(found[1]), int(found[2]) + 1, int(found[3]) + 1, True
    return int(found[4]), int(found[5]), int(found[6]), False


def _known(figures: dict[str, float]) -> dict[str, Any]:
    known: dict[str, Any] = {NAMES[name]: value for name, value in figures.items() if name in NAMES}
    known = {name: value for name, value in known.items() if name not in ABOVE_ZERO or positive(str(value))}
    return known | {name: int(known[name]) for name in WHOLE if name in known}
