"""Plans on a cluster file where memory is short: offload where it is faster, and commands that keep the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

OWN = """
name = "unilake"
gpu = "A100-40"
nodes = 12
gpus_per_node = 4
network_gb_s_per_node = "100 Gb/s"
price = 0.85
currency = "EUR"
"""
GH = """
name = "grace"
gpu = "GH200"
nodes = 6
gpus_per_node = 4
nvlink_domain = 4
network_gb_s = "200 Gb/s"
host_gib = 110
"""


@pytest.fixture
def clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, text in (("own", OWN), ("own8", OWN.replace("nodes = 12", "nodes = 8")), ("gh", GH)):
        (tmp_path / f"{name}.toml").write_text(text)
    return tmp_path


def test_offload_is_planned_where_it_is_faster(meshwright: Any, clusters: Path) -> None:
    long = ("Llama-3.3-70B", "--goal", "pretrain", "--seq", "32k", "--tokens", "20B")
    whole = meshwright("recommend", *long, "--gpus", "own.toml", "--json").json
    assert whole["smallest_without_offload"] == "16x4xA100-40"  # not 8 nodes, where offload is ten times as fast
    part = meshwright("recommend", *long, "--gpus", "own8.toml", "--json").json
    assert part["layout"]["offload"] == "optimizer"
    assert part["estimate"]["step_s"] < 2 * whole["estimate"]["step_s"]
    assert "20B tokens are 1,193 steps" in meshwright("recommend", *long, "--gpus", "own.toml").out
    for verb in ("recommend", "plan"):  # a layout with headroom, but twice as slow
        found = meshwright(verb, "gpt-oss-120b", "--goal", "pretrain", "--gpus", "gh.toml", "--json").json
        best = found if verb == "recommend" else found["plans"][0]
        assert best["layout"]["offload"] == "optimizer"


def test_sizes_do_not_fall_where_offload_is_not_needed(meshwright: Any, clusters: Path) -> None:
    words = ("size", "Llama-3.3-70B", "--goal", "pretrain", "--seq", "32k", "--gpus", "own.toml", "--max-gpus", "64")
    found = meshwright(*words, "--json").json
    times = {one["gpus"]: one["step_s"] for one in found["sizes"] if one["fits"]}
    assert times[32] < times[28]
    assert "the smallest without is 64 GPUs" in found["notes"][-1]
