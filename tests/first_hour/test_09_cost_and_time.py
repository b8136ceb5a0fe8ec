"""Issue 2, number 9: days and cost for the cluster that one has."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from meshwright.display import gpu_hours
from meshwright.errors import InputError
from meshwright.parsing import price_per_hour, token_budget
from meshwright.planner.gpu_counts import gpu_counts


@pytest.mark.parametrize(
    ("typed", "tokens"),
    [("15T", 15e12), ("2B", 2e9), ("1e12", 1e12), ("1.5 trillion", 1.5e12), ("500,000,000", 5e8), ("300M tokens", 3e8)],
)
def test_token_budgets(typed: str, tokens: float) -> None:
    assert token_budget(typed) == pytest.approx(tokens)


@pytest.mark.parametrize(
    ("typed", "price"),
    [
        ("2.5", (2.5, "")),
        (2, (2.0, "")),
        ("2.10EUR", (2.1, "EUR")),
        ("€2.10", (2.1, "EUR")),
        ("$2/h", (2.0, "USD")),
        ("3 usd", (3.0, "USD")),
    ],
)
def test_prices(typed: str, price: tuple[float, str]) -> None:
    assert price_per_hour(typed) == price


@pytest.mark.parametrize(("price", "currency"), [("2EUR", "USD"), ("cheap", None), ("-1", None), (None, "EUR")])
def test_bad_prices_are_refused(price: str | None, currency: str | None) -> None:
    with pytest.raises(InputError):
        price_per_hour(price, currency)


@pytest.mark.parametrize("verb", ["recommend", "estimate"])
def test_days_hours_and_cost_with_their_range(meshwright: Any, verb: str) -> None:
    words = (verb, "llama3-8b", "--gpus", "8xH100", "--goal", "pretrain", "--tokens", "15B", "--price", "2.10EUR")
    found = meshwright(*words, "--json").json
    budget, estimate = found["budget"], found["estimate"]
    seconds = 15e9 / (8 * estimate["tokens_per_s_per_gpu"] * budget["goodput"]["share"])
    assert budget["days"] == pytest.approx(seconds / 86400)
    assert budget["gpu_hours"] == pytest.approx(8 * 24 * budget["days"])
    assert budget["cost"] == pytest.approx(2.1 * budget["gpu_hours"])
    assert budget["currency"] == "EUR"
    for name in ("days", "gpu_hours", "cost"):
        assert 0 < budget[f"{name}_band"]["low"] < budget[name] < budget[f"{name}_band"]["high"]
    text = meshwright(*words).out
    assert "15B tokens in" in text
    assert "EUR" in text
    assert "goodput" in text


def test_a_price_alone_takes_the_recipes_steps(meshwright: Any) -> None:
    found = meshwright("estimate", "llama3_8b_sft_config", "--price", "2", "--json").json
    steps = found["contract"]["steps"]
    assert found["budget"]["steps"] == steps
    assert found["budget"]["tokens_from"] == "the recipe's steps"
    assert "budget" not in meshwright("estimate", "llama3_8b_sft_config", "--json").json


def test_a_cluster_file_has_price_fabric_and_nodes(meshwright: Any, tmp_path: Path) -> None:
    own = tmp_path / "lab.toml"
    own.write_text('gpu = "L40S"\nnodes = 3\ngpus_per_node = 4\nnetwork_gb_s = 12.5\nprice = 0.9\ncurrency = "EUR"\n')
    words = ("--goal", "peft", "--tokens", "1B", "--json")
    found = meshwright("recommend", "qwen3-0.6b", "--gpus", str(own), *words).json
    assert (found["budget"]["price"], found["budget"]["currency"]) == (0.9, "EUR")
    sized = meshwright("size", "qwen3-0.6b", "--gpu", str(own), *words).json
    assert (sized["node"], sized["price"], sized["currency"]) == (4, 0.9, "EUR")
    twelve = next(one for one in sized["sizes"] if one["gpus"] == 12)
    assert twelve["nodes"] == "3x4"
    assert twelve["cost"] == pytest.approx(0.9 * twelve["gpu_hours"])
    for price, currency in (("2", "EUR"), ("2USD", "USD")):  # a bare number is in the currency of the file
        other = meshwright("recommend", "qwen3-0.6b", "--gpus", str(own), *words, "--price", price).json["budget"]
        assert (other["price"], other["currency"]) == (2, currency)


@pytest.mark.parametrize("node", [1, 4, 6, 8])
def test_every_number_of_nodes_is_tried(node: int) -> None:
    counts = gpu_counts(node)
    assert set(range(1, node + 1)) | {k * node for k in range(1, 17)} <= set(counts)
    assert all(later <= 1.34 * earlier for earlier, later in pairwise(counts) if earlier >= 4 * node)


def test_size_says_what_was_tried(meshwright: Any) -> None:
    text = meshwright("size", "qwen3-0.6b", "--goal", "sft", "--gpu", "4xL40S", "--tokens", "10B", "--price", "$1").out
    assert "cost USD" in text
    assert "counts tried: 1 to 4, then nodes of 4" in text
    assert "3x4" in text


def test_bad_sizes_name_their_option(meshwright: Any) -> None:
    answer = meshwright("size", "qwen3-0.6b", "--goal", "sft", "--gpu", "H10O", "--json")
    assert answer.code == 2
    assert answer.json["error"]["field"] == "gpu"
    assert "--gpu H100" in answer.json["error"]["fix"]


def test_epochs_of_an_own_file_have_a_time(meshwright: Any, tmp_path: Path) -> None:
    rows = tmp_path / "chats.jsonl"
    rows.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n' * 300)
    typed = (
        "recommend",
        "qwen3-4b",
        "--gpus",
        "1x4090",
        "--goal",
        "lora",
        f"data.dataset={rows}",
        "data.packing=false",
    )
    budget = meshwright(*typed, "train.epochs=3", "data.validation_part=0.1", "--json").json["budget"]
    assert budget["steps"] == -(-810 // 8)  # 270 samples, three times, in batches of 8
    assert "270 samples" in budget["tokens_from"]
    assert "budget" not in meshwright(*typed, "--json").json
    assert "minutes" in meshwright(*typed, "train.epochs=3").out


def test_gpu_hours_of_a_run_of_minutes_have_digits_that_count() -> None:
    assert [gpu_hours(one) for one in (0.0143, 0.0085, 0.5, 12.34, 345.6)] == ["0.014", "0.0085", "0.50", "12.3", "346"]
