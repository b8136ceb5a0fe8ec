"""Reads a run from a folder or a file: finds the log with the steps, its format, and what else belongs to it."""

from __future__ import annotations

import bz2
import json
import lzma
import os
import re
import shlex
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from meshwright import file_access, json_text
from meshwright.doctor import cache_flushes, faults, hang, nccl_network, recompiles, straggler_reports
from meshwright.doctor.formats import FORMATS, detect_format
from meshwright.doctor.formats.text import Line, has_any, lines_of
from meshwright.doctor.jobs import newest_job, newest_trainer, note_of_others, of_shorter_trainings, run_folders
from meshwright.doctor.run import Fault, NcclNetwork, Run, Step, Validation
from meshwright.errors import InputError, closest
from meshwright.rules import messages

MAX_BYTES = 512 * 1024**2  # bytes of one file
MAX_LINES = 2_000_000  # of one file, without empty ones; each takes some hundred bytes of memory
MAX_STATE = 32 * 1024**2  # characters of a trainer_state.json
CHUNK = 16 * 1024  # bytes that are decompressed at once
MAX_FILES, MAX_DEPTH = 200, 4
ENDINGS = (".log", ".out", ".err", ".txt", ".jsonl", ".output")
NAMES = ("stdout", "stderr", "output", "log")
GZIP, UTF16 = b"\x1f\x8b", (b"\xff\xfe", b"\xfe\xff")  # magic bytes of gzip and UTF-16
XZ, BZIP2, ZSTD = b"\xfd7zXZ\0", b"BZh", b"\x28\xb5\x2f\xfd"
COMPRESSED = (".gz", ".xz", ".bz2", ".zst")
TRAINER_STATE = "trainer_state.json"  # of the Hugging Face Trainer
EVENTS = "events.out.tfevents"  # of TensorBoard
STDIN = "-"
MAX_KEYS = 8  # of an unknown record in an error
BINARY = 0.05  # share of control characters
END_HINTS = ("raining", "exiting program", "'train_runtime'", "train_runtime", "checkpoint saved", "stopped early")
END = re.compile(
    r"after training is done|[Tt]raining (?:is )?(?:completed|finished|done)\b|exiting program [^\]\n]*|'train_runtime'"
    r"|\btrain_runtime\b|\b(?:interrupted|preempted)[^;\n]*; checkpoint saved at step [^;,\n]*"
    r"(?:; resume with: [^\n]*)?"
    r"|\bstopped early: [^;\n]*"
)
"""How trainers end: Megatron-LM, torchtitan, AutoModel, the Hugging Face Trainer and ours."""
METRICS, BAD_BATCHES, FAILURE = "metrics.jsonl", "bad_batches.jsonl", "failure.jsonl"


def read(path: str | Path) -> Run:
    """Read the run in a folder or a log file."""
    if file_access.is_dir(Path(path)):
        return _read_newest(Path(path))
    return read_text(_text(Path(path)), str(path))


def _read_newest(folder: Path) -> Run:
    """Read the run of a folder; of several run folders of ours in it, the one written last."""
    below = run_folders(folder, METRICS, MAX_DEPTH)
    if folder in below or len(below) < 2:
        return _read_folder(folder)
    newest, *others = below
    found = _read_folder(newest)
    return msgspec.structs.replace(found, notes=(*found.notes, note_of_others(newest, [*map(str, others)])))


def read_text(text: str, name: str) -> Run:
    """Read the run in the text of a log."""
    lines, notes = _lines(text, name)
    found = _read_lines(lines, name)
    if found is None or not _has_content(found):
        raise _unknown(name, _why_unknown(lines))
    return msgspec.structs.replace(found, notes=(*found.notes, *notes))


def _lines(text: str, name: str) -> tuple[list[Line], tuple[str, ...]]:
    """Return the lines of a log and a note on NUL bytes: a log that is cleared while it is written has some."""
    count = text.count("\0")
    note = f"{count:,} NUL bytes were skipped: a log that was cleared while it was written lacks its lines there"
    lines = list(islice(lines_of(_unfolded(text.replace("\0", "") if count else text)), MAX_LINES + 1))
    if len(lines) > MAX_LINES:
        raise _too_large(Path(name), f"has more than {MAX_LINES:,} lines", f"{MAX_LINES:,} lines")
    return lines, (note,) if count else ()


def _unfolded(text: str) -> str:
    """Return a JSON file of one line (`jq -c`) with a line per value: the parsers cut long lines."""
    if len(text) > MAX_STATE or '"log_history"' not in text or "\n" in text.strip():
        return text
    try:
        return json.dumps(json_text.loads(text), indent=2)  # unlike msgspec, it takes the NaN that Trainer writes
    except ValueError:
        return text


