"""Fit the calibration profiles of the cost model to published step times.

    python benchmarks/fit_costs.py [--rounds 6] [--write] [--csv benchmarks/data/measurements.csv]
    python benchmarks/fit_costs.py --engine [--write]      only our own engine, to results/calibration_set.json

Every fitted parameter has a prior with a physical meaning (a share of a peak, a latency, bytes per element) and a width
that limits how far data moves it; parameters without data stay at their prior. The loss is the absolute error of the
logarithm of the step time, smoothed near zero, plus some of its square; every source has equal weight, whatever its
number of rows. Rows beyond a factor of two (functional runs, misread tables) pull no more than those at it.

Solved by Gauss-Newton with reweighting. Leave-one-source-out refits everything without the source, starting from the
common solution and using its derivatives, then evaluates the source with the real model. Our own engine is fitted to
what calibration_set.py measured, where a model family is a source: the fit to every second family is evaluated on the
others, and the other way round.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import re
import shlex
import tomllib
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import meshwright
from meshwright.costs.accuracy import TIME_TIERS, layout_pairs, weighted_quantile
from meshwright.costs.calibration import PROFILES, Calibration, from_tables, read_tables
from meshwright.costs.measurements import BY_TFLOPS, Measurement, batches, read
from meshwright.costs.time import step_time
from meshwright.costs.uncertainty import error_bands, error_class, step_band
from meshwright.recipes.case import Case

HERE = Path(__file__).parent
PRIORS = HERE / "data" / "priors.toml"
ENGINE_PRIORS = HERE / "data" / "priors_engine.toml"
CALIBRATION_SET = HERE / "results" / "calibration_set.json"
SMOOTH = 0.04  # below this log error the loss is quadratic
TAIL = 2.0  # weight of the squared error added to the absolute one: large errors matter more than many small ones
CUT = 0.7  # beyond this log error (a factor of two) a row pulls no more
STEP = 0.02  # of a log parameter, for the derivatives
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Parameter:
    """A fitted parameter: its key in the profiles, its prior, the width of the prior in logs, its limits."""

    table: str
    key: str
    prior: float
    width: float
    low: float
    high: float

    @property
    def name(self) -> str:
        return f"{self.table}.{self.key}"


@dataclass(frozen=True)
class Data:
    """Rows with a measured time as batches, their weights, sources and types of training."""

    cases: list[tuple[Case, NDArray[np.int64]]]
    measured: Array
    weight: Array
    source: tuple[str, ...]
    training_type: tuple[str, ...]
    widening: Array | None = None  # of a row's band over that of its type: beyond the measured range


def parameters(path: Path = PRIORS) -> list[Parameter]:
    """Return all fitted parameters from a file of priors."""
    groups = tomllib.loads(path.read_text())
    return [Parameter(**entry) for group in groups.values() for entry in group["numbers"]]


def usable_rows(path: Path) -> list[Measurement]:
    """Return the rows of tiers A and B that have a case and a time."""
    timed = [r for r in read(path) if r.case and r.step_s and not r.oom and r.tier in TIME_TIERS]
    return [r for r in timed if r.timed_by != BY_TFLOPS]


def family(source: str) -> str:
    """Return the family of a source: sources of one project measure with the same hands."""
    named = re.match("mlperf|megatron_bridge|megatron_lm|megatron_sc21|vtrain|nemo_docs|automodel", source)
    if named:
        return named[0]
    return "torchtitan" if "titan" in source else source


def load(path: Path) -> Data:
    """Load the rows that the fit uses."""
    rows = usable_rows(path)
    count = Counter(r.source for r in rows)
    cases = [(case, np.array(indices)) for case, indices in batches(rows)]
    weight = np.array([1 / count[r.source] for r in rows])
    training_types = tuple(error_class(r.case) for r in rows if r.case)
    widening = np.array([step_band(r.case) / error_bands().step_pct[error_class(r.case)] for r in rows if r.case])
    measured, sources = np.array([r.step_s for r in rows]), tuple(r.source for r in rows)
    return Data(cases, measured, weight, sources, training_types, widening)


def load_engine(path: Path) -> Data:
    """Load what our own engine measured, with equal weight per square root of a family's rows."""
    rows = [row for row in json.loads(path.read_text())["rows"] if not {"error", "superseded"} & row.keys()]
    count = Counter(row["family"] for row in rows)
    cases = [(_measured_case(row["command"]), np.array([index])) for index, row in enumerate(rows)]
    return Data(
        cases,
        np.array([row["step_s"] for row in rows]),
        np.array([count[row["family"]] ** -0.5 for row in rows]),
        tuple(row["family"] for row in rows),
        tuple(row["case"] for row in rows),
    )


