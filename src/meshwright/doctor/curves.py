"""The curves of a run: loss, speed, gradient norm and memory by step, thinned without losing spikes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from typing import NamedTuple

import msgspec

from meshwright.doctor.run import Run, Step

MAX_POINTS = 600  # of one curve: twice the pixels that a phone has for it


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of a run by step; a value that is not finite is None."""

    name: str
    unit: str
    steps: tuple[int, ...]
    values: tuple[float | None, ...]


class _Metric(NamedTuple):
    name: str
    unit: str
    of: Callable[[Step], float | None]


METRICS = (
    _Metric("loss", "", lambda step: step.loss),
    _Metric("step time", "s", lambda step: step.seconds),
    _Metric("tokens/s per GPU", "", lambda step: step.tokens_per_s),
    _Metric("gradient norm", "", lambda step: step.grad_norm),
    _Metric("memory", "GiB", lambda step: step.memory_gib),
)
Point = tuple[int, float | None]


def curves_of(run: Run) -> tuple[Curve, ...]:
    """Return the curves that a log has; those with fewer than two points are left out."""
    found = {(one.name, one.unit): [(s.step, one.of(s)) for s in run.steps if one.of(s) is not None] for one in METRICS}
    found["validation loss", ""] = [(one.step, one.loss) for one in run.validations]
    return tuple(_curve(name, unit, points) for (name, unit), points in found.items() if len(points) > 1)


def _curve(name: str, unit: str, points: Sequence[Point]) -> Curve:
    kept = _thinned([(step, value if value is not None and isfinite(value) else None) for step, value in points])
    return Curve(name=name, unit=unit, steps=tuple(p[0] for p in kept), values=tuple(p[1] for p in kept))


def _thinned(points: Sequence[Point]) -> Sequence[Point]:
    """Return few enough points: the lowest and the highest of every group, and what is not finite."""
    if len(points) <= MAX_POINTS:
        return points
    size = -(-len(points) // (MAX_POINTS // 2))
    kept: list[Point] = []
    for start in range(0, len(points), size):
        group = points[start : start + size]
        finite = [one for one in group if one[1] is not None]
        lacking = [one for one in group if one[1] is None][:1]
        ends = (
            (min(finite, key=lambda one: one[1] or 0.0), max(finite, key=lambda one: one[1] or 0.0)) if finite else ()
        )
        kept += sorted({*ends, *lacking}, key=group.index)
    return kept
