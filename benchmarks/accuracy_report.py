"""Compare the cost model with published measurements: writes docs/accuracy.md and benchmarks/results/accuracy.json.

    python benchmarks/accuracy_report.py [--csv FILE] [--left-out]

--left-out also refits without each source in turn, and calibrates it with five of its runs (two minutes of one core);
otherwise the previous figures are kept.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import platform
import time
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from choice import summary, sweeps
from fit_costs import Array, Data, LinearFit, family, left_out, linear_fit, usable_rows
from five_runs import RESULT as FIVE_RUNS
from five_runs import measure as measure_five_runs
from numpy.typing import NDArray

from meshwright.costs.accuracy import ALL_TIERS, TIME_TIERS, Errors, compare, layout_pairs, to_dict, weighted_quantile
from meshwright.costs.estimate import estimate
from meshwright.costs.measurements import BY_TFLOPS, CONTRADICTION, Measurement, read
from meshwright.costs.open_knobs import knob_ranges
from meshwright.costs.uncertainty import step_band
from meshwright.planner.goodput import goodput

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "accuracy.md"
RESULT = HERE / "results" / "accuracy.json"
PUBLISHED = HERE / "data" / "published_runs.csv"  # well-known runs that are in no other table
KNOWN = HERE / "data" / "known_runs.csv"  # the well-known runs, by row id of any table
OTHERS = HERE / "data" / "measurements_2.csv"  # in no fit, so that its sources stay unseen
ADDED = HERE / "data" / "measurements_added.csv"  # sources that this project collected itself; in no fit either
SWEEPS = ("vtrain_ground_truth_single", "aleph_alpha_layouts")  # half of all rows: not counted among the pairs
GOODPUT = HERE / "data" / "goodput_runs.csv"  # published shares of time that runs trained
GOODPUT_STATE_GB = 405 * 12  # the sources do not give the size of every model; 1,000 B parameters change up to 2 points
DRY_RUNS = HERE / "data" / "dryrun.csv"  # written by dryrun_rows.py; our own engine, not used in any fit
REPEATS = 5  # estimates of one case
GOALS = {
    "step time, median": "6.5 %",
    "step time, 90th percentile": "22 %",
    "step time of a source left out of the fit, median": "8 %",
    "the same, 90th percentile": "30 %",
    "step time of a family of sources left out, median": "8.5 %",
    "the same for families, 90th percentile": "30 %",
    "rows of left-out sources inside the 80 % band": "78 to 85 %",
    "MoE of left-out sources, median": "10 %",
    "the same for MoE, 90th percentile": "30 %",
    "whole unseen sources, median": "10 %",
    "the same for whole sources, 90th percentile": "28 %",
    "rows supported": "90 %",
    "rows inside the 80 % band": "80 %",
    "memory, median": "3.5 %",
    "memory, 90th percentile": "12 %",
    "runs that fitted, called so": "95 %",
    "runs out of memory, called so": "90 %",
    "speed of the chosen layout over the best, median sweep": "99 %",
    "the same, worst tenth of the sweeps": "92 %",
    "pairs of measured layouts ordered as measured": "80 %",
    "error of a source after five of its runs, median": "7 %",
    "one estimate, once loaded": "1 ms",
}


def unseen(path: Path, fit: LinearFit) -> dict[str, Any]:
    """Return the errors of every source, and of every family of sources, when left out of the fit."""
    data, rest = fit.data, (fit.tables, fit.fitted, fit.theta, fit.error, fit.slope)
    by_source = left_out(data, *rest)
    by_family = left_out(replace(data, source=tuple(map(family, data.source))), *rest)
    bands = np.array([step_band(row.case) for row in usable_rows(path) if row.case]) / 100
    inside = np.expm1(np.abs(by_source)) <= bands
    kinds = np.array(data.training_type)
    return {
        **_quantiles(by_source, data),
        "family": _quantiles(by_family, data),
        "parameters": len(fit.fitted),
        "inside_band_pct": round(100 * float(np.average(inside, weights=data.weight)), 1),
        "kinds": {
            kind: {
                "rows": int((kinds == kind).sum()),
                **_quantiles(by_source, data, kinds == kind),
                "inside_band_pct": round(100 * _share(inside, data, kinds == kind), 1),
            }
            for kind in sorted(set(kinds))
        },
        "sources": {
            source: _quantiles(by_source, data, np.array(data.source) == source) for source in sorted(set(data.source))
        },
    }


def _quantiles(error: Array, data: Data, among: NDArray[np.bool_] | None = None) -> dict[str, float]:
    """Return median and 90th percentile of absolute errors in per cent, every source counting the same."""
    chosen = np.ones(len(error), bool) if among is None else among
    off, weight = np.abs(np.expm1(error[chosen])), _weights(data, chosen)
    median, high = (round(100 * weighted_quantile(off, weight, q), 2) for q in (0.5, 0.9))
    return {"median_abs_pct": median, "p90_abs_pct": high}


def _weights(data: Data, among: NDArray[np.bool_]) -> Array:
    sources = np.array(data.source)[among]
    count = Counter(sources)
    return np.array([1 / count[name] for name in sources])


def _share(inside: NDArray[np.bool_], data: Data, among: NDArray[np.bool_]) -> float:
    return float(np.average(inside[among], weights=_weights(data, among)))


def inside_band(rows: list[Measurement]) -> float:
    """Return the percentage of timed rows inside their 80 % band, with equal weight per source."""
    timed = [r for r in rows if r.case and r.step_s and not r.oom and r.tier in TIME_TIERS]
    timed = [r for r in timed if r.timed_by != BY_TFLOPS]
    count: dict[str, int] = {}
    for row in timed:
        count[row.source] = count.get(row.source, 0) + 1
    share = 0.0
    for row in timed:
        assert row.case is not None
        ratio = estimate(row.case).step_s / row.step_s
        share += (max(ratio, 1 / ratio) <= 1 + step_band(row.case) / 100) / count[row.source]
    return round(100 * share / len(count), 1)


def ordered_pairs(rows: list[Measurement]) -> dict[str, Any]:
    """Return how many pairs of layouts of one model on one cluster are ordered as measured, in per cent.

    Every source counts the same. Layouts of equal measured speed have no order.
    """
    pairs = layout_pairs(rows)
    differ = np.abs(pairs.measured) > 0
    right = np.sign(pairs.predicted[differ]) == np.sign(pairs.measured[differ])
    share = float(np.average(right, weights=pairs.weight[differ]))
    return {"pairs": int(differ.sum()), "sources": pairs.sources, "ordered_pct": round(100 * share, 1)}


def milliseconds(rows: list[Measurement]) -> float:
    """Return the median CPU time of one estimate over a sample of the rows; each row's least of REPEATS counts.

    Other processes on a shared machine evict its caches, which makes an estimate slower, never faster.
    """
    cases = [row.case for row in rows if row.case][::40]
    least = np.full(len(cases), np.inf)
    for _ in range(REPEATS):
        for place, case in enumerate(cases):
            fresh = case.replace()
            begin = time.process_time()
            estimate(fresh)
            least[place] = min(least[place], time.process_time() - begin)
    return round(1000 * float(np.median(least)), 2)


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


def not_fitted(rows: list[Measurement], others: list[Measurement], added: list[Measurement]) -> dict[str, Any]:
    """Compare rows that no fit has used: TFLOP/s-only rows of the fitted table, and all rows of the other tables."""
    own = {r.source for r in added}
    fitted = {r.source for r in rows if r.case and r.step_s and r.timed_by != BY_TFLOPS and r.tier in TIME_TIERS}
    by_tflops = [r for r in rows if r.timed_by == BY_TFLOPS]
    by_tflops = [msgspec.structs.replace(r, allocated_gib=0.0, reserved_gib=0.0) for r in by_tflops]
    chosen = [*by_tflops, *others, *added]

    def group(part: list[Measurement], tiers: tuple[str, ...] = ALL_TIERS) -> dict[str, Any]:
        found = compare(part, tiers, tiers, by_tflops=True)
        errors = {"time": found.step_time, "memory": found.memory}
        measured = {name: _figures(one) if len(one.error) else None for name, one in errors.items()}
        usable = [r for r in part if _usable(r)]
        return {"rows": len(usable), "priced": sum(r.case is not None for r in usable), **measured}

    everything = compare(chosen, ALL_TIERS, ALL_TIERS, by_tflops=True).step_time
    sources = sorted({r.source for r in chosen})
    return {
        "unseen": group([r for r in chosen if r.source not in fitted | own]),
        "unseen_a_b": group([r for r in chosen if r.source not in fitted | own], TIME_TIERS),
        "added": group(added),
        "whole": group([r for r in chosen if r.source not in fitted], TIME_TIERS),
        "partly": group([r for r in chosen if r.source in fitted]),
        "by_source": {
            name: {"seen": name in fitted, "added": name in own, **group([r for r in chosen if r.source == name])}
            for name in sources
        },
        "by_gpu": everything.by(everything.gpu),
        "by_engine": everything.by(everything.engine),
        "by_kind": everything.by(everything.kind),
    }


def _usable(row: Measurement) -> bool:
    """Return whether a row measures something and does not contradict itself."""
    measured = row.step_s or row.timed_by or row.allocated_gib or row.reserved_gib or row.oom
    return bool(measured) and not row.unsupported.startswith(CONTRADICTION)


def known_runs(rows: list[Measurement]) -> list[dict[str, Any]]:
    """Compare the well-known runs, which may be rows of any table."""
    by_id = {row.row_id: row for row in rows}
    with KNOWN.open(encoding="utf-8", newline="") as file:
        named = [(by_id[entry["row_id"]], entry) for entry in csv.DictReader(file)]
    found = []
    for row, entry in named:
        assert row.case is not None, f"{entry['title']}: {row.unsupported}"
        found.append(
            {
                "title": entry["title"],
                "reference": entry["reference"],
                "gpus": f"{row.case.cluster.world:,} {row.case.cluster.gpu.name}",
                "measured_s": round(row.step_s, 3),
                "predicted_s": round(float(estimate(row.case).step_s), 3),
                "band_pct": step_band(row.case),
                "fitted": row.tier in TIME_TIERS and row.timed_by != BY_TFLOPS,
            }
        )
    return found


def goodput_runs() -> list[dict[str, Any]]:
    """Compare the share of time that published runs trained, with a state of 12 bytes for each of 405 B parameters."""
    found = []
    with GOODPUT.open(encoding="utf-8", newline="") as file:
        for run in csv.DictReader(file):
            count, restart_s = int(run["gpus"]), float(run["restart_s"]) if run["restart_s"] else None
            one = goodput(count, GOODPUT_STATE_GB / count, restart_s=restart_s, replicas=int(run["replicas"]))
            found.append(
                {
                    "run": run["run"],
                    "reference": run["reference"],
                    "gpus": count,
                    "published_pct": round(100 * float(run["share"]), 1),
                    "predicted_pct": round(100 * one.share, 1),
                    "failures": int(run["failures"]) if run["failures"] else None,
                    "failures_predicted": round(one.failures_per_day * float(run["days"])) if run["days"] else None,
                }
            )
    return found


def _figures(errors: Errors) -> dict[str, float]:
    """Return rows, median, 90th percentile and bias, every source counting the same."""
    bias = weighted_quantile(errors.error, errors.weight, 0.5)
    return {
        "rows": len(errors.error),
        "median_abs_pct": round(errors.quantile(0.5), 2),
        "p90_abs_pct": round(errors.quantile(0.9), 2),
        "bias_pct": round(100 * bias, 2),
    }


def left_out_rows(rows: list[Measurement]) -> dict[str, dict[str, int]]:
    """Return how many rows of each source have no estimate, by reason."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        measured = row.step_s or row.allocated_gib or row.reserved_gib or row.oom
        if row.case is None or not measured:
            found[row.source][row.unsupported or "neither time nor memory stated"] += 1
    return {source: dict(reasons.most_common()) for source, reasons in sorted(found.items())}


