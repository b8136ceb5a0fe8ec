"""The landing page: an answer at once, chips and fixes that are links, intervals beside figures, terms explained."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qsl

import pytest
from tests.web.html import Page
from tests.web.test_pages import read

from meshwright import api
from meshwright.api.terms import meanings
from meshwright.web import presenters, quick_choices


def _linked(page: Page, **changed: str) -> list[dict[str, str]]:
    queries = [dict(parse_qsl(one[2:])) for one in page.addresses if one.startswith("/?")]
    return [one for one in queries if all(one.get(name) == value for name, value in changed.items())]


def test_the_first_page_has_an_answer_and_every_chip_another(client: Any, cli: Any) -> None:
    page = read(client, "/")
    answer = cli("recommend", "llama3-8b", "--gpus", "8xH100", "--goal", "sft")
    assert page.numbers["estimate.memory_gib.total"] == answer["estimate"]["memory_gib"]["total"]
    for changed in ({"model": "llama3-70b"}, {"gpus": "8xH200"}, {"gpus": "64xH100"}):
        linked = _linked(page, **changed)
        assert linked == [quick_choices.DEFAULT | changed]
    assert "ask with --engine" not in page.text, "a framework's own plan is a button, beside its files"


def test_chips_keep_what_was_typed_and_the_current_one_is_marked(client: Any) -> None:
    reply = client.get("/?model=meta-llama/Llama-3.1-8B&gpus=2x8xH200&goal=peft&seq=4k")
    page = Page(reply.text)
    assert page.wrong == []
    assert _linked(page, gpus="16xB200", seq="4k", goal="peft", model="meta-llama/Llama-3.1-8B")
    assert 'data-value="16xH200" aria-current="true"' in reply.text
    assert 'id="goal-peft" value="peft" checked' in reply.text


@pytest.mark.parametrize("send", ["get", "post"])
def test_a_link_with_only_a_model_names_what_is_missing_and_links_an_answer(client: Any, send: str) -> None:
    asked = {"model": "llama3-70b"}
    reply = client.get("/", params=asked) if send == "get" else client.post("/", data=asked)
    assert (reply.status_code, "gpus, goal required" in reply.text) == (422, True)
    fix = re.search(r'href="(/?\?[^"]+)">gpus: ', reply.text)
    assert fix is not None, "the fix is a link that fills in all that is missing"
    assert client.get("/" + fix[1].lstrip("/").replace("&amp;", "&")).status_code == 200


@pytest.mark.parametrize(
    ("typed", "expected"),
    [("8xH100", (8, "H100")), ("4x8xH200", (32, "H200")), ("8 h100", (8, "h100")), ("64", (64, "H100")),
     ("16xA100-80", (16, "A100-80")), ("8xMI300X", (8, "MI300X")), ("", (8, "H100")), ("?!", (8, "H100"))],
)  # fmt: skip
def test_clusters_are_split(typed: str, expected: tuple[int, str]) -> None:
    assert quick_choices.split_cluster(typed) == expected


@pytest.mark.parametrize(
    "model", ["llama3-70b", "Llama 3 70B", "meta-llama/Meta-Llama-3-70B", "NousResearch/Meta-Llama-3-70B"]
)
def test_a_model_in_any_spelling_is_answered(client: Any, model: str) -> None:
    assert "on 8x8xH100" in read(client, "/", {"model": model, "gpus": "64 H100", "goal": "sft"}).text


def test_every_figure_has_its_interval_and_no_more_digits_than_that(client: Any) -> None:
    text = " ".join(read(client, "/").text.split())
    estimate = client.get("/api/recommend?model=llama3-8b&gpus=8xH100&goal=sft").json()["estimate"]
    for one in presenters.tiles(estimate):
        assert f"{one['low']} to {one['high']}" in text
        assert float(one["low"].replace(",", "")) < float(one["high"].replace(",", ""))
    assert presenters._to_band(0.8217, 0.679, 0.996) == "0.82"
    assert presenters._to_band(10166.8, 8390.0, 12300.0) == "10,200"


def test_a_wide_band_is_the_headline() -> None:
    estimate = api.to_json(api.plan_response(api.recommend("llama3-8b", "8xH100", "sft")))["estimate"]
    wide = {**estimate, "band": {**estimate["band"], "step_pct": 45.0}}
    assert [one["wide"] for one in presenters.tiles(wide)] == [False, True, True, True, True]


def test_what_does_not_fit_has_no_speed_and_links_what_would(client: Any) -> None:
    page = read(client, "/", {"model": "llama3-405b", "gpus": "8xH100", "goal": "pretrain"})
    assert "does not fit" in page.text
    assert not [name for name in page.numbers if "step" in name or "mfu" in name or "tokens" in name]
    assert _linked(page, gpus="4x8xH100", model="llama3-405b")
    assert _linked(page, gpus="14x8xH100", model="llama3-405b")


def test_terms_are_explained_where_they_are_used(client: Any) -> None:
    reply = client.get("/?model=llama3-70b&gpus=64xH100&goal=pretrain")
    for name in (
        "tp",
        "pp",
        "vp",
        "cp",
        "ep",
        "recompute",
        "mfu",
        "dp_shard",
        "micro_batch_size",
        "band",
        "activations",
    ):
        assert f'href="/glossary#{name}" data-meaning="' in reply.text, name
    glossary = read(client, "/glossary")
    assert set(meanings()) <= set(glossary.ids)
    assert meanings()["tp"] in glossary.text


@pytest.mark.parametrize(
    ("query", "message", "fixed"),
    [
        ({"model": "lama3-70b", "gpus": "8xH100"}, "did you mean", {"model": "llama3_70b"}),
        ({"model": "nosuch/xyz-12b", "gpus": "8xH100"}, "paste or drop its config.json", {"model": "deepseek-v3"}),
        ({"model": "llama3-8b", "gpus": "8xH1000"}, "did you mean", {"gpus": "8xH100"}),
        ({"gpus": "8xH100"}, "choose one below", {"model": "llama3-70b"}),
    ],
)
def test_wrong_input_has_fixes_to_click(
    client: Any, query: dict[str, str], message: str, fixed: dict[str, str]
) -> None:
    page = read(client, "/", {**query, "goal": "sft"}, 422)
    assert message in page.text
    assert {**query, **fixed, "goal": "sft"} in _linked(page)


@pytest.mark.parametrize(
    ("kind", "typed", "expected"),
    [
        ("models", "llama3-70b", "llama3_70b"),
        ("models", "meta-llama/", "meta-llama/Llama-3.2-1B"),
        ("models", "qwen/qwen3-8", "Qwen/Qwen3-8B"),
        ("clusters", "8 H100", "8xH100"),
        ("clusters", "16 h2", "16xH200"),
        ("clusters", "64", "64xH100"),
        ("clusters", "2x8xh1", "2x8xH100"),
    ],
)
def test_names_complete_as_people_type_them(client: Any, kind: str, typed: str, expected: str) -> None:
    assert f'value="{expected}"' in client.get(f"/complete/{kind}", params={"typed": typed}).text


@pytest.mark.parametrize(
    ("to", "engine", "words"),
    [
        ("megatron-lm", "megatron", "Megatron-LM cannot run this layout"),  # the rules of Megatron reject it
        ("megatron-bridge", "megatron", "Megatron-Bridge cannot run this layout"),
        ("torchtitan", "", "do not cover fine-tuning"),  # no layout would help
        ("meshwright", "", "llama3_8b_sft_config.toml"),
    ],
)
def test_a_framework_that_cannot_run_the_layout_offers_its_own_plan(
    client: Any, to: str, engine: str, words: str
) -> None:
    page = Page(client.get("/ask/commands", params={**quick_choices.DEFAULT, "to": to}).text)
    assert words in page.text
    assert _linked(page, engine=engine) == ([quick_choices.DEFAULT | {"engine": engine}] if engine else [])
