"""Fit the calibration profiles of the cost model to published step times.

    python benchmarks/fit_costs.py [--rounds 6] [--write] [--csv benchmarks/data/measurements.csv]

Every fitted number has a prior with a physical meaning (a share of a peak, a latency, bytes per element) and a width
that says how far data may move it; numbers without data stay at their prior. The loss is the absolute error of the
logarithm of the step time, smoothed near zero, with some of its square; every source counts the same however many rows
it has. Rows beyond a factor of two (functional runs, misread tables) pull no more than those at it.

Solved by Gauss-Newton with reweighting. Leave-one-source-out refits everything without the source, starting from the
common solution and using its derivatives, then prices the source with the real model.
"""

from __future__ import annotations

import argparse
import copy
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.costs.accuracy import TIME_TIERS, weighted_quantile
from meshwright.costs.calibration import PROFILES, Calibration, from_tables, read_tables
from meshwright.costs.measurements import Measurement, batches, read
from meshwright.costs.time import step_time
from meshwright.costs.uncertainty import error_bands, error_class
from meshwright.recipes.case import Case

HERE = Path(__file__).parent
PRIORS = HERE / "data" / "priors.toml"
SMOOTH = 0.04  # below this log error the loss is quadratic
TAIL = 2.0  # weight of the squared error beside the absolute one: large errors matter more than many small ones
CUT = 0.7  # beyond this log error (a factor of two) a row pulls no more
STEP = 0.02  # of a log parameter, for the derivatives
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Parameter:
    """One fitted number: where it stands in the profiles, its prior, the width of the prior in logs, its limits."""

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
    """Rows with a measured time as batches, what they weigh, and the kind of training each is."""

    cases: list[tuple[Case, NDArray[np.int64]]]
    measured: Array
    weight: Array
    source: tuple[str, ...]
    kind: tuple[str, ...]


def parameters() -> list[Parameter]:
    """Every fitted number, from the file of priors."""
    groups = tomllib.loads(PRIORS.read_text())
    return [Parameter(**entry) for group in groups.values() for entry in group["numbers"]]


def load(path: Path) -> Data:
    """Rows of tiers A and B that have a case and a time."""
    rows: list[Measurement] = [r for r in read(path) if r.case and r.step_s and not r.oom and r.tier in TIME_TIERS]
    count = Counter(r.source for r in rows)
    cases = [(case, np.array(places)) for case, places in batches(rows)]
    weight = np.array([1 / count[r.source] for r in rows])
    kinds = tuple(error_class(r.case) for r in rows if r.case)
    return Data(cases, np.array([r.step_s for r in rows]), weight, tuple(r.source for r in rows), kinds)


def get(tables: dict[str, Any], parameter: Parameter) -> float:
    """The number's present value; the prior where the profile leaves it out."""
    value: Any = tables[parameter.table]
    for part in parameter.key.split("/"):
        value = value.get(part, parameter.prior)
    return float(value)


def put(tables: dict[str, Any], parameter: Parameter, value: float) -> None:
    """Set the number."""
    *path, last = parameter.key.split("/")
    at: Any = tables[parameter.table]
    for part in path:
        at = at[part]
    at[last] = value


def made(tables: dict[str, Any], fitted: list[Parameter], theta: Array) -> Calibration:
    """The calibration with the fitted numbers set."""
    changed = copy.deepcopy(tables)
    for parameter, value in zip(fitted, np.exp(theta), strict=True):
        put(changed, parameter, float(value))
    return from_tables(changed)


def touches(parameter: Parameter, case: Case, own: Calibration) -> bool:
    """Whether a batch can depend on the number at all."""
    kind, _, name = parameter.table.partition("_")
    if kind == "gpu":
        clock = parameter.key.split("/")
        return name == case.cluster.gpu.arch and (clock[0] != "clock" or clock[1] == case.cluster.gpu.name)
    if kind == "engine":
        return own.engine(case) is own.engines[name]
    return True


def log_error(data: Data, own: Calibration, only: Parameter | None = None, base: Array | None = None) -> Array:
    """Logarithm of predicted over measured; batches a parameter cannot change keep their base value."""
    out = np.empty(len(data.measured)) if base is None else base.copy()
    for case, places in data.cases:
        if only is None or touches(only, case, own):
            out[places] = np.log(priced(case, own) / data.measured[places])
    return out


def priced(case: Case, own: Calibration) -> Array:
    """Step seconds of a batch under a calibration; set in place, so that what it does not change is kept."""
    case.calibration = own  # type: ignore[attr-defined]  # names are found by __getattr__
    return np.asarray(step_time(case).step_s)


def derivatives(data: Data, tables: dict[str, Any], fitted: list[Parameter], theta: Array, base: Array) -> Array:
    """Change of every row's log error with every parameter."""
    out = np.empty((len(base), len(fitted)))
    for i, parameter in enumerate(fitted):
        moved = theta.copy()
        step = STEP if theta[i] + STEP <= np.log(parameter.high) else -STEP
        moved[i] += step
        out[:, i] = (log_error(data, made(tables, fitted, moved), parameter, base) - base) / step
    return out


