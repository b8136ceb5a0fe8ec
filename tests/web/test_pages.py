"""The pages: whole, without anything from elsewhere, with the command line's numbers, whatever is asked."""

from __future__ import annotations

import html
import json
from typing import Any
from urllib.parse import urlencode

import pytest
from tests.web.html import Page, at

import meshwright as mw
from meshwright import api
from meshwright.models import config_of
from meshwright.web import presenters

CONFIG = json.dumps(config_of("qwen3_8b"))
ASKED = {"model": "llama3-70b", "gpus": "64xH100", "goal": "pretrain"}
LAYOUTS = {"target": "llama3-8b", "gpus": "16xH100", "goal": "pretrain"}
NASTY = "\"><script>alert(1)</script>{{7*7}}' onload=x"


def read(client: Any, path: str, query: dict[str, str] | None = None, status: int = 200) -> Page:
    """A page that answers with this status and has nothing wrong with it."""
    reply = client.get(path + (f"?{urlencode(query)}" if query else ""))
    assert reply.status_code == status, reply.text[:500]
    assert reply.headers["content-type"].startswith("text/html")
    page = Page(reply.text)
    assert page.wrong == []
    return page


FINE = [
    ("/", {}),
    ("/", ASKED),
    ("/", {**ASKED, "seq": "32k", "engine": "megatron", "overrides": "layout.tp=8 layout.cp=4"}),
    ("/", {"model": "llama3-70b", "gpus": "8xH100", "goal": "pretrain"}),  # does not fit
    ("/", {"model": "llama3-8b", "gpus": "8xH100", "goal": "peft"}),
    ("/", {"model": "qwen3-30b-a3b", "gpus": "16xH100", "goal": "sft", "overrides": "layout.tp=3"}),  # illegal
    ("/", {"model": "llama3-8b", "gpus": "64xGB200", "goal": "pretrain", "benchmark": "1"}),
    ("/", {"config": CONFIG, "gpus": "8xH100", "goal": "sft"}),
    ("/", {**ASKED, "tokens": "100B", "price": "2.5EUR"}),
    ("/", {**ASKED, "days": "30", "utm_source": "mail"}),
    ("/ask/commands", {**ASKED, "to": "meshwright", "tokens": "100B"}),
    ("/ask/commands", {**ASKED, "to": "megatron-lm"}),
    ("/explore", {}),
    ("/explore", LAYOUTS),
    ("/explore", {"target": "llama3-405b", "gpus": "1xH100", "goal": "pretrain"}),  # nothing fits
    ("/explore", {**LAYOUTS, "tokens": "100B", "price": "2.5"}),
    ("/explore/compare", LAYOUTS),
    ("/explore/compare", {**LAYOUTS, "a": "layout.pp=2"}),
    ("/explore/compare", {**LAYOUTS, "a": "layout.pp=2 layout.tp=2", "b": "layout.pp=1 layout.tp=5"}),
    ("/scale", {}),
    ("/scale", {"model": "llama3-8b", "gpu": "H100", "goal": "sft"}),
    ("/check", {}),
    *(("/check", {"example": name}) for name in api.FRAMEWORKS),
    ("/complete/models", {"model": "lla"}),
    ("/complete/gpus", {"gpu": "H100 H2"}),
    ("/complete/clusters", {"gpus": "64x"}),
    ("/recipes", {}),
    ("/recipes", {"query": "llama 8b", "goal": "sft"}),
    ("/recipes", {"benchmark": "1", "query": "gb200"}),
    ("/recipes/llama3_8b_sft_config", {}),
    ("/recipes/deepseek_v3_pretrain_config", {}),
    ("/recipes/llama3_8b_sft_config/text", {"format": "python"}),
    ("/recipes/llama3_8b_sft_config/text", {"to": "automodel"}),
    ("/models", {}),
    ("/models", {"query": "qwen3"}),
    ("/models/qwen3_30b_a3b", {}),
    ("/models/meta-llama/Llama-3.1-8B", {}),
    ("/gpus", {}),
    ("/gpus", {"query": "blackwell"}),
    ("/gpus/H100", {}),
    ("/rules", {}),
    ("/rules", {"query": "torchtitan"}),
    ("/rules", {"pitfalls": "1", "severity": "error"}),
    ("/rules/batch.divides", {}),
    ("/rules/megatron-lm.max-connections", {}),
]
WRONG = [
    ("/", {**ASKED, "model": "y" * 5000}, 422, "the limit is 4,096"),
    ("/", {**ASKED, "overrides": "layout.tp=2 " * 61}, 422, "the limit is 60"),
    ("/ask/commands", {"to": "meshwright"}, 422, "required"),
    ("/ask/commands", ASKED, 422, "to required"),
    ("/scale", {"model": "llama3-8b", "gpu": "A B C D E F G", "goal": "sft"}, 422, "the limit is 6"),
    ("/check", {"text": "x: 1", "name": "a/b.yaml"}, 422, "must be a plain file name"),
    ("/", {**ASKED, "model": "lama3-70b"}, 422, "did you mean"),
    ("/", {"model": "llama3-8b", "goal": "sft"}, 422, "gpus required"),
    ("/", {**ASKED, "gpus": "64xH1000"}, 422, "unknown"),
    ("/", {**ASKED, "seq": "many"}, 422, "seq"),
    ("/", {**ASKED, "overrides": "layout.tp=lots"}, 422, "tp"),
    ("/", {**ASKED, "overrides": "'open"}, 422, "overrides"),
    ("/", {**ASKED, "goal": "dance"}, 422, "goal"),
    ("/", {**ASKED, "model": NASTY}, 422, "model"),
    ("/", {"config": "{nonsense", "gpus": "8xH100", "goal": "sft"}, 422, "config"),
    ("/", {**ASKED, "model": "/etc/passwd"}, 422, "model"),
    ("/ask/commands", {**ASKED, "to": "nobody"}, 422, "nobody"),
    ("/ask/commands", {**ASKED, "to": "torchtitan", "overrides": "'open"}, 422, "overrides"),
    ("/explore", {"target": "llama3-8b"}, 422, "gpus"),
    ("/scale", {"model": "llama3-8b", "goal": "sft"}, 422, "gpu required"),
    ("/scale", {"model": "llama3-8b", "gpu": "2x9000", "goal": "sft"}, 422, "are not one node"),
    ("/scale", {"model": "llama3-8b", "gpu": "H100", "goal": "sft", "price": "2"}, 422, "token budget"),
    (
        "/scale",
        {"model": "llama3-8b", "gpu": "H100", "goal": "sft", "price": "free"},
        422,
        "must be a price per GPU-hour",
    ),
    ("/check", {"example": "nobody"}, 422, "nobody"),
    ("/recipes", {"goal": "dance"}, 422, "goal"),
    ("/recipes/llama3_8b_sft_confg", {}, 404, "llama3_8b_sft_config"),
    ("/recipes/nope/text", {"format": "yaml"}, 422, "nope"),
    ("/models/lama3_8b", {}, 404, "llama3_8b"),
    ("/models", {"query": "zzzzzz"}, 422, "zzzzzz"),
    ("/gpus/H1000", {}, 404, "H100"),
    ("/rules/nope.nope", {}, 404, "nope.nope"),
    ("/explore/compare", {**LAYOUTS, "a": "layout.zz=2"}, 200, "zz"),
]