def _measured_case(command: str) -> Case:
    """Return the case of a `meshwright bench MODEL --goal GOAL KEY=VALUE...` command on an H200."""
    _, _, model, _, goal, *changes = shlex.split(command)
    changes = [change for change in changes if not change.startswith("train.steps=")]
    case: Case = meshwright.estimate(model, "1xH200", goal, overrides=changes).case
    return case


def get(tables: dict[str, Any], parameter: Parameter) -> float:
    """Return a parameter's current value, or its prior if the profile has none."""
    *path, last = parameter.key.split("/")
    table: Any = tables[parameter.table]
    for part in path:
        table = table.get(part, {})
    return float(table.get(last, parameter.prior))


def put(tables: dict[str, Any], parameter: Parameter, value: float) -> None:
    """Set a parameter."""
    *path, last = parameter.key.split("/")
    table: Any = tables[parameter.table]
    for part in path:
        table = table.setdefault(part, {})
    table[last] = value


def calibration_with(tables: dict[str, Any], fitted: list[Parameter], theta: Array) -> Calibration:
    """Return the calibration with the fitted parameters set."""
    changed = copy.deepcopy(tables)
    for parameter, value in zip(fitted, np.exp(theta), strict=True):
        put(changed, parameter, float(value))
    return from_tables(changed)


def touches(parameter: Parameter, case: Case, calibration: Calibration) -> bool:
    """Return whether a batch can depend on a parameter."""
    training_type, _, name = parameter.table.partition("_")
    if training_type == "gpu":
        clock = parameter.key.split("/")
        return name == case.cluster.gpu.arch and (clock[0] != "clock" or clock[1] == case.cluster.gpu.name)
    if training_type == "engine":
        return calibration.engine(case) is calibration.engines[name]
    return True


def log_error(data: Data, calibration: Calibration, only: Parameter | None = None, base: Array | None = None) -> Array:
    """Return log(predicted / measured); batches that a parameter cannot change keep their base value."""
    out = np.empty(len(data.measured)) if base is None else base.copy()
    for case, indices in data.cases:
        if only is None or touches(only, case, calibration):
            out[indices] = np.log(predict(case, calibration) / data.measured[indices])
    return out


def predict(case: Case, calibration: Calibration) -> Array:
    """Return the step seconds of a batch under a calibration."""
    return np.asarray(step_time(case.replace(calibration=calibration)).step_s)  # type: ignore[arg-type]


def derivatives(data: Data, tables: dict[str, Any], fitted: list[Parameter], theta: Array, base: Array) -> Array:
    """Return the derivative of every row's log error by every parameter."""
    out = np.empty((len(base), len(fitted)))
    for i, parameter in enumerate(fitted):
        moved = theta.copy()
        step = STEP if theta[i] + STEP <= np.log(parameter.high) else -STEP
        moved[i] += step
        out[:, i] = (log_error(data, calibration_with(tables, fitted, moved), parameter, base) - base) / step
    return out


def solve(error: Array, slope: Array, weight: Array, theta: Array, fitted: list[Parameter], loops: int = 12) -> Array:
    """Return the parameters that minimize the linearized loss, by reweighted least squares with priors."""
    prior = np.log([p.prior for p in fitted])
    pull = np.array([p.width for p in fitted]) ** -2.0
    low, high = np.log([p.low for p in fitted]), np.log([p.high for p in fitted])
    total = weight.sum()
    new = theta.copy()
    for _ in range(loops):
        now = error + slope @ (new - theta)
        each = weight / total * (1 / np.maximum(np.abs(now), SMOOTH) + TAIL)
        each = np.where(np.abs(now) > CUT, each * CUT / np.abs(now), each)
        scaled = slope * each[:, None]
        left = slope.T @ scaled + PRIOR_WEIGHT * np.diag(pull)
        right = -(scaled.T @ (error - slope @ theta)) + PRIOR_WEIGHT * pull * prior
        new = np.clip(np.linalg.solve(left, right), np.maximum(low, theta - 0.5), np.minimum(high, theta + 0.5))
    return new


PRIOR_WEIGHT = 0.0004  # one width off the prior costs as much as 0.02 % of error everywhere, or 0.7 % in one source


