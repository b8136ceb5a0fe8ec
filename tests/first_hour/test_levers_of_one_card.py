"""On one small card, no lever that is added by hand is faster than the recommendation."""

from __future__ import annotations

from typing import Any

import pytest

QUESTIONS = [
    ("gpt-oss-20b", "1xRTX4090", "qlora", 32),
    ("gpt-oss-20b", "1xRTX4090", "qlora", 16),
    ("qwen3-8b", "1xRTX4090", "qlora", 16),
    ("llama31-8b", "1xRTX4090", "lora", 32),
    ("qwen3-4b", "2xRTX3090", "sft", 32),
    ("gemma3-12b", "1xL40S", "lora", 16),
    ("qwen3-30b-a3b", "2xA6000", "lora", 32),
    ("llama31-8b", "4xL40S", "sft", 64),
]
LEVERS = ("kernels.loss=fused_linear", "layout.offload=params", "layout.offload=optimizer")
ALIKE = 1.12  # the gain below which a layout on the GPUs is kept, and half of the step's rounding


def step_s(meshwright: Any, question: tuple[str, str, str, int], *more: str) -> float:
    """Return the step time that is recommended, infinite if the settings are refused or do not fit."""
    model, gpus, goal, batch = question
    asked = ("recommend", model, "--gpus", gpus, "--goal", goal, f"train.global_batch_size={batch}", *more, "--json")
    answer = meshwright(*asked)
    return float(answer.json["estimate"]["step_s"]) if answer.code == 0 else float("inf")


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: "-".join(map(str, q)))
def test_a_lever_typed_by_hand_is_hardly_faster(meshwright: Any, question: tuple[str, str, str, int]) -> None:
    plain = step_s(meshwright, question)
    typed = {lever: step_s(meshwright, question, lever) for lever in LEVERS}
    assert min(typed.values()) >= plain / ALIKE, (plain, typed)
    model, gpus, goal, batch = question
    doubled = step_s(meshwright, (model, gpus, goal, 2 * batch))
    assert plain <= 0.6 * doubled, (plain, doubled)


def test_memory_of_an_offload_names_what_the_host_needs(meshwright: Any) -> None:
    asked = ("recommend", "gpt-oss-20b", "--gpus", "1xRTX4090", "--goal", "qlora", "train.global_batch_size=32")
    host_gib = meshwright(*asked, "--json").json["estimate"]["host_gib"]
    assert 13 < host_gib < 64  # 20.9 B parameters in 4 bits and the adapters' state
    assert f"{host_gib:.1f} GiB of host memory per GPU" in meshwright(*asked).out
    plain = ("recommend", "llama31-8b", "--goal", "lora", "--gpus", "8xH100", "--json")
    assert "host_gib" not in meshwright(*plain).json["estimate"]
