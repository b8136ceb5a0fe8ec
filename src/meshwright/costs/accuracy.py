"""Compares the cost model with published measurements: step time, memory, and whether a run fits.

Sources publish between one and hundreds of rows, many of them similar, so every source counts the same: a row weighs
one over the number of rows of its source. Errors are predicted over measured, minus one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.costs.measurements import BY_TFLOPS, Measurement, batches, read_with_notes
from meshwright.costs.memory import memory
from meshwright.costs.open_knobs import knob_ranges
from meshwright.costs.time import step_time
from meshwright.display import Readable, Row, titled
from meshwright.errors import InputError
from meshwright.recipes.case import Case

TIME_TIERS = ("A", "B")
MEMORY_TIERS = ("A",)
ALL_TIERS = ("A", "B", "C")
KNOB_ROWS = 300  # larger tables are not checked for settings that rows leave open


class Errors(msgspec.Struct, frozen=True):
    """Signed errors of some rows, with source, GPU, engine and kind of training of each."""

    error: NDArray[np.float64]
    source: tuple[str, ...]
    gpu: tuple[str, ...]
    measured: NDArray[np.float64]  # seconds or GiB
    engine: tuple[str, ...] = ()
    kind: tuple[str, ...] = ()  # dense, MoE, hybrid, diffusion or adapters

    @property
    def weight(self) -> NDArray[np.float64]:
        """One over the rows of the same source."""
        count = Counter(self.source)
        return np.array([1 / count[name] for name in self.source])

    def quantile(self, share: float) -> float:
        """Return the absolute error in per cent that this share of rows stays below, every source counting the same."""
        return 100 * weighted_quantile(np.abs(self.error), self.weight, share)

    def by(self, names: Sequence[str]) -> dict[str, dict[str, float]]:
        """Return rows, median and 90th percentile of the absolute error, and median signed error, for each name."""
        places: dict[str, list[int]] = defaultdict(list)
        for place, name in enumerate(names):
            places[name].append(place)
        return {name: _group(self.error[np.array(at)]) for name, at in sorted(places.items())}


class Report(Readable, msgspec.Struct, frozen=True):
    """The cost model compared with one table of measurements."""

    rows: int
    predicted: int
    unsupported: dict[str, int]
    step_time: Errors
    memory: Errors
    fit: dict[str, int]
    points: dict[str, list[tuple[float, float]]]  # (measured, predicted) of every usable row, for a plot
    notes: tuple[str, ...] = ()

    def summary(self) -> list[Row]:
        """Return how many rows were predicted and how far off the predictions are."""
        return [
            ("Rows", f"{self.predicted:,} of {self.rows:,} predicted"),
            ("Time", _errors_text(self.step_time)),
            ("Memory", _errors_text(self.memory)),
            *titled("Notes", self.notes),
        ]


def _errors_text(errors: Errors) -> str:
    if not len(errors.error):
        return "no row measured it"
    return (
        f"median |error| {errors.quantile(0.5):.1f} %, 90th percentile {errors.quantile(0.9):.1f} % "
        f"({len(errors.error):,} rows)"
    )


def accuracy(path: str | Path) -> Report:
    """Compare the cost model with every row of a CSV of measurements."""
    rows, notes = read_with_notes(path)
    tflops = sum(row.timed_by == BY_TFLOPS for row in rows)
    if tflops:
        notes = [*notes, f"{tflops} rows state TFLOP/s only; they are in docs/accuracy.md, not in these step times"]
    stated = sum(bool(row.case and (row.allocated_gib or row.reserved_gib)) and not row.oom for row in rows)
    sized = sum(bool(row.case) and _memory_row(row, MEMORY_TIERS) for row in rows)
    if sized < stated:
        which = f"{sized} of the {stated} rows that state it: tier {' and '.join(MEMORY_TIERS)}, models of real size"
        notes = [*notes, f"memory errors are of {which}"]
    if len(rows) <= KNOB_ROWS:  # those of the shipped table are in docs/accuracy.md
        notes = [*notes, *map(str, knob_ranges(rows))]
    return report(rows, str(path), notes)


def report(rows: Sequence[Measurement], path: str, notes: Sequence[str] = ()) -> Report:
    """Compare the cost model with rows, at least one of which can be predicted."""
    if not any(row.case is not None for row in rows):
        reason = Counter(row.unsupported for row in rows).most_common(1)[0][0]
        raise InputError(f"no row of {len(rows)} can be predicted: {reason}", field="file", value=path)
    return msgspec.structs.replace(compare(rows), notes=tuple(notes))


def compare(
    rows: Sequence[Measurement],
    time_tiers: Sequence[str] = TIME_TIERS,
    memory_tiers: Sequence[str] = MEMORY_TIERS,
    by_tflops: bool = False,
) -> Report:
    """Compare the cost model with parsed rows: tiers A and B for time, tier A and real models for memory.

    Rows whose time follows from TFLOP/s are in no fit, as conventions differ; `by_tflops` includes them.
    """
    step, allocated, reserved, fits = predictions(rows)
    usable = [r.case is not None and r.step_s > 0 and (by_tflops or r.timed_by != BY_TFLOPS) for r in rows]
    timed = [i for i, r in enumerate(rows) if usable[i] and not r.oom and r.tier in time_tiers]
    sized = [i for i, r in enumerate(rows) if r.case and _memory_row(r, memory_tiers)]
    gib = np.array([allocated[i] if rows[i].allocated_gib else reserved[i] for i in sized])
    measured = np.array([rows[i].allocated_gib or rows[i].reserved_gib for i in sized])
    return Report(
        rows=len(rows),
        predicted=sum(row.case is not None for row in rows),
        unsupported=dict(Counter(row.unsupported for row in rows if row.case is None).most_common()),
        step_time=_errors(rows, timed, step[timed], np.array([rows[i].step_s for i in timed])),
        memory=_errors(rows, sized, gib, measured),
        fit=_fit(rows, fits),
        points={
            "step time, s": [(r.step_s, float(step[i])) for i, r in enumerate(rows) if usable[i] and not r.oom],
            "memory, GiB": list(zip(measured.tolist(), gib.tolist(), strict=True)),
        },
    )


def predictions(rows: Sequence[Measurement]) -> tuple[NDArray[np.float64], ...]:
    """Return step seconds, GiB allocated and reserved on the measured stage, and whether it fits; NaN if no case."""
    out = np.full((4, len(rows)), np.nan)
    for case, places in batches(rows):
        out[0, places], out[3, places] = step_time(case).step_s, memory(case).fits
        for stage in {rows[place].stage for place in places}:
            gib, here = memory(case, stage), [rows[place].stage == stage for place in places]
            out[1:3, np.array(places)[here]] = np.stack([gib.allocated, gib.reserved])[:, here]
    return tuple(out)


def kind_of(case: Case) -> str:
    """Return the kind of training that errors are grouped by."""
    if case.goal == "peft":
        return "adapters"
    if case.is_diffusion:
        return "diffusion"
    return "hybrid" if case.is_hybrid else "MoE" if case.is_moe else "dense"


def _memory_row(row: Measurement, tiers: Sequence[str]) -> bool:
    measured = bool(row.allocated_gib or row.reserved_gib)
    return measured and not row.oom and not row.tiny and row.mem_tier in tiers


def _errors(
    rows: Sequence[Measurement], at: Sequence[int], predicted: NDArray[np.float64], measured: NDArray[np.float64]
) -> Errors:
    sources, gpus = (tuple(getattr(rows[i], name) for i in at) for name in ("source", "gpu"))
    cases = [case for i in at if (case := rows[i].case) is not None]
    engines = tuple(str(getattr(case, "speed_profile", "") or case.engine) for case in cases)
    return Errors(predicted / measured - 1, sources, gpus, measured, engines, tuple(map(kind_of, cases)))


def _fit(rows: Sequence[Measurement], fits: NDArray[np.float64]) -> dict[str, int]:
    """Count rows that ran and are predicted to fit, and rows that ran out of memory and are predicted not to."""
    labelled = [i for i, r in enumerate(rows) if r.case is not None and r.mem_tier and not r.tiny]
    ran = [i for i in labelled if not rows[i].oom]
    failed = [i for i in labelled if rows[i].oom]
    return {
        "ok_called_ok": int(np.sum(fits[ran] == 1)),
        "ok_rows": len(ran),
        "oom_called_oom": int(np.sum(fits[failed] == 0)),
        "oom_rows": len(failed),
    }


def weighted_quantile(values: NDArray[np.float64], weight: NDArray[np.float64], share: float) -> float:
    """Return the smallest value above this share of the weight; NaN if there are no values.

    A share that ends between two values returns their mean: with equal weights, half of it is the usual median.
    """
    if not len(values):
        return float("nan")
    order: NDArray[np.int64] = np.argsort(values)
    running = np.cumsum(weight[order]) / weight.sum()
    rounding = 1e-9  # of the sums: 0.1 + 0.2 must end where 0.3 does
    low, high = (int(np.searchsorted(running, share + sign * rounding)) for sign in (-1, 1))
    return float(values[order[np.minimum((low, high), len(values) - 1)]].mean())


def _group(error: NDArray[np.float64]) -> dict[str, float]:
    return {
        "rows": len(error),
        "median_abs_pct": _pct(float(np.median(np.abs(error)))),
        "p90_abs_pct": _pct(weighted_quantile(np.abs(error), np.ones(len(error)), 0.9)),
        "bias_pct": _pct(float(np.median(error))),
    }


def _pct(value: float) -> float:
    return round(100 * value, 2)


def to_dict(report: Report) -> dict[str, Any]:
    """Return the report as plain values."""

    def part(errors: Errors) -> dict[str, Any]:
        median, high = (errors.quantile(q) for q in (0.5, 0.9))
        none = not len(errors.error)
        return {
            "median_abs_pct": None if none else round(median, 2),
            "p90_abs_pct": None if none else round(high, 2),
            "rows": len(errors.error),
            "by_source": errors.by(errors.source),
        }

    return {
        "rows": report.rows,
        "predicted": report.predicted,
        "unsupported": report.unsupported,
        "step_time": {
            **part(report.step_time),
            "by_gpu": report.step_time.by(report.step_time.gpu),
            "by_engine": report.step_time.by(report.step_time.engine),
            "by_kind": report.step_time.by(report.step_time.kind),
        },
        "memory": part(report.memory),
        "fit": report.fit,
        "notes": list(report.notes),
    }


def points(report: Report) -> dict[str, list[dict[str, Any]]]:
    """Return every row behind the errors of step time (s) and memory (GiB): source, measured and predicted."""

    def rows(errors: Errors) -> list[dict[str, Any]]:
        columns = zip(errors.source, errors.gpu, errors.measured, errors.error, strict=True)
        return [
            {"source": source, "gpu": gpu, "measured": float(measured), "predicted": float(measured * (1 + error))}
            for source, gpu, measured, error in columns
        ]

    return {"step_time": rows(report.step_time), "memory": rows(report.memory)}


LAYOUT_COLUMNS = (
    "tp",
    "pp",
    "vp",
    "cp",
    "ep",
    "etp",
    "dp_replicate",
    "sp",
    "micro_batch_size",
    "recompute",
    "strategy",
)
SETUP_COLUMNS = ("params_total", "gpu", "world", "gpus_per_node", "seq_length", "global_batch_size", "matmul", "goal")


class LayoutPairs(msgspec.Struct, frozen=True):
    """Pairs of measured layouts of one model on one cluster: logarithms of the ratio of their step times."""

    predicted: NDArray[np.float64]
    measured: NDArray[np.float64]
    weight: NDArray[np.float64]  # every source counts the same, and in it every model on a cluster
    sources: int

    def quantile(self, share: float) -> float:
        """Return the error of a predicted ratio, in per cent, that this share of the pairs stays below."""
        return 100 * float(np.expm1(weighted_quantile(np.abs(self.predicted - self.measured), self.weight, share)))

    def faster(self, gain: float) -> float:
        """Return the share of pairs measured as faster among those predicted to be faster by more than a gain."""
        chosen = np.abs(self.predicted) > np.log1p(gain)
        right = (np.sign(self.predicted) == np.sign(self.measured))[chosen]
        return float(np.average(right, weights=self.weight[chosen]))


def layout_pairs(rows: Sequence[Measurement]) -> LayoutPairs:
    """Return every pair of rows that differ in layout only: same source, framework, model, cluster, data and batch."""
    step = predictions(rows)[0]
    setups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        timed = row.step_s and row.timed_by != BY_TFLOPS and row.tier in TIME_TIERS
        if row.case and timed and not row.oom and not row.tiny:
            profile = getattr(row.case, "speed_profile", "")
            key = (row.source, row.case.engine, profile, *(getattr(row.case, name) for name in SETUP_COLUMNS))
            setups[key].append(i)
    groups: dict[str, list[list[tuple[float, float]]]] = defaultdict(list)
    for (source, *_), places in setups.items():
        if found := _pairs(rows, step, places):
            groups[source].append(found)
    weighted = [(*pair, 1 / len(pairs) / len(setup)) for setup in groups.values() for pairs in setup for pair in pairs]
    predicted, measured, weight = np.array(weighted, dtype=np.float64).reshape(-1, 3).T
    return LayoutPairs(predicted, measured, weight, len(groups))


def _pairs(rows: Sequence[Measurement], step: NDArray[np.float64], places: list[int]) -> list[tuple[float, float]]:
    layouts = {i: tuple(getattr(rows[i].case, name) for name in LAYOUT_COLUMNS) for i in places}
    return [
        (float(np.log(step[a] / step[b])), float(np.log(rows[a].step_s / rows[b].step_s)))
        for a, b in combinations(places, 2)
        if layouts[a] != layouts[b]
    ]
