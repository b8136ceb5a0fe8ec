"""Failures of large runs: what size recommends against them."""

from __future__ import annotations

from typing import Any


def test_size_recommends_checkpoints_spares_and_replicas(meshwright: Any) -> None:
    words = ("size", "llama3-70b", "--goal", "pretrain", "--gpu", "128x8xH100", "--max-gpus", "1024")
    found = meshwright(*words, "--json").json["reliability"]
    assert found["gpus"] == 1024
    assert found["spare_nodes"] >= 1
    assert found["share_without_spares"] < found["share_with_spares"] <= found["share"] <= 1
    assert not found["replicas_pay"]
    assert found["replicas_pay_from"] > 8192
    text = meshwright(*words).out
    assert f"checkpoint.save_every={found['save_every']}" in text
    assert f"{found['spare_nodes']} spare nodes" in text
    assert "replica fault tolerance" in text
    # the printed setting works when typed
    typed = ("estimate", "llama3-70b", "--gpus", "128x8xH100", "--goal", "pretrain", "--tokens", "1T")
    setting = f"checkpoint.save_every={found['save_every']}"
    assert meshwright(*typed, setting, "--json").json["budget"]["goodput"]["save_every"] == found["save_every"]


def test_one_node_gets_no_advice_on_spares(meshwright: Any) -> None:
    text = meshwright("size", "qwen3-0.6b", "--goal", "sft", "--gpu", "H100", "--max-gpus", "8").out
    assert "checkpoint.save_every=" in text
    assert "spare" not in text
    assert "replica" not in text


def test_own_runs_that_contradict_themselves_are_reported(meshwright: Any, tmp_path: Any) -> None:
    template = meshwright("accuracy", "--template").out.splitlines()
    header = next(line for line in template if not line.startswith("#")).split(",")
    known = {"model": "llama3-8b", "gpus": "8xH100", "goal": "pretrain", "seq_length": "8192", "micro_batch_size": "1"}
    known |= {"global_batch_size": "8", "step_time_s": "1.2", "tokens_per_s_per_gpu": "900"}
    for framework in ("torchtitan", "meshwright"):
        row = {**known, "framework": framework}
        path = tmp_path / "runs.csv"
        path.write_text(",".join(header) + "\n" + ",".join(row.get(name, "") for name in header) + "\n")
        refused = meshwright("accuracy", str(path))
        assert refused.code != 0
        assert "contradicts itself: tokens/s and step time" in refused.err + refused.out
