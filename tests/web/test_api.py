"""The JSON API gives what the command line gives, to those who name things and to those who send texts."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from meshwright import api
from meshwright.api.verbs import verbs_on

SAME = {
    "/api/recommend?model=llama3-8b&gpus=8xH100&goal=sft": "recommend llama3-8b --gpus 8xH100 --goal sft",
    "/api/recommend?model=qwen3-30b-a3b&gpus=4x8xH100&goal=pretrain&seq=32k&overrides=layout.ep%3D8&explain=true": (
        "recommend qwen3-30b-a3b --gpus 4x8xH100 --goal pretrain --seq 32k layout.ep=8 --explain"
    ),
    "/api/recommend?model=llama3-70b&gpus=1xH100&goal=pretrain": "recommend llama3-70b --gpus 1xH100 --goal pretrain",
    "/api/plan?target=llama3-8b&gpus=8xH100&goal=sft&top=2": "plan llama3-8b --gpus 8xH100 --goal sft --top 2",
    "/api/estimate?target=llama3_70b_pretrain_config&engine=megatron": (
        "estimate llama3_70b_pretrain_config --engine megatron"
    ),
    "/api/size?model=llama3-8b&goal=sft&gpu=H100&tokens=1T&price=2.5": (
        "size llama3-8b --goal sft --gpu H100 --tokens 1T --price 2.5"
    ),
    "/api/check?target=llama3_8b_pretrain_config&gpus=16xA100-80": (
        "check llama3_8b_pretrain_config --gpus 16xA100-80"
    ),
    "/api/export?target=llama3_8b_pretrain_config&to=torchtitan&gpus=8xH100": (
        "export llama3_8b_pretrain_config --to torchtitan --gpus 8xH100"
    ),
    "/api/recipes?query=llama&goal=sft": "recipes llama --goal sft",
    "/api/recipes/llama3_8b_sft_config?overrides=layout.tp%3D4": "recipe llama3_8b_sft_config layout.tp=4",
    "/api/models?query=qwen3": "models qwen3",
    "/api/gpus": "gpus",
    "/api/rules?pitfalls=true": "rules --pitfalls",
}
"""An address, and the command that answers the same."""
BAD = {
    "/api/recommend?model=llama4-8b&gpus=8xH100&goal=sft": ("model", "llama"),
    "/api/recommend?model=llama3-8b&gpus=8xH1000&goal=sft": ("gpus", "8xH100"),
    "/api/recommend?model=llama3-8b&gpus=8xH100&goal=stf": ("goal", "sft"),
    "/api/recommend?model=llama3-8b&gpus=8xH100&goal=sft&overrides=layout.tpp%3D2": ("key", "layout.tp"),
    "/api/recommend?model=llama3-8b&gpus=8xH100": ("goal", ""),
    "/api/recommend?model=llama3-8b&gpus=8xH100&goal=sft&colour=red": ("colour", ""),
    "/api/plan?target=llama3-8b&gpus=8xH100&goal=sft&top=1000": ("top", ""),
    "/api/recipes/llama3_8b_sft_confgi": ("recipe", "llama3_8b_sft_config"),
    "/api/models/lama3-8b": ("model", "llama3_8b"),
    "/api/complete?kind=colours": ("kind", ""),
}
"""A question that cannot be understood, the field it is about, and what its fix names."""
NAMED = ("/api/recipes/llama3_8b_sft_confgi", "/api/models/lama3-8b")
"""Addresses of something that does not exist."""
SCRIPT = """#!/bin/bash
torchrun --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 3 --num-layers 32 --hidden-size 4096 \\
  --num-attention-heads 32 --micro-batch-size 1 --global-batch-size 128 --seq-length 4096 --max-position-embeddings 4096
