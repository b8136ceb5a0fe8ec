"""Calibrates the cost model to a machine, from microbenchmarks or from runs."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright import file_access
from meshwright.clusters import Gpu, gpu
from meshwright.costs.calibration import Calibration, shipped
from meshwright.costs.measurements import Measurement, batches
from meshwright.costs.time import step_time
from meshwright.display import Entry
from meshwright.errors import InputError

LARGE = 2048  # minimum tokens and widths at which a matmul reaches its plateau
SLOWEST, FASTEST = 0.3, 3.0  # range of speeds over the shipped profile
WORST_FIT = 0.5  # median error above which the fit is rejected
CLOCKS, COARSE = 461, 24  # speeds tried (0.5 % apart), and those that are computed (10 % apart)
FEW_RUNS = 5
PRIOR_WIDTH = 0.12  # log of the speed by which a source that the model has not seen differs from it
ONE_RUN = (
    "the calibration rests on one run, whose time a fitted speed always matches: this says nothing about other runs, "
    "and another layout may differ by more than the error band; calibrate with at least 4 more runs"
)
EXPLAINED = 0.03  # log of the time of one run over its calibrated estimate, up to which the speed explains it
UNEXPLAINED = (
    "the calibration explains its one run only in part: the run took {factor:.3g} times its calibrated estimate. Only "
    "the speed of compute is fitted, and one run does not show whether its network, kernels or data cause the rest, so "
    "no estimate includes it; the error band does. Calibrate with at least 4 more runs in other layouts"
)
FAR_OFF = 0.25  # share of the estimate; nine of ten published runs are nearer to theirs than 19 %
DOUBTFUL = (
    "the run takes {ratio:.3g} times the shipped estimate for {gpu}, and nine of ten published runs are within 19 % of "
    "theirs: a fault of the run, or GPUs other than {gpu}, would count as the speed of {gpu}; meshwright doctor RUN "
    "looks for a fault"
)
LEAST_SPREAD = 0.02  # log of the times; runs never agree better, so one run is followed nearly exactly


class MachineProfile(Entry, msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one machine reaches, on top of the shipped profile of its GPU architecture."""

    gpu: str
    source: str = ""
    clock: float = 1.0  # speed of compute over the architecture's profile
    matmul: dict[str, float] = {}  # share of the dense peak, by precision
    attention: float | None = None  # share of the bf16 peak over the causal half, forward, best kernel
    hbm: float | None = None
    link: float | None = None
    network: float | None = None
    engines: tuple[str, ...] = ()  # of the runs it was fitted to
    families: tuple[str, ...] = ()  # of the models of these runs
    largest_world: int = 0  # GPUs of the largest of them
    runs: int = 0  # number of runs it was fitted to
    error_pct: float | None = None  # median error over them after the fit
    error_before_pct: float | None = None  # with the shipped profile
    error_left_out_pct: float | None = None  # of every run with the profile fitted to the others
    unexplained: float | None = None  # time of the only run over its estimate after the fit
    doubts: tuple[str, ...] = ()  # why the speed of its runs may not be that of sound GPUs

    @property
    def band_pct(self) -> float:
        """The half-width in per cent of a band that contains the only run, with the spread of its step times."""
        return 100 * (math.exp(abs(math.log(self.unexplained or 1.0)) + LEAST_SPREAD) - 1)

    @property
    def one_run_note(self) -> str:
        """What a single run says; empty with several, or if nothing was fitted."""
        if self.runs != 1:
            return ""
        left = self.unexplained or 1.0
        return UNEXPLAINED.format(factor=left) if abs(math.log(left)) > EXPLAINED else ONE_RUN

    @property
    def times_estimate(self) -> float:
        """The time of the only run over the shipped estimate; 1 with several runs."""
        if self.runs != 1 or self.error_before_pct is None:
            return 1.0
        off = self.error_before_pct / 100  # of the measured time
        return 1 / max(1 - off, 0.01) if self.clock < shipped_clock(self.gpu) else 1 / (1 + off)

    @property
    def is_far_off(self) -> bool:
        """Whether the only run is so far from its estimate that another cause than the speed of its GPUs is likely."""
        return abs(self.times_estimate - 1) > FAR_OFF

    @property
    def fit_notes(self) -> tuple[str, ...]:
        """What to know before the fit is used: doubts about its runs, and what a single one says."""
        doubtful = DOUBTFUL.format(ratio=self.times_estimate, gpu=self.gpu) if self.is_far_off else ""
        return tuple(filter(None, (doubtful, *self.doubts, self.one_run_note)))

    def apply(self, to: Calibration) -> Calibration:
        """Return the calibration with this machine's numbers in place of its architecture's."""
        arch = gpu(self.gpu).arch
        known = to.gpus[arch]
        link = "pcie" if gpu(self.gpu).link == "pcie" else "link"
        changes: dict[str, Any] = {"hbm": self.hbm, link: self.link, "network": self.network}
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


