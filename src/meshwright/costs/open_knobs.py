"""Settings that a measurement row leaves open, and how far its estimate moves over their usual values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from meshwright.costs.measurements import Measurement
from meshwright.costs.time import step_time
from meshwright.recipes.case import Case

USUAL_CHUNKS = (1, 2, 4)
USUAL: dict[str, tuple[Any, ...]] = {
    "cuda_graphs": ("none", "transformer_engine"),
    "dispatcher": ("alltoall", "deepep"),
    "ep_overlap": (False, True),
    "recompute": ("none", "full"),
}


class OpenKnob(msgspec.Struct, frozen=True):
    """A setting that some rows do not state, and what stating it would tell."""

    name: str
    rows: int
    median_pct: float  # half of the range of the estimate over the usual values, in per cent, of the median row
    p90_pct: float

    def __str__(self) -> str:
        rows = "1 row does not" if self.rows == 1 else f"{self.rows:,} rows do not"
        width = f"±{self.median_pct:.0f}" if round(self.median_pct) else "less than ±1"
        return f"{rows} state {self.name}: the estimate is certain to {width} % only once it is known"


def knob_ranges(rows: Sequence[Measurement]) -> list[OpenKnob]:
    """Return every setting that timed rows leave open, with the range of their estimates."""
    widths: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.case is None or not row.step_s or row.case.engine == "meshwright":  # our engine's defaults are known
            continue
        for name in row.open_knobs:
            seconds = [float(step_time(case).step_s) for case in _usual(row.case, name)]
            if len(seconds) > 1:
                widths[name].append(100 * ((max(seconds) / min(seconds)) ** 0.5 - 1))
    return [
        OpenKnob(name, len(some), round(float(np.median(some)), 1), round(float(np.quantile(some, 0.9)), 1))
        for name, some in sorted(widths.items())
    ]


def _usual(case: Case, name: str) -> Iterator[Case]:
    """Yield the case with each usual value of a setting."""
    if name != "vp":
        yield from (case.replace(**{name: value}) for value in USUAL[name])
        return
    for chunks in USUAL_CHUNKS:
        if case.model.num_layers % (case.pp * chunks) == 0:
            schedule = "interleaved_1f1b" if chunks > 1 else "1f1b"
            yield case.replace(vp=chunks, pp_schedule=schedule, stage_layers=())
