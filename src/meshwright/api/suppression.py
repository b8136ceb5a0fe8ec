"""Findings that a team accepts: by a comment in the file, by rule, or by a baseline of known findings."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import msgspec

from meshwright import config_io, file_access, frameworks, json_text
from meshwright.api import requests
from meshwright.api.resolve import write_text
from meshwright.errors import InputError, MeshwrightError, closest, unknown
from meshwright.frameworks import BaselineEntry, CheckResult, IgnoredFinding
from meshwright.rules import Finding
from meshwright.version import SCHEMA

MARK = "meshwright: ignore"
COMMENT = re.compile(
    r"(?:^|(?<=\s))#\s*meshwright:\s*ignore(?P<file>-file)?(?:\s*\[(?P<rules>[^\]]*)\])?[\s:,-]*(?P<reason>.*)$"
)
COMMENTED = ("yaml", "toml", "shell", "python")  # formats that have # comments


class Comment(msgspec.Struct, frozen=True):
    """A comment that accepts findings of some rules."""

    line: int
    lines: frozenset[int]  # of the settings it is about; empty: the whole file
    rules: tuple[str, ...]
    reason: str


class Baseline(msgspec.Struct, frozen=True):
    """The findings that a team knows: they are not counted again."""

    findings: tuple[BaselineEntry, ...]
    schema: str = SCHEMA


def suppressed(result: CheckResult, request: requests.Check) -> CheckResult:
    """Return the result with the accepted findings apart, and notes on comments that accept nothing."""
    require_rules(request.ignore)
    comments = _Comments()
    known = None if request.baseline is None else read_baseline(request.baseline)
    name = None if request.baseline is None else baseline_name(request.baseline, result.file or result.recipe.name)
    left = Counter(() if known is None else (_key(one) for one in known.findings if one.file == name))
    kept: list[Finding] = []
    ignored: list[IgnoredFinding] = []
    for finding in result.findings:
        key = (finding.rule, finding.field)
        comment = comments.about(finding, result.file)
        if comment is not None:
            ignored.append(IgnoredFinding(finding, "comment", comment.reason))
        elif any(fnmatchcase(finding.rule, pattern) for pattern in request.ignore):
            ignored.append(IgnoredFinding(finding, "option"))
        elif left[key] > 0:
            left[key] -= 1
            ignored.append(IgnoredFinding(finding, "baseline"))
        else:
            kept.append(finding)
    entries = () if known is None else [one for one in known.findings if one.file == name]
    stale = tuple(one for one in entries if _take(left, _key(one)))
    return msgspec.structs.replace(
        result,
        findings=tuple(kept),
        ignored=tuple(ignored),
        stale=stale,
        fail_on=request.fail_on,
        notes=(*result.notes, *comments.notes(result.file)),
    )


def _key(entry: BaselineEntry) -> tuple[str, str]:
    return entry.rule, entry.field


def _take(left: Counter[tuple[str, str]], key: tuple[str, str]) -> bool:
    """Return whether an entry of this key is left, and take it."""
    left[key] -= 1
    return left[key] >= 0


def require_rules(patterns: Iterable[str]) -> None:
    """Raise InputError with did-you-mean for a rule that no finding can have."""
    for pattern in patterns:
        if not any(fnmatchcase(rule, pattern) for rule in rule_ids()):
            raise unknown("ignore", pattern, rule_ids(), "meshwright rules", "rule")


@cache
def rule_ids() -> tuple[str, ...]:
    """Return the ids that findings may have."""
    from meshwright.frameworks import rule_catalog  # all frameworks: 50 ms

    return tuple(rule_catalog.all_rules())


class _Comments:
    """The comments of the files that findings are in; each file is read once."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[Comment, ...]] = {}
        self.used: set[tuple[str, int]] = set()

    def of(self, file: str) -> tuple[Comment, ...]:
        """Return the comments of a file; none if it has no text with # comments."""
        if file not in self.found:
            self.found[file] = tuple(_comments_of(file))
        return self.found[file]

    def about(self, finding: Finding, checked: str) -> Comment | None:
        """Return the comment that accepts a finding."""
        file = finding.file or checked
        for one in self.of(file) if file else ():
            applies = not one.lines or finding.line in one.lines
            if applies and any(fnmatchcase(finding.rule, rule) for rule in one.rules):
                self.used.add((file, one.line))
                return one
        return None

    def notes(self, checked: str) -> Iterator[str]:
        """Yield a note on each comment of the checked file that accepts nothing."""
        for one in self.of(checked) if checked else ():
            place = f"{checked}:{one.line}"
            if not one.rules:
                yield f"{place}: the comment names no rule: # {MARK}[rule.name] reason"
                continue
            wrong = [rule for rule in one.rules if not any(fnmatchcase(known, rule) for known in rule_ids())]
            for rule in wrong:
                near = closest(rule, rule_ids())
                meant = f"; did you mean {' or '.join(near)}?" if near else ""
                yield f"{place}: ignore[{rule}] names an unknown rule{meant}"
            if not wrong and (checked, one.line) not in self.used:
                yield f"{place}: ignore[{', '.join(one.rules)}] matches no finding; remove the comment"


