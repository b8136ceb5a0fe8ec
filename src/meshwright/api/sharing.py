"""Write a run's measurement as a file for a pull request: one row of the tables of measurements, nothing private."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from meshwright import clusters, doctor
from meshwright.api import run_requests as requests
from meshwright.api.diagnosis import run_and_case, stated_by
from meshwright.api.measured_runs import measurement
from meshwright.api.resolve import write_text
from meshwright.api.responses import Part, Response
from meshwright.api.verb_function import verb
from meshwright.costs.measurement_row import model_columns, row_of, to_csv
from meshwright.display import Row as SummaryRow
from meshwright.doctor import Run, RunStats
from meshwright.errors import InputError
from meshwright.recipes import index
from meshwright.recipes.case import Case
from meshwright.recipes.format_override import format_override
from meshwright.recipes.types import ENGINES, Recipe, field_value, recipe_fields

CONTRIBUTED = "benchmarks/data/contributed"
FEWEST_STEPS = 20  # after warm-up; a median of fewer moves with single slow steps
LOW, HIGH = 10, 90  # percentiles of the spread
SECTIONS = ("layout", "precision", "kernels", "moe", "peft")  # of the command; others have names and paths of users
FIELDS = ("train.global_batch_size", "data.seq_length", "data.packing", "optimizer.name", "optimizer.state")
TOKENS_DIGITS = 6  # significant digits of figures in the row
_NAME = re.compile(r"[A-Za-z0-9][\w .@+-]{0,60}")


class SpeedSpread(Part, frozen=True, kw_only=True):
    """Tokens per second and GPU: the median step, and the 10th and 90th percentile of steps."""

    low: float
    median: float
    high: float


class SharedMeasurement(Response, frozen=True, kw_only=True):
    """A run's measurement as it was written."""

    file: str
    row: Mapping[str, str]
    steps: int
    tokens_per_s_per_gpu: SpeedSpread
    peak_gib: float | None
    command: str
    notes: Sequence[str] = ()

    @property
    def ok(self) -> bool:
        """Return whether the file was written; a run that cannot be shared is an error."""
        return True

    def summary(self) -> list[SummaryRow]:
        """Return the file and what was measured."""
        speed = self.tokens_per_s_per_gpu
        return [
            ("File", self.file),
            ("Speed", f"{speed.median:,.0f} tokens/s per GPU ({speed.low:,.0f} to {speed.high:,.0f})"),
            ("Steps", str(self.steps)),
        ]


@verb(requests.Share)
def share(request: requests.Share) -> SharedMeasurement:
    """Write a run's measurement as one row of the tables of measurements; return what was written."""
    asked = requests.Doctor(
        request.run, recipe=request.recipe, model=request.model, gpus=request.gpus, goal=request.goal,
        overrides=request.overrides,
    )  # fmt: skip
    run, case, notes = run_and_case(asked)
    stated = stated_by(run, asked)
    found = measurement(run, case, notes[0] if notes else "", stated, 1)
    if isinstance(found, str) or case is None:
        reason = str(found).removeprefix("no estimate: ")
        raise _refused(request, reason, ("--recipe FILE --gpus 8xH100 says what ran",))
    stats = doctor.RunStats(run, case, None, stated)
    _require_clean(request, run, stats)
    version = _version(request, run)
    spread = _spread(stats)
    command = _command(run, case)
    assumed = _assumed(stats, stated)
    measured = {
        "source": _source(request),
        "source_url_or_path": "meshwright share",
        "framework_version": version,
        "tokens_per_s_per_gpu": _figure(spread.median),
        "step_time_s": _figure(stats.step_s) if stats.step_s is not None and not stats.assumed_batch else "",
        _memory_column(run): _figure(stats.peak_gib) if stats.peak_gib is not None else "",
        "tier": "B" if assumed else "A",
        "mem_tier": "" if stats.peak_gib is None else "B" if assumed else "A",
        "assumed_fields": ", ".join(assumed),
        "notes": _notes(request, run, stats, spread, command),
    }
    try:
        row = row_of(case, _framework(run, case), measured)
    except ValueError as error:
        raise _refused(request, str(error), ("--model NAME, if a model of the catalogue has the same shape",)) from None
    if not clusters.is_known(case.cluster.gpu.name):
        raise _refused(request, f"its GPU {case.cluster.gpu.name} is not in the catalogue", ("--gpus 8xH100",))
    file = request.out or f"measurement-{row['model']}-{row['n_gpus']}x{row['gpu']}-{row['row_id']}.csv"
    if Path(file).suffix != ".csv":
        raise InputError("must end in .csv", field="out", value=file, fix=(f"--out {Path(file).with_suffix('.csv')}",))
    write_text(file, to_csv(row), "out")
    steps = sum(step.covers for step in stats.steady)
    return SharedMeasurement(
        file=file, row=row, steps=steps, tokens_per_s_per_gpu=spread, peak_gib=stats.peak_gib, command=command,
        notes=_advice(file, assumed, notes),
    )  # fmt: skip


def _refused(request: requests.Share, reason: str, fix: Sequence[str] = ()) -> InputError:
    return InputError(f"cannot be shared: {reason}", field="run", value=request.run, fix=tuple(fix))


