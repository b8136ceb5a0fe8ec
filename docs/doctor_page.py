"""Generate the doctor's page from its own tables: log formats, findings and thresholds."""

from __future__ import annotations

import click
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
        "with gzip; logs of consecutive restarts in one folder are one run. The first step after every start, "
        "and the steps "
        "after it that are as slow, are warm-up and excluded from all speeds.\n\n"
        "A run that ends with an error is compared with the [known messages](messages.md) of the frameworks: the "
        "finding is then the rule or the error behind it, with file and line, and the rule's fixes are tried.\n\n"
        f"## Findings\n\n{table(('finding', 'meaning'), found)}\n"
        "Time explained by waiting for data or for the network is not reported again as low MFU. MFU uses the "
        "convention of the estimate: causal attention counted as half, recompute not counted.\n\n"
        "Every remedy that changes the layout comes with its estimated memory and step time, and violates no "
        "rule. If a "
        "run needed more memory than estimated, the estimates of its remedies are raised by the same amount. Remedies "
        "that fit are ordered by cost: step time first, new experiments last.\n\n"
        f"## Thresholds\n\n{table(('threshold', 'value', 'reason'), limits)}"
    )


def _sentence(text: str | None) -> str:
    return (text or "").strip().splitlines()[0]
