"""Check the config files that the frameworks' own repositories run: files read, errors by rule, false errors.

An error on a file that its owners run is false, unless ledger.toml lists it with the reason. A corpus module collects
the files of a checkout, and keeps the keys and values of each so that the check can be repeated without the checkout.
"""

from __future__ import annotations

import fnmatch
import json
import random
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from meshwright import check
from meshwright.errors import InputError

FOLDER = Path(__file__).parent
KEPT = FOLDER.parent / "data" / "corpora"
RESULTS = FOLDER.parent / "results" / "corpora.json"
LEDGER = FOLDER / "ledger.toml"
SOURCES = ("megatron", "src", "scripts")  # folders of a checkout that define keys
PROCESSES = 2
MESSAGE = 300  # characters of a message in the result file


@dataclass(frozen=True)
class Target:
    """A config file of a corpus, as `check` is given it."""

    path: str  # in its repository, with #RUN if one file describes several runs
    file: Path  # what `check` opens
    gpus: str | None = None  # those of its owners' runs, where the file does not name them
    model: str | None = None
    framework: str | None = None
    kept: Any = None  # keys and values from which Corpus.restore makes the file again
    skipped: str = ""  # why it is not counted: it trains nothing


@dataclass(frozen=True)
class Defect:
    """A defect put into a file that has none."""

    kind: str  # such as misspelled flag
    change: str  # such as --lr → --lrr
    target: Target


@dataclass(frozen=True)
class Corpus:
    """A set of files of one repository."""

    name: str
    repository: str
    title: str  # of its row in the docs
    collect: Callable[[Path, Path], Iterable[Target]]  # from a checkout; files that are made go to the second folder
    restore: Callable[[Mapping[str, Any], Path], Target]  # from a kept entry; the file goes to the folder
    defects: Callable[[Mapping[str, Any], Path, random.Random], Iterator[Defect]] | None = None


@dataclass(frozen=True)
class Error:
    """An error that `check` reports on a file."""

    rule: str
    field: str
    message: str
    reason: str = ""  # from the ledger; empty: the error is false


@dataclass(frozen=True)
class Outcome:
    """What `check` reports on one file."""

    path: str
    unread: str = ""  # why it could not be read; empty: it was
    skipped: str = ""
    errors: tuple[Error, ...] = ()
    warnings: tuple[str, ...] = ()  # rules
    model: bool = False  # whether the model is known
    estimate: bool = False  # whether there is an estimate of memory and time

    @property
    def false_errors(self) -> list[Error]:
        """Return the errors that the ledger does not explain."""
        return [one for one in self.errors if not one.reason]


@dataclass(frozen=True)
class Result:
    """The figures of one corpus."""

    corpus: str
    title: str
    repository: str
    commit: str
    files: int  # that train
    read: int
    with_model: int
    with_estimate: int
    skipped: int  # files that train nothing
    files_with_errors: int
    files_with_false_errors: int
    errors_by_rule: Mapping[str, int]
    warnings_by_rule: Mapping[str, int]
    unread: Mapping[str, str]  # path → reason
    false_errors: Mapping[str, Sequence[str]]  # path → rule: message
    explained_errors: Mapping[str, Sequence[str]]  # path → rule: reason of the ledger
    defects: Mapping[str, Any] = field(default_factory=dict)  # kind → injected, caught, missed


def run_checkout(corpus: Corpus, root: Path, commit: str) -> tuple[Result, list[dict[str, Any]]]:
    """Return the figures of a checkout, and the entries to keep of the files that are read."""
    with tempfile.TemporaryDirectory() as folder:
        for source in SOURCES:  # files that are made are checked as if they were in the checkout
            if (root / source).is_dir():
                Path(folder, source).symlink_to((root / source).resolve())
        targets = list(corpus.collect(root, Path(folder)))
        outcomes = check_all(corpus.name, targets)
    read = {one.path for one in outcomes if not one.unread and not one.skipped}
    kept = [{"path": one.path, **one.kept} for one in targets if one.kept and one.path in read]
    return summarize(corpus, commit, outcomes), kept


def run_kept(corpus: Corpus, entries: Sequence[Mapping[str, Any]]) -> list[Outcome]:
    """Return what `check` reports on kept entries of a corpus."""
    with tempfile.TemporaryDirectory() as folder:
        targets = [corpus.restore(one, _numbered(folder, number)) for number, one in enumerate(entries)]
        return check_all(corpus.name, targets)


def kept_entries(name: str) -> list[dict[str, Any]]:
    """Return the kept entries of a corpus."""
    found: list[dict[str, Any]] = json.loads((KEPT / f"{name}.json").read_text())["files"]
    return found


def recorded_commit(name: str) -> str:
    """Return the commit of a corpus's kept entries; empty if none are kept."""
    file = KEPT / f"{name}.json"
    return str(json.loads(file.read_text())["commit"]) if file.exists() else ""


def write_kept(corpus: Corpus, commit: str, entries: Sequence[Mapping[str, Any]]) -> None:
    """Write the kept entries of a corpus, one per line."""
    head = json.dumps({"repository": corpus.repository, "commit": commit})[:-1]
    lines = ",\n".join(json.dumps(one, ensure_ascii=False) for one in entries)
    KEPT.mkdir(parents=True, exist_ok=True)
    (KEPT / f"{corpus.name}.json").write_text(f'{head}, "files": [\n{lines}\n]}}\n')


