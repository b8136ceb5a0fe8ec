"""What a newcomer who fine-tunes typed: names of instruct releases, embedding models, logs, and recipes by version."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright import models


@pytest.fixture(autouse=True)
def here(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "weights"),
    [
        ("Qwen3-4B-Instruct-2507", "Qwen/Qwen3-4B-Instruct-2507"),
        ("qwen3_4b_thinking_2507", "Qwen/Qwen3-4B-Thinking-2507"),
        ("qwen/qwen3-4b-instruct-2507", "Qwen/Qwen3-4B-Instruct-2507"),
        ("someone/Qwen3-4B-Instruct-2507", "someone/Qwen3-4B-Instruct-2507"),
        ("llama3-8b-instruct", "meta-llama/Meta-Llama-3-8B-Instruct"),
        ("llama2-7b-chat", "meta-llama/Llama-2-7b-chat-hf"),
        ("llama3.3-70b", "meta-llama/Llama-3.3-70B-Instruct"),
        ("gemma-2-2b-it", "google/gemma-2-2b-it"),
        ("Qwen2.5-Coder-7B", "Qwen/Qwen2.5-Coder-7B"),
        ("qwen3-8b-base", "Qwen/Qwen3-8B-Base"),
        ("unsloth/Qwen2.5-7B-Instruct-bnb-4bit", "Qwen/Qwen2.5-7B-Instruct"),
        ("qwen3-4b", "Qwen/Qwen3-4B"),
        ("llama3.1-8b", "meta-llama/Meta-Llama-3.1-8B"),
    ],
)
def test_a_known_release_has_its_own_weights_with_and_without_organization(typed: str, weights: str) -> None:
    found, reference = models.find(typed), models.reference(typed)
    assert found.hf_id == weights
    assert reference == (weights if models.has_other_weights(found) else found.name)


def test_every_known_release_has_one_name() -> None:
    for name in models.names():
        for hub_id in models.releases(name):
            found = models.find(hub_id.rpartition("/")[2])
            assert found.name == name
            assert found.hf_id == hub_id or not models.dropped_words(hub_id.rpartition("/")[2])


def test_commands_and_exports_load_the_release_that_was_typed(meshwright: Any) -> None:
    typed, weights = "Qwen3-4B-Instruct-2507", "Qwen/Qwen3-4B-Instruct-2507"
    asked = meshwright("recommend", typed, "--gpus", "1xRTX4090", "--goal", "lora")
    assert f"--model {weights} --dataset" in asked.out
    assert "Qwen/Qwen3-4B " not in asked.out + asked.err
    for framework in ("megatron-bridge", "deepspeed", "automodel"):
        written = meshwright("export", typed, "--goal", "sft", "--gpus", "8xH100", "--to", framework).out
        assert weights in written
        assert "Qwen3-4B\n" not in written.replace('"', "\n")


def test_an_unknown_release_is_answered_with_the_known_ones(meshwright: Any) -> None:
    said = meshwright("recommend", "qwen3-4b-instruct", "--gpus", "1xRTX4090", "--goal", "lora").err
    assert "its weights are Qwen/Qwen3-4B; known others of its shape:" in said
    assert "Qwen/Qwen3-4B-Instruct-2507" in said
