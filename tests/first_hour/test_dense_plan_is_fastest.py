"""Plans of an own dense model: the fastest layout, and repairs that cost what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

OWN = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
ON = ("--goal", "pretrain", "--gpus", "16x8xH100")


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(OWN))
    return str(tmp_path / "config.json")


QUESTIONS = [
    ("own", *ON, "--seq", "8k"),
    ("llama3-8b", "--goal", "pretrain", "--gpus", "64xH100"),
    ("qwen3-30b-a3b", "--goal", "pretrain", "--gpus", "128xH100", "--seq", "32k"),
    ("qwen3-30b-a3b", "--goal", "sft", "--gpus", "16xH100"),
]


@pytest.mark.parametrize("words", QUESTIONS, ids=" ".join)
def test_neither_reduction_of_gradients_is_faster_than_the_recommended(
    meshwright: Any, own: str, words: tuple[str, ...]
) -> None:
    target = own if words[0] == "own" else words[0]
    found = meshwright("recommend", target, *words[1:], "--json").json["estimate"]["step_s"]
    for value in ("true", "false"):
        other = meshwright("recommend", target, *words[1:], f"layout.defer_grad_sync={value}", "--json").json[
            "estimate"
        ]
        assert not other["fits"] or found <= 1.021 * other["step_s"]


def test_the_printed_command_and_plan_reduce_alike(meshwright: Any, own: str) -> None:
    found = meshwright("recommend", own, *ON, "--seq", "8k", "--json").json
    ranked = meshwright("plan", own, *ON, "--seq", "8k", "--top", "1", "--json").json["plans"][0]
    assert found["estimate"]["step_s"] <= 1.021 * ranked["estimate"]["step_s"]
    chosen = {one["field"]: one["to"] for one in ranked["changes"]}.get("layout.defer_grad_sync", True)
    assert ("layout.defer_grad_sync=false" in found["commands"]["meshwright"]) is not chosen


@pytest.mark.parametrize(
    ("verb", "typed"),
    [
        ("recommend", ("layout.tp=6",)),
        ("recommend", ("layout.cp=2", "layout.vp=4")),
        ("estimate", ("layout.pp=7",)),
        ("check", ("layout.tp=6",)),
    ],
)
def test_a_repair_costs_what_typing_it_costs(meshwright: Any, own: str, verb: str, typed: tuple[str, ...]) -> None:
    repair = meshwright(verb, own, *ON, *typed, "--json").json["repair"]
    keys = {text.partition("=")[0] for text in repair["overrides"]}
    kept = [text for text in typed if text.partition("=")[0] not in keys]
    pasted = meshwright(verb, own, *ON, *kept, *repair["overrides"], "--json").json
    assert pasted["estimate"]["fits"]
    assert repair["step_s"] == pytest.approx(pasted["estimate"]["step_s"], rel=0.01)
    assert repair["total_gib"] == pytest.approx(pasted["estimate"]["memory_gib"]["total"], rel=0.01)


@pytest.mark.parametrize("typed", ["layout.tp=6", "layout.pp=7"])
def test_a_layout_that_cannot_be_built_has_no_figures(meshwright: Any, own: str, typed: str) -> None:
    for verb in ("check", "estimate"):
        shown = meshwright(verb, own, *ON, typed)
        out, err = shown.out, shown.err
        assert "no figures: this layout cannot be built" in out
        assert ": fits" not in out
        assert "the recommended one" not in err
    assert "no layout can have your overrides; this one is that of llama3_8b_pretrain_config" in err
    answer = meshwright("check", own, *ON, typed, "--json").json
    assert not answer["ok"]
    assert not answer["estimate"]["fits"]


def test_estimate_of_an_own_model_is_the_recommended_layout(meshwright: Any, own: str) -> None:
    found = meshwright("estimate", own, *ON, "layout.recompute=full", "--json")
    assert "the layout is the recommended one with your overrides" in found.err
    recommended = meshwright("recommend", own, *ON, "layout.recompute=full", "--json").json
    assert found.json["layout"] == recommended["layout"]
