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
    """A run of AutoModel."""
    steps = Steps()
    world, tokens_seen = None, None
    for line, found in of_one_rank(lines, STEP, HINTS):
        if found is not None:
            number_of, figures = _of_json(line.text) if found[1] is None else (int(found[1]), _of_text(line.text))
            if number_of is None:
                continue
            all_tokens, one_gpu = figures.get("all_tokens_per_s"), figures.get("tokens_per_s")
            if all_tokens and one_gpu:
                world = max(1, round(all_tokens / one_gpu))
            tokens = figures.pop("tokens", None)
            if tokens and all_tokens:
                tokens_seen = int(tokens)
                figures["seconds"] = tokens / all_tokens
            steps.add(number_of, line.number, **figures)
        elif saved := SAVED.search(line.text):
            steps.block(number(saved[1]) or 0.0)
        elif world is None and (said := WORLD.search(line.text)):
            world = int(said[1])
    return Run(
        kind="automodel",
        path=path,
        file=path,
        steps=steps.all(),
        starts=tuple(steps.starts),
        told=RunHeader(world=world, tokens_per_step=tokens_seen),
    )


def _of_text(text: str) -> dict[str, Any]:
    found = {name: number(match[1]) for name, words in FIELDS.items() if (match := words.search(text))}
    return _without_nothing({name: value for name, value in found.items() if value is not None})


def _of_json(text: str) -> tuple[int | None, dict[str, Any]]:
    try:
        told = msgspec.json.decode(text.strip())
    except msgspec.DecodeError:  # Python writes NaN and Infinity, which JSON has no words for
        told = _leniently(text)
    if not isinstance(told, dict) or not isinstance(told.get("step"), int) or "val_loss" in told:
        return None, {}
    figures = {NAMES[key]: _float(value) for key, value in told.items() if key in NAMES}
    return told["step"], _without_nothing({name: value for name, value in figures.items() if value is not None})


def _leniently(text: str) -> Any:
    import json

    try:
        return json.loads(text)
    except ValueError:
        return None


def _float(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _without_nothing(figures: dict[str, Any]) -> dict[str, Any]:
    """The figures without speeds of zero, which say nothing."""
    speeds = ("tokens_per_s", "all_tokens_per_s", "tokens")
    return {name: value for name, value in figures.items() if name not in speeds or positive(str(value))}
