"""Plans on a cluster file where memory is short: offload where it is faster, and commands that keep the file."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from meshwright.api.pipeline_schedule import schedule
from meshwright.errors import InputError

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
    sized = {f"own{nodes}": OWN.replace("nodes = 12", f"nodes = {nodes}") for nodes in (8, 37)}
    for name, text in {"own": OWN, "gh": GH, **sized}.items():
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
    assert "the smallest planned without is 64 GPUs" in found["notes"][-1]


def test_commands_and_fixes_keep_the_cluster_file(meshwright: Any, clusters: Path) -> None:
    large = meshwright("recommend", "Qwen3-235B-A22B", "--gpus", "gh.toml", "--goal", "sft", "--json").json
    why = next(one["no_fix"] for one in large["findings"] if one["rule"] == "memory.state")
    words = shlex.split(re.findall(r"\(meshwright (size .*) gives a count", why)[0])
    assert words[words.index("--gpu") + 1] == str(clusters / "gh.toml")
    sized = meshwright(*words, "--max-gpus", "48", "--json").json
    assert (sized["node"], sized["smallest"]["gpus"]) == (4, large["smallest_that_fits"])
    fails = meshwright("recommend", "llama3-8b", "--gpus", "own37.toml", "--goal", "pretrain", "--json").json
    assert fails["error"]["fix"][0] == f"--gpus 34x{clusters / 'own37.toml'}"
    typed = meshwright("recommend", "Qwen3-235B-A22B", "--gpus", "2x4xGH200", "--goal", "sft").out
    assert "--gpu 2x4xGH200" in typed


def test_host_memory_is_assumed_only_if_the_file_lacks_it(meshwright: Any, clusters: Path) -> None:
    words = ("--goal", "pretrain", "--json")
    own = meshwright("recommend", "Llama-3.3-70B", "--gpus", "own8.toml", *words).json["question"]["assumed"]
    assert [one["field"] for one in own] == ["network", "host_memory"]
    gh = meshwright("recommend", "gpt-oss-120b", "--gpus", "gh.toml", *words).json
    assumed = [one["field"] for one in gh["question"]["assumed"]]
    assert (gh["layout"]["offload"], assumed) == ("optimizer", ["network"])


def test_messages_agree_with_the_figures(meshwright: Any, clusters: Path) -> None:
    stages = meshwright("recommend", "llama3-8b", "--gpus", "own.toml", "--goal", "pretrain").out
    assert "(11, 11, 10) (layout)  follows pp: the layers do not divide evenly; the last stage gets fewer" in stages
    few = meshwright("recommend", "llama3-8b", "--gpus", "128xH100", "--goal", "sft", "train.global_batch_size=8").out
    assert "twice as many are not twice as fast" in few


def test_what_a_tool_cannot_do_is_named_with_the_way_out(meshwright: Any, clusters: Path) -> None:
    several = meshwright("compare", "llama3-8b", "--gpus", "own.toml,gh.toml", "--goal", "pretrain")
    assert "meshwright size MODEL --goal GOAL --gpu own.toml,gh.toml" in several.err
    words = ("--goal", "pretrain", "--max-gpus", "48")
    out = meshwright("size", "llama3-8b", "--gpus", "own.toml,gh.toml", *words).out
    assert "the rows are of A100-40" in out
    assert re.search("yours +A100-40: 48 GPUs", out)
    meshwright("recommend", "llama3-8b", "--gpus", "own.toml", "--goal", "pretrain", "--save", "plan8b.toml")
    lost = meshwright("export", "plan8b.toml", "--to", "deepspeed", "--json").json["error"]
    assert "so layout.pp=3 is lost" in str(lost)
    assert meshwright("export", "plan8b.toml", *lost["fix"][-1].split(), "--out", "kept").code == 0
    layout = ("layout.pp=3", "layout.stage_layers=[11,11,11]")
    with pytest.raises(InputError, match=r"cannot be built: .+"):
        schedule("llama3-8b", goal="pretrain", gpus="own.toml", overrides=layout)