def _why_unknown(lines: Sequence[Line]) -> str:
    """Return why a text is not the log of a training: empty, records with other keys, or another error."""
    if not any(line.text.strip() for line in lines):
        return "it is empty"
    try:
        records = [_keys_of(line.text) for line in lines if line.text.lstrip().startswith(("{", "["))]
    except json_text.NestingError as error:
        return f"no training found in it: its JSON {error}"
    if keys := next(filter(None, records), ()):
        named = ", ".join(keys[:MAX_KEYS]) + ", …" * (len(keys) > MAX_KEYS)
        return f"no training found in it: its JSON records have the keys {named}, which no supported format has"
    return f"no training found in it{_unknown_error(lines)}"


def _keys_of(text: str) -> tuple[str, ...]:
    """Return the keys of a JSON record; none for any other text."""
    try:
        found = json_text.decode(text)
    except json_text.NestingError:
        raise
    except msgspec.DecodeError:
        return ()
    return tuple(found) if isinstance(found, dict) else ()


def _read_lines(lines: Sequence[Line], name: str) -> Run | None:
    """Read the run in some lines; None if they have no step, no known failure and no start."""
    log_format, _ = detect_format(lines)
    run = log_format.read(lines, name) if log_format else Run(kind="torch", path=name, file=name)
    found_faults = tuple(faults.find(lines, [(step.line, step.step) for step in run.steps], name))
    if log_format is None and all(one.name == "error" and not faults.search_sure(one.context) for one in found_faults):
        return None
    network = nccl_network.find_network(lines, name)
    found = msgspec.structs.replace(
        run,
        faults=found_faults,
        ending=run.ending or _ending(lines, run),
        network=network,
        recompiles=recompiles.find_recompiles(lines, run.steps, name),
        straggler_reports=straggler_reports.find_reports(lines, run.steps),
        **cache_flushes.flushes(lines, run),
    )
    if found_faults:
        found = msgspec.structs.replace(found, collectives=tuple(hang.reports(lines, name)), hosts=hang.hosts(lines))
    return found if _has_content(found) or found.header.started or found.validations else None


def _ending(lines: Sequence[Line], run: Run) -> str:
    """Return the line with which a trainer ends, after the last step; empty if there is none."""
    last = run.steps[-1].line if run.steps else 0
    after = takewhile(lambda line: line.number > last and not line.text.startswith('{"kind":"'), reversed(lines))
    return next((found[0] for line in after if has_any(line.text, END_HINTS) and (found := END.search(line.text))), "")


def _unknown_error(lines: Sequence[Line]) -> str:
    """Return the last error of a text that is not a known message, for the refusal; empty if there is none."""
    found = [one for one in faults.find(lines) if one.name == "error"]
    if not found:
        return ""
    near = next(iter(messages.search(found[-1].context)), None)
    nearest = f"; the nearest is {near.message.text} (meshwright explain {near.message.ids[0]})" if near else ""
    return f"; its last error is not a known message: {found[-1].text}{nearest}"


def _has_content(run: Run) -> bool:
    return bool(run.steps or run.faults)


def _read_folder(folder: Path) -> Run:
    """Read the newest run of a folder: the log with the latest step, logs of earlier starts, and their faults."""
    runs: list[Run] = []
    notes: list[str] = []
    networks: list[NcclNetwork] = []  # also of files without a run, which NCCL_DEBUG_FILE names
    files = list(islice(_files(folder), MAX_FILES + 1))
    if len(files) > MAX_FILES:
        files.pop()
        notes.append(f"only the first {MAX_FILES} logs of {folder} were read")
    for path in files:
        try:
            lines, skipped = _lines(_text(path), str(path))
            found = _read_lines(lines, str(path))
            network = nccl_network.find_network(lines, str(path))
            networks += [] if network is None else [network]
        except InputError as error:
            notes.append(f"skipped {path}: it {error.reason}")
            continue
        if found is not None:
            runs.append(msgspec.structs.replace(found, notes=(*found.notes, *skipped)))
    for newest in (partial(newest_job, folder=folder), newest_trainer):
        runs, others = newest(runs)
        notes += others
    best = max(runs, key=_rank, default=Run(kind="meshwright", path=str(folder), file=str(folder / METRICS)))
    recorded = list(_recorded(folder, best))
    if not any(map(_has_content, runs)) and not recorded:
        what = f"no training found in its {len(files)} logs" if files else f"it contains no log{_events(folder)}"
        raise _unknown(str(folder), "; ".join([what, *notes]))
    starts = _starts(best, runs)
    unused = [run.file for run in runs if run.steps and run not in starts]
    if unused:
        used = ", ".join(run.file for run in starts)
        more = f"{len(unused)} more files contain steps, such as" if len(unused) > 1 else "another file with steps is"
        notes.append(f"steps were read from {used}; {more} {unused[0]}")
        notes += of_shorter_trainings([run for run in runs if run.file in unused], best)
    faults_besides = [fault for run in runs if run is not best for fault in run.faults]
    return msgspec.structs.replace(
        _with_validations(_joined(starts, runs), runs),
        path=str(folder),
        faults=(*best.faults, *faults_besides, *recorded),
        collectives=tuple(one for run in runs for one in run.collectives),
        hosts=hang.joined(run.hosts for run in runs),
        network=best.network or nccl_network.joined(networks),
        notes=(*best.notes, *notes),
    )