def figures(path: Path, old: dict[str, Any], refit: bool) -> dict[str, Any]:
    """Return all figures of the report."""
    rows, others, added = read(path), read(OTHERS), read(ADDED)
    fit = linear_fit(path) if refit else None
    five = measure_five_runs(usable_rows(path), fit.without) if fit else json.loads(FIVE_RUNS.read_text())
    report, dry = to_dict(compare(rows)), dry_runs()
    report["memory"]["by_source"] = dict(sorted({**report["memory"]["by_source"], **dry["by_source"]}.items()))
    return {
        "date": datetime.date.today().isoformat(),
        "command": "python benchmarks/accuracy_report.py --left-out",
        "python": platform.python_version(),
        **report,
        "dry_run": dry,
        "not_fitted": not_fitted(rows, others, added),
        "known_runs": known_runs([*rows, *others, *read(PUBLISHED)]),
        "goodput": goodput_runs(),
        "left_out_rows": left_out_rows([*rows, *others, *added]),
        "left_out": unseen(path, fit) if fit else old.get("left_out"),
        "inside_band_pct": inside_band(rows),
        "choice": summary(sweeps(rows)),
        "pairs": ordered_pairs([row for row in rows if row.source not in SWEEPS]),
        "open_knobs": [msgspec.structs.asdict(knob) for knob in knob_ranges([*rows, *others, *added])],
        "five_runs_pct": five["after_pct"],
        "estimate_ms": milliseconds(rows),
    }


