"""Where the report of each verb is: its response as text for a terminal, colored only there."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

_NAMES = {
    "catalogue_report": "recipes models gpus rules explain",
    "check_report": "check export import_file",
    "compare_report": "compare",
    "doctor_report": "doctor",
    "dryrun_report": "dryrun",
    "inspect_report": "inspect",
    "rehearse_report": "rehearse",
    "plan_report": "recommend estimate plan size",
    "run_report": "train bench tokenize samples generate evaluate convert accuracy share",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


def report(name: str) -> Callable[[dict[str, Any], Any], None]:
    """Return the report of a verb, which has its name and takes the response as JSON and the Python result."""
    found: Callable[[dict[str, Any], Any], None] = getattr(import_module(f"meshwright.cli.{_MODULES[name]}"), name)
    return found
