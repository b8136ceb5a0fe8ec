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


class _Decided:
    """The exit code of the answer, known before it is printed."""

    code = 0


def decide(code: int) -> None:
    """Record the exit code of the answer: a reader that closes the pipe, as `| head` does, does not change it."""
    _Decided.code = code


def decided() -> int:
    """Return the exit code of the answer that is being printed; 0 if none is known yet."""
    return _Decided.code


def end(ok: bool) -> None:
    """Exit with the code of the answer."""
    click.get_current_context().exit(0 if ok else FAILED)