def page(found: dict[str, Any]) -> str:
    """Return the report as Markdown."""
    step, gib, fit, chosen, new = (found[k] for k in ("step_time", "memory", "fit", "choice", "left_out"))
    values = [
        f"{step['median_abs_pct']} %", f"{step['p90_abs_pct']} %", f"{new['median_abs_pct']} %" if new else "not run",
        f"{new['p90_abs_pct']} %" if new else "not run",
        f"{new['family']['median_abs_pct']} %" if new else "not run",
        f"{new['family']['p90_abs_pct']} %" if new else "not run",
        f"{new['inside_band_pct']} %" if new else "not run",
        *(f"{new['kinds']['moe'][key]} %" if new else "not run" for key in ("median_abs_pct", "p90_abs_pct")),
        *(f"{_whole_sources(found)['time'][key]} %" for key in ("median_abs_pct", "p90_abs_pct")),
        f"{100 * found['predicted'] / found['rows']:.1f} %", f"{found['inside_band_pct']} %",
        f"{gib['median_abs_pct']} %", f"{gib['p90_abs_pct']} %",
        f"{100 * fit['ok_called_ok'] / fit['ok_rows']:.1f} %", f"{100 * fit['oom_called_oom'] / fit['oom_rows']:.1f} %",
        f"{chosen['median_pct']} %", f"{chosen['worst_tenth_pct']} %", f"{found['pairs']['ordered_pct']} %",
        f"{found['five_runs_pct']} %", f"{found['estimate_ms']} ms",
    ]  # fmt: skip
    lines = [
        "# How far to trust the estimates",
        "",
        f"Generated on {found['date']} by `{found['command']}` from {found['rows']:,} published measurements"
        " (`benchmarks/data/measurements.csv`). Every source has equal weight, whatever its number of rows; an error is"
        f" predicted / measured - 1. Step times: the {step['rows']:,} rows of tiers A and B that state seconds."
        f" Memory: the {gib['rows']} rows of tier A and models of real size."
        " `meshwright accuracy` compares the same rows.",
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
    if new:
        lines += _left_out_lines(new)
    for title in ("GPU", "engine", "kind", "source"):
        lines += [f"## Step time by {title}", "", *_table(title, step[f"by_{title.lower()}"]), ""]
    lines += ["## Memory by source", "", *_table("source", gib["by_source"])]
    lines += ["", *_open_knob_lines(found["open_knobs"])]
    lines += ["", *_not_fitted_lines(found["not_fitted"])]
    lines += ["", *_known_lines(found["known_runs"])]
    lines += ["", *_goodput_lines(found["goodput"])]
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
        *_table("family", dry["by_family"], "recipes"),
    ]
    lines += [
        "",
        "## Rows that are left out",
        "",
        "Nothing is left out silently: every row without an estimate, by source.",
    ]
    lines += ["", "| source | reason | rows |", "| --- | --- | --- |"]
    lines += [
        f"| {source} | {reason} | {count} |"
        for source, reasons in found["left_out_rows"].items()
        for reason, count in reasons.items()
    ]
    return "\n".join(lines) + "\n"


