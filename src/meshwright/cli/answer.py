"""The end of every command: one JSON object where it was requested, and the exit code of the answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click

FAILED = 1


def emit(answer: Mapping[str, Any]) -> None:
    """Print one JSON object."""
    click.echo(json.dumps(answer, indent=2, default=str))


def end(ok: bool) -> None:
    """Exit with the code of the answer."""
    click.get_current_context().exit(0 if ok else FAILED)
