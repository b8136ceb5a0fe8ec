"""Other degrees that are faster than those of a layout in host memory once the step's kernels are chosen.

Loss and gathering of weights are chosen after the search (planner/faster_step.py). With state in host memory, weights
that stay gathered are copied once per micro batch instead of twice, which decides between degrees.
"""

from __future__ import annotations

import numpy as np

from meshwright import costs
from meshwright.planner.baseline import Baseline
from meshwright.planner.faster_step import fast_values
from meshwright.planner.levers import lever_layouts
from meshwright.planner.search import Candidate, ScoredBatch, choose, degree_keys

WITHIN = 1.25  # times the step time of the layout found: more than kept weights gain
TRIED = 3  # other degrees
WORTH = 0.98  # of the step time of the layout found


def with_fastest_degrees(baseline: Baseline, found: Candidate) -> Candidate:
    """Return the layout found, or one of other degrees in host memory that is faster with its own kernels."""
    if not baseline.fast or not found.has_headroom or found.layout["offload"] not in ("optimizer", "params"):
        return found
    best, step_s = found, WORTH * _final_s(baseline, found)
    for rival in _rivals(baseline, found):
        rival_s = _final_s(baseline, rival)
        if rival_s < step_s:
            best, step_s = rival, rival_s
    return best


def _final_s(baseline: Baseline, found: Candidate) -> float:
    """Return the step time of a layout with the kernels that its plan will have."""
    case = baseline.case.replace(**found.layout)
    return float(costs.step_time(case.replace(**fast_values(baseline, case))).step_s)


def _rivals(baseline: Baseline, found: Candidate) -> list[Candidate]:
    """Return the best layouts of the fastest other degrees, with headroom."""
    batches = lever_layouts(baseline.case, baseline.pinned, offloads=True)
    own = int(degree_keys(baseline.case.replace(**found.layout)))
    kept = [
        b.rows(b.has_headroom & (b.step_s <= WITHIN * found.step_s) & (degree_keys(b.case) != own)) for b in batches
    ]
    kept = [batch for batch in kept if len(batch)]
    fastest: dict[int, float] = {}
    for batch in kept:
        for key, step_s in zip(degree_keys(batch.case).tolist(), batch.step_s.tolist(), strict=True):
            fastest[key] = min(step_s, fastest.get(key, np.inf))
    return [one for key in sorted(fastest, key=lambda k: fastest[k])[:TRIED] if (one := _best_of(key, kept, baseline))]


def _best_of(key: int, batches: list[ScoredBatch], baseline: Baseline) -> Candidate | None:
    rows = [batch.rows(degree_keys(batch.case) == key) for batch in batches]
    return choose([batch for batch in rows if len(batch)], baseline.case)
