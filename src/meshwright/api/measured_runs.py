"""What runs measured, as the rows that the cost model is compared with and fitted to."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from meshwright import clusters, doctor, json_text
from meshwright.api.counted_tokens import at_logged_length, with_counted_tokens
from meshwright.costs.measurements import Measurement, of_case
from meshwright.doctor import Run
from meshwright.doctor.logged_settings import stated_fields
from meshwright.doctor.slowdown import slowing_down, sustained_slowdown
from meshwright.doctor.user_file import differing_file
from meshwright.errors import InputError
from meshwright.recipes.case import Case, model_of
from meshwright.recipes.types import Recipe

METRICS = "metrics.jsonl"
TABLES = (".csv", ".tsv")


def is_table(path: Path) -> bool:
    """Return whether a file is a CSV of runs: by its name, or because its first line has the columns of one."""
    if path.is_dir() or not path.exists() or path.suffix in TABLES:
        return path.suffix in TABLES
    with suppress(OSError, UnicodeDecodeError), path.open(encoding="utf-8") as lines:
        head = next((line for line in lines if line.strip() and not line.startswith("#")), "")
        return head.count(",") + head.count("\t") + head.count(";") >= 2 and "model" in head and "gpu" in head
    return False


def rehearsal_in(path: Path) -> dict[str, Any] | None:
    """Return the rehearsal that a file of `rehearse --out` has; None for another file."""
    if path.suffix != ".json" or not path.is_file():
        return None
    with suppress(OSError, ValueError):
        found = json_text.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict) and found.get("kind") == "rehearsal":
            return found
    return None


def rehearsed(path: Path, found: dict[str, Any], number: int = 1) -> Measurement:
    """Return what a rehearsal timed; raise InputError if its times are not those of the GPU that it names."""
    reason = ""
    if found["scaled_to"] is not None:
        reason = f"its kernels were scaled from {found['device']} to {found['scaled_to']} with the cost model itself"
    elif found["mfu"] is None:
        reason = "its kernels were timed on a CPU, and the cost model is for GPUs"
    if reason:
        fix = ("meshwright rehearse RECIPE --gpus CLUSTER --out FILE with the type of the GPU that runs it",)
        raise InputError(reason, field="runs", value=str(path), fix=fix)
    try:
        recipe = msgspec.convert(found["settings"], Recipe)
        case = Case(recipe, model_of(recipe), clusters.cluster(found["cluster"]))
    except (msgspec.ValidationError, KeyError, TypeError) as error:
        raise InputError(f"not a rehearsal of this version: {error}", field="runs", value=str(path)) from None
    measured = {"step_time_s": str(found["step_s"]), "peak_mem_gib_allocated": str(found["allocated_gib"] or "")}
    return of_case(case, {"row_id": str(number), "source": path.name, **measured})


def runs_in(folder: Path) -> tuple[list[Measurement], list[str]]:
    """Return what our own runs in a folder measured, and which were left out and why."""
    folders = [folder] if (folder / METRICS).is_file() else sorted(one.parent for one in folder.rglob(METRICS))
    rows, notes = [], []
    for number, one in enumerate(folders, start=1):
        found = measured_alone(one, number)
        if isinstance(found, str):
            notes.append(f"left out {one}: {found}")
        else:
            rows.append(found)
    if not rows:
        reason = notes[0] if notes else f"there is no {METRICS} in it or below it"
        fix = ("meshwright calibrate --template > runs.csv", "a folder that meshwright train or bench wrote")
        raise InputError(f"has no run to compare with: {reason}", field="runs", value=str(folder), fix=fix)
    return rows, notes


def measured_alone(path: Path, number: int) -> Measurement | str:
    """Return what a run measured that says itself what it is, or why it cannot be used."""
    try:
        run = doctor.read(path)
    except InputError as error:
        if not path.is_dir():
            raise
        return error.reason
    case, why = doctor.case_of_run(run)
    return measurement(run, case, why, stated_fields(run, ()), number)


def measurement(run: Run, case: Case | None, why: str, stated: frozenset[str] | None, number: int) -> Measurement | str:
    """Return what a run measured, or why it cannot be used; `why` says why there is no case."""
    if not run.header.on_gpu:
        return "it ran on CPUs, and the cost model is for GPUs"
    if case is None:
        return why
    run, note = with_counted_tokens(run, case)
    case = at_logged_length(run, case)
    stats = doctor.RunStats(run, case, None, stated)
    if not stats.enough:
        return "it has too few steps after warm-up"
    if stats.tokens_per_s is None or stats.has_unknown_widths:
        return note or "the log does not state the tokens of a step, or its speed: the file of the run does"
    for differs in differing_file(stats):
        return differs.message
    measured = {"tokens_per_s_per_gpu": str(stats.tokens_per_s), "peak_mem_gib_allocated": str(stats.peak_gib or "")}
    found = of_case(case, {"row_id": str(number), "source": Path(run.path).name, **measured})
    return msgspec.structs.replace(found, doubt=_slower_later(stats))


def _slower_later(stats: doctor.RunStats) -> str:
    """Return that a run becomes slower, so that its median speed is not that of sound GPUs; empty if it does not."""
    found = (*stats.findings_of(sustained_slowdown), *stats.findings_of(slowing_down))
    if not found:
        return ""
    path, what = stats.run.path, found[0].message.partition(". ")[0]
    return f"in {path} {what}: the speed fitted is that of its median step; meshwright doctor {path} says what to check"