"""


def config() -> str:
    """The config.json of a model that nobody ships."""
    from meshwright.models import config_of

    return json.dumps({**config_of("llama3_8b"), "num_hidden_layers": 20})


@pytest.mark.parametrize("address", SAME)
def test_an_address_answers_as_its_command(
    address: str, client: TestClient, cli: Callable[..., dict[str, Any]]
) -> None:
    answer = client.get(address)
    assert answer.status_code == 200, answer.text
    assert answer.json() == cli(*SAME[address].split())


def test_every_verb_has_an_address_and_a_typed_response(client: TestClient) -> None:
    paths = client.get("/api/openapi.json").json()["paths"]
    for verb in verbs_on("http"):
        routes = paths[f"/api{verb.path.replace(':path', '') or '/' + verb.name}"]
        responses = routes.get("get", routes.get("post"))["responses"]  # a file can only be sent in a body
        content = responses["200"]["content"]["application/json"]
        assert content["schema"]["$ref"].endswith(f"/{verb.response.__name__}")
    for path in ("recommend", "plan", "estimate", "size", "scale", "schedule", "check", "export"):
        assert {"get", "post"} <= paths[f"/api/{path}"].keys()
    for operation in (one for path in paths.values() for one in path.values()):
        assert operation["summary"]


@pytest.mark.parametrize("address", BAD)
def test_an_invalid_request_is_reported_with_a_fix(address: str, client: TestClient) -> None:
    answer = client.get(address)
    error = answer.json()["error"]
    field, fix = BAD[address]
    assert answer.status_code == (404 if address in NAMED else 422)
    assert error.keys() == {"kind", "field", "value", "message", "fix"}
    assert field in error["field"] or field in error["message"]
    assert fix in " ".join(error["fix"])


@pytest.mark.parametrize(
    "body", ['{"text": "\\ud800"}', '{"text": "x", "\\ud800": 1}', '{"text": "x", "gpus": "\\ud800"}']
)
def test_half_a_character_is_refused(body: str, client: TestClient) -> None:
    answer = client.post("/api/check", content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (400, 422)  # as JSON, or as a value
    assert answer.json()["error"]["kind"] == "InputError"


def test_what_does_not_fit_is_an_answer(client: TestClient) -> None:
    answer = client.get("/api/recommend?model=llama3-70b&gpus=1xH100&goal=pretrain")
    assert answer.status_code == 200
    assert not answer.json()["estimate"]["fits"]
    assert answer.json()["smallest_that_fits"]


def test_a_config_that_is_sent_answers_as_the_file_does(
    client: TestClient, cli: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(config())
    for path, words in {
        "recommend": "recommend config.json --gpus 8xH100 --goal sft",
        "estimate": "estimate config.json --gpus 8xH100 --goal sft",
    }.items():
        sent = client.post(f"/api/{path}", json={"config": config(), "gpus": "8xH100", "goal": "sft"})
        assert sent.status_code == 200, sent.text
        result = cli(*words.split())
        for part in ("contract", "layout", "estimate", "findings"):
            assert sent.json()[part] == result[part]
        assert sent.json()["question"]["model"] == "config.json"
    facts = client.post("/api/models", json={"config": config()}).json()["model"]
    assert facts["layers"] == 20
    assert facts["parameters"]["total"] == api.find_model("config.json").params.total


@pytest.mark.parametrize("text", ["", "{", "[1]", '"x"', '{"model_type": "nobody"}', "[" * 100_000])
def test_a_text_that_is_not_a_config_is_rejected(text: str, client: TestClient) -> None:
    answer = client.post("/api/models", json={"config": text})
    assert answer.status_code == 422
    assert answer.json()["error"]["message"]


def test_a_script_that_is_sent_is_checked_as_the_file_is(
    client: TestClient, cli: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.sh").write_text(SCRIPT)
    sent = client.post("/api/check", json={"text": SCRIPT, "name": "train.sh", "gpus": "8xH100"}).json()
    assert sent == cli("check", "train.sh", "--gpus", "8xH100")
    assert not sent["ok"]
    assert {one["line"] for one in sent["findings"]} & {2, 3}


@pytest.mark.parametrize(
    ("text", "framework"),
    [
        ("# team run\nbase_model: meta-llama/Llama-3.1-8B\nadapter: lora\nmicro_batch_size: 1\n", "axolotl"),
        ('# team run\n\n[model]\nname = "llama3"\nflavor = "8B"\n[training]\nseq_len = 8192\n', "torchtitan"),
        ('lr = 1e-5\nfrom trl import SFTConfig, SFTTrainer\nargs = SFTConfig("out", learning_rate=lr)\n'
         'SFTTrainer(model="Qwen/Qwen3-8B", args=args).train()\n', "accelerate"),
        ("NPROC_PER_NODE=8 \\\nswift sft \\\n  --model Qwen/Qwen3-8B --train_type lora\n", "ms-swift"),
    ],
)  # fmt: skip
def test_a_text_without_a_name_is_read_in_the_format_that_it_shows(
    text: str, framework: str, client: TestClient
) -> None:
    answer = client.post("/api/check", json={"text": text, "gpus": "8xH100"})
    assert (answer.status_code, answer.json().get("framework")) == (200, framework)


def test_a_recipe_that_is_sent_is_checked_and_exported(client: TestClient) -> None:
    text = api.recipe_text(api.recipe("llama3_8b_pretrain_config", ["layout.tp=2"]), "toml")
    checked = client.post("/api/check", json={"text": text, "name": "mine.toml", "gpus": "8xH100"})
    assert checked.status_code == 200, checked.text
    assert checked.json()["framework"] == "meshwright"
    written = client.post("/api/export", json={"recipe": text, "to": "torchtitan", "gpus": "8xH100"})
    assert written.status_code == 200, written.text
    assert written.json()["files"]


def test_scale_puts_gpu_types_side_by_side(client: TestClient) -> None:
    answer = client.get("/api/scale?model=llama3-8b&goal=sft&gpu=H100&gpu=A100-80").json()
    alone = client.get("/api/size?model=llama3-8b&goal=sft&gpu=A100-80").json()
    assert [one["gpu"] for one in answer["series"]] == ["H100", "A100-80"]
    assert answer["series"][1]["sizes"] == alone["sizes"]


def test_a_schedule_places_every_pass_of_the_first_micro_batches(client: TestClient) -> None:
    answer = client.get("/api/schedule?target=llama3_70b_pretrain_config&first=8").json()
    assert (answer["ranks"], answer["schedule"]) == (4, "1f1b")
    passes = answer["passes"]
    assert len(passes) == 4 * 8 * 2
    for rank in range(4):
        own = sorted((one["start_s"], one["end_s"]) for one in passes if one["rank"] == rank)
        assert all(end <= start + 1e-9 for (_, end), (start, _) in pairwise(own))


def test_everything_lists_all_layouts_that_fit(client: TestClient) -> None:
    answer = client.get("/api/plan?target=llama3-8b&gpus=8xH100&goal=sft&top=1&everything=true").json()
    fitting = answer["fitting"]
    assert len(fitting) > len(answer["pareto"])
    fastest, best = min(one["step_s"] for one in fitting), answer["plans"][0]["estimate"]["step_s"]
    assert best <= fastest <= 1.05 * best  # loss and gathering are chosen for the plans, after the search


@pytest.mark.slow  # every measurement is estimated
def test_accuracy_has_every_point_by_source(client: TestClient) -> None:
    answer = client.get("/api/accuracy?points=true").json()
    assert len(answer["points"]["step_time"]) == answer["step_time"]["rows"] > 1000
    assert {one["source"] for one in answer["points"]["memory"]} == answer["memory"]["by_source"].keys()


@pytest.mark.parametrize(
    ("kind", "typed", "first"),
    [
        ("models", "llama3-8", "llama3_8b"),
        ("models", "meta llama3 8", "llama3_8b"),
        ("recipes", "qwen3_30b_a3b_sft", "qwen3_30b_a3b_sft_config"),
        ("clusters", "64 x h10", "64xH100"),
        ("clusters", "4x8xH2", "4x8xH200"),
        ("clusters", "", "8xA100-40"),
        ("gpus", "gb2", "GB200"),
        ("goals", "p", "pretrain"),
    ],
)
def test_letters_become_names(kind: str, typed: str, first: str, client: TestClient) -> None:
    names = client.get("/api/complete", params={"kind": kind, "query": typed}).json()["names"]
    assert first in names[:3]


def test_an_answer_is_not_sent_twice(client: TestClient) -> None:
    first = client.get("/api/gpus")
    again = client.get("/api/gpus", headers={"if-none-match": first.headers["etag"]})
    assert (first.status_code, again.status_code, again.content) == (200, 304, b"")


def test_what_was_answered_before_is_the_same_to_the_header(client: TestClient) -> None:
    address = "/api/complete?kind=models&query=never+asked+elsewhere"
    first, again = client.get(address), client.get(address)
    assert (first.content, dict(first.headers)) == (again.content, dict(again.headers))
    assert client.get("/api/complete?kind=models&query=llama").content != first.content
    bad = "/api/complete?kind=models&limit=0"
    assert [client.get(bad).status_code for _ in range(2)] == [422, 422]


def test_an_unknown_address(client: TestClient) -> None:
    page = client.get("/nothing/here")
    assert page.status_code == 404
    assert page.headers["content-type"].startswith("text/html")
    assert client.get("/api/nothing").status_code == 404
    assert client.delete("/api/gpus").status_code == 405
    assert client.get("/api/nothing").json()["error"]["field"] == "address"


@pytest.mark.parametrize("path", ["/openapi.json", "/docs", "/redoc", "/api"])
def test_usual_addresses_lead_to_the_description_of_the_api(client: TestClient, path: str) -> None:
    found = client.get(path)
    assert found.status_code == 200
    assert "/api/check" in (found.json()["paths"] if "json" in path else found.text)


@pytest.mark.parametrize(
    ("address", "sent", "text"),
    [
        ("/api/check", {"json": {"config": "optimizer: x"}}, "config is for other contents"),
        ("/api/check?config=x", {"json": {"text": "a: 1"}}, "in a JSON body, not in the query"),
        ("/api/check", {"content": "config=x"}, "the body is an object of text, config, target"),
    ],
)
def test_a_post_names_the_fields_that_it_takes(
    address: str, sent: dict[str, str], text: str, client: TestClient
) -> None:
    error = client.post(address, **sent).json()["error"]  # type: ignore[arg-type]
    assert text in error["message"]
    assert "target" in error["message"]
    assert "text" in error["message"]