def solve(error: Array, slope: Array, weight: Array, theta: Array, fitted: list[Parameter], loops: int = 12) -> Array:
    """The parameters that minimise the loss if errors change linearly, by reweighted least squares with priors."""
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
    """What the fit minimises."""
    off = np.abs(error)
    each = np.where(off < SMOOTH, off**2 / (2 * SMOOTH) + SMOOTH / 2, off) + TAIL / 2 * off**2
    each = np.minimum(each, CUT + TAIL / 2 * CUT**2)
    prior = np.log([p.prior for p in fitted])
    width = np.array([p.width for p in fitted])
    return float(
        (each * data.weight).sum() / data.weight.sum() + PRIOR_WEIGHT / 2 * np.sum(((theta - prior) / width) ** 2)
    )


def fit(data: Data, tables: dict[str, Any], fitted: list[Parameter], rounds: int) -> tuple[Array, Array, Array]:
    """Parameters, errors and derivatives at the end."""
    theta = np.log([np.clip(get(tables, p), p.low, p.high) for p in fitted])
    error = log_error(data, made(tables, fitted, theta))
    report("before", error, data)
    best = loss(error, theta, data, fitted)
    slope = derivatives(data, tables, fitted, theta, error)
    for i in range(rounds):
        goal, scale = solve(error, slope, data.weight, theta, fitted), 1.0
        while scale > 0.1:
            new = theta + scale * (goal - theta)
            now = log_error(data, made(tables, fitted, new))
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


def left_out(
    data: Data, tables: dict[str, Any], fitted: list[Parameter], theta: Array, error: Array, slope: Array
) -> Array:
    """Errors of every source when the fit has not seen it."""
    out = error.copy()
    sources = np.array(data.source)
    for name in sorted(set(data.source)):
        mine = sources == name
        new = solve(error, slope, np.where(mine, 0.0, data.weight), theta, fitted)
        own = made(tables, fitted, new)
        for case, places in data.cases:
            if mine[places].any():
                out[places] = np.log(priced(case, own) / data.measured[places])
    return out


def write(tables: dict[str, Any], fitted: list[Parameter], theta: Array) -> None:
    """Write the fitted numbers into the profile files, four digits each; everything else in them stays."""
    import tomlkit

    for name in {p.table for p in fitted}:
        path = PROFILES / f"{name}.toml"
        document = tomlkit.parse(path.read_text())
        for parameter, value in zip(fitted, np.exp(theta), strict=True):
            if parameter.table == name:
                put({name: document}, parameter, float(f"{value:.4g}"))
        path.write_text(tomlkit.dumps(document))


def fitted_bands(seen: Array, unseen: Array, data: Data) -> dict[str, float]:
    """Half-width of the 80 per cent band of every kind of training, every source counting the same within it.

    New runs lie between those the fit has seen and those of sources it has not: the geometric mean of the two 80th
    percentiles. Functional runs have no useful band and get a factor of two.
    """
    kinds, sources = np.array(data.kind), np.array(data.source)
    found = {}
    for kind in error_bands().step_pct:
        mine = kinds == kind
        count = Counter(sources[mine])
        weight = np.array([1 / count[name] for name in sources[mine]])
        both = [weighted_quantile(np.expm1(np.abs(e[mine])), weight, 0.8) for e in (seen, unseen)]
        found[kind] = round(min(100 * float(np.sqrt(both[0] * both[1])), 100.0), 1)
        print(f"  band {kind:16s} {found[kind]:5.1f} %   {mine.sum()} rows of {len(count)} sources")
    return found


def write_bands(found: dict[str, float]) -> None:
    """Write the fitted error bands; the factors that widen them stay."""
    import tomlkit

    path = PROFILES.parent / "uncertainty.toml"
    document = tomlkit.parse(path.read_text())
    for kind, value in found.items():
        put({"bands": document}, Parameter("bands", f"step_pct/{kind}", 0, 0, 0, 0), value)
    path.write_text(tomlkit.dumps(document))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=HERE / "data" / "measurements.csv")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--write", action="store_true", help="write the profiles")
    asked = parser.parse_args()
    data, tables, fitted = load(asked.csv), read_tables(PROFILES), parameters()
    print(f"{len(data.measured)} rows of {len(set(data.source))} sources, {len(fitted)} parameters")
    theta, error, slope = fit(data, tables, fitted, asked.rounds)
    unseen = left_out(data, tables, fitted, theta, error, slope)
    report("leave one source out", unseen, data)
    found = fitted_bands(error, unseen, data)
    inside = np.expm1(np.abs(error)) <= np.array([found[kind] for kind in data.kind]) / 100
    print(
        f"inside their band: {100 * np.average(inside, weights=data.weight):.1f} % of rows, sources weighing the same"
    )
    for parameter, value in zip(fitted, np.exp(theta), strict=True):
        print(f"  {parameter.name:42s} {parameter.prior:10.4g} -> {value:10.4g}")
    if asked.write:
        write(tables, fitted, theta)
        write_bands(found)


if __name__ == "__main__":
    main()
