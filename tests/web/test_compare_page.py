"""The page of comparisons: engines for one plan, or two plans."""

from __future__ import annotations

from typing import Any

import pytest
from tests.web.html import at
from tests.web.test_pages import read

from meshwright.web import presenters


def test_the_page_opens_with_the_engines_of_the_default_plan(client: Any, cli: Any) -> None:
    page = read(client, "/compare")
    answer = cli("compare", "llama3-8b", "--gpus", "8xH100", "--goal", "sft")
    assert answer["answer"] in page.text
    assert len(page.numbers) >= 9
    assert all(value == at(answer, path) for path, value in page.numbers.items())
    assert any("engine=megatron" in one for one in page.addresses)
    assert "What else decides: meshwright " in answer["answer"], "whose strength or weakness it is is named"


def test_two_plans_are_side_by_side(client: Any, cli: Any) -> None:
    query = {"model": "llama3-8b", "gpus": "8xH100", "goal": "sft", "gpus_b": "8xH200", "overrides_b": "layout.tp=1"}
    page = read(client, "/compare", query)
    for slot, gpus, more in (("a", "8xH100", ()), ("b", "8xH200", ("layout.tp=1",))):
        answer = cli("recommend", "llama3-8b", "--gpus", gpus, "--goal", "sft", *more)
        numbers = {path[2:]: value for path, value in page.numbers.items() if path.startswith(f"{slot}.")}
        assert len(numbers) > 10
        assert all(value == at(answer["estimate"], path) for path, value in numbers.items())
    assert "the error of the estimates" in page.text
    assert "fieldABgpus8xH1008xH200Keep" in "".join(page.text.split()), "what differs is the GPUs only"


def test_requests_contracts_and_layouts_are_compared() -> None:
    def plan(peft: Any, tp: int) -> dict[str, Any]:
        question = {"model": "m", "gpus": "8xH100", "goal": "sft", "engine": "meshwright"}
        return {"question": question, "contract": {"lr": 0.1, "peft": peft}, "layout": {"tp": tp, "pp": 1}}

    assert presenters.differing(plan(None, 1), plan({"method": "lora", "rank": 16}, 2)) == [
        {"name": "peft", "a": "–", "b": "method lora, rank 16"},
        {"name": "tp", "a": "1", "b": "2"},
    ]
    assert presenters.differing(plan(None, 1), plan(None, 1)) == []


@pytest.mark.parametrize(
    ("query", "status", "message"),
    [
        ({"model": "lama3-8b", "gpus": "8xH100", "goal": "sft"}, 422, "did you mean"),
        ({"model": "llama3-8b", "gpus": "8xH100", "goal": "sft", "model_b": "nope"}, 200, "unknown model"),
        ({"model": "llama3-8b", "gpus": "8xH100", "goal": "sft", "overrides_b": "'x"}, 200, "overrides"),
    ],
)
def test_wrong_input_is_reported(client: Any, query: dict[str, str], status: int, message: str) -> None:
    assert message in read(client, "/compare", query, status).text


def test_a_difference_within_the_error_is_called_that() -> None:
    def plan(rate: float, fits: bool = True) -> dict[str, Any]:
        estimate = {"tokens_per_s_per_gpu": rate, "fits": fits, "band": {"step_pct": 20.0}}
        return {"estimate": estimate, "question": {"model": "m"}}

    assert "within the error" in presenters.faster_side(plan(100), plan(110))
    assert "Plan B has 2.00 × " in presenters.faster_side(plan(100), plan(200))
    assert "more than the error" in presenters.faster_side(plan(100), plan(200))
    assert presenters.faster_side(plan(1, False), plan(1)) == "Only plan B fits."
