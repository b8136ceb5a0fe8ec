"""A saved plan is opened on another machine: its cluster file is beside it, replaced by --gpus, or not there."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

H100 = 'gpu = "H100"\nnodes = 2\ngpus_per_node = 8\nnetwork_gb_s = 50\n'
PLAN = """name = "plan"
model = "qwen3_600m"
goal = "pretrain"
{cluster}

[data]
seq_length = 4096

[train]
global_batch_size = 64
steps = 1000
"""
MOVED = 'cluster = "/home/anna/plans/h100.toml"'
FILE = "/home/anna/plans/h100.toml"


@pytest.mark.parametrize("cluster", [MOVED, ""], ids=["moved", "none"])
@pytest.mark.parametrize(
    "words",
    [
        ("estimate", "plan.toml"),
        ("recommend", "plan.toml"),
        ("plan", "plan.toml"),
        ("compare", "plan.toml", "qwen3_600m_pretrain_config"),
        ("check", "plan.toml"),
        ("export", "plan.toml", "--to", "megatron-lm", "--out", "job"),
        ("launch", "plan.toml", "--scheduler", "kubernetes", "--image", "me/mw:1", "--write", "job"),
    ],
    ids=lambda words: words[0],
)
def test_gpus_replace_the_cluster_of_a_plan(meshwright: Any, here: Path, cluster: str, words: tuple[str, ...]) -> None:
    (here / "plan.toml").write_text(PLAN.format(cluster=cluster))
    found = meshwright(*words, "--gpus", "8xH200")
    assert found.code != 2, found.err
    assert "error:" not in found.err
    assert FILE not in found.out.replace(f"made for {FILE}, which is not on this machine", "")


@pytest.mark.parametrize("verb", ["estimate", "recommend", "check", "plan"])
def test_a_moved_plan_says_which_file_is_missing(meshwright: Any, here: Path, verb: str) -> None:
    (here / "plan.toml").write_text(PLAN.format(cluster=MOVED))
    found = meshwright(verb, "plan.toml")
    assert found.code == 2
    assert f"cluster={FILE}: plan.toml names a cluster file that is not on this machine" in found.err
    assert "--gpus 8xH100" in found.err
    (here / "h100.toml").write_text(H100)  # the file of that name that was moved with the plan
    found = meshwright(verb, "plan.toml")
    assert "fix:   --gpus h100.toml |" in found.err
    assert meshwright(verb, "plan.toml", "--gpus", "h100.toml").code == 0


def test_a_plan_without_a_cluster_says_what_to_write(meshwright: Any, here: Path) -> None:
    (here / "plan.toml").write_text(PLAN.format(cluster=""))
    found = meshwright("estimate", "plan.toml")
    assert "error: cluster: missing" in found.err
    assert 'cluster = "8xH100"' in found.err
    assert "--gpus 8xH100" in found.err


def test_a_saved_plan_moves_with_its_cluster_file(meshwright: Any, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "anna").mkdir()
    (here / "anna/h100.toml").write_text(H100)
    words = ("recommend", "qwen3-600m", "--goal", "pretrain", "--gpus", "anna/h100.toml", "--save")
    assert meshwright(*words, "anna/plan.toml").code == 0
    assert 'cluster = "h100.toml"' in (here / "anna/plan.toml").read_text()
    assert meshwright(*words, "elsewhere.toml").code == 0
    assert 'cluster = "anna/h100.toml"' in (here / "elsewhere.toml").read_text()
    shutil.move(here / "anna", here / "ben")
    (here / "h100.toml").write_text(H100.replace("H100", "A100-80"))  # another file of that name where it is typed
    found = meshwright("check", "ben/plan.toml")
    assert found.code == 0, found.err
    assert "16" in found.out
    assert "A100" not in found.out
    monkeypatch.chdir(here / "ben")
    assert meshwright("estimate", "plan.toml").code == 0


def test_a_run_needs_no_cluster_file() -> None:
    from meshwright.engine.validate import run_cluster
    from meshwright.recipes.types import Recipe

    moved = Recipe(name="plan", model="qwen3_600m", goal="pretrain", cluster=FILE)
    assert run_cluster(moved, None, 2).world == 2