def _require_clean(request: requests.Share, run: Run, stats: RunStats) -> None:
    """Raise InputError for a run that measures no training: too short, with a NaN, or of a tiny model."""
    bad = next((step for step in run.steps if not step.is_finite), None)
    if bad is not None:
        reason = f"step {bad.step} has a loss or gradient that is NaN or infinite; such a run measures no training"
        raise _refused(request, reason, (f"meshwright doctor {shlex.quote(request.run)}",))
    if run.header.tiny:
        raise _refused(request, "it trained a tiny model, whose step is launch-bound", ("meshwright bench RECIPE",))
    steps = sum(step.covers for step in stats.steady)
    if steps < FEWEST_STEPS:
        reason = f"it has {steps} steps after warm-up, and a measurement needs {FEWEST_STEPS}"
        raise _refused(request, reason, ("train.steps=50 runs longer",))


def _version(request: requests.Share, run: Run) -> str:
    """Return the framework's version: as given, or as our own run recorded it."""
    recorded = run.header.versions
    if request.framework_version:
        return request.framework_version
    if recorded:
        return ", ".join(f"{name} {version}" for name, version in recorded.items())
    raise InputError(
        "the log does not state the version of what trained", field="framework_version",
        fix=("--framework-version 0.12.0", "--framework-version 'core_r0.14.0, torch 2.9'"),
    )  # fmt: skip


def _source(request: requests.Share) -> str:
    if not request.by:
        return "contributed"
    if not _NAME.fullmatch(request.by):
        raise InputError("is a name, at most 60 characters", field="by", value=request.by, fix=("--by 'Lab A'",))
    return f"contributed by {request.by}"


def _framework(run: Run, case: Case) -> str:
    return run.header.framework or case.engine


def _spread(stats: RunStats) -> SpeedSpread:
    """Return the speed of the median step and of slow and fast ones."""
    middle = float(stats.tokens_per_s or 0.0)
    times = np.array([one for step in stats.steady if (one := step.seconds_per_unit) is not None])
    shares = np.percentile(times, (LOW, HIGH)) / np.median(times)
    return SpeedSpread(low=middle / float(shares[1]), median=middle, high=middle / float(shares[0]))


def _memory_column(run: Run) -> str:
    """Return the column of the log's memory; torchtitan logs what the allocator reserved."""
    return "peak_mem_gib_reserved" if run.kind == "torchtitan" else "peak_mem_gib_allocated"


def _assumed(stats: RunStats, stated: frozenset[str] | None) -> list[str]:
    """Return fields of the row that neither the log nor the user states; they are those of our recipe."""
    if stated is None:
        return []
    shown = [key for key in recipe_fields() if key.startswith("layout.") or key in FIELDS]
    shown = [key for key in shown if key.partition(".")[2] in ("tp", "pp", "cp", "ep", "micro_batch_size", "recompute")
             or key in FIELDS[:2]]  # fmt: skip
    return [key for key in shown if not stats.states(key)]


def _notes(request: requests.Share, run: Run, stats: RunStats, spread: SpeedSpread, command: str) -> str:
    """Return what the columns do not have: the date, the spread, the network and the command."""
    steps = sum(step.covers for step in stats.steady)
    data = "mock data" if run.header.mock_data else "real data" if run.header.recipe is not None else ""
    width = 100 * (spread.high - spread.low) / spread.median
    parts = [
        _date(run),
        f"median of {steps} steps",
        f"steps between {_figure(spread.low)} and {_figure(spread.high)} tokens/s/GPU ({width:.1f} % wide, p10 to p90)",
        data,
        f"command: {command}",
    ]
    return "; ".join(part for part in parts if part)


def _date(run: Run) -> str:
    """Return the day of the run: its latest start, or that of its log file."""
    if run.header.started:
        return run.header.started[:10]
    path = Path(run.path)
    if path.exists():
        return datetime.fromtimestamp(path.stat().st_mtime, UTC).date().isoformat()
    return datetime.now(UTC).date().isoformat()


def _command(run: Run, case: Case) -> str:
    """Return the command that runs, or estimates, the same: without a user's paths and names."""
    recipe = case.recipe
    base = recipe.name if index.is_known(recipe.name) else ""
    shipped = index.load(base) if base else None
    own = case.engine == ENGINES[0] and shipped is not None
    compared = shipped or Recipe(name="measured", model=recipe.model, goal=recipe.goal, cluster=recipe.cluster)
    changed = _changed(recipe, compared)
    if own:
        words = ["meshwright", "train", base, "--dataset", "mock", *changed]
    else:
        target = base or model_columns_or_model(case)
        words = ["meshwright", "estimate", target, "--gpus", str(case.cluster), "--engine", str(case.engine)]
        words += [] if base else ["--goal", recipe.goal]
        words += changed
    return shlex.join(words)


def model_columns_or_model(case: Case) -> str:
    """Return the hub id of a catalogue model; CONFIG for a user's own, whose path is private."""
    try:
        name, shape = model_columns(case.model)
    except ValueError:
        return "CONFIG"
    return "CONFIG" if name.startswith("custom_") else shape


def _changed(recipe: Recipe, base: Recipe) -> list[str]:
    found = []
    for key in recipe_fields():
        if key.partition(".")[0] not in SECTIONS and key not in FIELDS:
            continue
        value = field_value(recipe, key)
        if value != field_value(base, key) and not _is_private(value):
            found.append(format_override(key, value))
    return found


def _is_private(value: Any) -> bool:
    """Return whether a value may be a path, an address or a name of a user."""
    return isinstance(value, str) and bool(re.search(r"[/\\@~:]", value))


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.{TOKENS_DIGITS}g}"


def _advice(file: str, assumed: Sequence[str], notes: Sequence[str]) -> list[str]:
    where = f"copy it to {CONTRIBUTED}/ of a checkout and open a pull request; read it first, nothing else is sent"
    missing = (
        [f"assumed, because the log does not state it: {', '.join(assumed)}; KEY=VALUE states it"] if assumed else []
    )
    return [where, *missing, *notes]