def write_result(result: Result) -> None:
    """Write the figures of a corpus into the common result file; without new defects, those of its commit stay."""
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    before = found.get(result.corpus, {})
    if not result.defects and before.get("commit") == result.commit:
        result = replace(result, defects=before["defects"])
    found[result.corpus] = asdict(result)
    RESULTS.write_text(json.dumps(dict(sorted(found.items())), indent=1, ensure_ascii=False) + "\n")


def inject(corpus: Corpus, entries: Sequence[Mapping[str, Any]], count: int, seed: int = 21) -> dict[str, Any]:
    """Put defects into kept files, and return by kind how many `check` reports as an error or refuses.

    A defect is caught if the changed file has an error, or is refused, where the unchanged file is not.
    """
    if corpus.defects is None:
        raise ValueError(f"{corpus.name} has no defects")
    draw = random.Random(seed)
    order = draw.sample(entries, len(entries))
    with tempfile.TemporaryDirectory() as folder:
        originals, defects = [], []
        for number, entry in enumerate(order):
            if len(defects) >= count:
                break
            here = _numbered(folder, number)
            original = corpus.restore(entry, _numbered(str(here), 0))
            added = list(corpus.defects(entry, here, draw))
            originals += [original] * len(added)
            defects += added
        before = check_all(corpus.name, originals[:count])
        after = check_all(corpus.name, [one.target for one in defects[:count]])
    found: dict[str, Any] = {}
    for defect, was, now in zip(defects, before, after, strict=False):
        kind = found.setdefault(defect.kind, {"injected": 0, "caught": 0, "warned": 0, "missed": []})
        known = {(one.rule, one.field) for one in was.errors}
        caught = bool(now.unread and not was.unread) or any((one.rule, one.field) not in known for one in now.errors)
        kind["injected"] += 1
        kind["caught"] += caught
        if not caught:
            kind["warned"] += bool(Counter(now.warnings) - Counter(was.warnings))
            kind["missed"].append(f"{defect.target.path}: {defect.change}")
    return found


def check_all(corpus: str, targets: Sequence[Target]) -> list[Outcome]:
    """Return what `check` reports on each target, in parallel."""
    jobs = [(corpus, one) for one in targets]
    if len(jobs) < 8:
        return [_outcome(*one) for one in jobs]
    with ProcessPoolExecutor(PROCESSES) as pool:
        return list(pool.map(_outcome, *zip(*jobs, strict=True), chunksize=4))


def _outcome(corpus: str, target: Target) -> Outcome:
    if target.skipped:
        return Outcome(target.path, skipped=target.skipped)
    options = {"gpus": target.gpus, "model": target.model, "framework": target.framework}
    try:
        result = check(str(target.file), **{name: value for name, value in options.items() if value})
    except InputError as error:
        return Outcome(target.path, unread=_plain(f"{error.field}: {error.reason}", target))
    errors = tuple(
        Error(one.rule, one.field, _plain(one.message, target), _ledger_reason(corpus, target.path, one.rule))
        for one in result.findings
        if one.severity == "error"
    )
    warnings = tuple(one.rule for one in result.findings if one.severity == "warning")
    known = result.model is not None
    return Outcome(target.path, "", "", errors, warnings, known, result.estimate is not None)


def _plain(text: str, target: Target) -> str:
    """Return a message without the folders of this machine."""
    return text.replace(f"{target.file.parent}/", "")[:MESSAGE]


@cache
def ledger() -> tuple[Mapping[str, str], ...]:
    """Return the entries of the ledger: errors on files of the frameworks' owners that are right, with the reason."""
    return tuple(tomllib.loads(LEDGER.read_text()).get("exception", ()))


def _ledger_reason(corpus: str, path: str, rule: str) -> str:
    for one in ledger():
        if one["corpus"] == corpus and one["rule"] == rule and fnmatch.fnmatch(path, one["path"]):
            return one["reason"]
    return ""


def summarize(corpus: Corpus, commit: str, outcomes: Sequence[Outcome]) -> Result:
    """Return the figures of a corpus."""
    train = [one for one in outcomes if not one.skipped]
    read = [one for one in train if not one.unread]
    false = {one.path: [f"{e.rule}: {e.message}" for e in one.false_errors] for one in read if one.false_errors}
    explained = {
        one.path: [f"{e.rule}: {e.reason}" for e in one.errors if e.reason]
        for one in read
        if any(e.reason for e in one.errors)
    }
    return Result(
        corpus=corpus.name,
        title=corpus.title,
        repository=corpus.repository,
        commit=commit,
        files=len(train),
        read=len(read),
        with_model=sum(one.model for one in read),
        with_estimate=sum(one.estimate for one in read),
        skipped=len(outcomes) - len(train),
        files_with_errors=sum(bool(one.errors) for one in read),
        files_with_false_errors=len(false),
        errors_by_rule=_ordered(e.rule for one in read for e in one.errors),
        warnings_by_rule=_ordered(rule for one in read for rule in one.warnings),
        unread={one.path: one.unread for one in train if one.unread},
        false_errors=false,
        explained_errors=explained,
    )


def _ordered(rules: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(rules).items(), key=lambda one: (-one[1], one[0])))


def _numbered(folder: str, number: int) -> Path:
    found = Path(folder, str(number))
    found.mkdir()
    return found
