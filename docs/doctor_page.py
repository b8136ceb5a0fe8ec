"""The page of the doctor: what it reads, what it looks for and by which limits, made from the tables it works with."""

from __future__ import annotations

import click
from tables import table

from meshwright import doctor
from meshwright.cli.app import app


def page() -> str:
    """Everything the doctor looks for."""
    outer = app.make_context("meshwright", ["doctor"], resilient_parsing=True)  # it names the option for help
    context = click.Context(app.commands["doctor"], parent=outer, info_name="doctor", terminal_width=100)
    found = [(f"`{one.id}`", _sentence(one.find.__doc__)) for one in doctor.DIAGNOSES]
    limits = [
        (name.replace("_", " "), f"{one.value:g} {one.unit}".strip(), one.why)
        for name, one in doctor.THRESHOLDS.items()
    ]
    reads = "\n".join(f"- {one.looked_for}" for one in doctor.FORMATS)
    return (
        "# What is wrong with a run\n\n"
        f"```\n{context.get_help()}\n```\n\n"
        f"## What is read\n\nWhose log it is shows in its lines:\n\n{reads}\n\n"
        "Colours and rank numbers are taken off; of several ranks that tell the same, one is heard. Logs may be packed "
        "with gzip; logs of starts that go on from each other, in one folder, are one run. The first line of "
        "every start, and those after it that are as slow, are warm-up and left out of all speeds.\n\n"
        f"## What is looked for\n\n{table(('finding', 'what it means'), found)}\n"
        "Time that waiting for data or for the network explains is not told again as low MFU. MFU is by the convention "
        "of the estimate: causal attention counted as half, recompute not counted.\n\n"
        "Every remedy that changes the layout has its memory and its step time by the cost model, and breaks no rule. "
        "Where a run was seen to need more memory than estimated, the estimates of its remedies are raised by as much. "
        "Remedies that fit come in the order of what they cost: time per step first, a new experiment last.\n\n"
        f"## By which limits\n\n{table(('limit', 'is', 'because'), limits)}"
    )


def _sentence(text: str | None) -> str:
    return (text or "").strip().splitlines()[0]
