"""Generate the doctor's page from its own tables: log formats, findings and thresholds."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import msgspec
from tables import table

from meshwright import doctor
from meshwright.cli.app import app


def page() -> str:
    """The page."""
    outer = app.make_context("meshwright", ["doctor"], resilient_parsing=True)  # it names the option for help
    command = app.get_command(outer, "doctor")
    assert command is not None
    context = click.Context(command, parent=outer, info_name="doctor", terminal_width=100)
    found = [(f"`{one.id}`", _sentence(one.find.__doc__)) for one in doctor.DIAGNOSES]
    limits = [
        (name.replace("_", " "), f"{one.value:g} {one.unit}".strip(), one.why)
        for name, one in doctor.THRESHOLDS.items()
    ]
    reads = "\n".join(f"- {one.looked_for}" for one in doctor.FORMATS)
    return (
        "# Doctor\n\n"
        f"```\n{context.get_help()}\n```\n\n"
        f"## Log formats\n\nThe log format is detected:\n\n{reads}\n\n"
        "Colors and rank prefixes are removed; duplicate lines from other ranks are dropped. Logs may be compressed "
        "with gzip; logs of consecutive restarts in one folder are one run. Of a folder with the logs of several jobs "
        "(slurm-ID.out, a time in the name, our run folders) the newest job is diagnosed, and a note lists the others. "
        "The first step after every start, and the steps after it that are as slow, are warm-up and excluded from all "
        "speeds.\n\n"
        "A run that ends with an error is compared with the [known messages](messages.md) of the frameworks: the "
        "finding is then the rule or the error behind it, with file and line, and the rule's fixes are tried.\n\n"
        f"## Findings\n\n{table(('finding', 'meaning'), found)}\n"
        "Time explained by waiting for data, for the network or by a slowdown is not reported again as low MFU. MFU "
        "uses the convention of the estimate: causal attention counted as half, recompute not counted.\n\n"
        "Every remedy that changes the layout comes with its estimated memory and step time, and violates no "
        "rule. If a "
        "run needed more memory than estimated, the estimates of its remedies are raised by the same amount. Remedies "
        "that fit are ordered by cost: step time first, new experiments last.\n\n"
        f"## Thresholds\n\n{table(('threshold', 'value', 'reason'), limits)}\n"
        f"{_corpus()}"
    )


def _corpus() -> str:
    """How often the doctor is right about labelled logs, and where their formats were read."""
    sys.path.append(str(Path(__file__).parents[1]))
    from benchmarks.doctor_corpus import RESULTS, Count, Result, share
    from tests.doctor.corpus import HELD_OUT, TUNED
    from tests.doctor.framework_logs import SOURCES

    kept = msgspec.json.decode(RESULTS.read_bytes(), type=Result)
    every = [*kept.healthy, *kept.troubles]

    def shares(counts: list[Count]) -> list[str]:
        pairs = [share(counts, held_out) for held_out in (False, True)]
        return [f"{right} of {count} ({right / count:.1%})" for right, count in pairs]

    rows = [(one.name, f"`{one.label}`" if one in kept.troubles else "none", *shares([one])) for one in every]
    totals = [("**healthy runs**", "", *shares(kept.healthy)), ("**troubles**", "", *shares(kept.troubles))]
    read = [(f"{one.repo}", f"`{one.commit[:12]}`", f"`{one.place}`", one.what) for one in SOURCES]
    return (
        "## Accuracy\n\n"
        f"`python -m benchmarks.doctor_corpus` diagnoses {share(every)[1] + share(every, True)[1]} labelled logs: "
        f"runs with "
        "known behavior, written with the frameworks' own format strings. A diagnosis is right if the first finding "
        "is the "
        "expected one, nothing unexpected is found, and what the label names is in the text, such as the rank behind a "
        f"timeout or the framework's own key. Thresholds were set on the logs of {len(TUNED)} seeds; the logs of "
        f"{len(HELD_OUT)} further seeds were only counted. Real logs vary more than these.\n\n"
        f"{table(('run', 'expected', 'tuned seeds', 'held-out seeds'), [*totals, *rows])}\n"
        f"### Sources of the log formats\n\n{table(('repository', 'commit', 'file', 'what it prints'), read)}"
    )


def _sentence(text: str | None) -> str:
    return (text or "").strip().splitlines()[0]
