"""An export to a framework that has no key for a kernel: the memory without it is that of the check of the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

PLAN = """name = "plan"
model = "meta-llama/Llama-3.1-8B-Instruct"
goal = "peft"
cluster = "{cluster}"

[data]
dataset = "org/rows"
packing = true

[train]
global_batch_size = 8
steps = 10000

[peft]
rank = 16

[layout]
strategy = "ddp"

[kernels]
compile = true
loss = "fused_linear"
"""


@pytest.fixture
def export(meshwright: Any) -> Any:
    def run(cluster: str, *words: str, out: str = "out") -> Any:
        Path("plan.toml").write_text(PLAN.format(cluster=cluster))
        return meshwright("export", "plan.toml", "--to", "automodel", "--out", out, *words, "--json").json

    return run


def test_a_file_without_compile_may_not_fit_and_the_fix_fits(export: Any, meshwright: Any) -> None:
    (found,) = export("4xL40S")["findings"]
    assert (found["rule"], found["severity"]) == ("memory.tight", "warning")
    assert "the written file has kernels.compile=false" in found["message"]
    checked = meshwright("check", "out/plan.yaml", "--gpus", "4xL40S", "--json").json
    (same,) = (one for one in checked["findings"] if one["rule"] == "memory.tight")
    assert found["message"].endswith(same["message"])
    assert not export("4xL40S", *found["fix"], out="fixed")["findings"]
    checked = meshwright("check", "fixed/plan.yaml", "--gpus", "4xL40S", "--json").json
    assert "memory.tight" not in {one["rule"] for one in checked["findings"]}


def test_a_file_without_compile_that_fits_has_a_note(export: Any) -> None:
    found = export("4xH100")
    assert not found["findings"]
    (note,) = (one for one in found["notes"] if "kernels.compile=false" in one)
    assert "GiB per GPU" in note
