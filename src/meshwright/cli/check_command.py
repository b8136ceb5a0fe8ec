"""The check command: one target or many, in the format of a terminal, a program or a CI system."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import click
import msgspec

from meshwright import api
from meshwright.api.verbs import Verb
from meshwright.cli.answer import FAILED, decide, emit
from meshwright.cli.progress import waiting_line
from meshwright.errors import InputError, MeshwrightError
from meshwright.version import SCHEMA

FEW = 8  # files that one process checks before others would have started
Answer = dict[str, Any]


class Checked(msgspec.Struct, frozen=True):
    """One target's response, or its error."""

    target: str
    answer: Answer | None = None
    exists: bool = True  # whether the layout can be built
    verdict: str = ""  # the result in words
    error: Answer | None = None
    skipped: str = ""  # why it was not checked
    exit_code: int = 0


def check(verb: Verb, request: Any, as_json: bool) -> None:
    """Print the findings of every target; the exit code is the worst."""
    format = _format(request, as_json)
    words = (request.target, *request.more)
    targets = api.expand(words, request.skip_unknown, (request.baseline, request.write_baseline))
    api.require_rules(request.ignore)
    if request.baseline is not None:
        api.read_baseline(request.baseline)
    cleared = {"more": (), "format": None, "write_baseline": None, "skip_unknown": False}
    single = msgspec.structs.replace(request, **cleared)
    if not targets.several and format in ("text", "json"):
        with waiting_line(f"check {targets.names[0]}"):
            found = [_of_result(verb, msgspec.structs.replace(single, target=targets.names[0]))]
    else:
        found = _check_all([msgspec.structs.replace(single, target=one) for one in targets.names], targets.optional)
    answers = [one.answer for one in found if one.answer is not None]
    failed = [{"file": one.target, "error": one.error} for one in found if one.error is not None]
    skipped = [api.SkippedFile(file=one.target, reason=one.skipped) for one in found if one.skipped]
    if skipped and not answers and not failed and not request.skip_unknown:
        raise api.nothing_checked(words, skipped)
    gone = [] if request.baseline is None else [msgspec.to_builtins(e) for e in api.missing_entries(request.baseline)]
    ok = not failed and all(answer["ok"] for answer in answers)
    code = max((one.exit_code for one in found), default=0)
    if request.write_baseline is not None:
        entries = [entry for answer in answers for entry in api.entries_of(answer, request.write_baseline)]
        api.write_baseline(request.write_baseline, entries)
        known = [*api.distinct_findings(answers), *api.distinct_findings(answers, "ignored")]
        count = sum(one.get("by", "baseline") == "baseline" for _, one in known)
        click.echo(f"wrote {request.write_baseline}: {_count(count, 'known finding')}", err=True)
    if not failed:
        code = 0 if ok or request.fail_on == "never" or request.write_baseline is not None else FAILED
    decide(code)
    left_out = [msgspec.to_builtins(one) for one in skipped]
    if format == "sarif":
        emit(api.sarif(answers, failed, code))
    elif format == "json":
        emit(_several(answers, failed, left_out, gone, ok) if targets.several else answers[0])
    else:
        if format == "github":
            for line in api.github(answers, failed):
                click.echo(line)
        else:
            _print_reports(found)
        _print_summary(answers, failed, left_out, gone, targets.several or format == "github")
    click.get_current_context().exit(code)


def _format(request: Any, as_json: bool) -> str:
    if as_json and request.format not in (None, "json"):
        fix = (f"without --json: --format {request.format}", "without --format")
        raise InputError("is given with --json", field="--format", value=request.format, fix=fix)
    return "json" if as_json else request.format or "text"


def _of_result(verb: Verb, request: Any) -> Checked:
    result = verb.handle(request)
    return Checked(str(request.target), api.to_json(verb.respond(result, request)), result.exists, result.verdict)


def _check_one(request: Any, optional: frozenset[str]) -> Checked:
    """Check one of several targets: what is wrong with it does not keep the others from being checked."""
    from meshwright.api.verbs import VERBS

    try:
        reason = api.why_skipped(request.target, request.framework) if request.target in optional else ""
        return Checked(request.target, skipped=reason) if reason else _of_result(VERBS["check"], request)
    except MeshwrightError as error:
        details = error.to_dict()
        return Checked(str(request.target), error=details, exit_code=error.exit_code)


