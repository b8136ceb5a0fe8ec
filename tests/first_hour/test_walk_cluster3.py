"""A cluster's first day: engines compared, fixes that can be pasted, imports with errors, batches that divide."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.api import comparison, recommend
from meshwright.rules import Finding


@pytest.fixture
def h100(tmp_path: Path) -> str:
    file = tmp_path / "h100.toml"
    file.write_text('gpu = "H100"\nnodes = 4\ngpus_per_node = 8\nnetwork_gb_s = "400 Gb/s"\n')
    return str(file)


def test_compare_has_the_layout_that_recommend_gives_each_engine(meshwright: Any, h100: str) -> None:
    answer = meshwright("compare", "llama3-70b", "--gpus", h100, "--goal", "sft", "--seq", "8k", "--json").json
    layouts = {}
    for side in answer["sides"]:
        if side["ok"]:
            plan = recommend("llama3-70b", h100, "sft", seq="8k", engine=side["name"])
            layouts[side["name"]] = {name: plan.layout_dict()[name] for name in ("tp", "pp", "cp", "recompute")}
            assert layouts[side["name"]].items() <= side["layout"].items()
    assert layouts["automodel"]["cp"] == 1
    can_run = [side["ok"] for side in answer["sides"]]
    assert can_run == sorted(can_run, reverse=True)
    cannot = [side for side in answer["sides"] if not side["ok"]]
    assert {"torchtitan", "kempnerforge"} <= {side["name"] for side in cannot}
    assert all((side["estimate"], side["layout"], side["relative_speed"]) == (None, None, None) for side in cannot)
    assert " % longer than meshwright" in str(answer["sides"][-4]["reasons"])


def test_compare_lists_what_a_framework_refuses_last(meshwright: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("compare", "llama3-8b", "--gpus", "8xH100", "--goal", "sft", "--engines", "automodel,deepspeed", "--json")
    before = meshwright(*words).json["sides"]
    assert [side["name"] for side in before] == ["automodel", "deepspeed"]
    assert before[0]["contract"] == before[1]["contract"]
    error = Finding("automodel.cp-packing", "error", "packed_sequence", "refused there", ())
    monkeypatch.setattr(comparison, "framework_findings", lambda theirs, *_: [error] * (theirs.name == "automodel"))
    answer = meshwright(*words).json
    side = answer["sides"][-1]
    assert (side["name"], side["ok"], side["estimate"], side["error"]) == ("automodel", False, None, "refused there")
    assert "Cannot run it: automodel" in answer["answer"]
    assert side["findings"][0]["rule"] == "automodel.cp-packing"
