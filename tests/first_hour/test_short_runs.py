"""A loss that frees memory, warm-ups of short runs, sizes of epochs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import meshwright as adviser
from meshwright import costs, rules

CHAT = {"messages": [{"role": "user", "content": "Why? " * 60}, {"role": "assistant", "content": "So. " * 60}]}
LOSSES = ("plain", "chunked", "fused_linear", "vocab_parallel")


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(CHAT) + "\n" for _ in range(2000)))
    return path


@pytest.mark.parametrize("gpus", ["1xRTX3090", "2xRTX4090", "1xL40S"])
@pytest.mark.parametrize("goal", ["sft", "lora", "qlora"])
@pytest.mark.parametrize("model", ["llama3.2-1b", "qwen3-1.7b", "gemma-3-1b"])
def test_no_other_loss_is_both_faster_and_leaner(model: str, goal: str, gpus: str) -> None:
    case = adviser.recommend(model, gpus=gpus, goal=goal).case
    gib, step_s = float(costs.memory(case).total), float(costs.step_time(case).step_s)
    for loss in LOSSES:
        other = case.replace(loss=loss)
        if bool(rules.legal(other)):
            leaner, faster = float(costs.memory(other).total) < gib, float(costs.step_time(other).step_s) < step_s
            assert not (leaner and faster), loss


def test_a_plan_that_may_not_fit_has_the_loss_that_frees_memory(meshwright: Any) -> None:
    asked = ("llama3.2-1b", "--gpus", "1x3090", "--goal", "full", "--json")
    found = meshwright("recommend", *asked).json
    changed = {change["field"]: change["to"] for change in found["changes"]}
    assert changed["kernels.loss"] == "vocab_parallel"
    own = meshwright("estimate", *asked, "kernels.loss=chunked", "layout.recompute=full").json["estimate"]
    assert found["estimate"]["memory_gib"]["total"] < own["memory_gib"]["total"]
    assert found["estimate"]["step_s"] < own["step_s"]
    first = meshwright("plan", *asked).json["plans"][0]["estimate"]
    assert first["step_s"] == found["estimate"]["step_s"]


@pytest.mark.parametrize("verb", ["recommend", "estimate", "check"])
def test_a_warm_up_as_long_as_the_epochs_is_found(meshwright: Any, chats: Path, verb: str) -> None:
    asked = (verb, "qwen3_8b_peft_config", "--gpus", "1xH100", f"data.dataset={chats}", "train.epochs=2", "--json")
    length = ("data.seq_length=4096", "train.global_batch_size=32")
    found = {one["rule"]: one for one in meshwright(*asked, *length).json["findings"]}
    steps = int(found["learning_rate.warmup-too-long"]["message"].split()[-2])
    assert 4 < steps <= 20
    assert found["learning_rate.warmup-too-long"]["fix"] == ["schedule.warmup_steps=1"]
    assert "data.few-steps" not in found
    fixed = meshwright(*asked, *length, "schedule.warmup_steps=1").json["findings"]
    assert not [one for one in fixed if one["rule"] == "learning_rate.warmup-too-long"]


@pytest.mark.parametrize("verb", ["recommend", "check"])
def test_a_batch_larger_than_the_file_is_found(meshwright: Any, chats: Path, verb: str) -> None:
    asked = (verb, "qwen3_8b_peft_config", "--gpus", "1xH100", f"data.dataset={chats}", "train.epochs=1", "--json")
    asked = (*asked, "data.seq_length=4096", "schedule.warmup_steps=0")
    found = {one["rule"]: one for one in meshwright(*asked, "train.global_batch_size=512").json["findings"]}
    assert "1 step of 512" in found["data.few-steps"]["message"]
    (fix,) = found["data.few-steps"]["fix"]
    assert fix.startswith("train.global_batch_size=")
    assert "data.few-steps" not in {one["rule"] for one in meshwright(*asked, fix).json["findings"]}


@pytest.mark.parametrize(("steps", "warned"), [(11, True), (19, True), (20, False), (100, False)])
def test_more_than_half_of_the_steps_is_a_long_warm_up(meshwright: Any, steps: int, warned: bool) -> None:
    found = meshwright("check", "qwen3_8b_peft_config", f"train.steps={steps}", "schedule.warmup_steps=10", "--json")
    assert warned == any(one["rule"] == "learning_rate.warmup-too-long" for one in found.json["findings"])


def test_size_takes_epochs_over_a_file_as_its_tokens(meshwright: Any, chats: Path) -> None:
    words = (
        "--goal",
        "qlora",
        "--seq",
        "4k",
        f"data.dataset={chats}",
        "train.epochs=2",
        "--price",
        "0.12EUR",
        "--json",
    )
    sized = meshwright("size", "qwen3-8b", "--gpu", "RTX3090", "--max-gpus", "1", *words).json["sizes"][0]
    asked = meshwright("recommend", "qwen3-8b", "--gpus", "1xRTX3090", *words).json["budget"]
    assert sized["days"] == pytest.approx(asked["days"], rel=0.05)  # recommend counts whole steps
    assert sized["cost"] == pytest.approx(asked["cost"], rel=0.05)
