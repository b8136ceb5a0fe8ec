"""Plans for another engine, odd node counts, long runs from short recipes, and scripts of a cluster."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

OUR_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "moe_intermediate_size": 1024,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}


@pytest.fixture
def own_model(tmp_path: Path) -> Path:
    folder = tmp_path / "ourmoe"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(OUR_MOE))
    return folder / "config.json"


@pytest.fixture
def saved(meshwright: Any, own_model: Path) -> Path:
    """Save a plan for Megatron."""
    path = own_model.parents[1] / "moe.toml"
    words = ("--engine", "megatron", "--gpus", "16x8xH100", "--goal", "pretrain", "--tokens", "400B")
    meshwright("recommend", str(own_model), *words, "--save", str(path))
    return path


def test_a_saved_plan_keeps_its_engine(meshwright: Any, saved: Path) -> None:
    assert 'engine = "megatron"' in saved.read_text()
    assert meshwright("check", str(saved), "--json").json["engine"] == "megatron"
    plan = meshwright("recommend", str(saved), "--json").json
    assert plan["question"]["engine"] == "megatron"
    assert next(iter(plan["commands"])) == "megatron-lm"  # the engine that was requested comes first
    job = meshwright("launch", str(saved), "--scheduler", "slurm")
    assert "is for megatron: the job runs megatron-lm" in job.err
    assert "pretrain_gpt.py" in job.out
    assert 'engine="megatron"' in meshwright("recipe", str(saved), "--format", "python").out
    moved = meshwright("check", str(saved), "--engine", "meshwright", "--json").json
    assert (moved["ok"], moved["engine"]) == (True, "meshwright")


def test_every_run_line_can_start(meshwright: Any, saved: Path, tmp_path: Path) -> None:
    plan = meshwright("recommend", str(saved), "--json").json
    assert "meshwright" in plan["commands"]  # train has fsdp2 in place of zero1, as check with our engine
    old = tmp_path / "old.toml"  # as saved before files had an engine
    old.write_text(re.sub("engine = .*\n", "", saved.read_text()))
    plan = meshwright("recommend", str(old), "--engine", "megatron", "--json").json
    assert list(plan["commands"]) == ["megatron-lm"]
    assert "strategy=zero1" in plan["no_command"]["meshwright"]


def test_a_long_run_has_its_own_warmup(meshwright: Any, own_model: Path, saved: Path) -> None:
    assert "warmup_steps = 953" in saved.read_text()  # the recipe of 100 steps has 40
    words = ("recommend", str(own_model), "--gpus", "16x8xH100", "--goal", "pretrain")
    days = {one["field"]: one for one in meshwright(*words, "--days", "3", "--json").json["changes"]}
    assert days["schedule.warmup_steps"]["new"] == days["train.steps"]["new"] // 100
    assert "40 were for 100 steps" in days["schedule.warmup_steps"]["why"]
    typed = meshwright(*words, "--tokens", "400B", "schedule.warmup_steps=50", "--json").json
    assert typed["contract"]["warmup_steps"] == 50
    assert meshwright(*words, "--json").json["contract"]["warmup_steps"] == 40


def test_a_short_run_gets_one_number_of_warmup_steps(meshwright: Any) -> None:
    words = ("--gpus", "16x8xH100", "--goal", "pretrain", "--tokens", "5B")
    ended = meshwright("recommend", "llama3-70b", *words)
    assert set(re.findall(r"schedule.warmup_steps=(\d+)", ended.out)) == {"119"}