def report(name: str, error: Array, data: Data) -> tuple[float, float]:
    """Print and return the source-weighted median and 90th percentile."""
    off = np.abs(np.expm1(error))
    median, high = (100 * weighted_quantile(off, data.weight, q) for q in (0.5, 0.9))
    print(f"{name:28s} median {median:5.2f} %   p90 {high:5.1f} %", flush=True)
    return median, high


def loss(error: Array, theta: Array, data: Data, fitted: list[Parameter]) -> float:
    """Return the loss that the fit minimizes."""
    off = np.abs(error)
    each = np.where(off < SMOOTH, off**2 / (2 * SMOOTH) + SMOOTH / 2, off) + TAIL / 2 * off**2
    each = np.minimum(each, CUT + TAIL / 2 * CUT**2)
    prior = np.log([p.prior for p in fitted])
    width = np.array([p.width for p in fitted])
    return float(
        (each * data.weight).sum() / data.weight.sum() + PRIOR_WEIGHT / 2 * np.sum(((theta - prior) / width) ** 2)
    )


def fit(data: Data, tables: dict[str, Any], fitted: list[Parameter], rounds: int) -> tuple[Array, Array, Array]:
    """Fit, and return the final parameters, errors and derivatives."""
    theta = np.log([np.clip(get(tables, p), p.low, p.high) for p in fitted])
    error = log_error(data, calibration_with(tables, fitted, theta))
    report("before", error, data)
    best = loss(error, theta, data, fitted)
    slope = derivatives(data, tables, fitted, theta, error)
    for i in range(rounds):
        goal, scale = solve(error, slope, data.weight, theta, fitted), 1.0
        while scale > 0.1:
            new = theta + scale * (goal - theta)
            now = log_error(data, calibration_with(tables, fitted, new))
            value = loss(now, new, data, fitted)
            if value < best:
                break
            scale /= 2
        else:
            break
        gain, theta, error, best = best - value, new, now, value
        report(f"round {i + 1} (loss {best:.4f})", error, data)
        slope = derivatives(data, tables, fitted, theta, error)
        if gain < 1e-4:
            break
    return theta, error, slope


@dataclass(frozen=True)
class LinearFit:
    """The shipped parameters, their errors and derivatives: what a fit without some sources starts from."""

    data: Data
    tables: dict[str, Any]
    fitted: list[Parameter]
    theta: Array
    error: Array
    slope: Array

    def without(self, source: str) -> Calibration:
        """Return the calibration that is fitted to all other sources."""
        weight = np.where(np.array(self.data.source) == source, 0.0, self.data.weight)
        return calibration_with(
            self.tables, self.fitted, solve(self.error, self.slope, weight, self.theta, self.fitted)
        )


def linear_fit(path: Path) -> LinearFit:
    """Load the rows, and return the shipped parameters with their errors and derivatives."""
    data, tables, fitted = load(path), read_tables(PROFILES), parameters()
    theta = np.log([np.clip(get(tables, p), p.low, p.high) for p in fitted])
    error = log_error(data, calibration_with(tables, fitted, theta))
    return LinearFit(data, tables, fitted, theta, error, derivatives(data, tables, fitted, theta, error))


def left_out(
    data: Data, tables: dict[str, Any], fitted: list[Parameter], theta: Array, error: Array, slope: Array
) -> Array:
    """Return the errors of every source when left out of the fit."""
    out = error.copy()
    sources = np.array(data.source)
    for name in sorted(set(data.source)):
        selected = sources == name
        new = solve(error, slope, np.where(selected, 0.0, data.weight), theta, fitted)
        calibration = calibration_with(tables, fitted, new)
        for case, indices in data.cases:
            if selected[indices].any():
                out[indices] = np.log(predict(case, calibration) / data.measured[indices])
    return out


def write(tables: dict[str, Any], fitted: list[Parameter], theta: Array) -> None:
    """Write the fitted parameters into the profile files with four digits; everything else is unchanged."""
    import tomlkit

    for name in {p.table for p in fitted}:
        path = PROFILES / f"{name}.toml"
        document = tomlkit.parse(path.read_text())
        for parameter, value in zip(fitted, np.exp(theta), strict=True):
            if parameter.table == name:
                put({name: document}, parameter, float(f"{value:.4g}"))
        path.write_text(tomlkit.dumps(document))


