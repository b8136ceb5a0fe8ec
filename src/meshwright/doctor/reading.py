"""From a folder or a file to a run: which file tells the steps, whose log it is, and what else lies beside it."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TypeVar

import msgspec

from meshwright import file_access
from meshwright.doctor import faults
from meshwright.doctor.formats import FORMATS, recognised
from meshwright.doctor.formats.text import Line, lines_of
from meshwright.doctor.run import Fault, Run, Step
from meshwright.errors import InputError, closest

LARGEST = 512 * 1024**2  # bytes of one file
MOST_FILES, DEEPEST = 200, 4
ENDINGS = (".log", ".out", ".err", ".txt", ".jsonl", ".output")
NAMES = ("stdout", "stderr", "output", "log")
PACKED, OTHER_TEXT = b"\x1f\x8b", (b"\xff\xfe", b"\xfe\xff")  # how gzip and UTF-16 begin
METRICS, BAD_BATCHES, FAILURE = "metrics.jsonl", "bad_batches.jsonl", "failure.jsonl"


def read(path: str | Path) -> Run:
    """The run in a folder or a log file."""
    place = Path(path)
    if file_access.is_dir(place):
        return _read_folder(place)
    return read_text(_text(place), str(path))


def read_text(text: str, name: str) -> Run:
    """The run that a log tells."""
    lines = list(lines_of(text))
    found = _read_lines(lines, name)
    if found is None or not _tells(found):
        raise _unknown(name, "nothing in it tells of a training")
    return found


def _read_lines(lines: Sequence[Line], name: str) -> Run | None:
    """The run that lines tell; None where they tell neither a step, nor an end that is known, nor what begins."""
    form, _ = recognised(lines)
    run = form.read(lines, name) if form else Run(kind="torch", path=name, file=name)
    told = tuple(faults.find(lines, [(step.line, step.step) for step in run.steps], name))
    if form is None and all(one.name == "error" for one in told):
        return None
    found = msgspec.structs.replace(run, faults=told)
    return found if _tells(found) or found.told.started else None


def _tells(run: Run) -> bool:
    return bool(run.steps or run.faults)


def _read_folder(folder: Path) -> Run:
    """The run of a folder: the file that tells the furthest step, those of starts before it, and all their faults."""
    runs: list[Run] = []
    notes: list[str] = []
    looked = list(islice(_files(folder), MOST_FILES + 1))
    if len(looked) > MOST_FILES:
        looked.pop()
        notes.append(f"only the first {MOST_FILES} logs of {folder} are read")
    for place in looked:
        try:
            found = _read_lines(list(lines_of(_text(place))), str(place))
        except InputError as error:
            notes.append(f"{place} is left out: it {error.reason}")
            continue
        if found is not None:
            runs.append(found)
    best = max(runs, key=_rank, default=Run(kind="meshwright", path=str(folder), file=str(folder / METRICS)))
    written = list(_recorded(folder, best))
    if not any(map(_tells, runs)) and not written:
        what = f"none of its {len(looked)} logs tells of a training" if looked else "there is no log in it"
        raise _unknown(str(folder), "; ".join([what, *notes]))
    starts = _starts(best, runs)
    left = [run.file for run in runs if run.steps and run not in starts]
    if left:
        told = ", ".join(run.file for run in starts)
        notes.append(f"steps are read from {told}; {len(left)} more files tell steps as well, such as {left[0]}")
    others = [fault for run in runs if run is not best for fault in run.faults]
    return msgspec.structs.replace(
        _joined(starts, runs),
        path=str(folder),
        faults=(*best.faults, *others, *written),
        notes=(*best.notes, *notes),
    )


def _rank(run: Run) -> tuple[bool, int, int]:
    """Which file is believed: our metrics before all, then whichever tells the furthest step, then the most."""
    return Path(run.file).name == METRICS and bool(run.steps), run.last_step, len(run.steps)


def _starts(last: Run, runs: Sequence[Run]) -> list[Run]:
    """The runs that a run goes on from, in order, and itself: each begins and ends before the next, without a gap."""
    found = [last]
    while found[0].steps:
        first = found[0].steps[0].first
        before = [
            run
            for run in runs
            if run.kind == last.kind and run.steps and run.steps[0].first < first <= run.last_step + 1
            if run.last_step < found[0].last_step
        ]
        if not before:
            break
        found.insert(0, max(before, key=_rank))
    return found


def _joined(starts: Sequence[Run], runs: Sequence[Run]) -> Run:
    """One run of several starts that have a log each."""
    last = starts[-1]
    if len(starts) == 1:
        return last
    steps: list[Step] = []
    for run in starts:
        before = steps[-1].attempt + 1 if steps else 0
        steps += [msgspec.structs.replace(one, file=run.file, attempt=one.attempt + before) for one in run.steps]
    stems = {Path(run.file).stem for run in starts[:-1]}  # what went to stderr lies beside
    return msgspec.structs.replace(
        last,
        steps=tuple(steps),
        starts=tuple(step for run in starts for step in run.starts),
        earlier=tuple(run.file for run in runs if Path(run.file).stem in stems and run is not last),
    )


def _files(folder: Path) -> Iterator[Path]:
    """The files of a folder that may be logs, a few folders deep, in order of their names."""
    for here, folders, names in os.walk(folder):
        depth = len(Path(here).relative_to(folder).parts)
        folders[:] = sorted(folders) if depth < DEEPEST else []
        for name in sorted(names):
            plain = Path(name.removesuffix(".gz"))
            if name not in (BAD_BATCHES, FAILURE) and (plain.suffix in ENDINGS or plain.stem in NAMES):
                yield Path(here) / name


def _recorded(folder: Path, run: Run) -> Iterator[Fault]:
    """What our own runs write down when they fail: batches whose loss is no number, and the error itself.

    What the run has overcome since is not told: steps taken beyond a bad batch, a start after an error.
    """
    bad = [one for one in _json_lines(folder / BAD_BATCHES, BadBatch) if one.step >= run.last_step]
    if bad:
        first = bad[0]
        text = f"loss {first.loss}, gradient norm {first.grad_norm} on rank {first.rank}"
        yield Fault(name="loss_not_a_number", line=1, text=text, file=BAD_BATCHES, step=first.step)
    for failure in _json_lines(folder / FAILURE, Failure):
        if failure.at < run.told.started[:19]:
            continue
        lines = list(lines_of(failure.error))
        unnamed = Fault(name="error", line=1, text=failure.error[: faults.SHOWN], file=FAILURE)
        for fault in [*faults.find(lines, file=FAILURE)] or [unnamed]:
            yield msgspec.structs.replace(fault, step=run.last_step or None, written_down=True, fix=failure.fix)


class BadBatch(msgspec.Struct):
    """A batch whose loss is no number, as our runs write it down."""

    step: int
    rank: int
    loss: float | str | None = None
    grad_norm: float | str | None = None


class Failure(msgspec.Struct):
    """What a run of ours failed of, as it writes it down."""

    error: str
    fix: tuple[str, ...] = ()
    at: str = ""


Record = TypeVar("Record", BadBatch, Failure)


def _json_lines(place: Path, what: type[Record]) -> list[Record]:
    """The lines of a file that are whole; none where there is no such file."""
    found = []
    with suppress(InputError):
        for line in _text(place).splitlines():
            with suppress(msgspec.DecodeError):
                found.append(msgspec.json.decode(line, type=what))
    return found


def _text(place: Path) -> str:
    """The text of a log; bytes that are no text are shown as such, because logs of killed runs hold some."""
    sent = file_access.text_of(place)
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
        fix = (f"chmod +r {place}",) if isinstance(error, PermissionError) else ()
        raise InputError(f"cannot be read: {error.strerror}", field="run", value=str(place), fix=fix) from error
    if raw.startswith(PACKED):
        raw = _unpacked(raw)
    if raw.startswith(OTHER_TEXT):
        return raw.decode("utf-16", errors="replace")
    if b"\0" in raw[:4096]:
        raise InputError("is binary, not a log", field="run", value=str(place), fix=("name the text log of the run",))
    return raw.decode("utf-8", errors="replace")


def _unpacked(raw: bytes) -> bytes:
    """What gzip has packed, as far as it is whole and may be read."""
    found = b""
    with suppress(zlib.error):
        while raw.startswith(PACKED) and len(found) < LARGEST:
            packed = zlib.decompressobj(wbits=31)  # with the head of gzip
            found += packed.decompress(raw, LARGEST - len(found))
            raw = packed.unused_data
    return found


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
