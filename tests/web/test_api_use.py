"""The API as a client with curl meets it: documentation, compression, status codes, and no fault on any config."""

from __future__ import annotations

import html
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from meshwright.api.verbs import VERBS
from meshwright.models import config_of
from meshwright.web import serve
from meshwright.web.settings import Settings

ROOT = Path(__file__).parents[2]
PLAN = {"gpus": "8xH100", "goal": "sft"}


def test_the_documentation_works_offline_and_its_examples_are_answered(client: TestClient) -> None:
    for address in ("/docs", "/redoc", "/api", "/api/docs"):
        page = client.get(address)
        assert page.status_code == 200
        assert "text/html" in page.headers["content-type"]
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert not [one for one in loaded if one.startswith(("http:", "https:", "//"))]
    examples = [shlex.split(html.unescape(one)) for one in re.findall(r"<code>(curl [^<]+)</code>", page.text)]
    assert len(examples) > 12
    quick = ("accuracy", "scale", "size", "plan", "compare")  # searches: answered in other tests
    for words in examples:
        address = next(word for word in words if word.startswith("http"))
        if any(f"/api/{name}" in address for name in quick):
            continue
        body = words[words.index("-d") + 1] if "-d" in words else None
        if body is not None:
            assert isinstance(json.loads(body), dict)
            continue
        answer = client.get(address)
        assert answer.status_code == 200, (address, answer.text)
    assert "pretrain, sft, peft" in page.text  # the values of an argument are listed
    assert "built-in" not in page.text


def test_arguments_with_choices_are_enums_of_the_document(client: TestClient) -> None:
    document = client.get("/api/openapi.json").json()
    parameters = {one["name"]: one for one in document["paths"]["/api/recommend"]["get"]["parameters"]}
    assert {"pretrain", "sft", "peft"} <= set(parameters["goal"]["schema"]["enum"])
    assert "megatron" in parameters["engine"]["schema"]["enum"]
    assert document["components"]["schemas"]["Finding"]["properties"]["severity"]["enum"]
    for path in document["paths"].values():
        for operation in path.values():
            if operation["operationId"].split("_")[0] in VERBS:
                assert {"400", "404", "422", "429"} <= operation["responses"].keys()


@pytest.mark.parametrize("address", ["/", "/api/models", "/api/openapi.json", "/recipes"])
def test_large_answers_are_compressed(address: str, client: TestClient) -> None:
    packed = client.get(address, headers={"accept-encoding": "gzip"})
    plain = client.get(address, headers={"accept-encoding": "identity"})
    assert packed.headers["content-encoding"] == "gzip"
    assert "accept-encoding" in packed.headers["vary"].lower()
    assert int(packed.headers["content-length"]) < len(plain.content) / 2
    assert "content-encoding" not in plain.headers
    if address.startswith("/api"):
        assert packed.json() == plain.json()


