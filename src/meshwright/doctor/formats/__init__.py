"""The logs that can be read, each in a module of its own: how its steps look, and how to read them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NamedTuple

from meshwright.doctor.formats import automodel, megatron, own, torchtitan
from meshwright.doctor.formats.text import Line, has_any
from meshwright.doctor.run import Kind, Run


class Format(NamedTuple):
    """A kind of log."""

    kind: Kind
    looked_for: str  # as an error tells it
    hints: tuple[str, ...]  # one of which stands in every line that tells a step
    step: re.Pattern[str]  # a line that tells a step
    marks: re.Pattern[str]  # a line that nobody else writes
    read: Callable[[Sequence[Line], str], Run]


def _format(kind: Kind, module: ModuleType) -> Format:
    return Format(kind, module.LOOKED_FOR, module.HINTS, module.STEP, module.MARKS, module.read)


FORMATS = (
    _format("meshwright", own),
    _format("megatron", megatron),
    _format("torchtitan", torchtitan),
    _format("automodel", automodel),
)


def recognised(lines: Sequence[Line]) -> tuple[Format | None, int]:
    """The format of a log by what stands in it, and how many of its lines tell a step."""
    steps = [sum(_tells(one, line.text) for line in lines) for one in FORMATS]
    most = max(steps)
    if most:
        return FORMATS[steps.index(most)], most
    marks = [sum(bool(one.marks.search(line.text)) for line in lines) for one in FORMATS]
    return (FORMATS[marks.index(max(marks))] if max(marks) else None), 0


def _tells(one: Format, text: str) -> bool:
    """Whether a line tells a step."""
    return has_any(text, one.hints) and one.step.search(text) is not None
