"""The jobs whose logs a folder contains: which file is of which job, and which job is the newest."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from meshwright.doctor.run import Run

JOB = re.compile(
    r"slurm[-_.]?(?P<slurm>[0-9]+)|(?:^|[-_.])(?P<time>20[0-9]{2}-?[01][0-9]-?[0-3][0-9](?:[-_t.]?(?:[0-9]{2}[-_:]?){2,3})?)"
    r"(?![0-9])|(?:^|(?<!rank)(?<!node)(?<!host)(?<!checkpoint)(?<!ckpt)(?<!step)(?<!iter)[-_.])"
    r"(?P<number>[0-9]{4,})(?![0-9a-z])"
)
"""A scheduler's job or a time of start in the name of a log; numbers below 1,000 may be ranks or nodes.

Those of a checkpoint's folder are its step.
"""
SECONDS = 14  # digits of a time to the second
MUCH_FURTHER = 1.1  # times the steps; a log of the same job may lack the last lines
MOST = 4  # other jobs that a note names
TRAINERS = {
    "megatron": "megatron", "nemo": "megatron", "torchtitan": "torchtitan", "automodel": "automodel",
    "kempnerforge": "kempnerforge", "transformers": "transformers",
}  # fmt: skip
"""Log format → the trainer that writes it; the others are written beside the logs of any trainer."""


class Jobs(NamedTuple):
    """The runs of a folder that are of one job, with the logs that belong to no job, and notes on the others."""

    runs: list[Run]
    notes: list[str]


def newest_job(runs: Sequence[Run], folder: Path) -> Jobs:
    """Return the runs of the newest job and of those that it resumed from; without several jobs, all runs."""
    jobs: dict[str, list[Run]] = {}
    for run in runs:
        jobs.setdefault(_job(Path(run.file), folder), []).append(run)
    unnamed = jobs.pop("", [])
    if len(jobs) < 2:
        return Jobs(list(runs), [])
    newest, *others = _newest_first(jobs)
    apart = _of_other_trainings(unnamed, jobs[newest])
    if apart and max(map(_time_of, apart)) > max(map(_time_of, jobs[newest])):
        return Jobs(apart, [note_of_others(_main(apart).file, [_described(jobs[key]) for key in (newest, *others)])])
    kept, used = [*jobs[newest], *(run for run in unnamed if run not in apart)], {newest}
    notes: list[str] = []
    if not any(run.steps for run in kept):  # it failed before its first step: what it may have resumed from
        before = next((key for key in others if any(run.steps for run in jobs[key])), "")
        kept += map(_without_end, jobs.get(before, ()))
        used.add(before)
        notes += [_no_steps(jobs[newest], jobs[before])] if before else []
    first = min((run.steps[0].first for run in kept if run.steps), default=1)
    for key in others:  # from the latest: each may have resumed from the one before
        stepped = [run for run in jobs[key] if run.steps]
        start = min((run.steps[0].first for run in stepped), default=first)
        if key not in used and start < first <= max(run.last_step for run in stepped) + 1:
            kept, first = [*kept, *jobs[key]], start
            used.add(key)
    left = [_described(jobs[key]) for key in others if key not in used] + [_described([run]) for run in apart]
    return Jobs(kept, [*([note_of_others(_main(jobs[newest]).file, left)] if left else []), *notes])


def newest_trainer(runs: Sequence[Run]) -> Jobs:
    """Return the runs of the trainer whose log was written last, with those of any trainer; of one trainer, all."""
    trainers: dict[str, list[Run]] = {}
    for run in runs:
        trainers.setdefault(TRAINERS.get(run.kind, ""), []).append(run)
    shared = trainers.pop("", [])
    if len(trainers) < 2:
        return Jobs(list(runs), [])
    newest, *others = sorted(trainers.values(), key=lambda found: max(map(_time_of, found)), reverse=True)
    left = [_described([run]) for found in others for run in found]
    return Jobs([*newest, *shared], [note_of_others(_main(newest).file, left)])


def of_shorter_trainings(runs: Iterable[Run], diagnosed: Run) -> list[str]:
    """Return notes on errors of logs that may be of another training: they end long before the diagnosed one."""
    return [
        f"the errors of {run.file} are among those shown: it ends at step {run.last_step:,}, and may be of another "
        f"training (meshwright doctor {run.file} diagnoses it alone)"
        for run in runs
        if run.faults and run.last_step * MUCH_FURTHER < diagnosed.last_step
    ][:MOST]


def _of_other_trainings(unnamed: Sequence[Run], newest: Sequence[Run]) -> list[Run]:
    """Return the logs without a job that are much further than the newest job, which has steps of its own."""
    last = max(run.last_step for run in newest)
    return [run for run in unnamed if last and run.last_step > MUCH_FURTHER * last]


def _no_steps(newest: Sequence[Run], before: Sequence[Run]) -> str:
    """Return whose steps are shown with the end of a job that has none."""
    return (
        f"{_main(newest).file} ends before its first step: only its errors are of it, and the steps and figures are "
        f"those of {_main(before).file}, from which it may have resumed"
    )


def run_folders(folder: Path, record: str, depth: int) -> list[Path]:
    """Return the folders below one that contain a file of that name, the one written last first."""
    found = []
    for here, folders, names in os.walk(folder):
        if len(Path(here).relative_to(folder).parts) >= depth:
            folders.clear()
        found += [Path(here) / record] if record in names else []
    return [file.parent for file in sorted(found, key=_written, reverse=True)]


def note_of_others(newest: Path | str, others: Sequence[str]) -> str:
    """Return which of several jobs is diagnosed."""
    more = f" and {len(others) - MOST} more" if len(others) > MOST else ""
    return (
        f"several jobs have logs here: the newest is diagnosed, {newest}; not the others, newest first: "
        f"{', '.join(others[:MOST])}{more} (meshwright doctor takes one of them)"
    )


def _job(path: Path, folder: Path) -> str:
    """Return the job that the name of a log or of its folders shows; empty if none does."""
    inside = [one for one in (path, *path.parents) if folder in one.parents]
    found = next(filter(None, (JOB.search(one.name.lower()) for one in inside)), None)
    return "" if found is None else found["slurm"] or found["number"] or f"at {found['time']}"


def _without_end(run: Run) -> Run:
    """Return an earlier job's run without what ended it."""
    return msgspec.structs.replace(run, faults=(), collectives=(), ending="")


