"""The cost model: compared with measurements, and fitted to a machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import UNSET, UnsetType

from meshwright import extras
from meshwright.api import requests
from meshwright.api.inputs import verb
from meshwright.api.resolve import write_text
from meshwright.api.responses import Part, Response
from meshwright.costs import accuracy as accuracies
from meshwright.costs import calibrate as calibration
from meshwright.costs.accuracy import Report
from meshwright.costs.calibrate import MachineProfile


@verb(requests.Accuracy)
def accuracy(request: requests.Accuracy) -> Report:
    """Compare the cost model with a CSV of measurements; the shipped ones by default."""
    return accuracies.accuracy(request.file or shipped_measurements())


def shipped_measurements() -> str:
    """Return the path of the published measurements: in the installed package, or in the repository."""
    package = Path(__file__).parents[1]
    places = (package / "costs" / "measurements.csv", package.parents[1] / "benchmarks" / "data" / "measurements.csv")
    return str(next((place for place in places if place.is_file()), places[0]))


@verb(requests.Calibrate)
def calibrate(request: requests.Calibrate) -> list[MachineProfile]:
    """Measure this machine's GPU (imports torch), or fit profiles to a CSV of runs."""
    if request.runs:
        profiles = calibration.from_runs(request.runs, one_type=bool(request.out))
    else:
        extras.require("calibrate", "torch")
        from meshwright.engine.machine import measured

        profiles = [measured()[0]]
    if request.out:
        write_text(request.out, calibration.to_text(profiles[0]), "out")
    return profiles


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
    points: Mapping[str, Sequence[Point]] | UnsetType = UNSET


class CalibrateResponse(Response, frozen=True, kw_only=True):
    """Profiles, and each as the TOML file that --calibration reads."""

    profiles: Sequence[MachineProfile]


def accuracy_response(report: Report, request: requests.Accuracy = requests.Accuracy()) -> AccuracyResponse:  # noqa: B008
    """Return the response of accuracy."""
    values: dict[str, Any] = accuracies.to_dict(report)
    points = accuracies.points(report) if request.points else UNSET
    return AccuracyResponse(**values, points=points)  # type: ignore[arg-type]  # plain values of the same keys


def calibrate_response(profiles: list[MachineProfile], request: requests.Calibrate | None = None) -> CalibrateResponse:
    """Return the response of calibrate."""
    return CalibrateResponse(profiles=profiles)


def profile_text(profile: MachineProfile) -> str:
    """Return a profile as the TOML file that --calibration reads."""
    return calibration.to_text(profile)
