"""The search next to levers that save memory: micro batches of layouts in host memory, and layouts that surely fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

TIGHT = """
model = "llama2_7b"
goal = "pretrain"
cluster = "8x8xH100"
engine = "torchtitan"
[train]
global_batch_size = 1024
steps = 100000
[layout]
micro_batch_size = 4
defer_grad_sync = false
[kernels]
compile = true
"""
OFFLOADED = [
    ("qwen3-8b", "1xH100"),
    ("meta-llama/Llama-3.1-8B-Instruct", "1xH100"),
    ("meta-llama/Llama-3.1-8B-Instruct", "1xA100-80"),
    ("meta-llama/Llama-3.1-8B-Instruct", "2xL40S"),
    ("qwen3-8b", "2xL40S"),
    ("qwen3-32b", "4xH100"),
    ("qwen3-30b-a3b", "8xA100-40"),
]


@pytest.mark.parametrize(("model", "gpus"), OFFLOADED)
def test_no_other_micro_batch_of_an_offloaded_plan_is_faster(meshwright: Any, model: str, gpus: str) -> None:
    words = ("recommend", model, "--gpus", gpus, "--goal", "sft")
    plan = meshwright(*words, "--json").json
    assert plan["layout"]["offload"] == "optimizer"
    size = plan["layout"]["micro_batch_size"]
    for other in {max(size // 2, 1), size * 2} - {size}:
        tried = meshwright(*words, f"layout.micro_batch_size={other}", "--json").json
        errors = [one for one in tried["findings"] if one["severity"] == "error"]
        if not errors and tried["estimate"]["fits"]:
            assert tried["estimate"]["step_s"] >= 0.97 * plan["estimate"]["step_s"]


def test_large_micro_batches_are_ranked_too(meshwright: Any) -> None:
    ranked = meshwright("plan", "qwen3-8b", "--gpus", "1xH100", "--goal", "sft", "--top", "5", "--json").json["plans"]
    recommended = meshwright("recommend", "qwen3-8b", "--gpus", "1xH100", "--goal", "sft", "--json").json
    assert max(one["layout"]["micro_batch_size"] for one in ranked) > 8
    assert recommended["estimate"]["step_s"] <= 1.03 * min(one["estimate"]["step_s"] for one in ranked)


def test_a_leaner_loss_is_chosen_over_a_layout_that_may_not_fit(meshwright: Any) -> None:
    words = ("recommend", "qwen3_8b", "--gpus", "1xRTX4090", "--goal", "peft", "data.seq_length=4096")
    words = (*words, "train.global_batch_size=16", "peft.method=lora", "peft.rank=32", "peft.alpha=16.0")
    found = meshwright(*words, "--json").json
    assert not [one for one in found["findings"] if one["rule"] == "memory.tight"]
    text = meshwright(*words).out
    assert "probably fits" in text
    assert "kernels.loss=fused_linear" in text
    typed = meshwright(*words, "kernels.loss=vocab_parallel", "--json").json  # what the user typed stays
    assert typed["estimate"]["step_s"] <= found["estimate"]["step_s"] < 1.1 * typed["estimate"]["step_s"]


def test_size_says_that_a_count_may_miss_the_deadline(meshwright: Any) -> None:
    words = ("size", "llama2-13b", "--goal", "pretrain", "--gpus", "H100", "--max-gpus", "256", "--tokens", "2T")
    found = meshwright(*words, "--days", "60", "--json").json
    assert found["in_time"]["days_band"]["high"] > 60
    [note] = [one for one in found["notes"] if "may miss the 60 days" in one]
    sure = min(one["gpus"] for one in found["sizes"] if one["fits"] and one["days_band"]["high"] <= 60)
    assert f"{sure} GPUs are in time also at the slow end" in note
    high = found["in_time"]["days_band"]["high"]
    assert not [one for one in meshwright(*words, "--days", f"{high + 1:.0f}", "--json").json["notes"] if "miss" in one]


MOE_ON_24_NODES = ("qwen3-30b-a3b", "--gpus", "24x8xH100", "--goal", "pretrain", "--engine", "torchtitan")


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        ((*MOE_ON_24_NODES, "train.global_batch_size=960"), ("micro_batch_size=5", "micro_batch_size=10")),
        ((*MOE_ON_24_NODES, "train.global_batch_size=1008"), ("ep=8", "ep=4")),
        (
            ("llama3-8b", "--gpus", "5x8xH100", "--goal", "sft", "--engine", "megatron", "train.global_batch_size=280"),
            ("micro_batch_size=7", "tp=2"),
        ),
    ],
    ids=["5 samples per rank", "21 samples per rank", "7 samples per rank"],
)
def test_batches_of_odd_parts_are_searched_like_others(
    meshwright: Any, words: tuple[str, ...], sizes: tuple[str, ...]
) -> None:
    plan = meshwright("recommend", *words, "--json").json["estimate"]
    for layout in sizes:
        tried = meshwright("recommend", *words, f"layout.{layout}", "--json").json
        if "estimate" in tried and tried["estimate"]["fits"]:
            assert plan["step_s"] <= 1.03 * tried["estimate"]["step_s"]


@pytest.mark.parametrize(
    ("gpus", "batch", "suggested"),
    [("24x8xH100", 1024, 1152), ("24x8xH100", 1120, 1152), ("3x8xA100-80", 1024, 1008), ("12x8xH100", 1024, 960)],
)
def test_a_batch_that_divides_is_one_in_equal_micro_batches(
    meshwright: Any, gpus: str, batch: int, suggested: int
) -> None:
    words = ("recommend", "qwen3-30b-a3b", "--gpus", gpus, "--goal", "pretrain", "--engine", "torchtitan")
    refused = meshwright(*words, f"train.global_batch_size={batch}")
    assert refused.code == 2
    assert f"train.global_batch_size={suggested}" in refused.err
    assert meshwright(*words, f"train.global_batch_size={suggested}").code == 0


def test_the_fix_for_tight_memory_is_the_largest_micro_batch_that_resolves_it(meshwright: Any) -> None:
    """Its fix was 1, which led to the advice to double it: slower, and back to the value that was right."""
    Path("own.toml").write_text(TIGHT)
    [found] = meshwright("check", "own.toml", "--json").json["findings"]
    assert (found["rule"], found["fix"]) == ("memory.tight", ["layout.micro_batch_size=2"])
    assert not meshwright("check", "own.toml", *found["fix"], "--advice", "--json").json["findings"]
