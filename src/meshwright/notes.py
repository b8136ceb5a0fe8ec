"""Notes for the user on stderr: how an ambiguous input was understood."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache

_SILENT: ContextVar[bool] = ContextVar("silent", default=False)
_REWRITE: ContextVar[Callable[[str], str]] = ContextVar("rewrite", default=str)
_COLLECTED: ContextVar[list[str] | None] = ContextVar("collected", default=None)


@contextmanager
def no_notes() -> Iterator[None]:
    """Print no notes inside: for work that is not the user's request, such as finding what a wrong option means."""
    before = _SILENT.set(True)
    try:
        yield
    finally:
        _SILENT.reset(before)


@contextmanager
def rewritten(rewrite: Callable[[str], str]) -> Iterator[None]:
    """Rewrite the notes inside: for callers that have other names for what a note suggests."""
    before = _REWRITE.set(rewrite)
    try:
        yield
    finally:
        _REWRITE.reset(before)


@contextmanager
def collected_notes() -> Iterator[list[str]]:
    """Collect notes instead of printing them: for an answer that carries them."""
    found: list[str] = []
    before = _COLLECTED.set(found)
    try:
        yield found
    finally:
        _COLLECTED.reset(before)


def note(text: str) -> None:
    """Print a note to stderr: once per process, and on one rank only."""
    text, found = _REWRITE.get()(text), _COLLECTED.get()
    if found is not None:
        if text not in found and not _SILENT.get():
            found.append(text)
    elif not _SILENT.get():  # a note that was not printed must be printed later
        print_once(text)


@cache
def print_once(text: str) -> None:
    """Print a note to stderr on one rank, unless it has been printed."""
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0" and sys.stderr is not None:
        with suppress(OSError, ValueError):  # a closed stderr must not end the command
            print(f"note: {text}", file=sys.stderr, flush=True)