@pytest.mark.parametrize(("path", "query"), FINE, ids=lambda one: str(one)[:60])
def test_every_page_is_valid(client: Any, path: str, query: dict[str, str]) -> None:
    read(client, path, query)


@pytest.mark.parametrize(("path", "query", "status", "said"), WRONG, ids=lambda one: str(one)[:60])
def test_errors_are_reported_with_a_fix(client: Any, path: str, query: dict[str, str], status: int, said: str) -> None:
    page = read(client, path, query, status)
    assert said in page.text
    assert "<script>alert" not in html.unescape("".join(page.addresses))


def test_what_was_typed_stays_text(client: Any) -> None:
    reply = client.get("/?" + urlencode({**ASKED, "model": NASTY}))
    assert "<script>alert" not in reply.text
    assert html.escape(NASTY).replace("&#x27;", "&#39;").replace("&quot;", "&#34;") in reply.text
    assert "49" not in Page(reply.text).text.split("alert(1)")[1][:40]


def test_htmx_gets_an_error_as_a_page_to_show(client: Any) -> None:
    reply = client.get("/?model=nope&gpus=8xH100&goal=sft", headers={"hx-request": "true"})
    assert reply.status_code == 200
    assert 'role="alert"' in reply.text


def _same(page: Page, answer: dict[str, Any], prefix: str = "") -> int:
    """Every number of the page that names a field of the answer is that field's value; how many there are."""
    compared = 0
    for path, value in page.numbers.items():
        if prefix and not path.startswith(prefix):
            continue
        assert value == at(answer, path.removeprefix(prefix)), path
        compared += 1
    return compared


OF_THE_PLAN, OF_A_STAGE = 20, 8
"""Numbers on the page: of the estimate, and the parts of the memory of every pipeline stage."""


def _shown_of(answer: dict[str, Any]) -> int:
    return OF_THE_PLAN + OF_A_STAGE * len(answer["memory_by_stage_gib"])