def _comments_of(file: str) -> Iterator[Comment]:
    if not (file_access.closed() or Path(file).is_file()):
        return
    try:
        text = config_io.read_text(file)
        if MARK not in re.sub(r":\s*", ": ", text) or frameworks.format_of(file, text) not in COMMENTED:
            return
        continued = frameworks.format_of(file, text) == "shell"
    except InputError:  # a text of another name, or a format of its own
        return
    yield from comments_in(text, continued)


def comments_in(text: str, continued: bool = False) -> Iterator[Comment]:
    """Yield the comments of a text. One alone on its line is about the next setting; in a shell script, about the
    whole command that continues over several lines, where no comment can stand.
    """
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        match = COMMENT.search(line)
        if match is None:
            continue
        rules = tuple(rule.strip() for rule in (match["rules"] or "").split(",") if rule.strip())
        covered = frozenset({number}) if line[: match.start()].strip() else _next_setting(lines, number, continued)
        yield Comment(number, frozenset() if match["file"] else covered, rules, match["reason"].strip())


def _next_setting(lines: Sequence[str], number: int, continued: bool) -> frozenset[int]:
    """Return the lines that a comment alone on line `number` is about."""
    first = number + 1
    while first <= len(lines) and lines[first - 1].lstrip().startswith("#"):
        first += 1
    last = first
    while continued and last <= len(lines) and lines[last - 1].rstrip().endswith("\\"):
        last += 1
    return frozenset((number, *range(first, last + 1)))


def baseline_name(baseline: str, target: str) -> str:
    """Return how a baseline names a target: its path from the baseline's folder, or the name of a recipe."""
    if not Path(target).exists():
        return target
    return Path(os.path.relpath(Path(target).resolve(), Path(baseline).resolve().parent)).as_posix()


def read_baseline(path: str) -> Baseline:
    """Read a baseline file."""
    text = config_io.read_text(Path(path).expanduser(), max_bytes=50_000_000)
    try:
        found: Baseline = json_text.decode(text, type=Baseline)
    except msgspec.DecodeError as error:
        fix = (f"meshwright check FILES --write-baseline {path}",)
        raise InputError(f"is not a baseline: {error}", field="baseline", value=path, fix=fix) from None
    return found


def is_baseline(path: str) -> bool:
    """Return whether a file has the form of a baseline."""
    try:
        return bool(read_baseline(path).findings)
    except MeshwrightError:
        return False


def write_baseline(path: str, entries: Sequence[BaselineEntry]) -> None:
    """Write a baseline file, in the order of files."""
    ordered = tuple(sorted(entries, key=lambda one: (one.file, one.rule, one.field)))
    encoded = msgspec.json.format(msgspec.json.encode(Baseline(ordered)), indent=2)
    write_text(str(Path(path).expanduser()), encoded.decode() + "\n", "write_baseline")


def missing_entries(path: str) -> list[BaselineEntry]:
    """Return the entries of files that no longer exist; a recipe has no file."""
    folder = Path(path).expanduser().resolve().parent
    named = read_baseline(path).findings
    return [one for one in named if Path(one.file).suffix in frameworks.SUFFIXES and not (folder / one.file).exists()]


def entries_of(answer: Mapping[str, object], path: str) -> list[BaselineEntry]:
    """Return the findings of a response as entries of a baseline; those that comments or options accept stay out."""
    checked = str(answer.get("file") or answer.get("recipe"))
    findings: list[Mapping[str, object]] = [
        *answer["findings"],  # type: ignore[misc]
        *(one for one in answer.get("ignored", ()) if one["by"] == "baseline"),  # type: ignore[attr-defined]
    ]
    name = baseline_name(path, checked)
    return [BaselineEntry(name, str(f["rule"]), str(f["field"]), str(f["message"])) for f in findings]