def _events(folder: Path) -> str:
    """Return that a folder has TensorBoard's files, which are not read; empty if it has none."""
    found = next((name for _, _, names in os.walk(folder) for name in names if name.startswith(EVENTS)), None)
    return f": {found} is of TensorBoard, whose files are not read; the console output is needed" if found else ""


def _rank(run: Run) -> tuple[bool, int, int]:
    """Return the priority of a file: our metrics first, then the latest step, then the most steps."""
    return Path(run.file).name == METRICS and bool(run.steps), run.last_step, len(run.steps)


def _starts(last: Run, runs: Sequence[Run]) -> list[Run]:
    """Return the runs that a run resumed from, in order, and itself: each overlaps or adjoins the next."""
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
    """Join several starts with a log each into one run."""
    last = starts[-1]
    if len(starts) == 1:
        return last
    steps: list[Step] = []
    for run in starts:
        before = steps[-1].attempt + 1 if steps else 0
        steps += [msgspec.structs.replace(one, file=run.file, attempt=one.attempt + before) for one in run.steps]
    stems = {Path(run.file).stem for run in starts[:-1]}  # stderr is in a file of its own with the same stem
    return msgspec.structs.replace(
        last,
        steps=tuple(steps),
        starts=tuple(step for run in starts for step in run.starts),
        validations=_validations(starts),
        earlier=tuple(run.file for run in runs if Path(run.file).stem in stems and run is not last),
    )


def _with_validations(joined: Run, runs: Sequence[Run]) -> Run:
    """Return a run with the validation losses of files that have nothing else, such as AutoModel's validation.jsonl."""
    apart = [run for run in runs if run.validations and not run.steps and run.kind == joined.kind]
    if joined.validations or not apart:
        return joined
    return msgspec.structs.replace(joined, validations=_validations(apart))


