"""The table of docs/rehearse.md: rehearsals against what was measured, from benchmarks/results/rehearse_h200.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tables import table

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "results" / "rehearse_h200.json"
PAGE = HERE / "rehearse.md"
MARKS = ("<!-- rows -->\n", "<!-- /rows -->")
KINDS = {
    "single": "one GPU, against `bench`",
    "ranks": "ranks that share the GPU over gloo, against `bench`",
    "cluster": "a cluster, against the published run and the dry run",
}


def page() -> str:
    """Return the page with today's rows."""
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.split(MARKS[0])[0], text.split(MARKS[1])[1]
    return f"{before}{MARKS[0]}{rows()}{MARKS[1]}{after}"


def rows() -> str:
    """Return the tables, one for each kind of row."""
    found: dict[str, Any] = json.loads(RESULTS.read_text())["rows"]
    text = ""
    for kind, title in KINDS.items():
        lines = [line for name, row in found.items() if name.startswith(kind) for line in _lines(name, row)]
        head = ("run", "measured", "rehearsed", "error", "took", "GiB allocated: rehearsed / expected")
        text += f"{title[0].upper()}{title[1:]}:\n\n{table(head, lines)}\n"
    return text


def _lines(name: str, row: dict[str, Any]) -> list[tuple[str, ...]]:
    label = name.partition(" ")[2]
    if "error" in row:
        return [(label, "", "failed", "", "", "")]
    measured, rehearsed = row.get("measured_s") or row.get("published_s"), row["rehearsed_s"]
    gib, expected = row.get("rehearsed_gib"), row.get("dryrun_gib") or row.get("measured_gib")
    memory = f"{gib:.2f} / {expected:.2f} ({100 * (gib / expected - 1):+.1f} %)" if gib and expected else ""
    shown = f"{measured:.3f} s" if measured else "-"
    found = [(label, shown, f"{rehearsed:.3f} s", _error(rehearsed, measured), f"{row['wall_s']:.0f} s", memory)]
    if "projected_s" in row:
        engine, projected = row["published_engine"], row["projected_s"]
        found.append((f"… projected to {engine}", shown, f"{projected:.3f} s", _error(projected, measured), "", ""))
    return found


def _error(rehearsed: float, measured: float | None) -> str:
    return f"{100 * (rehearsed / measured - 1):+.1f} %" if measured else ""