def _table(title: str, groups: dict[str, dict[str, float]], counted: str = "rows") -> list[str]:
    """Return groups of errors as a Markdown table."""
    return [
        f"| {title} | {counted} | median error | 90th percentile | bias |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {name} | {v['rows']} | {v['median_abs_pct']} % | {v['p90_abs_pct']} % | {v['bias_pct']:+} % |"
            for name, v in groups.items()
        ),
    ]


def _whole_sources(found: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of all sources of which no row is in the fit, tiers A and B."""
    whole: dict[str, Any] = found["not_fitted"]["whole"]
    return whole


def _open_knob_lines(knobs: list[dict[str, Any]]) -> list[str]:
    """Return the section on settings that rows do not state."""
    return [
        "## Settings that rows do not state",
        "",
        "Their framework's default is taken, or else the usual value. The range of the estimate over the usual values"
        " is the certainty that stating the setting would add (`costs/open_knobs.py`).",
        "",
        "| setting | rows that leave it open | half range, median row | 90th percentile |",
        "| --- | --- | --- | --- |",
        *(f"| {knob['name']} | {knob['rows']} | ±{knob['median_pct']} % | ±{knob['p90_pct']} % |" for knob in knobs),
    ]


def _known_lines(found: list[dict[str, Any]]) -> list[str]:
    """Return the section on well-known runs."""
    off = [abs(one["predicted_s"] / one["measured_s"] - 1) for one in found]
    new = [error for error, one in zip(off, found, strict=True) if not one["fitted"]]
    lines = [
        "## Well-known runs",
        "",
        "Seconds per step. LLaMA, Llama 2, Falcon, GPT-NeoX and DeepSeek-V3 state an average over the whole run,"
        " restarts included, which estimates leave out. Where no layout is published, the fastest that fits is taken."
        f" Median error {100 * float(np.median(off)):.1f} % over {len(off)} runs,"
        f" {100 * float(np.median(new)):.1f} % over the {len(new)} that no fit has used.",
        "",
        "| run | GPUs | published | estimate | error | band | in the fit | source |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in found:
        error = 100 * (one["predicted_s"] / one["measured_s"] - 1)
        lines.append(
            f"| {one['title']} | {one['gpus']} | {one['measured_s']:.3g} s | {one['predicted_s']:.3g} s |"
            f" {error:+.1f} % | ±{one['band_pct']:.0f} % | {'yes' if one['fitted'] else 'no'} | {one['reference']} |"
        )
    return lines


def _goodput_lines(found: list[dict[str, Any]]) -> list[str]:
    """Return the section on the share of time that runs train."""
    lines = [
        "## Goodput of published runs",
        "",
        "Share of the time that a run trains, after failures, restarts and checkpoints (`planner/goodput.py`). The"
        " failure rate is that of Llama 3; restarts and replicas as the source states them.",
        "",
        "| run | GPUs | published | estimate | failures, published | estimate | source |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in found:
        counts = (one["failures"], one["failures_predicted"])
        failures = " | ".join("" if count is None else str(count) for count in counts)
        lines.append(
            f"| {one['run']} | {one['gpus']:,} | {one['published_pct']} % | {one['predicted_pct']} % | {failures} |"
            f" {one['reference']} |"
        )
    return lines


def _left_out_lines(found: dict[str, Any]) -> list[str]:
    """Return the section on sources that the fit had not seen."""
    return [
        "## Sources left out of the fit",
        "",
        "Each source is estimated with the parameters that a fit to all others finds. The band is the stated one.",
        "",
        "| kind | rows | median error | 90th percentile | inside the 80 % band |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {kind} | {v['rows']} | {v['median_abs_pct']} % | {v['p90_abs_pct']} % | {v['inside_band_pct']} % |"
            for kind, v in found["kinds"].items()
        ),
        "",
        "| source | median error | 90th percentile |",
        "| --- | --- | --- |",
        *(f"| {name} | {v['median_abs_pct']} % | {v['p90_abs_pct']} % |" for name, v in found["sources"].items()),
        "",
    ]


def _not_fitted_lines(found: dict[str, Any]) -> list[str]:
    """Return the section on rows that no fit has used."""

    def cells(errors: dict[str, Any] | None) -> str:
        if not errors:
            return " |  |  | "
        return f"{errors['rows']} | {errors['median_abs_pct']} % | {errors['p90_abs_pct']} % | {errors['bias_pct']:+} %"

    lines = [
        "## Rows that no fit has used",
        "",
        "`benchmarks/data/measurements_2.csv`, `measurements_added.csv` (sources that this project collected itself),"
        " and the rows of `measurements.csv` that state TFLOP/s only. Their step"
        " time is tokens per step × model FLOPs per token / TFLOP/s, with the convention that the source states: causal"
        " attention counted as half (Megatron since 2024) or in full; without one, only if the two differ by less than"
        " 5 %. All tiers. A source is unseen if no row of it is in the fit. Rows that measure nothing or contradict"
        " themselves are not counted. The sequence length of AutoModel's CI runs"
        " is their mean number of tokens per sample, and their memory that of a median step.",
        "",
        "| rows | time | median error | 90th percentile | bias | memory | median error | 90th percentile | bias |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    titles = {
        "unseen": "unseen sources",
        "unseen_a_b": "of these, tiers A and B",
        "added": "sources that we added, also unseen",
        "partly": "rows of fitted sources",
    }
    for name, title in titles.items():
        group = found[name]
        rows = title if name == "unseen_a_b" else f"{title}: {group['priced']} of {group['rows']} have an estimate"
        lines.append(f"| {rows} | {cells(group['time'])} | {cells(group['memory'])} |")
    lines += [
        "",
        "| source | in the fit | estimates | time | median error | 90th percentile | bias | memory | median error |"
        " 90th percentile | bias |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, one in found["by_source"].items():
        seen = "other rows" if one["seen"] else "no; added by us" if one["added"] else "no"
        priced = f"{one['priced']} of {one['rows']}"
        lines.append(f"| {name} | {seen} | {priced} | {cells(one['time'])} | {cells(one['memory'])} |")
    for title in ("gpu", "engine", "kind"):
        lines += ["", *_table(title.replace("gpu", "GPU"), found[f"by_{title}"])]
    return lines


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
