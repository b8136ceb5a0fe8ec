"""Compare the cost model with published measurements: writes docs/accuracy.md and benchmarks/results/accuracy.json.

    python benchmarks/accuracy_report.py [--csv FILE] [--left-out]

--left-out also refits without each source in turn (about two minutes); otherwise the previous figures are kept.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
from choice import summary, sweeps
from fit_costs import calibration_with, derivatives, get, left_out, load, log_error, parameters

from meshwright.costs.accuracy import compare, to_dict, weighted_quantile
from meshwright.costs.calibration import PROFILES, read_tables
from meshwright.costs.estimate import estimate
from meshwright.costs.measurements import Measurement, read
from meshwright.costs.uncertainty import step_band

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "accuracy.md"
RESULT = HERE / "results" / "accuracy.json"
DRY_RUNS = HERE / "data" / "dryrun.csv"  # written by dryrun_rows.py; our own engine, not used in any fit
GOALS = {
    "step time, median": "8 %",
    "step time, 90th percentile": "25 %",
    "step time of a source the fit has not seen, median": "15 %",
    "rows supported": "90 %",
    "rows inside the 80 % band": "80 %",
    "memory, median": "5 %",
    "memory, 90th percentile": "12 %",
    "runs that fitted, called so": "95 %",
    "runs out of memory, called so": "90 %",
    "speed of the chosen layout over the best, median sweep": "97 %",
    "the same, worst tenth of the sweeps": "90 %",
    "one estimate, once loaded": "1 ms",
}


def unseen(path: Path) -> dict[str, float]:
    """Return the errors of every source when left out of the fit."""
    data, tables, fitted = load(path), read_tables(PROFILES), parameters()
    theta = np.log([np.clip(get(tables, p), p.low, p.high) for p in fitted])
    error = log_error(data, calibration_with(tables, fitted, theta))
    slope = derivatives(data, tables, fitted, theta, error)
    off = np.abs(np.expm1(left_out(data, tables, fitted, theta, error, slope)))
    median, high = (round(100 * weighted_quantile(off, data.weight, q), 2) for q in (0.5, 0.9))
    return {"median_abs_pct": median, "p90_abs_pct": high, "parameters": len(fitted)}


def inside_band(rows: list[Measurement]) -> float:
    """Return the percentage of timed rows inside their 80 % band, with equal weight per source."""
    timed = [r for r in rows if r.case and r.step_s and not r.oom and r.tier in ("A", "B")]
    count: dict[str, int] = {}
    for row in timed:
        count[row.source] = count.get(row.source, 0) + 1
    share = 0.0
    for row in timed:
        assert row.case is not None
        ratio = estimate(row.case).step_s / row.step_s
        share += (max(ratio, 1 / ratio) <= 1 + step_band(row.case) / 100) / count[row.source]
    return round(100 * share / len(count), 1)


def milliseconds(rows: list[Measurement]) -> float:
    """Return the median CPU time of one estimate over a sample of the rows."""
    times = []
    for row in [r for r in rows if r.case][::40]:
        assert row.case is not None
        fresh = row.case.replace()
        begin = time.process_time()
        estimate(fresh)
        times.append(time.process_time() - begin)
    return round(1000 * float(np.median(times)), 2)


def dry_runs(path: Path = DRY_RUNS) -> dict[str, Any]:
    """Compare memory estimates of our engine with the dry runs of shipped recipes, in total and by family."""
    rows = read(path)
    sized = [row for row in rows if row.model is not None and not row.tiny]
    errors = compare(rows).memory
    median, high = (round(100 * float(np.quantile(np.abs(errors.error), q)), 2) for q in (0.5, 0.9))
    families = [row.model.family for row in sized if row.model is not None]
    return {
        "median_abs_pct": median,
        "p90_abs_pct": high,
        "by_source": errors.by(errors.source),
        "by_family": errors.by(families),
    }


def figures(path: Path, old: dict[str, Any], refit: bool) -> dict[str, Any]:
    """Return all figures of the report."""
    rows = read(path)
    report, dry = to_dict(compare(rows)), dry_runs()
    report["memory"]["by_source"] = dict(sorted({**report["memory"]["by_source"], **dry["by_source"]}.items()))
    return {
        "date": datetime.date.today().isoformat(),
        "command": "python benchmarks/accuracy_report.py --left-out",
        "python": platform.python_version(),
        **report,
        "dry_run": dry,
        "left_out": unseen(path) if refit else old.get("left_out"),
        "inside_band_pct": inside_band(rows),
        "choice": summary(sweeps(rows)),
        "estimate_ms": milliseconds(rows),
    }


def page(found: dict[str, Any]) -> str:
    """Return the report as Markdown."""
    step, gib, fit, chosen, new = (found[k] for k in ("step_time", "memory", "fit", "choice", "left_out"))
    values = [
        f"{step['median_abs_pct']} %", f"{step['p90_abs_pct']} %", f"{new['median_abs_pct']} %" if new else "not run",
        f"{100 * found['predicted'] / found['rows']:.1f} %", f"{found['inside_band_pct']} %",
        f"{gib['median_abs_pct']} %", f"{gib['p90_abs_pct']} %",
        f"{100 * fit['ok_called_ok'] / fit['ok_rows']:.1f} %", f"{100 * fit['oom_called_oom'] / fit['oom_rows']:.1f} %",
        f"{chosen['median_pct']} %", f"{chosen['worst_tenth_pct']} %", f"{found['estimate_ms']} ms",
    ]  # fmt: skip
    lines = [
        "# How far to trust the estimates",
        "",
        f"Generated on {found['date']} by `{found['command']}` from {found['rows']:,} published measurements"
        " (`benchmarks/data/measurements.csv`). Every source has equal weight, whatever its number of rows; an error is"
        " predicted / measured - 1. Step times: tiers A and B. Memory: tier A, models of real size.",
        "",
        "| figure | reached | goal |",
        "| --- | --- | --- |",
        *(f"| {name} | {value} | {goal} |" for (name, goal), value in zip(GOALS.items(), values, strict=True)),
        "",
        f"The profiles have {new['parameters'] if new else 'about a hundred'} fitted parameters, each with a prior of"
        " physical meaning; `benchmarks/fit_costs.py` fits them. The error on left-out sources is the fairest figure"
        " for a new cluster.",
        "",
    ]
    for title, part, key in (("GPU", step, "by_gpu"), ("source", step, "by_source")):
        lines += [
            f"## Step time by {title}",
            "",
            f"| {title} | rows | median error | bias |",
            "| --- | --- | --- | --- |",
        ]
        lines += [
            f"| {name} | {v['rows']} | {v['median_abs_pct']} % | {v['bias_pct']:+} % |" for name, v in part[key].items()
        ]
        lines.append("")
    lines += ["## Memory by source", "", "| source | rows | median error | bias |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {name} | {v['rows']} | {v['median_abs_pct']} % | {v['bias_pct']:+} % |"
        for name, v in gib["by_source"].items()
    ]
    dry = found["dry_run"]
    lines += [
        "",
        "## Memory of our own engine by family",
        "",
        "Estimates compared with dry runs of shipped recipes at full size on their own clusters"
        " (`benchmarks/data/dryrun.csv`), which match measured peaks of an H200 within 1.2 %. They are not used in any"
        " fit, nor in the figures at the top."
        f" Median {dry['median_abs_pct']} %, 90th percentile {dry['p90_abs_pct']} %.",
        "",
        "| family | recipes | median error | bias |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        f"| {name} | {v['rows']} | {v['median_abs_pct']} % | {v['bias_pct']:+} % |"
        for name, v in dry["by_family"].items()
    ]
    lines += ["", "## Rows that cannot be used", "", "| reason | rows |", "| --- | --- |"]
    lines += [f"| {reason} | {count} |" for reason, count in found["unsupported"].items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=HERE / "data" / "measurements.csv")
    parser.add_argument("--left-out", action="store_true", help="refit without each source in turn")
    args = parser.parse_args()
    old = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    found = figures(args.csv, old, args.left_out)
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    PAGE.write_text(page(found))
    print(page(found).split("## Step time by GPU")[0])


if __name__ == "__main__":
    main()
