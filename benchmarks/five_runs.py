"""How well five runs of a source that the cost model has not seen calibrate it to the source's other runs.

    python benchmarks/five_runs.py [measurements.csv]

Every source is left out of the fit in turn, as in fit_costs.py. Five of its runs on one GPU type are drawn at random,
`meshwright calibrate` fits a speed to them, and the others are predicted with it. Sources with fewer than eight runs on
a GPU type are left out. Every source has equal weight. Writes results/five_runs.json.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from fit_costs import PROFILES, Data, calibration_with, derivatives, get, load, log_error, parameters, solve

from meshwright.costs.accuracy import TIME_TIERS
from meshwright.costs.calibrate import best_clock, clock_ratios, clocks_tried
from meshwright.costs.calibration import Calibration, read_tables
from meshwright.costs.measurements import BY_TFLOPS, Measurement, read

RUNS, LEAST, DRAWS, SEED = 5, 8, 40, 17
RESULT = Path(__file__).parent / "results" / "five_runs.json"


def timed(path: Path) -> list[Measurement]:
    """Return the rows that fit_costs.load uses, in its order."""
    found = [r for r in read(path) if r.case and r.step_s and not r.oom and r.tier in TIME_TIERS]
    return [r for r in found if r.timed_by != BY_TFLOPS]


def without_source(path: Path) -> dict[str, Calibration]:
    """Return the calibration that is fitted without each source, by source."""
    data, tables, fitted = load(path), read_tables(PROFILES), parameters()
    theta = np.log([np.clip(get(tables, p), p.low, p.high) for p in fitted])
    error = log_error(data, calibration_with(tables, fitted, theta))
    slope = derivatives(data, tables, fitted, theta, error)
    return {name: calibration_with(tables, fitted, _solved(data, name, error, slope, theta)) for name in {*data.source}}


def _solved(data: Data, name: str, error: np.ndarray, slope: np.ndarray, theta: np.ndarray) -> np.ndarray:
    weight = np.where(np.array(data.source) == name, 0.0, data.weight)
    return solve(error, slope, weight, theta, parameters())


def five_runs(rows: list[Measurement], calibrations: dict[str, Calibration]) -> dict[str, dict[str, float]]:
    """Return the median errors of a source's runs in per cent, without and with five of its runs, by source and GPU."""
    groups: dict[tuple[str, str], list[Measurement]] = defaultdict(list)
    for row in rows:
        groups[row.source, row.gpu].append(row)
    draw = np.random.default_rng(SEED)
    found = {}
    for (source, gpu), some in sorted(groups.items()):
        if len(some) < LEAST or some[0].case is None:
            continue
        base, name = calibrations[source], some[0].case.cluster.gpu.name
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


def main() -> None:
    """Measure, print and write the figures."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "data" / "measurements.csv"
    found = five_runs(timed(path), without_source(path))
    medians = {
        name: round(float(np.median([one[name] for one in found.values()])), 2) for name in ("before_pct", "after_pct")
    }
    for name, one in found.items():
        print(f"{name:60s} {one['runs']:4.0f} runs   {one['before_pct']:6.1f} % -> {one['after_pct']:6.1f} %")
    print(
        f"median of {len(found)} sources: {medians['before_pct']} % before, {medians['after_pct']} % after {RUNS} runs"
    )
    RESULT.write_text(json.dumps({"runs_used": RUNS, **medians, "sources": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
