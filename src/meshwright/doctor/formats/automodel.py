"""Logs of NeMo AutoModel: `step 10 | epoch 0 | loss …` lines, and its training.jsonl."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from meshwright.doctor.formats.steps import Steps
from meshwright.doctor.formats.text import NUMBER, Line, number, of_one_rank, positive
from meshwright.doctor.run import Run, RunHeader

LOOKED_FOR = "`step 10 | epoch 0 | loss … | grad_norm … | … | tps …(…/gpu)` or training.jsonl of NeMo AutoModel"
HINTS = ("| mem", "num_label_tokens", "tps_per_gpu")
MARKS = re.compile(r"nemo_automodel|NeMo AutoModel")
STEP = re.compile(r"\bstep (\d+) \| epoch \d+ \| loss .*\| mem:? |^\s*\{.*\"(?:tps_per_gpu|num_label_tokens)\":")

FIELDS = {
    "loss": re.compile(rf"\| loss ({NUMBER})", re.IGNORECASE),
    "grad_norm": re.compile(rf"\| grad_norm ({NUMBER})", re.IGNORECASE),
    "lr": re.compile(rf"\| lr ({NUMBER})"),
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
    "mem": "memory_gib",
    "tps_per_gpu": "tokens_per_s",
    "tps": "all_tokens_per_s",
    "num_tokens_per_step": "tokens",
}
SAVED = re.compile(rf"[Ss]av(?:ed|ing) checkpoint.* in ({NUMBER}) ?s(?:ec)")
WORLD = re.compile(r"[Ww]orld[ _]size:? (\d+)")


def read(lines: Sequence[Line], path: str) -> Run:
    """Read a run of AutoModel."""
    steps = Steps()
    world, tokens_seen = None, None
    for line, found in of_one_rank(lines, STEP, HINTS):
        if found is not None:
            step, figures = _parse_json(line.text) if found[1] is None else (int(found[1]), _parse_text(line.text))
            if step is None:
                continue
            all_tokens, one_gpu = figures.get("all_tokens_per_s"), figures.get("tokens_per_s")
            if all_tokens and one_gpu:
                world = max(1, round(all_tokens / one_gpu))
            tokens = figures.pop("tokens", None)
            if tokens and all_tokens:
                tokens_seen = int(tokens)
                figures["seconds"] = tokens / all_tokens
            steps.add(step, line.number, **figures)
        elif saved := SAVED.search(line.text):
            steps.block(number(saved[1]) or 0.0)
        elif world is None and (found_world := WORLD.search(line.text)):
            world = int(found_world[1])
    return Run(
        kind="automodel",
        path=path,
        file=path,
        steps=steps.all(),
        starts=tuple(steps.starts),
        header=RunHeader(world=world, tokens_per_step=tokens_seen),
    )


def _parse_text(text: str) -> dict[str, Any]:
    found = {name: number(match[1]) for name, regex in FIELDS.items() if (match := regex.search(text))}
    return _without_zero_speeds({name: value for name, value in found.items() if value is not None})


def _parse_json(text: str) -> tuple[int | None, dict[str, Any]]:
    try:
        record = msgspec.json.decode(text.strip())
    except msgspec.DecodeError:  # Python writes NaN and Infinity, which are not valid JSON
        record = _decode_leniently(text)
    if not isinstance(record, dict) or not isinstance(record.get("step"), int) or "val_loss" in record:
        return None, {}
    figures = {NAMES[key]: _float(value) for key, value in record.items() if key in NAMES}
    return record["step"], _without_zero_speeds({name: value for name, value in figures.items() if value is not None})


def _decode_leniently(text: str) -> Any:
    import json

    try:
        return json.loads(text)
    except ValueError:
        return None


def _float(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _without_zero_speeds(figures: dict[str, Any]) -> dict[str, Any]:
    """Drop speeds of zero, which carry no information."""
    speeds = ("tokens_per_s", "all_tokens_per_s", "tokens")
    return {name: value for name, value in figures.items() if name not in speeds or positive(str(value))}
