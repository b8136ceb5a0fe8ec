"""Logs of NeMo AutoModel: `step 10 | epoch 0 | loss …` lines, and its training.jsonl."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from meshwright import json_text
from meshwright.doctor.formats.json_records import as_share
from meshwright.doctor.formats.steps import Steps
from meshwright.doctor.formats.text import NUMBER, Line, number, of_one_rank, positive, time_of
from meshwright.doctor.run import Run, RunHeader, Step

LOOKED_FOR = "`step 10 | epoch 0 | loss … | grad_norm … | … | tps …(…/gpu)` or training.jsonl of NeMo AutoModel"
HINTS = ("| mem", "num_label_tokens", "tps_per_gpu")
MARKS = re.compile(r"nemo_automodel|NeMo AutoModel")
STEP = re.compile(r"\bstep (\d+) \| epoch \d+ \| loss .*\| mem:? |^\s*\{.*\"(?:tps_per_gpu|num_label_tokens)\":")

FIELDS = {
    "loss": re.compile(rf"\| loss ({NUMBER})", re.IGNORECASE),
    "grad_norm": re.compile(rf"\| grad_norm ({NUMBER})", re.IGNORECASE),
    "lr": re.compile(rf"\| lr ({NUMBER})"),
    "epoch": re.compile(rf"\| epoch ({NUMBER})"),
    "memory_gib": re.compile(rf"\| mem:? ({NUMBER}) GiB"),
    "tokens_per_s": re.compile(rf"\| tps {NUMBER}\(({NUMBER})/gpu\)"),
    "all_tokens_per_s": re.compile(rf"\| tps ({NUMBER})"),
    "seconds": re.compile(rf"\| time ({NUMBER})s\b"),
}
NAMES = {
    "loss": "loss",
    "train_loss": "loss",
    "grad_norm": "grad_norm",
    "lr": "lr",
    "epoch": "epoch",
    "mem": "memory_gib",
    "tps_per_gpu": "tokens_per_s",
    "tps": "all_tokens_per_s",
    "num_tokens_per_step": "tokens",
    "mfu": "mfu",
}
VALIDATION = re.compile(rf'\[val\] (?:name "([^"]*)" \| )?step (\d+) \| epoch \d+ \| loss ({NUMBER})', re.IGNORECASE)
VALIDATION_FILE = re.compile(r"validation_(.+)\.jsonl")
DEFAULT = "default"  # AutoModel's name of the only validation set
SAVED = re.compile(rf"[Ss]av(?:ed|ing) checkpoint.* in ({NUMBER}) ?s(?:ec)")
CLOCK_S = 1.0  # to which the times of its lines are rounded
LEAST_STEPS = 5  # whose median is not that of a slow first step
WORLD = re.compile(r"[Ww]orld[ _]size:? (\d+)|initializing torch distributed with (\d+) workers")


def read(lines: Sequence[Line], path: str) -> Run:
    """Read a run of AutoModel."""
    steps = Steps(CLOCK_S)
    world, data_ranks, tokens_seen, validations_of = None, None, None, _validation_set(path)
    for line, found in of_one_rank(lines, STEP, HINTS):
        if found is not None:
            step, figures = _parse_json(line.text) if found[1] is None else (int(found[1]), _parse_text(line.text))
            if step is None:
                continue
            if "val_loss" in figures:
                steps.validated(step, figures["val_loss"], line.number, validations_of)
                continue
            all_tokens, one_rank = figures.get("all_tokens_per_s"), figures.get("tokens_per_s")
            if all_tokens and one_rank:  # AutoModel divides by dp × cp, not by tp and pp
                data_ranks = max(1, round(all_tokens / one_rank))
            if all_tokens and world:
                figures["tokens_per_s"] = all_tokens / world
            tokens = figures.pop("tokens", None)
            if tokens and all_tokens:
                tokens_seen = int(tokens)
                figures["seconds"] = tokens / all_tokens
            steps.add(step, line.number, at_s=time_of(line.text, whole=True), **figures)
        elif saved := SAVED.search(line.text):
            steps.block(number(saved[1]) or 0.0)
        elif done := VALIDATION.search(line.text):
            name = done[1] or ""
            steps.validated(int(done[2]), number(done[3]), line.number, "" if name == DEFAULT else name)
        elif world is None and (found_world := WORLD.search(line.text)):
            world = int(found_world[1] or found_world[2])
    rows = steps.all()
    return Run(
        kind="automodel",
        path=path,
        file=path,
        steps=rows,
        starts=tuple(steps.starts),
        validations=steps.validations,
        header=RunHeader(world=world, data_ranks=data_ranks, tokens_per_step=tokens_seen or _tokens_between(rows)),
    )


def _tokens_between(rows: Sequence[Step]) -> int | None:
    """Return the tokens of a step by its rate and time: a line has no total, and samples may be short."""
    tokens = [one.all_tokens_per_s * one.seconds for one in rows if one.all_tokens_per_s and one.seconds]
    return round(median(tokens)) if len(tokens) >= LEAST_STEPS else None


def _validation_set(path: str) -> str:
    """Return the name of the validation set whose records a file has; empty for the only one."""
    found = VALIDATION_FILE.fullmatch(Path(path).name)
    return found[1] if found else ""


def _parse_text(text: str) -> dict[str, Any]:
    found = {name: number(match[1]) for name, regex in FIELDS.items() if (match := regex.search(text))}
    return _without_zero_speeds({name: value for name, value in found.items() if value is not None})


def _parse_json(text: str) -> tuple[int | None, dict[str, Any]]:
    try:
        record = json_text.decode(text.strip())
    except msgspec.DecodeError:  # Python writes NaN and Infinity, which are not valid JSON
        record = _decode_leniently(text)
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return None, {}
    if "val_loss" in record:
        loss = _float(record["val_loss"])
        return record["step"], {} if loss is None else {"val_loss": loss}
    figures = {NAMES[key]: _float(value) for key, value in record.items() if key in NAMES}
    if (mfu := figures.get("mfu")) is not None:
        figures["mfu"] = as_share(mfu)
    return record["step"], _without_zero_speeds({name: value for name, value in figures.items() if value is not None})


def _decode_leniently(text: str) -> Any:
    try:
        return json_text.loads(text)
    except ValueError:
        return None


def _float(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _without_zero_speeds(figures: dict[str, Any]) -> dict[str, Any]:
    """Drop speeds of zero, which carry no information."""
    speeds = ("tokens_per_s", "all_tokens_per_s", "tokens")
    return {name: value for name, value in figures.items() if name not in speeds or positive(str(value))}