def _newest_first(jobs: Mapping[str, Sequence[Run]]) -> list[str]:
    """Return the jobs by their numbers or times, or by the time of their files where the names show both."""
    timed = [key.startswith("at ") for key in jobs]
    if any(timed) and not all(timed):
        return sorted(jobs, key=lambda key: max(_written(Path(run.file)) for run in jobs[key]), reverse=True)
    digits = {key: re.sub(r"[^0-9]", "", key).ljust(SECONDS if any(timed) else 0, "0") for key in jobs}
    return sorted(jobs, key=lambda key: int(digits[key]), reverse=True)


def _written(file: Path) -> float:
    """Return when a file was last written; 0 for a text that was sent."""
    with suppress(OSError):
        return file.stat().st_mtime
    return 0.0


def _time_of(run: Run) -> float:
    return _written(Path(run.file))


def _described(runs: Sequence[Run]) -> str:
    """Return the log of a job with its last step and its last error."""
    main = _main(runs)
    ended = next((fault.name.replace("_", " ") for run in runs for fault in reversed(run.faults)), "")
    return f"{main.file} ({', '.join(filter(None, (f'to step {main.last_step:,}' if main.steps else '', ended)))})"


def _main(runs: Iterable[Run]) -> Run:
    return max(runs, key=lambda run: (run.last_step, len(run.faults)))
