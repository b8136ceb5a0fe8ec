"""Styled text on a terminal; plain text in a file or pipe, where rich is not imported."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Protocol

TAG = re.compile(r"(\\*)\[([a-z#/@][^\[\]]*)\]")
"""Tags such as [bold] and [/]; a backslash before one makes it plain text."""


class Out(Protocol):
    """Where reports are printed."""

    def print(self, text: str, *, markup: bool = True) -> object:
        """Print a line."""


class Plain:
    """A file or a pipe."""

    def print(self, text: str, *, markup: bool = True) -> None:
        """Print a line without its tags."""
        print(plain(text) if markup else text)


def escape(text: str) -> str:
    """Return text in which nothing is a tag."""
    return TAG.sub(lambda found: f"{found[1] * 2}\\[{found[2]}]", text)


def plain(text: str) -> str:
    """Return text without its tags."""

    def without(found: re.Match[str]) -> str:
        slashes, escaped = divmod(len(found[1]), 2)
        return "\\" * slashes + (f"[{found[2]}]" if escaped else "")

    return TAG.sub(without, text)


def is_terminal() -> bool:
    """Return whether stdout is a terminal."""
    return sys.stdout is not None and sys.stdout.isatty()


def console() -> Out:
    """Return the terminal with its colors and width, or plain output."""
    if not is_terminal():
        return Plain()
    from rich.console import Console

    out: Out = Console(highlight=False, soft_wrap=True)
    return out


def table(rows: Sequence[Sequence[str]], *headers: str) -> None:
    """Print rows under headers, in columns."""
    if is_terminal():
        _rich_table(rows, headers)
        return
    lines = [headers, *rows]
    widths = [max(len(line[place]) for line in lines) for place in range(len(headers))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _rich_table(rows: Sequence[Sequence[str]], headers: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    rich_table = Table(*headers, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        rich_table.add_row(*[escape(cell) for cell in row])
    Console(highlight=False, soft_wrap=True).print(rich_table)