def from_runs(rows: Sequence[Measurement], what: str, *, one_type: bool = False) -> list[MachineProfile]:
    """Return one profile per GPU type in some runs: the speed at which predictions match them.

    With one_type, runs on several types are rejected before anything is fitted.
    """
    runs: dict[str, list[Measurement]] = {}
    for row in rows:
        if row.case is not None and row.step_s > 0 and not row.oom:
            runs.setdefault(row.case.cluster.gpu.name, []).append(row)
    if not runs:
        raise InputError(
            "no run has a usable model, GPUs and step time",
            field="runs",
            value=what,
            fix=("fill step_time_s or tokens_per_s_per_gpu", "meshwright calibrate --template > runs.csv"),
        )
    if one_type and len(runs) > 1:
        names = ", ".join(sorted(runs))
        raise InputError(
            f"the runs are on several GPU types ({names}); a profile is for one",
            field="runs",
            value=what,
            fix=("one table per GPU type", "without --out, all profiles are printed"),
        )
    return [_fitted(runs[name], name, what) for name in sorted(runs)]


def _fitted(rows: list[Measurement], name: str, what: str) -> MachineProfile:
    """Return the clock with the least error, and what it would be worth for a run that is not among these."""
    clocks = clocks_tried()
    ratios, start = clock_ratios(rows, name, clocks), shipped_clock(name)
    errors = np.abs(ratios - 1)
    shipped_errors = np.abs(clock_ratios(rows, name, np.array([start])) - 1)[0]
    at = best_clock(ratios, clocks, start)
    clock, error = float(clocks[at]), float(np.median(errors[at]))
    if error > WORST_FIT or not SLOWEST * 1.01 < clock < FASTEST / 1.01:
        worst = rows[int(np.argmax(errors[at]))]
        raise InputError(
            f"no speed of {name} between {SLOWEST:g} and {FASTEST:g} fits these runs: the best has a median error of "
            f"{100 * error:.0f} %; the worst is {worst.source}, row {worst.row_id}",
            field="runs",
            value=what,
            fix=("check the step times, batch sizes and layouts of the rows",),
        )
    return MachineProfile(
        name,
        f"fitted to {len(rows)} run{'s' * (len(rows) > 1)} of {what}",
        round(clock, 4),
        engines=tuple(sorted({row.case.engine for row in rows if row.case is not None})),
        families=tuple(sorted({row.case.model.family for row in rows if row.case is not None})),
        largest_world=max(row.case.cluster.world for row in rows if row.case is not None),
        runs=len(rows),
        error_pct=round(100 * error, 2),
        error_before_pct=round(100 * float(np.median(shipped_errors)), 2),
        error_left_out_pct=_left_out(ratios, clocks, start),
        unexplained=round(1 / float(ratios[at, 0]), 4) if len(rows) == 1 else None,
        doubts=tuple(dict.fromkeys(row.doubt for row in rows if row.doubt)),
    )


def clocks_tried() -> NDArray[np.float64]:
    """Return the speeds that a fit chooses from."""
    return np.geomspace(SLOWEST, FASTEST, CLOCKS)


def best_clock(ratios: NDArray[np.float64], clocks: NDArray[np.float64], start: float) -> int:
    """Return the place of the clock that fits predicted over measured times by clock and run, from a starting clock.

    The mean error in logarithms, in units of its spread between the runs, with a prior: sources differ from the model
    by about PRIOR_WIDTH. Runs that agree move the clock as far as they say, runs that contradict each other do not.
    """
    logs = np.log(ratios)
    near = int(np.argmin(np.abs(np.log(clocks / start))))
    spread = max(float(np.std(logs[near])), LEAST_SPREAD)
    loss = np.abs(logs).sum(axis=1) / spread + np.log(clocks / start) ** 2 / (2 * PRIOR_WIDTH**2)
    return int(np.argmin(loss))


def shipped_clock(name: str) -> float:
    """Return the speed of a GPU in the shipped calibration."""
    return float(shipped().gpus[gpu(name).arch].clock.get(name, 1.0))


def _left_out(ratios: NDArray[np.float64], clocks: NDArray[np.float64], start: float) -> float | None:
    """Return the median error in per cent of every run, each predicted by the clock fitted to all others."""
    count = ratios.shape[1]
    if count < 2:
        return None
    found = []
    for place in range(count):
        at = best_clock(np.delete(ratios, place, axis=1), clocks, start)
        found.append(abs(ratios[at, place] - 1))
    return round(100 * float(np.median(found)), 2)


