"""The cost model: compared with measurements, and fitted to a machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from meshwright import clusters, doctor, extras
from meshwright.api import requests
from meshwright.api.diagnosis import run_and_case, stated_by
from meshwright.api.measured_runs import (
    METRICS,
    is_table,
    measured_alone,
    measurement,
    rehearsal_in,
    rehearsed,
    runs_in,
)
from meshwright.api.resolve import write_text
from meshwright.api.responses import Part, Response
from meshwright.api.run_requests import Doctor
from meshwright.api.targets import job_for
from meshwright.api.verb_function import verb
from meshwright.costs import accuracy as accuracies
from meshwright.costs import calibrate as calibration
from meshwright.costs.accuracy import Report
from meshwright.costs.calibrate import MachineProfile
from meshwright.costs.measurements import Measurement, read_with_notes
from meshwright.costs.runs_table import template
from meshwright.display import Listing
from meshwright.doctor.logged_settings import CONTRADICTS
from meshwright.doctor.match_recipe import logged_model
from meshwright.errors import InputError
from meshwright.hub import no_downloads
from meshwright.recipes.overrides import native_key
from meshwright.stages import stage


@verb(requests.Accuracy)
def accuracy(request: requests.Accuracy) -> Report:
    """Compare the cost model with a CSV of measurements or a folder of runs; the shipped measurements by default."""
    _refuse_template(request.template)
    path = request.file or shipped_measurements()
    stage(f"accuracy: predicting the measurements of {Path(path).name}")
    if not Path(path).is_dir():
        with nullcontext() if request.file else no_downloads():
            return accuracies.accuracy(path)
    rows, notes = runs_in(Path(path))
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
        _refuse_settings(runs)
        profiles = _fitted(runs, request)
    else:
        for name in ("recipe", "model", "gpus"):
            if getattr(request, name) is not None:
                fix = ("meshwright calibrate train.log --recipe FILE --gpus 8xH100",)
                raise InputError("says what ran in a log, and no log is given", field=name, fix=fix)
        extras.require("calibrate", "torch")
        from meshwright.engine.machine import measured

        profiles = [measured()[0]]
    if request.out:
        write_text(request.out, calibration.to_text(profiles[0]), "out")
    return Listing(profiles, PROFILE_COLUMNS)


def _refuse_settings(runs: Sequence[str]) -> None:
    """Raise InputError for a setting among the runs: what a log does not state is in the file that ran."""
    for word in runs:
        key, equals, _ = word.partition("=")
        if equals and native_key(key) and not Path(word).exists():
            fix = ("--recipe FILE names the file that ran, with all its settings",)
            raise InputError("calibrate takes runs and no settings", field="runs", value=word, fix=fix)


def _fitted(runs: Sequence[str], request: requests.Calibrate) -> list[MachineProfile]:
    """Return the profiles that some runs fit."""
    own, counted = _with_own_models(runs, request), _with_own_counts(runs, request)
    alone = msgspec.structs.replace(request, model=None)
    each = {path: alone if path in own else request for path in runs}
    each |= {path: msgspec.structs.replace(each[path], gpus=gpus) for path, gpus in counted.items()}
    tables = [_measured(Path(path), each[path]) for path in runs]
    notes = [f"--model {request.model} is not used for {path}, which names its own" for path in own]
    if not clusters.is_known(str(request.gpus)):
        notes += [f"{path} is of {gpus}, as many as its log states" for path, gpus in counted.items()]
    tables.append(([], notes))
    rows = [row for table, _ in tables for row in table]
    what = "; ".join([", ".join(runs), *(note for _, notes in tables for note in notes)])
    return calibration.from_runs(rows, what, one_type=bool(request.out))


def _with_own_models(runs: Sequence[str], request: requests.Calibrate) -> list[str]:
    """Return the logs that name their own model, for which --model is not used: it is for those of several without."""
    if request.model is None or request.recipe is not None or len(runs) == 1:
        return []
    files = [path for path in runs if Path(path).is_file()]
    logs = [path for path in files if not is_table(Path(path)) and rehearsal_in(Path(path)) is None]
    named = [path for path in logs if logged_model(doctor.read(path)) is not None]
    return named if len(named) < len(logs) else []


def _with_own_counts(runs: Sequence[str], request: requests.Calibrate) -> dict[str, str]:
    """Return the logs of another number of GPUs than typed, with their number of the typed type, by path.

    One --gpus names the type for several logs; a single one is of the GPUs that were typed.
    """
    if request.gpus is None or len(runs) == 1:
        return {}
    typed, found = clusters.cluster(str(request.gpus)), {}
    for path in runs:
        if not Path(path).is_file() or is_table(Path(path)) or rehearsal_in(Path(path)) is not None:
            continue
        world = doctor.read(path).header.world
        if world not in (None, typed.world):
            found[path] = str(clusters.cluster(f"{world}x{typed.gpu.name}"))
    return found


def _measured(path: Path, request: requests.Calibrate) -> tuple[list[Measurement], list[str]]:
    """Return what the runs of a path measured, and notes: our run folders, a CSV, or another framework's log."""
    says = {name: value for name in ("recipe", "model", "gpus") if (value := getattr(request, name)) is not None}
    if is_table(path):
        if says:
            name = next(iter(says))
            reason = f"the table {path} says what ran"
            raise InputError(reason, field=name, value=says[name], fix=(f"remove --{name}",))
        return read_with_notes(path)
    if (rehearsal := rehearsal_in(path)) is not None:
        if says:
            name = next(iter(says))
            reason = f"the rehearsal {path} says what ran"
            raise InputError(reason, field=name, value=says[name], fix=(f"remove --{name}",))
        return [rehearsed(path, rehearsal)], []
    if path.is_dir() and any(path.rglob(METRICS)) and not says:
        return runs_in(path)
    found = _measured_log(path, says)
    if isinstance(found, str):
        missing = found.rpartition("; add ")[2] if "; add " in found else "--recipe FILE --gpus 8xH100"
        template = "meshwright calibrate --template > runs.csv"
        fix: tuple[str, ...] = (f"{missing} says what ran", template)
        is_alone = len(request.runs) == 1 or (path.is_file() and logged_model(doctor.read(path)) is None)
        if request.recipe is not None and is_alone and found.startswith(CONTRADICTS):
            fix = _settings_of_the_log(request.recipe, template)
        elif request.recipe is not None and len(request.runs) > 1:
            fix = ("leave out --recipe, which is for all runs, where the logs name what ran", template)
        raise InputError(found.removeprefix("no estimate: "), field="runs", value=str(path), fix=fix)
    return [found], []


