"""Names of clusters, folders of configs, and runs that are too fast for their cluster."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

SIZE = ("size", "llama3-8b", "--goal", "pretrain")


def test_every_named_cluster_has_a_row(meshwright: Any) -> None:
    typed = (*SIZE, "--gpus", "16xH100,24xB200,8xA100-80,MI300X", "--max-gpus", "32", "--tokens", "100B")
    prices = ("--price", "H100=2.2,B200=4.5,A100-80=1.1,MI300X=2")
    named = {one["gpu"]: one for one in meshwright(*typed, *prices, "--json").json["compared"]}
    counts = {gpu: one["own"] for gpu, one in named.items()}
    assert counts == {"H100": 16, "B200": 24, "A100-80": 8, "MI300X": None}
    yours = {gpu: one["yours"] for gpu, one in named.items() if one["yours"]}
    fastest = min(yours, key=lambda gpu: yours[gpu]["days"])
    cheapest = min(yours, key=lambda gpu: yours[gpu]["cost"])
    assert {gpu for gpu, one in named.items() if "fastest" in one["best"]} == {fastest}
    assert {gpu for gpu, one in named.items() if "cheapest" in one["best"]} == {cheapest}
    out = meshwright(*typed, *prices).out
    rows = out.partition("yours")[2].partition("smallest")[0]
    for gpu, one in yours.items():
        assert re.search(rf"{gpu}: {one['gpus']} GPUs: .*days", rows), gpu
    assert rows.count("(fastest)") == rows.count("(cheapest)") == 1
    assert "16xH100 is one of the counts" in out


def test_guessed_words_lead_to_what_exists(meshwright: Any) -> None:
    limit = meshwright(*SIZE, "--gpu", "H100", "--budget", "100000")
    assert limit.code == 2
    assert "--tokens 1T --price 2.50" in limit.err
    assert "100000" in limit.err
    assert "without --max-cost" in meshwright(*SIZE, "--days", "9", "--price", "2", "--max-cost", "5").err
    assert "--tokens 2T" in meshwright(*SIZE, "--gpu", "H100", "--budget", "2T").err
    named = [one["name"] for one in meshwright("gpus", "h100", "--json").json["gpus"]]
    assert named[0] == "H100"
    assert all("H100" in name for name in named)
    assert "unknown GPU H101" in meshwright("gpus", "H101").err


def test_a_folder_of_configs_names_them(meshwright: Any) -> None:
    folder = Path("cfg")
    folder.mkdir()
    (folder / "titan.toml").write_text('[model]\nname = "llama3"\nflavor = "8B"\n[training]\nseq_len = 8192\n')
    (folder / "notes.py").write_text("print('hello')\n")
    answer = meshwright("check", "cfg/", "--gpus", "8xH100")
    assert "cfg/titan.toml on 8xH100 with torchtitan" in answer.out
    assert "skipped cfg/notes.py: " in answer.out


def test_a_run_that_is_too_fast_for_its_cluster_is_noted(meshwright: Any) -> None:
    line = (
        "[titan] 2026-11-16 10:00:{:02d},100 - root - INFO - step: {} loss: 4.8 memory: 31GiB(39%) tps: {} mfu: {}%\n"
    )
    for tps, mfu, noted in (("17,000", 85.0, True), ("7,000", 36.0, False)):
        start = "[titan] 2026-11-16 10:00:00,100 - root - INFO - Building 1-D device mesh with ['dp_shard'], [8]\n"
        rows = [line.format(number, number, tps, mfu) for number in range(1, 40)]
        Path("run.log").write_text(start + "".join(rows))
        typed = ("doctor", "run.log", "--gpus", "8xH100", "--recipe", "llama3_8b_pretrain_config")
        changes = ("data.seq_length=8192", "layout.recompute=full", "train.global_batch_size=16")
        answer = meshwright(*typed, *changes, "--json").json
        assert any("times as fast as the estimate" in note for note in answer["notes"]) is noted, answer["notes"]


BOARDS = """gpu = "{gpu}"
nodes = {nodes}
gpus_per_node = {each}
nvlink_domain = {each}
network_gb_s = "200 Gb/s"
price = 1.10
"""


@pytest.mark.parametrize(
    ("gpu", "nodes", "each", "cluster"),
    [
        ("GH200", 24, 4, "24x4xGH200"),  # a board of superchips is a node
        ("GH200-144", 6, 2, "6x2xGH200-144"),
        ("GB200", 2, 72, "36x4xGB200"),  # racks
    ],
)
def test_the_nodes_of_a_cluster_file_are_those_of_its_boards_or_of_its_racks(
    meshwright: Any, tmp_path: Path, gpu: str, nodes: int, each: int, cluster: str
) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(BOARDS.format(gpu=gpu, nodes=nodes, each=each))
    words = ("llama3-8b", "--goal", "pretrain", "--tokens", "10B")
    plan = meshwright("recommend", *words, "--gpus", str(file), "--json").json
    assert plan["question"]["gpus"] == cluster
    per_node = cluster.split("x")[1]
    assert f"--nproc-per-node={per_node} --nnodes={cluster.split('x')[0]}" in plan["commands"]["meshwright"]
    if gpu == "GH200":
        sized = meshwright("size", *words, "--gpu", str(file), "--max-gpus", "96", "--json").json
        own = next(one for one in sized["sizes"] if one["gpus"] == sized["own"])
        assert own["cost"] == pytest.approx(plan["budget"]["cost"], rel=0.01)