def clock_ratios(
    rows: list[Measurement], name: str, clocks: NDArray[np.float64], base: Calibration | None = None
) -> NDArray[np.float64]:
    """Return predicted over measured step time of every run with every clock; coarse clocks are interpolated.

    `base` is the calibration that the clock is set in; the shipped one by default.
    """
    coarse = clocks if len(clocks) <= COARSE else np.geomspace(clocks[0], clocks[-1], COARSE)
    table = np.empty((len(coarse), len(rows)))
    for at, clock in enumerate(coarse):
        machine = MachineProfile(gpu=name, clock=float(clock)).apply(base or shipped())
        for case, places in batches(rows):
            table[at, places] = step_time(case.replace(calibration=machine)).step_s
    measured = np.array([row.step_s for row in rows])
    if coarse is clocks:
        return np.asarray(table / measured)
    logs = [np.interp(np.log(clocks), np.log(coarse), np.log(table[:, place])) for place in range(len(rows))]
    return np.asarray(np.exp(np.stack(logs, axis=1)) / measured)


NO_IMPROVEMENT = "no improvement: do not use the profile"


def is_worth_using(profile: MachineProfile) -> bool:
    """Return whether runs that a fit does not know are predicted better with it; a single run cannot say."""
    before, left_out = profile.error_before_pct, profile.error_left_out_pct
    return before is None or left_out is None or left_out < before


def worth(profile: MachineProfile) -> list[str]:
    """Return what a fit improved and how much that is worth, in sentences."""
    if not profile.runs or profile.error_before_pct is None or profile.error_pct is None:
        return []
    speed = f"{profile.gpu}: {profile.clock / shipped_clock(profile.gpu):.3g} times the speed of the shipped profile"
    errors = f"{profile.error_before_pct:g} % before, {profile.error_pct:g} % after"
    lines = [profile.source, f"{speed}. Median error of the step time: {errors}"]
    lines.append("only the speed is fitted: memory columns are not used (meshwright accuracy TABLE compares them)")
    lines += profile.fit_notes
    if profile.error_left_out_pct is None:
        return lines
    gained = is_worth_using(profile)
    lines.append(
        f"each run predicted from the others: {profile.error_left_out_pct:g} % "
        + ("(an improvement for runs that are not in the table)" if gained else f"({NO_IMPROVEMENT})")
    )
    if profile.runs < FEW_RUNS:
        lines.append(
            f"{profile.runs} runs are few: one different run can change the result; {FEW_RUNS} or more are better"
        )
    return lines


def load(path: str | Path) -> Calibration:
    """Return the shipped calibration with the machine that a profile file describes."""
    supplied = file_access.text_of(path, "calibration")
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8-sig") if supplied is None else supplied)
        machine = msgspec.convert(table, MachineProfile)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise InputError(f"not a calibration profile: {error}", field="calibration", value=str(path)) from None
    numbers = {
        **{name: getattr(machine, name) for name in ("clock", "attention", "hbm", "unexplained")},
        **machine.matmul,
    }
    for name, value in numbers.items():
        if value is not None and not 0.01 <= value <= 10:
            raise InputError("a share or speed must be between 0.01 and 10", field=f"calibration.{name}", value=value)
    return with_machine(machine)


def with_machine(machine: MachineProfile) -> Calibration:
    """Return the shipped calibration with a machine's numbers."""
    return msgspec.structs.replace(machine.apply(shipped()), machine=machine)


def applied(calibration: Calibration | None, on: Gpu, engine: str) -> tuple[str, ...]:
    """Return whether a user's calibration applies to a GPU and an engine, as a sentence."""
    if calibration is None or calibration.machine is None:
        return ()
    machine: MachineProfile = calibration.machine
    known, what = gpu(machine.gpu), machine.source or "measured"
    measured = [name for name in ("matmul", "attention", "hbm", "link", "network") if getattr(machine, name)]
    title = f"calibration of {known.name} ({what})"
    if known.name != on.name:
        if known.arch == on.arch and measured:
            return (f"{title}: its {', '.join(measured)} also apply to {on.name}, its clock does not",)
        return (f"{title}: does not apply to {on.name}; the shipped profile is used",)
    others = f"; the runs are of {', '.join(machine.engines)}, so {engine} may differ"
    notes: tuple[str, ...] = (f"{title}: applied{others if machine.engines and engine not in machine.engines else ''}",)
    if not is_worth_using(machine):
        notes = (*notes, f"{title}: runs that it was not fitted to are not predicted better: {NO_IMPROVEMENT}")
    return (*notes, *machine.fit_notes)


def to_text(profile: MachineProfile) -> str:
    """Return a profile as the TOML that `load` reads."""
    import tomlkit

    table = {k: v for k, v in msgspec.to_builtins(profile).items() if v not in (None, {}, "", [])}
    comments = "".join(f"# {line}\n" for line in worth(profile))
    return comments + tomlkit.dumps(table)
