"""What a lead who evaluates the tool for a team types: counts, names of models and requests of monitors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("model", "is_other"), [("meta-llama/Llama-3.3-70B-Instruct", False), ("llama3.2-1b", True)])
def test_a_model_with_the_layers_of_a_shipped_one_is_no_other_architecture(
    meshwright: Any, model: str, is_other: bool
) -> None:
    plan = meshwright("recommend", model, "--gpus", "64xH100", "--goal", "sft", "--json").json
    assert ("another architecture" in plan["recipe"]["approach"]) is is_other
    assert plan["recipe"]["approach"] not in ("use the recipe directly", "recipe with its layout adjusted")


def test_the_counts_of_recipes_add_up(meshwright: Any) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    stated = re.search(r"(\d+) recipes \((\d+) to train with, (\d+) throughput benchmarks\)", readme)
    assert stated is not None
    answer = meshwright("recipes", "--json")
    listed = answer.json
    benchmarks = meshwright("recipes", "--benchmark", "--json").json["recipes"]
    assert [int(one) for one in stated.groups()][1:] == [len(listed["recipes"]), len(benchmarks)]
    assert int(stated[1]) == int(stated[2]) + int(stated[3])
    assert f"{len(benchmarks)} more are throughput benchmarks" in answer.err


@pytest.mark.parametrize("address", ["/", "/check", "/api/health", "/api/gpus"])
def test_head_is_answered_like_get_without_a_body(address: str) -> None:
    testing = pytest.importorskip("fastapi.testclient")
    from meshwright.web.app import Settings, create_app

    with testing.TestClient(create_app(Settings(workers=0)), base_url="http://127.0.0.1") as client:
        found = client.head(address)
        assert (found.status_code, found.content) == (client.get(address).status_code, b"")


def test_the_config_of_a_model_has_a_field_of_its_own_over_http() -> None:
    testing = pytest.importorskip("fastapi.testclient")
    from meshwright.web.app import Settings, create_app

    sizes = {"hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16, "intermediate_size": 3072}
    config = json.dumps({"model_type": "llama", "vocab_size": 32000, **sizes}, indent=2)
    sent = {"gpus": "1xH100", "goal": "pretrain"}
    with testing.TestClient(create_app(Settings(workers=0)), base_url="http://127.0.0.1") as client:
        for contents in (config, json.loads(config)):
            reply = client.post("/api/recommend", json={"model": contents, **sent})
            error = reply.json()["error"]
            assert (reply.status_code, error["field"]) == (422, "model")
            assert error["fix"] == ['config: "the contents of the file"']
        assert client.post("/api/recommend", json={"config": config, **sent}).status_code == 200
