"""The supported log formats, one per module."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NamedTuple

from meshwright.doctor.formats import (
    automodel,
    deepspeed,
    hf_trainer,
    json_records,
    kempnerforge,
    megatron,
    nemo,
    own,
    torchtitan,
)
from meshwright.doctor.formats.text import Line, has_any
from meshwright.doctor.run import LogFormat, Run


class Format(NamedTuple):
    """A log format."""

    kind: LogFormat
    looked_for: str  # for error messages and docs
    hints: tuple[str, ...]  # every step line contains one of these
    step: re.Pattern[str]  # a step line
    marks: re.Pattern[str]  # a line that only this format has
    read: Callable[[Sequence[Line], str], Run]


def _format(kind: LogFormat, module: ModuleType) -> Format:
    return Format(kind, module.LOOKED_FOR, module.HINTS, module.STEP, module.MARKS, module.read)


FORMATS = (
    _format("meshwright", own),
    _format("megatron", megatron),
    _format("nemo", nemo),
    _format("torchtitan", torchtitan),
    _format("automodel", automodel),
    _format("kempnerforge", kempnerforge),
    _format("transformers", hf_trainer),
    _format("json", json_records),
    _format("deepspeed", deepspeed),
)


def detect_format(lines: Sequence[Line]) -> tuple[Format | None, int]:
    """Return the format of a log, and how many of its lines report a step."""
    *named, general, last = FORMATS  # records of frameworks are also JSON with a step and a loss
    for formats in (named, [general], [last]):  # programs of all kinds train with DeepSpeed
        steps = _step_counts(lines, formats)
        if most := max(steps):
            return formats[steps.index(most)], most
    marks = [sum(bool(one.marks.search(line.text)) for line in lines) for one in FORMATS]
    return (FORMATS[marks.index(max(marks))] if max(marks) else None), 0


def _step_counts(lines: Sequence[Line], formats: Sequence[Format]) -> list[int]:
    """Return how many lines report a step, for each format; lines without any hint are seen once, not per format."""
    hints = tuple(dict.fromkeys(hint for one in formats for hint in one.hints))
    counts = [0] * len(formats)
    for line in lines:
        if has_any(line.text, hints):
            for number, one in enumerate(formats):
                counts[number] += _is_step(one, line.text)
    return counts


def _is_step(one: Format, text: str) -> bool:
    """Return whether a line reports a step."""
    return has_any(text, one.hints) and one.step.search(text) is not None
