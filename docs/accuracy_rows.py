"""The rows on accuracy in the README and in measured.md, from the figures that the report states."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "accuracy.json"
FILES = ("README.md", "docs/measured.md")


def rows() -> dict[str, Mapping[str, str]]:
    """Return the rows of each file, by the words that they start with."""
    found: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8"))
    step, gib, fit, new = (found[key] for key in ("step_time", "memory", "fit", "left_out"))
    time, memory = (
        f"median error {part['median_abs_pct']} %, 90th percentile {part['p90_abs_pct']} %" for part in (step, gib)
    )
    unseen, family = new["median_abs_pct"], new["family"]["median_abs_pct"]
    shares = [100 * fit[f"{key}_called_{key}"] / fit[f"{key}_rows"] for key in ("ok", "oom")]
    called = f"{shares[0]:.0f} % of the runs that fitted and {shares[1]:.0f} % of the OOM runs predicted correctly"
    report = "([report](docs/accuracy.md))"
    return {
        "README.md": {
            "| step time": f"| step time of {step['rows']:,} published runs | {time}; {unseen} % median for a source"
            f" left out of the fit {report} |",
            "| memory": f"| memory of {gib['rows']:,} published runs of models of real size | {memory} {report} |",
        },
        "docs/measured.md": {
            "| step time,": f"| step time, {step['rows']:,} published runs from {len(step['by_source'])} sources"
            f" | {time}; {unseen} % for a source left out of the fit, {family} % for a family of sources"
            " | `make accuracy`, [report](accuracy.md) |",
            "| memory,": f"| memory, {gib['rows']:,} published runs of models of real size | {memory}; {called}"
            " | `make accuracy` |",
        },
    }


def with_rows(name: str, text: str) -> str:
    """Return the text of a file with its rows of today."""
    for start, row in rows()[name].items():
        text = re.sub(rf"(?m)^{re.escape(start)}.*$", lambda _, row=row: row, text, count=1)
    return text
