"""Runs the doctor on the corpus of labelled logs and prints how often it is right.

python -m benchmarks.doctor_corpus [--write]
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from tests.doctor.corpus import HEALTHY, HELD_OUT, TUNED, Log, logs

from meshwright import api
from meshwright.doctor import Checkup
from meshwright.errors import InputError

RESULTS = Path(__file__).parent / "results" / "doctor_corpus.json"


@dataclass(frozen=True)
class Verdict:
    """What the doctor said about a log, and what was wrong with it; empty if nothing was."""

    log: Log
    said: tuple[str, ...]
    wrong: str


class Count(msgspec.Struct):
    """How many logs of one kind of run were diagnosed rightly."""

    name: str
    label: str
    formats: int
    tuned: tuple[int, int]  # right, all
    held_out: tuple[int, int]


class Result(msgspec.Struct):
    """The result of the whole corpus."""

    healthy: list[Count]
    troubles: list[Count]


def judge(log: Log, folder: Path) -> Verdict:
    """Return what the doctor says about a log compared with its label."""
    entry, path = log.entry, folder / "train.log"
    path.write_text(log.text)
    given = {
        "model": entry.model or None,
        "gpus": entry.gpus or None,
        "goal": entry.goal or None,
        "overrides": entry.overrides,
    }
    try:
        found = api.diagnose(str(path), **given)
    except InputError as error:
        return Verdict(log, (), f"rejected: {error}")
    said = tuple(one.id for one in found.findings)
    return Verdict(log, said, _wrong(log, found, said))


def _wrong(log: Log, found: Checkup, said: Sequence[str]) -> str:
    label = log.label
    if not label.main:
        return f"false alarm: {found.findings[0].message}" if said else ""
    if not said or said[0] not in (label.main, *label.instead):
        return f"{label.main} expected, {', '.join(said) or 'nothing'} said"
    if more := [one for one in said[1:] if one not in (label.main, *label.also)]:
        return f"also said: {', '.join(more)}"
    if also := [one for one in said if one in label.not_said]:
        return f"must not be said: {', '.join(also)}"
    main = found.findings[0]
    texts = [main.message, *(text for one in main.remedies for text in (*one.try_, *one.there, one.why))]
    missing = [text for text in label.says if not any(text in one for one in (*texts, *found.notes))]
    return f"not said: {', '.join(missing)}" if missing else ""


def verdicts(seeds: tuple[int, ...]) -> list[Verdict]:
    """Return the verdicts on all logs that are drawn with some seeds."""
    with tempfile.TemporaryDirectory() as folder:
        return [judge(log, Path(folder)) for log in logs(seeds)]


def result(tuned: Sequence[Verdict], held_out: Sequence[Verdict]) -> Result:
    """Return the counts by kind of run."""
    names = dict.fromkeys(one.log.entry.name for one in tuned)
    healthy = {one.name for one in HEALTHY}
    counts = []
    for name in names:
        entry = next(one.log.entry for one in tuned if one.log.entry.name == name)
        parts = [[one for one in some if one.log.entry.name == name] for some in (tuned, held_out)]
        right, other = ((sum(not one.wrong for one in part), len(part)) for part in parts)
        counts.append(Count(name, entry.label.main or "none", len(entry.writers), right, other))
    return Result([one for one in counts if one.name in healthy], [one for one in counts if one.name not in healthy])


def share(counts: Sequence[Count], held_out: bool = False) -> tuple[int, int]:
    """Return how many logs are right, and how many there are."""
    pairs = [one.held_out if held_out else one.tuned for one in counts]
    return sum(right for right, _ in pairs), sum(every for _, every in pairs)


def main() -> None:
    """Print every wrong diagnosis and the shares; --write keeps them."""
    tuned, held_out = verdicts(TUNED), [] if "--tuned" in sys.argv else verdicts(HELD_OUT)
    for one in (*tuned, *held_out):
        if one.wrong:
            print(f"{one.log.name}: {one.wrong}")
    found = result(tuned, held_out)
    for name, held in (("tuned seeds", False), ("held-out seeds", True)):
        for what, counts in (("healthy", found.healthy), ("troubles", found.troubles)):
            right, every = share(counts, held)
            print(f"{name}, {what}: {right} of {every} right ({right / max(1, every):.1%})")
    if "--write" in sys.argv:
        RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


if __name__ == "__main__":
    main()
