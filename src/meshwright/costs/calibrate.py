"""Calibrates the cost model to a machine, from microbenchmarks or from runs."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np

from meshwright import file_access
from meshwright.clusters import Gpu, gpu
from meshwright.costs.calibration import Calibration, shipped
from meshwright.costs.measurements import Measurement, batches, read
from meshwright.costs.time import step_time
from meshwright.errors import InputError

LARGE = 2048  # minimum tokens and widths at which a matmul reaches its plateau
SLOWEST, FASTEST = 0.3, 3.0  # range of speeds over the shipped profile
WORST_FIT = 0.5  # median error above which the fit is rejected


class MachineProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one machine reaches, on top of the shipped profile of its GPU architecture."""

    gpu: str
    source: str = ""
    clock: float = 1.0  # speed of compute over the architecture's profile
    matmul: dict[str, float] = {}  # share of the dense peak, by precision
    attention: float | None = None  # share of the bf16 peak over the causal half, forward, best kernel
    hbm: float | None = None
    link: float | None = None
    network: float | None = None
    runs: int = 0  # number of runs it was fitted to
    error_pct: float | None = None  # median error over them after the fit

    def apply(self, to: Calibration) -> Calibration:
        """Return the calibration with this machine's numbers in place of its architecture's."""
        arch = gpu(self.gpu).arch
        known = to.gpus[arch]
        changes: dict[str, Any] = {name: getattr(self, name) for name in ("hbm", "link", "network")}
        calibrated = msgspec.structs.replace(
            known,
            matmul={**known.matmul, **self.matmul},
            attention={**known.attention, **({"best": self.attention} if self.attention else {})},
            clock={**known.clock, gpu(self.gpu).name: self.clock},
            **{name: value for name, value in changes.items() if value is not None},
        )
        return msgspec.structs.replace(to, gpus={**to.gpus, arch: calibrated})


def from_points(points: Iterable[Mapping[str, Any]], of: Gpu, source: str = "") -> MachineProfile:
    """Return the profile from measured points of a GPU: plateaus of matmuls, attention and memory traffic."""
    rows = list(points)
    shares: dict[str, list[float]] = {}
    for row in rows:
        if row["kind"] == "gemm" and min(row["shape"]) >= LARGE and row["precision"] in of.peak_tflops:
            shares.setdefault(row["precision"], []).append(row["tflops"] / of.peak_tflops[row["precision"]])
    attention = [r for r in rows if r["kind"] == "attention" and r["pass"] == "forward"]
    forward = [r["tflops"] / of.peak_tflops["bf16"] for r in attention]
    copies = [r["gb_s"] / of.hbm_gb_s for r in rows if r["kind"] == "copy"]
    if not shares or not copies:
        raise InputError("no large matmul or memory copy was measured", field="points")
    links = {name: _share(value) for name, value in _links(rows, of).items()}
    return MachineProfile(
        gpu=of.name,
        source=source,
        matmul={name: _share(median(values)) for name, values in shares.items()},
        attention=_share(max(forward)) if forward else None,
        hbm=_share(max(copies)),
        link=links.get("link"),
        network=links.get("network"),
    )


def _links(rows: list[Mapping[str, Any]], of: Gpu) -> dict[str, float]:
    """Return the shares of link rates that collectives reached, if several ranks measured them."""
    best = {where: max((r["gb_s"] for r in rows if r["kind"] == where), default=0.0) for where in ("link", "network")}
    rates = {"link": of.nvlink_gb_s, "network": of.network_gb_s}
    return {where: best[where] / rates[where] for where in best if best[where]}


def _share(value: float) -> float:
    return round(min(max(value, 0.01), 1.0), 4)


def from_runs(path: str | Path, *, one_type: bool = False) -> list[MachineProfile]:
    """Return one profile per GPU type in a table of runs: the speed at which predictions match them.

    With one_type, a table with several types is rejected before anything is fitted.
    """
    runs: dict[str, list[Measurement]] = {}
    for row in usable_runs(path):
        if row.case is not None:
            runs.setdefault(row.case.cluster.gpu.name, []).append(row)
    if one_type and len(runs) > 1:
        names = ", ".join(sorted(runs))
        raise InputError(
            f"the runs are on several GPU types ({names}); use one table per type", field="runs", value=str(path)
        )
    return [_fitted(runs[name], name, path) for name in sorted(runs)]


def usable_runs(path: str | Path) -> list[Measurement]:
    """Return the rows with a model, GPUs and a step time; at least one."""
    rows = [r for r in read(path) if r.case is not None and r.step_s > 0 and not r.oom]
    if not rows:
        raise InputError("no row has a usable model, GPUs and step time", field="runs", value=str(path))
    return rows


def _fitted(rows: list[Measurement], name: str, path: str | Path) -> MachineProfile:
    """Return the clock with the least error: a coarse grid search, then finer ones around the best."""
    low, high = SLOWEST, FASTEST
    for steps in (9, 9, 9):
        clocks = [float(c) for c in np.geomspace(low, high, steps)]
        errors = [_error(rows, MachineProfile(gpu=name, clock=c)) for c in clocks]
        at = int(np.argmin(errors))
        low, high = clocks[max(at - 1, 0)], clocks[min(at + 1, steps - 1)]
    clock, error = clocks[at], errors[at]
    if error > WORST_FIT or not SLOWEST * 1.01 < clock < FASTEST / 1.01:
        raise InputError(
            f"no speed of {name} fits these runs: the best has a median error of {100 * error:.0f} %",
            field="runs",
            value=str(path),
            fix=("check the step times and layouts of the rows",),
        )
    source = f"fitted to {len(rows)} runs of {Path(path).name}"
    return MachineProfile(name, source, round(clock, 4), runs=len(rows), error_pct=round(100 * error, 2))


def _error(rows: list[Measurement], profile: MachineProfile) -> float:
    """Return the median relative error of the step time over some runs with this profile."""
    machine = profile.apply(shipped())
    errors: list[float] = []
    for case, places in batches(rows):
        predicted = np.broadcast_to(step_time(case.replace(calibration=machine)).step_s, len(places))
        errors += [abs(float(p) / rows[i].step_s - 1) for p, i in zip(predicted, places, strict=True)]
    return float(np.median(errors))


def load(path: str | Path) -> Calibration:
    """Return the shipped calibration with the machine that a profile file describes."""
    supplied = file_access.text_of(path, "calibration")
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8") if supplied is None else supplied)
        machine = msgspec.convert(table, MachineProfile)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise InputError(f"not a calibration profile: {error}", field="calibration", value=str(path)) from None
    numbers = {"clock": machine.clock, "attention": machine.attention, "hbm": machine.hbm, **machine.matmul}
    for name, value in numbers.items():
        if value is not None and not 0.01 <= value <= 10:
            raise InputError("a share or speed must be between 0.01 and 10", field=f"calibration.{name}", value=value)
    return machine.apply(shipped())


def to_text(profile: MachineProfile) -> str:
    """Return a profile as the TOML that `load` reads."""
    import tomlkit

    table = {k: v for k, v in msgspec.to_builtins(profile).items() if v not in (None, {}, "")}
    return tomlkit.dumps(table)