def fit_bands(unseen: Array, data: Data) -> dict[str, float]:
    """Return the half-width of the 80 % band of every type of training, with equal weight per source.

    It is the 80th percentile of the errors of left-out sources. Functional runs have no useful band and get a factor
    of two.
    """
    training_types, sources = np.array(data.training_type), np.array(data.source)
    found = {}
    for training_type in error_bands().step_pct:
        selected = training_types == training_type
        count = Counter(sources[selected])
        weight = np.array([1 / count[name] for name in sources[selected]])
        assert data.widening is not None
        off = np.expm1(np.abs(unseen[selected])) / data.widening[selected]
        found[training_type] = min(math.ceil(1000 * weighted_quantile(off, weight, 0.8)) / 10, 100.0)
        print(
            f"  band {training_type:16s} {found[training_type]:5.1f} %   {selected.sum()} rows of {len(count)} sources"
        )
    return found


def write_bands(found: dict[str, float], csv: Path) -> None:
    """Write the fitted error bands and the gain of a layout that counts; the widening factors are unchanged."""
    import tomlkit

    path = PROFILES.parent / "uncertainty.toml"
    document = tomlkit.parse(path.read_text())
    for training_type, value in found.items():
        put({"bands": document}, Parameter("bands", f"step_pct/{training_type}", 0, 0, 0, 0), value)
    document["layout_gain_pct"] = round(layout_pairs(read(csv)).quantile(0.6), 1)
    path.write_text(tomlkit.dumps(document))


def fit_engine(rounds: int, writes: bool) -> None:
    """Fit our own engine, and print how well families predict each other."""
    data, tables, fitted = load_engine(CALIBRATION_SET), read_tables(PROFILES), parameters(ENGINE_PRIORS)
    print(f"{len(data.measured)} cases of {len(set(data.source))} families, {len(fitted)} parameters")
    theta, error, slope = fit(data, tables, fitted, rounds)
    unseen = left_out(data, tables, fitted, theta, error, slope)
    report("leave one family out", unseen, data)
    report("leave half the families out", half_left_out(data, tables, fitted, theta, error, slope), data)
    for case, seen, new in zip(data.training_type, np.expm1(error), np.expm1(unseen), strict=True):
        print(f"  {case:50s} {seen:+6.0%}   family left out {new:+6.0%}")
    for parameter, value in zip(fitted, np.exp(theta), strict=True):
        print(f"  {parameter.name:42s} {parameter.prior:10.4g} -> {value:10.4g}")
    if writes:
        write(tables, fitted, theta)


def half_left_out(
    data: Data, tables: dict[str, Any], fitted: list[Parameter], theta: Array, error: Array, slope: Array
) -> Array:
    """Return the errors of every second family when fitted to the others, and of the others when fitted to these."""
    out = error.copy()
    first = set(sorted(set(data.source))[::2])
    for half in (first, set(data.source) - first):
        left = np.array([source in half for source in data.source])
        new = solve(error, slope, np.where(left, 0.0, data.weight), theta, fitted)
        now = log_error(data, calibration_with(tables, fitted, new))
        out[left] = now[left]
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=HERE / "data" / "measurements.csv")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--write", action="store_true", help="write the profiles")
    parser.add_argument("--engine", action="store_true", help="fit our own engine to its calibration set")
    args = parser.parse_args()
    if args.engine:
        fit_engine(args.rounds, args.write)
        return
    data, tables, fitted = load(args.csv), read_tables(PROFILES), parameters()
    print(f"{len(data.measured)} rows of {len(set(data.source))} sources, {len(fitted)} parameters")
    theta, error, slope = fit(data, tables, fitted, args.rounds)
    unseen = left_out(data, tables, fitted, theta, error, slope)
    report("leave one source out", unseen, data)
    families = replace(data, source=tuple(map(family, data.source)))
    report("leave one family of sources out", left_out(families, tables, fitted, theta, error, slope), data)
    found = fit_bands(unseen, data)
    bands = np.array([found[training_type] for training_type in data.training_type]) * data.widening / 100
    inside = np.expm1(np.abs(unseen)) <= bands
    print(f"left out, inside their band: {100 * np.average(inside, weights=data.weight):.1f} % of rows")
    for parameter, value in zip(fitted, np.exp(theta), strict=True):
        print(f"  {parameter.name:42s} {parameter.prior:10.4g} -> {value:10.4g}")
    if args.write:
        write(tables, fitted, theta)
        write_bands(found, args.csv)


if __name__ == "__main__":
    main()
