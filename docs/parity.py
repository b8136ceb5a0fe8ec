"""Convert the JUnit report of the parity tests to docs/parity_results.json; `make parity` calls it."""

from __future__ import annotations

import json
import platform
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "parity_results.json"
FULL = "test_a_layout_trains_like_one_process"  # the others take fewer steps
PACKAGES = ("torch", "transformers", "numpy")


def properties(test: ElementTree.Element) -> dict[str, Any]:
    """Properties recorded by a test, by name."""
    found = test.findall("./properties/property")
    return {one.get("name", ""): json.loads(one.get("value", "null")) for one in found}


def outcome(test: ElementTree.Element) -> str:
    """passed or failed; an expected failure counts as failed."""
    return "failed" if any(test.find(one) is not None for one in ("failure", "error", "skipped")) else "passed"


def rounded(value: float) -> float:
    """Round to two digits: the others change from run to run."""
    return float(f"{value:.1e}")


def results(report: Path) -> Iterator[dict[str, Any]]:
    """One row per combination that ran or that a rule refuses."""
    from tests.engine.layouts import TRIED

    pairs = {f"{name}-{family}": (name, family) for name, tried in TRIED.items() for family in tried.runs}
    for test in ElementTree.parse(report).iter("testcase"):
        recorded, parameters = properties(test), test.get("name", "").partition("[")[2].rstrip("]")
        if parameters in pairs and test.get("name", "").startswith(FULL):
            name, family = pairs[parameters]
            differences = recorded.get("parity", {}).get("differences", {})  # none where the run itself failed
            yield (
                _layout(TRIED[name])
                | {
                    "family": family,
                    "outcome": outcome(test),
                    "differences": {what: rounded(value) for what, value in differences.items()},
                    "seconds": round(float(test.get("time", "0")), 1),
                }
                | ({"why": TRIED[name].fails[family]} if family in TRIED[name].fails else {})
            )
        elif "refused" in recorded and outcome(test) == "passed":
            one = recorded["refused"]
            for family, rule in one["families"].items():
                yield _layout(TRIED[one["layout"]]) | {"family": family, "outcome": "refused", "rule": rule}


def _layout(tried: Any) -> dict[str, Any]:
    return {"layout": tried.name, "technique": tried.technique, "world": tried.world}


def in_order(rows: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows in the order of the layout and family tables; tests finish in any order."""
    from tests.engine.families import FAMILIES
    from tests.engine.layouts import TRIED

    layouts, families = list(TRIED), list(FAMILIES)
    return sorted(rows, key=lambda row: (layouts.index(row["layout"]), families.index(row["family"])))


def main(report: str) -> None:
    sys.path.insert(0, str(ROOT))
    versions = {"python": platform.python_version()} | {name: version(name) for name in PACKAGES}
    head = json.dumps({"date": date.today().isoformat(), "versions": versions})[:-1]
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in in_order(results(Path(report))))
    RESULTS.write_text(f'{head}, "results": [\n{lines}\n]}}\n', encoding="utf-8")
    print(f"wrote {RESULTS.relative_to(ROOT)}")


if __name__ == "__main__":
    main(sys.argv[1])
