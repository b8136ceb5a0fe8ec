"""From a folder or a file to a run: which file tells the steps, whose log it is, and what else lies beside it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from meshwright import handed
from meshwright.doctor import faults
from meshwright.doctor.formats import FORMATS, recognised
from meshwright.doctor.formats.text import Line, lines_of
from meshwright.doctor.run import Fault, Run
from meshwright.errors import InputError, closest

LARGEST = 512 * 1024**2  # bytes of one file
MOST_FILES, DEEPEST = 200, 4
ENDINGS = (".log", ".out", ".err", ".txt", ".jsonl", ".output")
NAMES = ("stdout", "stderr", "output", "log")
METRICS, BAD_BATCHES, FAILURE = "metrics.jsonl", "bad_batches.jsonl", "failure.jsonl"


def read(path: str | Path) -> Run:
    """The run in a folder or a log file."""
    place = Path(path)
    if handed.is_dir(place):
        return _read_folder(place)
    return read_text(_text(place), str(path))


def read_text(text: str, name: str) -> Run:
    """The run that a log tells."""
    lines = list(lines_of(text))
    found = _read_lines(lines, name)
    if found is None:
        raise _unknown(name, "nothing in it tells of a training")
    return found


def _read_lines(lines: Sequence[Line], name: str) -> Run | None:
    """The run that lines tell; None where they tell neither a step nor an end that is known."""
    form, _ = recognised(lines)
    run = form.read(lines, name) if form else Run(kind="torch", path=name, file=name)
    told = tuple(faults.find(lines, [(step.line, step.step) for step in run.steps], name))
    if not run.steps and not told:
        return None
    return msgspec.structs.replace(run, faults=told)


def _read_folder(folder: Path) -> Run:
    """The run of a folder: the file that tells most steps, and the faults that all of them tell."""
    runs: list[tuple[int, Run]] = []
    looked = list(_files(folder))
    for place in looked:
        if place.name in (BAD_BATCHES, FAILURE):
            continue
        text = _text(place, tolerant=True)
        found = _read_lines(list(lines_of(text)), str(place)) if text else None
        if found is not None:
            runs.append((_rank(found, place), found))
    if not runs:
        what = f"none of its {len(looked)} logs tells of a training" if looked else "there is no log in it"
        raise _unknown(str(folder), what)
    runs.sort(key=lambda one: -one[0])
    best = runs[0][1]
    others = [run for _, run in runs[1:]]
    told = [*best.faults, *(fault for run in others for fault in run.faults), *_recorded(folder, best)]
    notes = [*best.notes]
    left = [run.file for run in others if run.steps]
    if left:
        notes.append(f"steps are read from {best.file}; {len(left)} more files tell steps as well, such as {left[0]}")
    return msgspec.structs.replace(best, path=str(folder), faults=tuple(told), notes=tuple(notes))


def _rank(run: Run, place: Path) -> int:
    """Which file is believed: our metrics before all, then whichever tells most steps."""
    return (1 << 40) * (place.name == METRICS and bool(run.steps)) + len(run.steps)


def _files(folder: Path) -> Iterator[Path]:
    """The files of a folder that may be logs, a few folders deep, in order of their names."""
    count = 0
    for here, folders, names in os.walk(folder):
        depth = len(Path(here).relative_to(folder).parts)
        folders[:] = sorted(folders) if depth < DEEPEST else []
        for name in sorted(names):
            place = Path(here) / name
            if place.suffix in ENDINGS or place.stem in NAMES or place.name == METRICS:
                count += 1
                if count > MOST_FILES:
                    return
                yield place


def _recorded(folder: Path, run: Run) -> Iterator[Fault]:
    """What our own runs write down when they fail: batches whose loss is no number, and the error itself.

    What the run has overcome since is not told: steps taken beyond a bad batch, a start after an error.
    """
    bad = [one for one in _json_lines(folder / BAD_BATCHES) if (one.get("step") or 0) >= run.last_step]
    if bad:
        first = bad[0]
        text = f"loss {first.get('loss')}, gradient norm {first.get('grad_norm')} on rank {first.get('rank')}"
        yield Fault(name="loss_not_a_number", line=1, text=text, file=BAD_BATCHES, step=first.get("step"))
    for failure in _json_lines(folder / FAILURE):
        if str(failure.get("at", "")) < run.told.started[:19]:
            continue
        lines = list(lines_of(str(failure.get("error", ""))))
        for fault in faults.find(lines, file=FAILURE):
            yield msgspec.structs.replace(fault, step=run.last_step or None)


def _json_lines(place: Path) -> list[dict[str, Any]]:
    if not place.is_file():
        return []
    found = []
    for line in _text(place, tolerant=True).splitlines():
        try:
            one = msgspec.json.decode(line)
        except msgspec.DecodeError:
            continue
        if isinstance(one, dict):
            found.append(one)
    return found


def _text(place: Path, tolerant: bool = False) -> str:
    """The text of a log; bytes that are no text are shown as such, because logs of killed runs hold some."""
    sent = handed.text_of(place)
    if sent is not None:
        return sent
    try:
        if not place.is_file():
            raise _missing(place)
        if place.stat().st_size > LARGEST:
            raise InputError(
                f"has {place.stat().st_size / 1024**2:,.0f} MiB, and at most {LARGEST // 1024**2} are read",
                field="run",
                value=str(place),
                fix=("keep the lines that tell steps: grep -E 'iteration|step|memory'",),
            )
        raw = place.read_bytes()
    except OSError as error:
        if tolerant:
            return ""
        raise InputError(f"cannot be read: {error.strerror}", field="run", value=str(place)) from error
    except InputError:
        if tolerant:
            return ""
        raise
    if b"\0" in raw[:4096] and not tolerant:
        raise InputError("is binary, not a log", field="run", value=str(place), fix=("name the text log of the run",))
    return raw.decode("utf-8", errors="replace")


def _missing(place: Path) -> InputError:
    try:
        near = closest(place.name, [entry.name for entry in os.scandir(place.parent)], limit=2)
    except OSError:
        near = []
    names = [str(place.parent / name) for name in near]
    hint = f"; did you mean {names[0]}?" if names else ""
    reason = "is a device or a pipe, not a file" if place.exists() else f"there is no such file or folder{hint}"
    return InputError(reason, field="run", value=str(place), fix=names)


def _unknown(name: str, what: str) -> InputError:
    looked = "; ".join(one.looked_for for one in FORMATS)
    return InputError(
        f"{what}. Looked for: {looked}; or torch's words for a run that ran out of memory",
        field="run",
        value=name,
        fix=("name the file that the training printed to, or the folder it lies in",),
    )
