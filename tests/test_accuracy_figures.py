"""The README, the documents, the command and the web page state the same errors for the same rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from meshwright import api

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))

import accuracy_rows  # noqa: E402


@pytest.mark.parametrize("name", accuracy_rows.FILES)
def test_the_rows_on_accuracy_are_those_of_the_report(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    for row in accuracy_rows.rows()[name].values():
        assert row in text.splitlines(), "python docs/make.py"


def test_the_command_states_the_figures_of_the_report() -> None:
    stated = json.loads(accuracy_rows.RESULT.read_text(encoding="utf-8"))
    found = api.to_json(api.accuracy_response(api.accuracy()))
    for part in ("step_time", "memory"):
        for key in ("rows", "median_abs_pct", "p90_abs_pct"):
            same = pytest.approx(stated[part][key], abs=0.02)
            assert found[part][key] == same, f"{part} {key}: python benchmarks/accuracy_report.py --left-out"
    assert any("models of real size" in note for note in found["notes"])