def _check_all(requests: Sequence[Any], optional: frozenset[str]) -> list[Checked]:
    """Check targets, many of them in as many processes as there are cores."""
    import multiprocessing

    run = partial(_check_one, optional=optional)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # A copy of a process with other threads may wait forever for a lock that one of them held.
    can_fork = "fork" in multiprocessing.get_all_start_methods() and threading.active_count() == 1
    if len(requests) <= FEW or cores < 2 or not can_fork or "torch" in sys.modules:
        with waiting_line(f"check: 0 of {len(requests)} files") as show:
            return _counted(map(run, requests), len(requests), show)
    first, rest = run(requests[0]), requests[1:]  # what every check imports is imported before the copies are made
    workers = min(cores, len(rest), 8)
    # The copies are made before the line's thread starts.
    with multiprocessing.get_context("fork").Pool(workers) as pool, waiting_line("check") as show:
        found = pool.imap(run, rest, chunksize=max(1, len(rest) // (workers * 8)))
        return [first, *_counted(found, len(rest), show)]


def _counted(found: Iterable[Checked], count: int, show: Callable[[str], None]) -> list[Checked]:
    """Return all, and show how many there are already."""
    kept = []
    for one in found:
        kept.append(one)
        show(f"check: {len(kept)} of {count} files")
    return kept


def _several(
    answers: Sequence[Answer], failed: Sequence[Answer], skipped: Sequence[Answer], gone: Sequence[Answer], ok: bool
) -> Answer:
    """Return one object for several targets: the findings of all, and the response of each in `files`."""
    frameworks = dict.fromkeys(str(answer["framework"]) for answer in answers)
    return {
        "schema": SCHEMA,
        "framework": ", ".join(frameworks),
        "ok": ok,
        "findings": [{"file": _name(a), **finding} for a in answers for finding in a["findings"]],
        "notes": [],
        "files": [{key: value for key, value in answer.items() if key != "schema"} for answer in answers],
        "failed": list(failed),
        "skipped": list(skipped),
        "ignored": [{"file": _name(a), **finding} for a in answers for finding in a.get("ignored", ())],
        "stale": [*(one for answer in answers for one in answer.get("stale", ())), *gone],
    }


def _name(answer: Answer) -> str:
    return str(answer["file"] or answer["recipe"])


def _print_reports(found: Sequence[Checked]) -> None:
    from meshwright.cli.reports import report

    for place, one in enumerate(one for one in found if one.answer is not None):
        if place:
            click.echo()
        report("check")(one.answer or {}, SimpleNamespace(exists=one.exists, verdict=one.verdict))
    for one in found:
        if one.error is not None:
            fix = f"  fix: {' | '.join(one.error['fix'][:3])}" if one.error["fix"] else ""
            click.echo(f"error: {one.target}: {one.error['message']}{fix}", err=True)


def _print_summary(
    answers: Sequence[Answer],
    failed: Sequence[Answer],
    skipped: Sequence[Answer],
    gone: Sequence[Answer],
    several: bool,
) -> None:
    """Print what was skipped, the entries of the baseline that are stale, and the counts."""
    for one in skipped:
        click.echo(f"skipped {one['file']}: {one['reason']}")
    for one in (*(one for answer in answers for one in answer.get("stale", ())), *gone):
        click.echo(f"stale in the baseline: {one['file']}: {one['rule']} {one['field']} is no longer found")
    if not several:
        return
    counts = {
        level: sum(one["severity"] == level for _, one in api.distinct_findings(answers))
        for level in ("error", "warning", "advice")
    }
    ignored = len(api.distinct_findings(answers, "ignored"))
    parts = [
        _count(len(answers), "file") + " checked",
        *(_count(count, level) if level != "advice" else f"{count} advice" for level, count in counts.items() if count),
        *([f"{len(failed)} not readable"] if failed else []),
        *([f"{len(skipped)} skipped"] if skipped else []),
        *([f"{_count(ignored, 'finding')} ignored"] if ignored else []),
    ]
    click.echo(", ".join(parts))


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