def test_ask_has_the_numbers_of_recommend(client: Any, cli: Any) -> None:
    page = read(client, "/", ASKED)
    answer = cli("recommend", "llama3-70b", "--gpus", "64xH100", "--goal", "pretrain", "--explain")
    assert _same(page, answer) == _shown_of(answer)
    assert answer["commands"]["meshwright"] in page.text
    for part in ("approach", "name"):
        assert answer["recipe"][part] in page.text
    for reason in answer["reasons"]:
        assert reason["why"] in page.text


def test_the_command_on_the_page_asks_the_same(client: Any, cli: Any) -> None:
    query = {**ASKED, "engine": "megatron", "seq": "16k", "overrides": "layout.tp=8"}
    page = read(client, "/", query)
    options = ("--gpus", "64xH100", "--goal", "pretrain", "--seq", "16k", "--engine", "megatron")
    assert " ".join(("meshwright", "recommend", "llama3-70b", *options, "layout.tp=8")) in page.text
    answer = cli("recommend", "llama3-70b", *options, "layout.tp=8", "--explain")
    assert _same(page, answer) == _shown_of(answer)


def test_a_pasted_config_is_answered_like_its_file(client: Any, cli: Any, tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text(CONFIG)
    reply = client.post("/", data={"config": CONFIG, "gpus": "8xH100", "goal": "sft"})
    page = Page(reply.text)
    assert page.wrong == []
    answer = cli("recommend", str(tmp_path / "config.json"), "--gpus", "8xH100", "--goal", "sft", "--explain")
    assert _same(page, answer) > 20


def test_explore_has_the_numbers_of_plan(client: Any, cli: Any) -> None:
    page = read(client, "/explore", LAYOUTS)
    answer = cli("plan", "llama3-8b", "--gpus", "16xH100", "--goal", "pretrain", "--top", "10")
    numbers = {path: value for path, value in page.numbers.items() if path.startswith("plans.")}
    assert len(numbers) == 30
    assert all(value == at(answer, path) for path, value in numbers.items())
    assert page.numbers["searched"] == answer["searched"]


def test_the_layouts_of_the_chart_are_those_that_estimate_prices(client: Any, cli: Any) -> None:
    found = api.plan("llama3-8b", "16xH100", "pretrain", top=1, everything=True)
    ranking = api.to_json(api.plans_response(found))
    data = presenters.table_of(ranking["fitting"])
    assert len(data["rows"]) == len(ranking["fitting"]) > 100
    for row in (data["rows"][0], data["rows"][len(data["rows"]) // 2], data["rows"][-1]):
        result = {**data["common"], **dict(zip(data["columns"], row, strict=True))}
        gib, step_s = result.pop("total_gib"), result.pop("step_s")
        overrides = [f"{name}={value}" for name, value in result.items()]
        answer = cli("estimate", "llama3-8b", "--gpus", "16xH100", "--goal", "pretrain", *overrides)
        assert answer["estimate"]["step_s"] == pytest.approx(step_s, rel=1e-12)
        assert answer["estimate"]["memory_gib"]["total"] == pytest.approx(gib, rel=1e-12)


def test_two_layouts_side_by_side_have_the_numbers_of_estimate(client: Any, cli: Any) -> None:
    sides = {"a": "layout.pp=2 layout.tp=2", "b": "layout.pp=4 layout.tp=1"}
    page = read(client, "/explore/compare", {**LAYOUTS, **sides})
    for slot, overrides in sides.items():
        answer = cli("estimate", "llama3-8b", "--gpus", "16xH100", "--goal", "pretrain", *overrides.split())
        numbers = {path: value for path, value in page.numbers.items() if path.startswith(f"{slot}.")}
        assert len(numbers) > 15
        assert all(value == at(answer["estimate"], path[2:]) for path, value in numbers.items())
    assert "pipeline over time: 1f1b, 4 ranks" in page.text


def test_a_plan_that_is_opened_is_that_plan(client: Any, cli: Any) -> None:
    answer = cli("plan", "llama3-8b", "--gpus", "16xH100", "--goal", "pretrain", "--top", "10")
    links = [one for one in read(client, "/explore", LAYOUTS).addresses if one.startswith("/?model=")]
    replicated = [n for n, one in enumerate(answer["plans"]) if one["layout"]["dp_replicate"] > 1]
    for place in (0, replicated[0]):
        page = read(client, links[place])
        assert page.numbers["estimate.step_s"] == pytest.approx(answer["plans"][place]["estimate"]["step_s"], rel=1e-12)


@pytest.mark.parametrize(
    ("path", "query", "said"),
    [
        ("/", {**ASKED, "gpus": "64xGB200", "benchmark": "1"}, "--goal pretrain --benchmark --json"),
        ("/explore", LAYOUTS, "--top 10 --json"),
        ("/scale", {"model": "llama3-8b", "gpu": "H100,H200", "goal": "sft"}, "--gpu H200 --json"),
    ],
)
def test_the_command_line_has_all_inputs(client: Any, path: str, query: dict[str, str], said: str) -> None:
    assert said in read(client, path, query).text


def test_where_nothing_fits_there_is_nothing_to_compare(client: Any) -> None:
    page = read(client, "/explore", {"target": "llama3-405b", "gpus": "1xH100", "goal": "pretrain"})
    assert "Side by side" not in page.text
    assert any(one.startswith("/scale?model=llama31_405b&gpu=H100") for one in page.addresses)


def test_a_question_too_long_for_a_link_has_none(client: Any) -> None:
    long = json.dumps({**config_of("qwen3_8b"), "note": "y" * presenters.LINK_BYTES})
    page = Page(client.post("/", data={"config": long, "gpus": "8xH100", "goal": "sft"}).text)
    assert page.wrong == []
    assert "too long for a link" in page.text
    links = [one for one in page.addresses if one.startswith(("/?", "/explore?", "/scale?"))]
    assert all(one.startswith("/?model=") for one in links)  # chips of other models


def test_scale_has_the_numbers_of_size(client: Any, cli: Any) -> None:
    query = {"model": "llama3-8b", "gpu": "H200", "goal": "sft", "tokens": "1B", "price": "2.5"}
    page = read(client, "/scale", query)
    options = ("--goal", "sft", "--gpu", "H200", "--tokens", "1B", "--price", "2.5")
    assert _same(page, cli("size", "llama3-8b", *options), "H200.") > 50


def test_check_shows_findings_on_their_lines(client: Any, cli: Any, tmp_path: Any) -> None:
    text = (
        "#!/bin/bash\ntorchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 \\\n"
        "  --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 \\\n"
        "  --tensor-model-parallel-size 16 --micro-batch-size 1 --global-batch-size 7\n"
    )
    (tmp_path / "run.sh").write_text(text)
    answer = cli("check", str(tmp_path / "run.sh"), "--gpus", "8xH100")
    reply = client.post("/check", data={"text": text, "name": "run.sh", "gpus": "8xH100"})
    page = Page(reply.text)
    assert page.wrong == []
    for finding in answer["findings"]:
        assert finding["message"] in page.text
        assert all(fix in page.text for fix in finding["fix"])
    lines = {finding["line"] for finding in answer["findings"] if finding["line"]}
    assert lines
    for number in lines:
        assert f'class="source {_worst(answer, number)}" id="line-{number}"' in reply.text
    assert "estimate.memory_gib.total" not in page.numbers, "tp=16 cannot be built on 8 GPUs"


def test_check_shows_the_memory_of_the_file(client: Any, cli: Any) -> None:
    answer = cli("check", "llama3_8b_pretrain_config", "--gpus", "8xH100")
    text = client.get("/api/recipes/llama3_8b_pretrain_config?format=toml").json()["text"]
    page = Page(client.post("/check", data={"text": text, "name": "mine.toml", "gpus": "8xH100"}).text)
    assert page.numbers["estimate.memory_gib.total"] == answer["estimate"]["memory_gib"]["total"]


def test_lines_are_counted_as_in_the_file(client: Any) -> None:
    text = "\n\n  torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096"
    text += " --num-attention-heads 32 --seq-length 4096 --tensor-model-parallel-size 16 --micro-batch-size 1\n"
    reply = client.post("/check", data={"text": text, "name": "run.sh", "gpus": "8xH100"})
    assert 'class="source error" id="line-3"' in reply.text
    assert f">\n{text}</textarea>" in reply.text  # a browser leaves the first line break out


def test_a_long_text_is_shown_around_its_findings(client: Any) -> None:
    text = "#\n" * 100_000 + "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --micro-batch-size 0\n"
    reply = client.post("/check", data={"text": text, "name": "run.sh"})
    page = Page(reply.text)
    assert page.wrong == []
    assert 'id="line-100001"' in reply.text
    assert "of 100,001 lines" in page.text
    assert len(reply.content) < len(text) + 50_000


def test_a_form_has_a_limit_of_fields(client: Any) -> None:
    assert client.post("/", data={f"f{n}": "1" for n in range(300)}).status_code == 413


def _worst(answer: dict[str, Any], line: int) -> str:
    return str(next(one["severity"] for one in answer["findings"] if one.get("line") == line))


@pytest.mark.parametrize("text", ["", "key: [", "\x00\x01", "torchrun", "a" * 5000, "{}", "[model]\nname = 3"])
def test_check_takes_anything(client: Any, text: str) -> None:
    for name in ("a.yaml", "a.toml", "a.json", "a.sh", "a.py", "../../etc/passwd", ""):
        reply = client.post("/check", data={"text": text, "name": name})
        assert reply.status_code in (200, 422)
        assert Page(reply.text).wrong == []


def test_recipe_and_catalogues_have_the_numbers_of_their_commands(client: Any, cli: Any) -> None:
    name = "llama3_70b_pretrain_config"
    page = read(client, f"/recipes/{name}")
    assert _same(page, cli("estimate", name)) > 30
    assert read(client, "/recipes").numbers["recipes"] == len(cli("recipes")["recipes"])
    assert read(client, "/gpus").numbers["gpus"] == len(cli("gpus")["gpus"])
    assert read(client, "/rules").numbers["rules"] == len(cli("rules")["rules"])
    models = {one["name"]: one["parameters"]["total"] for one in cli("models")["models"]}
    assert presenters.shortened(models["gemma3_1b"]) == "1B", "999,885,952 is not 1e+03M"
    shown = {path.removesuffix(".total"): n for path, n in read(client, "/models").numbers.items() if path != "models"}
    assert shown == models


@pytest.mark.slow  # every measurement is estimated
def test_accuracy_has_the_numbers_of_its_question(client: Any) -> None:
    page = read(client, "/accuracy")
    report = client.get("/api/accuracy?points=true").json()  # compared with the command line in test_api.py
    for path in ("rows", "predicted", "step_time.median_abs_pct", "memory.median_abs_pct", "fit.ok_called_ok"):
        assert page.numbers[path] == at(report, path)
    by_source = {path: value for path, value in page.numbers.items() if path.startswith("step_time.by_source.")}
    assert len(by_source) == len(report["step_time"]["by_source"])


def test_every_link_of_every_page_leads_somewhere(client: Any) -> None:
    found: set[str] = set()
    for path, query in (("/", ASKED), ("/recipes/llama3_8b_sft_config", {})):
        page = read(client, path, query)
        found |= {one.split("#")[0] for one in page.addresses if one.startswith("/")}
    slow = ("/accuracy", "/explore?", "/scale?", "/?", "/ask/commands")
    for address in sorted(one for one in found if not one.startswith(slow)):
        assert client.get(address).status_code in (200, 422), address


def test_bars_are_cut_off_at_their_end() -> None:
    made = presenters.bar({"a": 1.0, "b": 3.0, "c": 0.0}, ("a", "b", "c"), 2.0, 1.5)
    assert [(one["name"], one["x"], one["width"]) for one in made["pieces"]] == [("a", 0, 500), ("b", 500, 500)]
    assert made["limit"] == 750
    assert presenters.bar({"a": 0.0}, ("a",), 0.0)["pieces"] == []


def test_a_later_word_for_a_field_wins() -> None:
    said = {"model": "m", "overrides": "layout.tp=4 data.dataset='my data'"}
    assert presenters.with_override(said, ["layout.tp=8"]) == urlencode(
        {"model": "m", "overrides": "layout.tp=8 'data.dataset=my data'"}
    )


def test_a_budget_gives_the_figures_of_the_command_line(client: Any) -> None:
    page = read(client, "/", {**ASKED, "tokens": "100B", "price": "2.5EUR"})
    plan = mw.to_dict(mw.recommend(**ASKED, tokens="100B", price="2.5EUR"))
    for name in ("tokens", "days", "gpu_hours", "cost"):
        assert page.numbers[f"budget.{name}"] == pytest.approx(plan["budget"][name])
    assert "2.5 EUR per GPU hour" in page.text
    assert "--tokens 100B --price 2.5EUR" in page.text


@pytest.mark.parametrize(
    ("path", "field", "meant"),
    [
        ("/", "seq_len", "seq: 1"),
        ("/explore", "num_gpus", "gpus: 1"),
        ("/scale", "price_per_hour", "price: 1"),
        ("/models", "name", 'query: "1"'),
        ("/gpus", "nonsense", "query"),
        ("/rules", "sevrity", "severity"),
        ("/recipes", "goals", "goal"),
    ],
)
def test_a_field_that_a_page_does_not_have_is_refused(client: Any, path: str, field: str, meant: str) -> None:
    page = read(client, path, {field: "1"}, 422)
    assert field in page.text
    assert meant.replace('"1"', "1") in page.text.replace('"1"', "1")