def _settings_of_the_log(recipe: str, otherwise: str) -> tuple[str, ...]:
    """Return how to calibrate with the log's own settings in place of those of a file that it contradicts."""
    with suppress(InputError):  # the file leaves its model or its GPUs open
        return (f"--model {job_for(recipe).recipe.model} in place of --recipe: the settings are those of the log",)
    return ("--recipe FILE with the settings that ran", otherwise)


def _measured_log(path: Path, says: Mapping[str, Any]) -> Measurement | str:
    """Return what the run of a log measured, or why it cannot be used; `says` are the options that say what ran."""
    if not says:
        return measured_alone(path, 1)
    asked = Doctor(str(path), **says)
    run, case, notes = run_and_case(asked)
    return measurement(run, case, notes[0] if notes else "", stated_by(run, asked), 1)


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
    return CalibrateResponse(profiles=profiles, notes=[*notes, *_stored(profiles, request)])


def _stored(profiles: list[MachineProfile], request: requests.Calibrate | None) -> list[str]:
    """Return where a profile is stored and what uses it."""
    if request is None or not profiles:
        return []
    if not all(map(calibration.is_worth_using, profiles)) and len(request.runs) > 1:
        stored = f"stored in {request.out}" if request.out else "not stored"
        alone = " or ".join(f"--like {path}" for path in request.runs[:2])
        return [f"{stored}: one speed does not fit these runs; recommend {alone} follows a single one"]
    used = "recommend, plan, estimate, compare, size, check and doctor take --calibration"
    if request.out:
        return [f"stored in {request.out}: {used} {request.out}"]
    like = f"; recommend --like {request.runs[0]} fits it again" if len(request.runs) == 1 else ""
    return [f"not stored: --out mine.toml writes it, and {used} mine.toml{like}"]


def profile_text(profile: MachineProfile) -> str:
    """Return a profile as the TOML file that --calibration reads."""
    return calibration.to_text(profile)
