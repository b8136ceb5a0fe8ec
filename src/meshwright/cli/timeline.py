"""Memory over a step as text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any

from meshwright.cli.layout import LETTERS, PARTS

COLUMNS, ROWS = 70, 12
LIMIT = "─"


def drawn(moments: Sequence[dict[str, Any]], limit: float) -> list[str]:
    """Return lines of at most 80 characters: parts stacked by their letters, with a line at the limit."""
    if not moments:
        return []
    shown = _columns(moments)
    top = max(limit, *(_total(m) for m in shown)) * 1.05
    lines = []
    for row in range(ROWS, 0, -1):
        low, high = top * (row - 1) / ROWS, top * row / ROWS
        ends = low <= limit < high
        label = f"{limit:7.1f}" if ends else f"{(low + high) / 2:7.1f}" if row % 3 == 1 else " " * 7
        cells = [_cell(moment["gib"], (low + high) / 2, ends) for moment in shown]
        lines.append(f"[dim]{label} {'┼' if ends else '│'}[/]{''.join(_colored(cells))}")
    peak = max(range(len(shown)), key=lambda place: _total(shown[place]))
    return [*lines, f"{'':8}[dim]└{_phases(shown)}[/]", f"{'':9}{'':{peak}}[bold]^[/]"]


def _columns(moments: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one moment per column: the highest of several, or one repeated."""
    if len(moments) <= COLUMNS:
        return [moment for moment in moments for _ in range(COLUMNS // len(moments))]
    ends = [len(moments) * place // COLUMNS for place in range(COLUMNS + 1)]
    return [max(moments[a:b], key=_total) for a, b in pairwise(ends)]


def _total(moment: dict[str, Any]) -> float:
    return float(sum(moment["gib"].values()))


def _cell(gib: dict[str, float], height: float, ends: bool) -> str:
    """Return the part at this height; the limit line if there is none."""
    below = 0.0
    for part in PARTS:
        below += gib.get(part, 0.0)
        if height < below:
            return part
    return LIMIT if ends else " "


def _colored(cells: Sequence[str]) -> list[str]:
    runs = [(cell, len(list(same))) for cell, same in groupby(cells)]
    return [
        f"[{PARTS[cell]}]{LETTERS[cell] * count}[/]" if cell in PARTS else f"[dim]{cell * count}[/]"
        for cell, count in runs
    ]


def _phases(shown: Sequence[dict[str, Any]]) -> str:
    """Return the name of every phase under its columns, cut to their width."""
    runs = [(phase, len(list(same))) for phase, same in groupby(moment["phase"] for moment in shown)]
    return "".join((("┴" if count > 1 else "") + phase)[:count].ljust(count) for phase, count in runs)
