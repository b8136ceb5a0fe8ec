"""Issue 2, number 10: no number contradicts another, or cannot be."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from meshwright import api
from meshwright.errors import InputError

MODELS = ("llama3-8b", "qwen3-30b-a3b", "llama3-70b", "gemma3-4b", "qwen3-0.6b", "deepseek-v3", "nemotron-nano-9b-v2")
CLUSTERS = (
    "1xRTX4090",
    "4xT4",
    "8xH100",
    "12xL40S",
    "64xH200",
    "2x8xA100-40",
    "72xGB200",
    "6xRTX5080",
    "8xMI300X",
    "3xGH200",
)
ENGINES = ("meshwright", "megatron", "torchtitan")


def check_numbers(answer: dict[str, Any]) -> None:
    """Assert that the figures of a plan are consistent."""
    estimate, world = answer["estimate"], 1
    gib, band = estimate["memory_gib"], estimate["band"]
    parts = sum(gib[part] for part in gib if part not in ("total", "capacity"))
    assert parts == pytest.approx(gib["total"])
    assert all(gib[part] >= 0 for part in gib)
    assert sum(estimate["step_parts_s"].values()) == pytest.approx(estimate["step_s"])
    assert all(seconds >= 0 for seconds in estimate["step_parts_s"].values())
    for factor in answer["question"]["gpus"].split("x")[:-1]:
        world *= int(factor)
    tokens = answer["contract"]["global_batch_size"] * answer["contract"]["seq_length"]
    assert estimate["tokens_per_s_per_gpu"] == pytest.approx(tokens / estimate["step_s"] / world)
    assert 0 < estimate["mfu"] < 0.9
    assert 0 < band["step_low_s"] < estimate["step_s"] < band["step_high_s"]
    assert 0 < band["memory_low_gib"] < gib["total"] < band["memory_high_gib"]
    assert estimate["fits"] == (estimate["fit"] in ("fits", "probably fits", "may not fit"))
    if estimate["fit"] == "fits":
        assert band["memory_high_gib"] <= gib["capacity"]
    if estimate["fit"] == "does not fit" and not any(f["severity"] == "error" for f in answer["findings"]):
        assert band["memory_low_gib"] > 0.98 * gib["capacity"]
    text = str(answer["findings"]) + str(answer.get("changes", ""))
    assert not re.search(r"\b(nan|inf|None) ?(%|GiB|s\b|tokens)", text)


@pytest.mark.parametrize("count", [6, pytest.param(60, marks=pytest.mark.slow)])
def test_figures_of_random_questions_are_consistent(count: int) -> None:
    draw = random.Random(9)
    for _ in range(count):
        question = (draw.choice(MODELS), draw.choice(CLUSTERS), draw.choice(("pretrain", "sft", "peft")))
        try:
            plan = api.recommend(*question, engine=draw.choice(ENGINES))
        except InputError:
            continue  # no layout divides this count
        check_numbers(api.to_json(api.plan_response(plan)))


def test_a_wide_band_is_a_range_and_never_negative(meshwright: Any) -> None:
    words = ("estimate", "qwen3-30b-a3b", "--gpus", "8xMI300X", "--goal", "sft")
    band = meshwright(*words, "--json").json["estimate"]["band"]
    assert band["step_pct"] > 50
    assert 0 < band["step_low_s"] < band["step_high_s"]
    text = meshwright(*words).out
    assert "±" not in text
    assert f"({band['step_low_s']:.2f} to {band['step_high_s']:.2f})" in text


def test_a_band_across_capacity_is_said_with_a_remedy(meshwright: Any) -> None:
    found: dict[str, Any] = {}
    for seq in ("1k", "2k", "3k", "4k", "5k", "6k", "8k"):
        words = ("estimate", "qwen3_8b_peft_config", "--gpus", "1xRTX4090", "--seq", seq)
        answer = meshwright(*words, "--json").json
        found.setdefault(answer["estimate"]["fit"], (words, answer))
    assert "may not fit" in found or "probably fits" in found
    for verdict in ("probably fits", "may not fit"):
        if verdict not in found:
            continue
        words, answer = found[verdict]
        assert answer["estimate"]["fits"] is True
        findings = {f["rule"]: f for f in answer["findings"]}
        finding = findings.get("memory.tight") or findings["memory.uncertain"]
        assert finding["fix"]
        assert verdict in meshwright(*words).out
        after = meshwright(*words, *finding["fix"], "--json").json["estimate"]
        assert after["memory_gib"]["total"] < answer["estimate"]["memory_gib"]["total"]


def test_messages_agree_with_the_estimate(meshwright: Any) -> None:
    """Experts never need more than the estimate of all."""
    seen = 0
    for engine, recipe in (
        ("meshwright", "qwen3_235b_a22b_pretrain_config"),
        ("megatron", "deepseek_v3_pretrain_config"),
    ):
        words = ("--gpus", "64xH200", "--engine", engine, "layout.ep=1", "layout.etp=1", "--json")
        answer = meshwright("estimate", recipe, *words).json
        for finding in answer["findings"]:
            if finding["rule"] == "moe.ep-too-low":
                seen += 1
                needed = float(finding["message"].split(" need ")[1].split(" GiB")[0])
                assert needed <= answer["estimate"]["memory_gib"]["total"] + 1
    assert seen


def test_a_peak_that_does_not_fit_is_above_what_is_usable(meshwright: Any) -> None:
    answer = meshwright("estimate", "llama3-8b", "--gpus", "1xRTX4090", "--goal", "peft", "layout.recompute=full").out
    assert "GiB of 23.5 GiB usable" in answer


def test_a_batch_that_is_small_for_the_budget_is_said(meshwright: Any) -> None:
    found = meshwright("size", "qwen3-0.6b", "--goal", "sft", "--gpu", "8xH100", "--tokens", "1T", "--json").json
    assert len(found["notes"]) == 1
    assert "is small for 1T tokens" in found["notes"][0]
    batch = found["notes"][0].split("train.global_batch_size=")[1].split(" ")[0]
    words = ("estimate", "qwen3-0.6b", "--goal", "sft", "--gpus", "8xH100", "--json", "--tokens")

    def about_the_batch(*more: str) -> list[str]:
        return [note for note in meshwright(*words, *more).json["budget"]["notes"] if "batch" in note]

    assert about_the_batch("1T") == found["notes"]
    assert about_the_batch("1T", f"train.global_batch_size={batch}") == []
    assert about_the_batch("1B") == []


def test_a_batch_that_is_large_for_the_budget_is_said(meshwright: Any) -> None:
    words = ("recommend", "llama3.2-1b", "--gpus", "8xH100", "--seq", "8k", "--json", "--tokens")

    def about_the_batch(*more: str, goal: str = "pretrain") -> list[str]:
        found = meshwright(*words, *more, "--goal", goal).json
        return [note for note in found["budget"]["notes"] if "batch" in note]

    (note,) = about_the_batch("20B", "train.global_batch_size=1024")
    assert "8,388,608 tokens is large for 20B tokens: 2,385 steps" in note
    batch = note.split("train.global_batch_size=")[1].split(" ")[0]
    assert about_the_batch("20B", f"train.global_batch_size={batch}") == []
    assert about_the_batch("200B", "train.global_batch_size=1024") == []
    assert about_the_batch("20B", "train.global_batch_size=1024", goal="cpt") == []


def test_a_large_pipeline_bubble_is_a_finding_whose_fix_lowers_it(meshwright: Any) -> None:
    words = ("estimate", "llama3_8b_peft_config", "--gpus", "12xL40S", "layout.pp=3", "layout.cp=2")
    words = (*words, "layout.stage_layers=[11,11,10]", "layout.recompute=full")
    answer = meshwright(*words, "--json").json

    def share(one: dict[str, Any]) -> float:
        return float(one["estimate"]["step_parts_s"]["pp_bubble"] / one["estimate"]["step_s"])

    assert share(answer) > 0.3
    finding = next(f for f in answer["findings"] if f["rule"] == "schedule.idle-pipeline")
    assert finding["fix"]
    after = meshwright(*words, *finding["fix"], "--json").json
    assert share(after) < share(answer) / 1.5