def _validations(runs: Sequence[Run]) -> tuple[Validation, ...]:
    """Return the validation losses of several files, by step; a repeated one counts as in the latest file."""
    found = {(one.name, one.step): (one, run.file) for run in runs for one in run.validations}
    placed = [msgspec.structs.replace(one, file=file) for one, file in found.values()]
    return tuple(sorted(placed, key=lambda one: one.step))


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder that may be logs, up to a few levels deep, in order of their names."""
    for here, folders, names in os.walk(folder):
        depth = len(Path(here).relative_to(folder).parts)
        folders[:] = sorted(folders) if depth < MAX_DEPTH else []
        for name in sorted(names):
            plain = Path(Path(name).stem if name.endswith(COMPRESSED) else name)
            if name not in (BAD_BATCHES, FAILURE) and (
                plain.suffix in ENDINGS or plain.stem in NAMES or name == TRAINER_STATE
            ):
                yield Path(here) / name


def _recorded(folder: Path, run: Run) -> Iterator[Fault]:
    """Yield the failures that our own runs record: batches with a NaN or infinite loss, and the error itself.

    Failures that the run recovered from are left out: steps after a bad batch, a start after an error.
    """
    bad = [one for one in _json_lines(folder / BAD_BATCHES, BadBatch) if one.step >= run.last_step]
    if bad:
        first = bad[0]
        text = f"loss {first.loss}, gradient norm {first.grad_norm} on rank {first.rank}"
        yield Fault(name="loss_not_a_number", line=1, text=text, file=BAD_BATCHES, step=first.step)
    for failure in _json_lines(folder / FAILURE, Failure):
        if failure.at < run.header.started[:19]:
            continue
        lines = list(lines_of(failure.error))
        unnamed = Fault(name="error", line=1, text=failure.error[: faults.MAX_TEXT], file=FAILURE)
        for fault in [*faults.find(lines, file=FAILURE)] or [unnamed]:
            yield msgspec.structs.replace(fault, step=run.last_step or None, recorded=True, fix=failure.fix)


class BadBatch(msgspec.Struct):
    """A record of bad_batches.jsonl: a batch with a NaN or infinite loss."""

    step: int
    rank: int
    loss: float | str | None = None
    grad_norm: float | str | None = None


class Failure(msgspec.Struct):
    """A record of failure.jsonl: why a run failed."""

    error: str
    fix: tuple[str, ...] = ()
    at: str = ""


Record = TypeVar("Record", BadBatch, Failure)


def _json_lines(path: Path, what: type[Record]) -> list[Record]:
    """Return the valid records of a file; none if it does not exist."""
    found = []
    with suppress(InputError):
        for line in _text(path).splitlines():
            with suppress(msgspec.DecodeError):
                found.append(json_text.decode(line, type=what))
    return found


def _text(path: Path) -> str:
    """Return the text of a log; invalid bytes are replaced, because logs of killed runs contain some."""
    supplied = file_access.text_of(path)
    if supplied is not None:
        return supplied
    try:
        raw: bytes | bytearray = _bytes(path)
    except OSError as error:
        fix = (f"chmod +r {path}",) if isinstance(error, PermissionError) else ()
        raise InputError(f"cannot be read: {error.strerror}", field="run", value=str(path), fix=fix) from error
    if raw.startswith(ZSTD):
        command = f"zstd -dc {shlex.quote(str(path))} | meshwright doctor -"
        raise InputError("is compressed with Zstandard", field="run", value=str(path), fix=(command,))
    if raw.startswith((GZIP, XZ, BZIP2)):
        raw = _unpacked(bytes(raw))
    if raw.startswith(UTF16):
        return raw.decode("utf-16", errors="replace")
    if b"\0" in raw and _is_binary(raw):
        raise InputError("is binary, not a log", field="run", value=str(path), fix=("pass the text log of the run",))
    return raw.decode("utf-8-sig", errors="replace")


def _bytes(path: Path) -> bytes:
    """Return the bytes of a file, a pipe or standard input."""
    if str(path) == STDIN and not path.exists():
        return _limited(path, sys.stdin.buffer.read(MAX_BYTES + 1))
    if path.is_fifo():
        with path.open("rb") as pipe:
            return _limited(path, pipe.read(MAX_BYTES + 1))
    if not path.is_file():
        raise _missing(path)
    if path.stat().st_size > MAX_BYTES:
        raise _too_large(path, f"has {path.stat().st_size / 1024**2:,.0f} MiB")
    return path.read_bytes()


def _limited(path: Path, raw: bytes) -> bytes:
    if len(raw) > MAX_BYTES:
        raise _too_large(path, "is too long")
    return raw


def _too_large(path: Path, what: str, most: str = f"{MAX_BYTES // 1024**2} MiB") -> InputError:
    return InputError(
        f"{what}; the limit is {most}",
        field="run",
        value=str(path),
        fix=("keep only the step lines: grep -E 'iteration|step|memory'",),
    )


def _is_binary(raw: bytes | bytearray) -> bool:
    """Return whether a file with NUL bytes is not a log: logs that were cleared while written have text beside them."""
    rest = raw.replace(b"\0", b"")[:65536]
    controls = sum(byte < 9 or 13 < byte < 27 or 27 < byte < 32 or byte > 126 for byte in rest)
    return controls > BINARY * len(rest) or not rest


def _unpacked(raw: bytes) -> bytearray:
    """Decompress gzip, xz or bzip2 data as far as it is intact, up to the size limit; parts may follow each other."""
    found, place, packed = bytearray(), 0, None
    with suppress(zlib.error, lzma.LZMAError, OSError, EOFError):
        while place < len(raw) and len(found) < MAX_BYTES:
            if packed is None:
                if not raw.startswith((GZIP, XZ, BZIP2), place):
                    break
                packed = _decompressor(raw[place : place + len(XZ)])
            chunk = raw[
                place : place + CHUNK
            ]  # of a part that ends, the rest is copied: small, or many parts take long
            found += packed.decompress(chunk, MAX_BYTES - len(found))
            place += len(chunk)
            if packed.eof:
                place, packed = place - len(packed.unused_data), None
    return found


def _decompressor(start: bytes) -> Any:
    if start.startswith(GZIP):
        return zlib.decompressobj(wbits=31)  # gzip header
    return lzma.LZMADecompressor() if start.startswith(XZ) else bz2.BZ2Decompressor()


def _missing(path: Path) -> InputError:
    try:
        similar = closest(path.name, [entry.name for entry in os.scandir(path.parent)], limit=2)
    except OSError:
        similar = []
    names = [str(path.parent / name) for name in similar if not path.exists()]
    hint = f"; did you mean {names[0]}?" if names else ""
    reason = "is a device, not a file" if path.exists() else f"there is no such file or folder{hint}"
    return InputError(reason, field="run", value=str(path), fix=names)


def _unknown(name: str, what: str) -> InputError:
    files = "; ".join(one.looked_for for one in FORMATS)
    return InputError(
        f"{what}. Supported: {files}; or torch's out-of-memory message",
        field="run",
        value=name,
        fix=("pass the file with the output of the training, or its folder",),
    )
