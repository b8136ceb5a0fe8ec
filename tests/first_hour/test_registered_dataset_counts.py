"""Epochs of a registered dataset that is not on this machine: its card publishes how many samples it has."""

from __future__ import annotations

from typing import Any

import pytest

QUESTION = ("recommend", "llama3-8b", "--gpus", "1xH100", "--goal", "lora", "--price", "2", "train.epochs=2")


@pytest.mark.parametrize("name", ["squad", "rajpurkar/squad"])
def test_epochs_of_a_registered_dataset_have_steps_hours_and_a_cost(meshwright: Any, name: str) -> None:
    budget = meshwright(*QUESTION, "--dataset", name, "data.packing=false", "--json").json["budget"]
    assert budget["steps"] == 2 * 87_599 // 8 + 1
    assert "87,599 samples of rajpurkar/squad, as published" in budget["tokens_from"]
    assert budget["cost"] > 0


def test_packed_samples_are_counted_by_the_published_bytes(meshwright: Any) -> None:
    budget = meshwright(*QUESTION, "--dataset", "gsm8k", "--json").json["budget"]
    assert "packed samples of openai/gsm8k, at 4 bytes per token" in budget["tokens_from"]


def test_a_card_without_counts_leaves_the_length_open(meshwright: Any) -> None:
    assert meshwright(*QUESTION, "--dataset", "medpix", "--json").json["budget"] is None
