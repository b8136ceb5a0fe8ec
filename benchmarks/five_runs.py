"""How well five runs of a source that the cost model has not seen calibrate it to the source's other runs.

    python benchmarks/five_runs.py [measurements.csv]

Every source is left out of the fit in turn, as in fit_costs.py. Five of its runs on one GPU type are drawn at random,
`meshwright calibrate` fits a speed to them, and the others are predicted with it. Sources with fewer than eight runs on
a GPU type are left out. Every source has equal weight. Writes results/five_runs.json, as accuracy_report.py --left-out
does.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from fit_costs import linear_fit, usable_rows

from meshwright.costs.calibrate import best_clock, clock_ratios, clocks_tried
from meshwright.costs.calibration import Calibration
from meshwright.costs.measurements import Measurement

RUNS, LEAST, DRAWS, SEED = 5, 8, 40, 17
RESULT = Path(__file__).parent / "results" / "five_runs.json"


def five_runs(rows: list[Measurement], without: Callable[[str], Calibration]) -> dict[str, dict[str, float]]:
    """Return the median errors of a source's runs in per cent, without and with five of its runs, by source and GPU.

    `without` returns the calibration that is fitted to all other sources.
    """
    groups: dict[tuple[str, str], list[Measurement]] = defaultdict(list)
    for row in rows:
        groups[row.source, row.gpu].append(row)
    draw = np.random.default_rng(SEED)
    found = {}
    for (source, gpu), some in sorted(groups.items()):
        if len(some) < LEAST or some[0].case is None:
            continue
        base, name = without(source), some[0].case.cluster.gpu.name
        clock = float(base.gpus[some[0].case.cluster.gpu.arch].clock.get(name, 1.0))
        before = np.abs(clock_ratios(some, name, np.array([clock]), base) - 1)[0]
        clocks = clocks_tried()
        ratios = clock_ratios(some, name, clocks, base)
        after = []
        for _ in range(DRAWS):
            chosen = draw.choice(len(some), RUNS, replace=False)
            rest = np.setdiff1d(np.arange(len(some)), chosen)
            after.append(np.median(np.abs(ratios[best_clock(ratios[:, chosen], clocks, clock), rest] - 1)))
        found[f"{source} on {gpu}"] = {
            "runs": len(some),
            "before_pct": round(100 * float(np.median(before)), 2),
            "after_pct": round(100 * float(np.median(after)), 2),
        }
    return found


def measure(rows: list[Measurement], without: Callable[[str], Calibration]) -> dict[str, Any]:
    """Measure and write the figures."""
    found = five_runs(rows, without)
    medians = {
        name: round(float(np.median([one[name] for one in found.values()])), 2) for name in ("before_pct", "after_pct")
    }
    figures = {"runs_used": RUNS, **medians, "sources": found}
    RESULT.write_text(json.dumps(figures, indent=1) + "\n")
    return figures


def main() -> None:
    """Measure, print and write the figures."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "data" / "measurements.csv"
    found = measure(usable_rows(path), linear_fit(path).without)
    for name, one in found["sources"].items():
        print(f"{name:60s} {one['runs']:4.0f} runs   {one['before_pct']:6.1f} % -> {one['after_pct']:6.1f} %")
    print(
        f"median of {len(found['sources'])} sources: {found['before_pct']} % before, {found['after_pct']} % after"
        f" {RUNS} runs"
    )


if __name__ == "__main__":
    main()
