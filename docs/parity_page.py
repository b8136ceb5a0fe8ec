"""Generate the page of layouts that agree with one process, from the last full parity run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tables import table

PARITY = Path(__file__).parent / "parity_results.json"
Run = dict[str, Any]


def _cell(rows: Sequence[Run]) -> str:
    """The combined result of one family with one technique."""
    ran = [row for row in rows if row["outcome"] in ("passed", "failed")]
    if any(row["outcome"] == "failed" for row in ran):
        return "**fails**"
    if ran:
        return f"✓ {len(ran)}"
    return ", ".join(sorted({f"`{row['rule']}`" for row in rows if row["outcome"] == "refused"}))


def _largest(rows: Iterable[Run]) -> str:
    return f"{max((value for row in rows for value in row['differences'].values()), default=float('nan')):.1e}"


def _families_by_techniques(rows: Sequence[Run]) -> str:
    techniques = list(dict.fromkeys(row["technique"] for row in rows))
    families = list(dict.fromkeys(row["family"] for row in rows if row["technique"] == "fsdp2"))
    cells: dict[tuple[str, str], list[Run]] = {}
    for row in rows:
        cells.setdefault((row["technique"], row["family"]), []).append(row)
    return table(
        ("technique", *families), [(t, *(_cell(cells.get((t, family), [])) for family in families)) for t in techniques]
    )


def _tried_layouts(ran: Sequence[Run]) -> str:
    groups: dict[str, list[Run]] = {}
    for row in ran:
        groups.setdefault(row["layout"], []).append(row)
    rows = [
        (f"`{name}`", group[0]["technique"], group[0]["world"], len(group), _largest(group))
        for name, group in groups.items()
    ]
    return table(("layout", "technique", "ranks", "families", "largest difference"), rows)


def page() -> str:
    """Which family trains with which technique: results of the last full parity run."""
    found = json.loads(PARITY.read_text(encoding="utf-8"))
    ran = [row for row in found["results"] if row["outcome"] in ("passed", "failed")]
    passed = [row for row in ran if row["outcome"] == "passed"]
    versions = ", ".join(f"{name} {value}" for name, value in found["versions"].items())
    text = "# Parity: supported layouts\n\n"
    text += f"{len(passed)} of {len(ran)} runs agree with one process: losses and gradient norms of five steps, every "
    text += "gradient of the first and every weight after the last, in fp32, on 2 to 16 gloo ranks with tiny models of "
    text += f"each family's structure. Largest relative difference: {_largest(passed)}; the limit is 1e-05. "
    text += f"`make parity` ran them on {found['date']} with {versions}; every run is in "
    text += "[parity_results.json](parity_results.json).\n\nA number counts the layouts that were run; a name is the "
    text += (
        "rule with which `meshwright check` refuses the combination; an empty cell was not run: another family with "
    )
    text += "the same code covers it.\n\n"
    failed = [row for row in ran if row["outcome"] == "failed"]
    notes = "".join(
        f"\n- `{row['layout']}` with {row['family']} fails: {row.get('why', 'reason unknown')}" for row in failed
    )
    return text + _families_by_techniques(found["results"]) + notes + "\n\n## Layouts\n\n" + _tried_layouts(ran)