@pytest.mark.parametrize(
    ("method", "address", "body", "status", "field"),
    [
        ("POST", "/api/recommend", "{", 400, "body"),
        ("POST", "/api/recommend", "NaN", 400, "body"),
        ("POST", "/api/recommend", "", 400, "body"),
        ("POST", "/api/recommend", "[1]", 400, "body"),
        ("POST", "/api/recommend", '{"model": "llama3-8b", "gpus": 1e400, "goal": "sft"}', 400, "body"),
        ("POST", "/api/recommend", '{"model": {"a": 1}, "gpus": "8xH100", "goal": "sft"}', 422, "model"),
        ("POST", "/api/recommend", '{"model": "llama3-8b", "gpus": -8, "goal": "sft"}', 422, "gpus"),
        ("POST", "/api/recommend", f'{{"model": "llama3-8b", "gpus": {10**40}, "goal": "sft"}}', 422, "gpus"),
        ("GET", "/api/recipes/nope", "", 404, "recipe"),
        ("GET", "/api/models/nope", "", 404, "model"),
        ("GET", "/api/nope", "", 404, "address"),
        ("PUT", "/api/recommend", "{}", 405, "address"),
        ("GET", "/api/recommend?model=llama3-8b&gpus=8xH100&goal=stf", "", 422, "goal"),
    ],
)
def test_an_error_has_its_status_and_all_four_parts(
    method: str, address: str, body: str, status: int, field: str, client: TestClient
) -> None:
    answer = client.request(method, address, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["field"] == field
    assert error["message"]
    assert error["fix"]


def test_loose_arguments_are_understood_as_over_mcp(client: TestClient) -> None:
    exact = client.post(
        "/api/recommend", json={"model": "llama3-8b", **PLAN, "overrides": ["layout.tp=2"], "seq": 4096}
    )
    loose = {"Model": "llama3-8b", "gpus": 8, "gpuType": "H100", "goal": "sft", "overrides": {"layout": {"tp": 2}}}
    answer = client.post("/api/recommend", json={**loose, "seq": "4k", "tokens": None})
    assert answer.status_code == 200, answer.text
    assert answer.json()["estimate"] == exact.json()["estimate"]


BAD_VALUES: tuple[Any, ...] = (
    *(-1, 0, 10_000, 10**12, 10**40, 1.5, True, None, "", "x", "12", [], [-1], [None], ["full_attention"], {}),
    *({"type": None}, {"rope_type": []}, "\ud800"),
)


@pytest.mark.parametrize("model", ["llama3_8b", "qwen3_30b_a3b", "gemma3_vl_27b", "deepseek_v3"])
def test_no_config_is_a_fault(model: str, client: TestClient) -> None:
    config = config_of(model)
    keys = [*config, "layer_types", "num_hidden_layers", "quantization_config", "rope_scaling"]
    for place, key in enumerate(dict.fromkeys(keys)):
        for value in BAD_VALUES[place % 3 :: 3]:
            sent = json.dumps({**config, key: value})
            answer = client.post("/api/models", json={"config": sent})
            assert answer.status_code in (200, 422), (key, value, answer.text)
            if answer.status_code == 422:
                assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "changed",
    [
        {"layer_types": -1},
        {"num_hidden_layers": 10_000},
        {"hidden_size": 0},
        {"vocab_size": float("nan")},
        {"rope_theta": float("inf")},
        {"intermediate_size": [14336]},
        {"rope_scaling": {"factor": None, "rope_type": {"a": [None]}}},
        {"rope_scaling": {"factor": {"a": 1}, "rope_type": "yarn"}},
        {"rope_scaling": {"factor": 2.0, "rope_type": "yarn", "beta_fast": None}},
    ],
)
def test_a_plan_for_a_strange_config_is_an_answer(changed: dict[str, Any], client: TestClient) -> None:
    config = json.dumps({**config_of("llama3_8b"), **changed})
    for path in ("recommend", "inspect"):
        more = PLAN if path == "recommend" else {}
        answer = client.post(f"/api/{path}", json={"config": config, **more})
        assert answer.status_code in (200, 422), answer.text


def test_no_answer_echoes_a_folder_of_this_machine(client: TestClient) -> None:
    places = (str(Path.home()), str(ROOT))
    sent: list[tuple[str, dict[str, Any]]] = []
    for path in ("~/config.json", "./x/config.json", "~", "../recipe.toml", "~root/x.yaml"):
        sent += [("recommend", {"model": path, **PLAN}), ("estimate", {"target": path, "gpus": "8xH100"})]
        sent += [("check", {"target": path}), ("recommend", {"model": "llama3-8b", "gpus": path, "goal": "sft"})]
    recipe = 'base = "llama3_8b_sft_config"\nmodel = "~/weights"\n[data]\ndataset = "~/chats.jsonl"\n'
    sent += [("check", {"text": recipe, "name": "mine.toml"}), ("estimate", {"recipe": recipe})]
    for path, arguments in sent:
        answer = client.post(f"/api/{path}", json=arguments)
        assert not any(place in answer.text for place in places), answer.text
    assert not any(place in client.get("/api/docs").text for place in places)


def test_an_open_server_warns_and_names_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_own_address", lambda: "10.1.2.3")
    assert serve.open_to_others(Settings(), 8765) == []
    settings = serve.with_own_address(Settings(host="0.0.0.0", allow_hosts=("gpu-box.lan",)))
    assert "10.1.2.3" in settings.allow_hosts
    first, *others = serve.open_to_others(settings, 9000)
    assert first.startswith("warning: everybody")
    assert others == [f"from other machines: http://{name}:9000/" for name in ("gpu-box.lan", "10.1.2.3")]
