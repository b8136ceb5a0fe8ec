"""The cost model: compared with measurements, and fitted to a machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import UNSET, UnsetType

from meshwright import doctor, extras
from meshwright.api import requests
from meshwright.api.resolve import write_text
from meshwright.api.responses import Part, Response
from meshwright.api.verb_function import verb
from meshwright.costs import accuracy as accuracies
from meshwright.costs import calibrate as calibration
from meshwright.costs.accuracy import Report
from meshwright.costs.calibrate import MachineProfile
from meshwright.costs.measurements import Measurement, of_case, read_with_notes
from meshwright.costs.runs_table import template
from meshwright.display import Listing
from meshwright.errors import InputError


@verb(requests.Accuracy)
def accuracy(request: requests.Accuracy) -> Report:
    """Compare the cost model with a CSV of measurements or a folder of runs; the shipped measurements by default."""
    _refuse_template(request.template)
    path = request.file or shipped_measurements()
    if not Path(path).is_dir():
        return accuracies.accuracy(path)
    rows, notes = _runs_in(Path(path))
    return accuracies.report(rows, path, notes)


def runs_template() -> str:
    """Return a CSV for your own runs that accuracy and calibrate accept: explanations, header and two examples."""
    return template()


def _refuse_template(asked: bool) -> None:
    if asked:
        raise InputError("only the command line prints it", field="template", fix=("meshwright.api.runs_template()",))


def shipped_measurements() -> str:
    """Return the path of the published measurements: in the installed package, or in the repository."""
    package = Path(__file__).parents[1]
    places = (package / "costs" / "measurements.csv", package.parents[1] / "benchmarks" / "data" / "measurements.csv")
    return str(next((place for place in places if place.is_file()), places[0]))


PROFILE_COLUMNS: Mapping[str, Callable[[MachineProfile], object]] = {
    "GPU": lambda one: one.gpu,
    "runs": lambda one: one.runs,
    "clock": lambda one: one.clock,
    "error %": lambda one: one.error_pct,
    "error before %": lambda one: one.error_before_pct,
    "from": lambda one: one.source,
}


@verb(requests.Calibrate)
def calibrate(request: requests.Calibrate) -> list[MachineProfile]:
    """Measure this machine's GPU (imports torch), or fit profiles to run folders and CSVs of runs."""
    _refuse_template(request.template)
    if request.runs:
        runs = (request.runs,) if isinstance(request.runs, str) else tuple(request.runs)
        tables = [_runs_in(Path(path)) if Path(path).is_dir() else read_with_notes(path) for path in runs]
        rows = [row for table, _ in tables for row in table]
        what = "; ".join([", ".join(runs), *(note for _, notes in tables for note in notes)])
        profiles = calibration.from_runs(rows, what, one_type=bool(request.out))
    else:
        extras.require("calibrate", "torch")
        from meshwright.engine.machine import measured

        profiles = [measured()[0]]
    if request.out:
        write_text(request.out, calibration.to_text(profiles[0]), "out")
    return Listing(profiles, PROFILE_COLUMNS)


METRICS = "metrics.jsonl"


def _runs_in(folder: Path) -> tuple[list[Measurement], list[str]]:
    """Return what our own runs in a folder measured, and which were left out and why."""
    folders = [folder] if (folder / METRICS).is_file() else sorted(one.parent for one in folder.rglob(METRICS))
    rows, notes = [], []
    for number, one in enumerate(folders, start=1):
        found = _run_in(one, number)
        if isinstance(found, str):
            notes.append(f"left out {one}: {found}")
        else:
            rows.append(found)
    if not rows:
        reason = notes[0] if notes else f"there is no {METRICS} in it or below it"
        fix = ("meshwright calibrate --template > runs.csv", "a folder that meshwright train or bench wrote")
        raise InputError(f"has no run to compare with: {reason}", field="runs", value=str(folder), fix=fix)
    return rows, notes


def _run_in(folder: Path, number: int) -> Measurement | str:
    """Return what one of our runs measured, or why it cannot be used."""
    try:
        run = doctor.read(folder)
    except InputError as error:
        return error.reason
    if not run.header.on_gpu:
        return "it ran on CPUs, and the cost model is for GPUs"
    case, why = doctor.case_of_run(run)
    if case is None:
        return why
    stats = doctor.RunStats(run, case)
    if not stats.enough or not stats.step_s:
        return "it has too few steps after warm-up"
    measured = {"step_time_s": str(stats.step_s), "peak_mem_gib_allocated": str(stats.peak_gib or "")}
    return of_case(case, {"row_id": str(number), "source": folder.name, **measured})


class GroupError(Part, frozen=True, kw_only=True):
    """Errors of a group of rows in percent."""

    rows: int
    median_abs_pct: float
    bias_pct: float


class PredictionErrors(Part, frozen=True, kw_only=True):
    """Errors in percent, every source weighted equally."""

    median_abs_pct: float | None
    p90_abs_pct: float | None
    rows: int
    by_source: Mapping[str, GroupError]


class StepTimeErrors(PredictionErrors, frozen=True, kw_only=True):
    """Errors of step time."""

    by_gpu: Mapping[str, GroupError]


class FitCounts(Part, frozen=True, kw_only=True):
    """How often the cost model predicts correctly what fits."""

    ok_called_ok: int
    ok_rows: int
    oom_called_oom: int
    oom_rows: int


class Point(Part, frozen=True, kw_only=True):
    """One measurement and its prediction."""

    source: str
    gpu: str
    measured: float
    predicted: float


class AccuracyResponse(Response, frozen=True, kw_only=True):
    """The error of the cost model."""

    rows: int
    predicted: int
    unsupported: Mapping[str, int]
    step_time: StepTimeErrors
    memory: PredictionErrors
    fit: FitCounts
    notes: Sequence[str] = ()
    points: Mapping[str, Sequence[Point]] | UnsetType = UNSET


class CalibrateResponse(Response, frozen=True, kw_only=True):
    """Profiles, and each as the TOML file that --calibration reads."""

    profiles: Sequence[MachineProfile]
    notes: Sequence[str] = ()  # what the fit improved, and how much that is worth


def accuracy_response(report: Report, request: requests.Accuracy = requests.Accuracy()) -> AccuracyResponse:  # noqa: B008
    """Return the response of accuracy."""
    values: dict[str, Any] = accuracies.to_dict(report)
    points = accuracies.points(report) if request.points else UNSET
    return AccuracyResponse(**values, points=points)  # type: ignore[arg-type]  # plain values of the same keys


def calibrate_response(profiles: list[MachineProfile], request: requests.Calibrate | None = None) -> CalibrateResponse:
    """Return the response of calibrate."""
    notes = [line for profile in profiles for line in calibration.worth(profile)]
    return CalibrateResponse(profiles=profiles, notes=notes)


def profile_text(profile: MachineProfile) -> str:
    """Return a profile as the TOML file that --calibration reads."""
    return calibration.to_text(profile)
