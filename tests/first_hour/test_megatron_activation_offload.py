"""Offloaded activations on Megatron and Megatron-Bridge."""

from __future__ import annotations

from pathlib import Path

import pytest

from .mistakes import call

BASE = "llama3_8b_64k_pretrain_config"
LAYOUT = [
    "--gpus",
    "16x8xH100",
    "train.global_batch_size=64",
    "layout.tp=1",
    "layout.sp=false",
    "layout.offload=activations",
]
RUN = "torchrun --nproc-per-node=8 scripts/training/run_recipe.py --recipe llama3_8b_pretrain_config "


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_bridge_does_not_offload_beside_recompute() -> None:
    words = [*LAYOUT, "layout.cp=2", "layout.recompute=selective"]
    said = call("export", BASE, "--to", "megatron-bridge", *words).out
    assert "cpu_offloading=true" not in said
    assert "neither recompute nor a pipeline can be combined with it" in said


def test_bridge_names_the_layers_to_offload() -> None:
    words = [*LAYOUT, "layout.cp=8", "layout.recompute=none"]
    said = call("export", BASE, "--to", "megatron-bridge", *words).out
    assert "model.cpu_offloading=true" in said
    assert "model.cpu_offloading_num_layers=31" in said


@pytest.mark.parametrize(
    ("given", "code", "said"),
    [
        ("model.cpu_offloading=true model.recompute_granularity=selective", 1, "cannot be combined with recompute"),
        ("model.cpu_offloading=true", 0, "model.cpu_offloading_num_layers=31"),
    ],
)
def test_check_knows_what_bridge_offloads(folder: Path, given: str, code: int, said: str) -> None:
    (folder / "run.sh").write_text(RUN + given + "\n")
    found = call("check", "run.sh", "--gpus", "8xH100")
    assert said in found.out
    assert found.code == code


def test_megatron_keeps_feed_forward_activations_on_the_gpu() -> None:
    """Its modules to offload are attention, norms and experts: the dense feed-forward block stays."""
    words = [*LAYOUT, "layout.cp=4", "layout.recompute=selective"]
    found = call("export", BASE, "--to", "megatron-lm", *words)
    assert found.code == 1
    assert "the estimated peak is 10" in found.out  # GiB; 62 if everything were offloaded
