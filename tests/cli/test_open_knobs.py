"""accuracy: settings that a row does not state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

ROWS = """model,gpus,framework,seq_len,gbs,mbs,tp,pp,vp,step_time_s
llama3-70b,64xH100,Megatron-LM,8192,128,1,4,4,{vp},20
"""


@pytest.mark.parametrize("vp", ["", "5"])
def test_accuracy_names_the_setting_that_a_row_leaves_open(meshwright: Any, tmp_path: Path, vp: str) -> None:
    table = tmp_path / "runs.csv"
    table.write_text(ROWS.format(vp=vp), encoding="utf-8")
    answer = meshwright("accuracy", str(table))
    assert answer.code == 0, answer
    assert ("state vp" in answer.out) == (not vp)


MOE = """model,gpus,framework,seq_len,gbs,mbs,ep,{names}step_time_s
qwen3-30b-a3b,16xH100,megatron-bridge,4096,1024,1,16,{values}25
"""


@pytest.mark.parametrize(
    ("stated", "left"),
    [
        ({}, ("cuda_graphs", "dispatcher", "ep_overlap")),
        ({"cuda_graphs": "none", "dispatcher": "alltoall"}, ("ep_overlap",)),
        ({"cuda_graphs": "transformer_engine", "dispatcher": "hybridep", "ep_overlap": "on"}, ()),
    ],
)
def test_settings_of_experts_can_be_stated(
    meshwright: Any, tmp_path: Path, stated: dict[str, str], left: tuple[str, ...]
) -> None:
    table = tmp_path / "runs.csv"
    names, values = ("".join(f"{cell}," for cell in cells) for cells in (stated, stated.values()))
    table.write_text(MOE.format(names=names, values=values), encoding="utf-8")
    answer = meshwright("accuracy", str(table))
    assert answer.code == 0, answer
    assert tuple(name for name in ("cuda_graphs", "dispatcher", "ep_overlap") if f"state {name}:" in answer.out) == left


def test_a_setting_of_megatron_in_a_run_of_another_framework_is_an_error(meshwright: Any, tmp_path: Path) -> None:
    table = tmp_path / "runs.csv"
    text = MOE.format(names="cuda_graphs,", values="none,").replace("megatron-bridge", "torchtitan")
    table.write_text(text, encoding="utf-8")
    answer = meshwright("accuracy", str(table))
    assert answer.code != 0
    assert "only Megatron-LM and Megatron-Bridge" in answer.err
