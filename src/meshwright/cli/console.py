"""Marked-up text on a terminal, and the same without its marks in a file or pipe, where rich is not even loaded."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Protocol

TAG = re.compile(r"(\\*)\[([a-z#/@][^\[\]]*)\]")
"""Marks such as [bold] and [/]; a backslash before one makes it plain text."""


class Out(Protocol):
    """Where answers are written to."""

    def print(self, text: str, *, markup: bool = True) -> object:
        """Writes a line."""


class Plain:
    """A file or a pipe: lines as they are."""

    def print(self, text: str, *, markup: bool = True) -> None:
        """Writes a line without its marks."""
        print(plain(text) if markup else text)


def escape(text: str) -> str:
    """Text in which nothing is a mark."""
    return TAG.sub(lambda found: f"{found[1] * 2}\\[{found[2]}]", text)


def plain(text: str) -> str:
    """Marked-up text without its marks."""

    def without(found: re.Match[str]) -> str:
        slashes, escaped = divmod(len(found[1]), 2)
        return "\\" * slashes + (f"[{found[2]}]" if escaped else "")

    return TAG.sub(without, text)


def is_terminal() -> bool:
    """Whether a person is looking."""
    return sys.stdout is not None and sys.stdout.isatty()


def console() -> Out:
    """Colour and width of the terminal; plain lines when the output is a file or a pipe."""
    if not is_terminal():
        return Plain()
    from rich.console import Console

    out: Out = Console(highlight=False, soft_wrap=True)
    return out


def table(rows: Sequence[Sequence[str]], *headers: str) -> None:
    """Rows under headers, in columns."""
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

    made = Table(*headers, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        made.add_row(*[escape(cell) for cell in row])
    Console(highlight=False, soft_wrap=True).print(made)
