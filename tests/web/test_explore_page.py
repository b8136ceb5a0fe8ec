"""The page of layouts: an answer at once, what is marked in its chart, filters in its link, one table."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from tests.web.test_pages import LAYOUTS, read

from meshwright.models import config_of
from meshwright.web import charts


def _data(text: str, id: str) -> Any:
    found = re.search(rf'id="{id}">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_page_opens_with_an_answer(client: Any) -> None:
    assert read(client, "/explore").numbers["fitting"] > 10


def test_the_recommended_plan_and_the_capacity_are_marked(client: Any, cli: Any) -> None:
    reply = client.get("/explore", params=LAYOUTS)
    answer = cli("recommend", "llama3-8b", "--gpus", "16xH100", "--goal", "pretrain")
    marks = {one["label"]: one for one in _data(reply.text, "layouts-marks")}
    recommended = next(one for label, one in marks.items() if label.startswith("recommended"))
    assert recommended["step_s"] == answer["estimate"]["step_s"]
    assert recommended["total_gib"] == answer["estimate"]["memory_gib"]["total"]
    layers = _data(reply.text, "layouts-spec")["layer"]
    assert layers[0]["data"]["values"][0]["total_gib"] == answer["estimate"]["memory_gib"]["capacity"]
    assert reply.text.count("<table") == 3  # of measured runs, of layouts, and of what was left out


def test_a_published_layout_that_the_plan_leaves_is_marked(client: Any, cli: Any) -> None:
    asked = ("--gpus", "4x8xH100", "--goal", "pretrain")
    answer = cli("recommend", "llama3-70b", *asked)
    published = answer.get("published")
    reply = client.get("/explore", params={"target": "llama3-70b", "gpus": "4x8xH100", "goal": "pretrain"})
    labels = {one["label"]: one for one in _data(reply.text, "layouts-marks")}
    if published and not published["kept"]:
        mark = next(one for label, one in labels.items() if label.startswith("published"))
        assert mark["step_s"] == published["step_s"]
    elif published:
        assert any(label.startswith("recommended = published") for label in labels)


def test_filters_are_fields_of_the_link(client: Any) -> None:
    page = read(client, "/explore", {**LAYOUTS, "only": "pp:2,tp:1", "most": "60", "color": "pp"})
    assert any("only=pp%3A2%2Ctp%3A1" in text for text in page.text.split())


def test_the_chart_of_nothing_is_empty() -> None:
    estimate = {"memory_gib": {"capacity": 80.0}}
    assert charts.layouts({"plans": [{"estimate": estimate}], "fitting": []})["layer"]


def test_measured_runs_of_the_same_training_are_points(client: Any) -> None:
    reply = client.get("/explore", params=LAYOUTS)
    layers = _data(reply.text, "layouts-spec")["layer"]
    points = next(one["data"]["values"] for one in layers if one["mark"].get("style") == "measured")
    answer = client.get("/api/recommend?model=llama3-8b&gpus=16xH100&goal=pretrain").json()
    tokens = answer["contract"]["seq_length"] * answer["contract"]["global_batch_size"]
    assert 1 <= len(points) <= 12
    for one in points:
        assert one["step_s"] == pytest.approx(tokens / (16 * one["tokens_per_s_per_gpu"]))
        assert one["words"].partition(",")[0].endswith("xH100")
        assert one["source"] in reply.text
    estimate = answer["estimate"]["step_s"]
    assert min(abs(one["step_s"] / estimate - 1) for one in points) < 0.3  # of the same order


def test_a_training_that_nobody_measured_says_so(client: Any) -> None:
    text = client.get("/explore", params={"target": "llama3-8b", "gpus": "8xL40S", "goal": "peft"}).text
    assert "No measured run of this model on this GPU" in text
    assert "meshwright share RUN" in text
    own = client.get("/explore", params={"config": json.dumps(config_of("qwen3_8b")), "gpus": "8xH100", "goal": "sft"})
    assert "Crosses:" not in own.text


def test_filters_have_the_values_of_the_layouts_and_explain_their_fields(client: Any) -> None:
    text = client.get("/explore", params=LAYOUTS).text
    found = re.search(r'<label for="only-pp">(.*?)</label><select id="only-pp" data-only="pp">(.*?)</select>', text)
    assert found is not None
    assert 'data-meaning="pipeline parallelism' in found[1]
    values = re.findall("<option>([0-9]+)</option>", found[2])
    assert values == sorted(values, key=int)
    assert values[:2] == ["1", "2"]
