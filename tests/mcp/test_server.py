"""The server as an agent meets it: over standard input and output, and over HTTP."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import anyio
import httpx
import jsonschema
import pytest
from mcp import Client
from mcp.shared.exceptions import MCPError
from tests.mcp.conftest import COMMAND, ENV, Call, asked, over_stdio

from meshwright.api.inputs import BODY_BYTES, TEXT_BYTES, command_words, read
from meshwright.api.requests import MAX_PLANS
from meshwright.mcp.compact import answer_of, round_numbers
from meshwright.mcp.server import Executor, make_server
from meshwright.mcp.tools import TOOLS
from meshwright.models import config_of

RECIPE = 'base = "llama3_8b_sft_config"\n[layout]\ntp = 3\n'
SCRIPT = (
    "torchrun --nproc-per-node=8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --tensor-model-parallel-size 3\n"
)
CONFIG = json.dumps(config_of("llama3_8b"))

# Every example of every tool, asked again on the command line.
EXAMPLES = {f"{t.name} {i}": Call(t.name, e) for t in TOOLS.values() for i, e in enumerate(t.calls)}
SENT = {
    "a script": (Call("check", {"text": SCRIPT, "name": "run.sh"}), ("check", "run.sh"), {"run.sh": SCRIPT}),
    "a recipe": (
        Call("check", {"text": RECIPE, "name": "mine.toml", "gpus": "8xH100", "overrides": ["layout.pp=2"]}),
        ("check", "mine.toml", "--gpus", "8xH100", "layout.pp=2"),
        {"mine.toml": RECIPE},
    ),
    "a recipe to export": (
        Call("export", {"recipe": RECIPE, "to": "automodel", "gpus": 8}),
        ("export", "recipe.toml", "--to", "automodel", "--gpus", "8"),
        {"recipe.toml": RECIPE},
    ),
}
WRONG: dict[str, tuple[Call, str, str]] = {  # the call, the field of the error, a part of the fix
    "a word too many": (Call("recipes", {"qery": "llama"}), "argument", "query"),
    "nothing said": (Call("explain", {}), "about", "heads.attention"),
    "no model": (Call("recommend", {"gpus": "8xH100", "goal": "sft"}), "model", "llama3-8b"),
    "both": (Call("recommend", {"model": "x", "config": "{}", "gpus": "1", "goal": "sft"}), "model", "only model"),
    "another type": (Call("plan", {"target": "llama3-8b", "gpus": "8xH100", "top": "three"}), "top", "top: 5"),
    "a boolean for a number": (Call("rules", {"limit": True}), "limit", "limit: 15"),
    "too many plans": (Call("plan", {"target": "llama3-8b", "gpus": 8, "top": MAX_PLANS + 1}), "top", "top: 5"),
    "an unknown goal": (Call("recommend", {"model": "llama3-8b", "gpus": 8, "goal": "stf"}), "goal", "sft"),
    "a model's typo": (Call("size", {"model": "lama3-8b", "goal": "sft", "gpu": "H100"}), "model", "llama3_8b"),
    "an override's typo": (
        Call("estimate", {"target": "llama3_8b_sft_config", "overrides": ["layout.tpp=2"]}),
        "layout.tpp",
        "layout.tp",
    ),
    "too long a text": (Call("check", {"text": "#" * (TEXT_BYTES + 1)}), "text", "send less"),
    "a goal left out": (Call("plan", {"target": "llama3-8b", "gpus": 8}), "goal", 'goal: "pretrain"'),
    "an unknown GPU type": (Call("size", {"model": "llama3-8b", "goal": "sft", "gpu": "H10O"}), "gpu", 'gpu: "H'),
    "a name like no other": (Call("recommend", {"model": "模型", "gpus": 8, "goal": "sft"}), "model", '"llama3-8b"'),
    "too long a sequence": (Call("estimate", {"target": "llama3-8b", "gpus": 8, "seq": 10**15}), "seq", "seq: 8192"),
    "a price below nothing": (
        Call("size", {"model": "llama3-8b", "goal": "sft", "gpu": "H100", "price": -1}),
        "price",
        "price: 2.5",
    ),
    "a path for a name": (Call("check", {"text": "{}", "name": "../x.json"}), "name", "train.yaml"),
}
A_PATH = Call("recommend", {"model": "/etc/config.json", "gpus": 8, "goal": "sft"})
MORE = {
    "config": Call("estimate", {"config": CONFIG, "gpus": "8xH100"}),
    "cut": Call("recipes", {"limit": 3}),
    **{name: call for name, (call, _, _) in SENT.items()},
    **{name: call for name, (call, _, _) in WRONG.items()},
}


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Any]]:
    """All calls of this file, answered over standard input and output by one server."""
    return over_stdio({**EXAMPLES, **MORE}, tmp_path_factory.mktemp("empty"))


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def as_answered(call: Call, printed: dict[str, Any]) -> dict[str, Any]:
    """What a tool answers if its command prints this."""
    request, _ = read(TOOLS[call.tool].request, call.arguments, "mcp", files=True)
    return answer_of(call.tool, printed, request)


def test_tools_are_listed_with_schemas_and_hints(answered: tuple[Any, dict[str, Any]]) -> None:
    tools = {tool.name: tool for tool in answered[0]}
    assert {"recommend", "plan", "estimate", "size", "check", "export", "recipes", "rules", "explain"} < set(tools)
    assert "doctor" in tools
    for tool in tools.values():
        assert tool.annotations.read_only_hint
        assert tool.annotations.idempotent_hint
        assert tool.description
        jsonschema.Draft202012Validator.check_schema(tool.input_schema)
        jsonschema.Draft202012Validator.check_schema(tool.output_schema)
        assert tool.input_schema["additionalProperties"] is False
        for field in tool.input_schema["properties"].values():
            assert field["description"]
            assert {"default", "enum", "examples", "maxLength", "maximum", "maxItems"} & set(field)
    assert tools["recommend"].input_schema["properties"]["goal"]["enum"][:3] == ["pretrain", "sft", "peft"]
    assert tools["recommend"].input_schema["required"] == ["gpus", "goal"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_tool_returns_what_the_command_prints(
    answered: tuple[Any, dict[str, Any]], name: str, meshwright: Any, files: Path
) -> None:
    call, answer = EXAMPLES[name], answered[1][name]
    tool = TOOLS[call.tool]
    jsonschema.validate(dict(call.arguments), tool.input_schema("mcp"))
    line = [tool.name, *command_words(tool.request, call.arguments)]
    for name in {"text", "log"} & set(call.arguments):
        (files / line[1]).write_text(call.arguments[name])
    assert not answer.is_error
    assert answer.structured_content == as_answered(call, meshwright(*line, "--json").json)
    assert 0 < len(answer.content[0].text.splitlines()) < ({"export": 200, "import": 60}.get(call.tool, 40))


@pytest.mark.parametrize("name", SENT)
def test_a_text_is_answered_like_a_file(
    answered: tuple[Any, dict[str, Any]], name: str, meshwright: Any, files: Path
) -> None:
    call, words, texts = SENT[name]
    for file, text in texts.items():
        (files / file).write_text(text)
    assert answered[1][name].structured_content == as_answered(call, meshwright(*words, "--json").json)


def test_a_config_is_a_model(answered: tuple[Any, dict[str, Any]], meshwright: Any, files: Path) -> None:
    (files / "config.json").write_text(CONFIG)
    found = answered[1]["config"].structured_content
    beside = meshwright("estimate", "config.json", "--gpus", "8xH100", "--json").json
    assert found["question"]["model"] == "config.json"
    assert (found["estimate"], found["layout"]) == (round_numbers(beside["estimate"]), beside["layout"])


def test_a_long_list_is_cut_and_the_rest_counted(answered: tuple[Any, dict[str, Any]], meshwright: Any) -> None:
    every, found = meshwright("recipes", "--json").json["recipes"], answered[1]["cut"]
    assert found.structured_content["recipes"] == every[:3]
    assert found.structured_content["left_out"] == len(every) - 3
    assert f"{len(every) - 3} more" in found.content[0].text


@pytest.mark.parametrize("name", WRONG)
def test_an_error_has_its_fix(answered: tuple[Any, dict[str, Any]], name: str) -> None:
    (_, field, fix), answer = WRONG[name], answered[1][name]
    assert answer.is_error
    result = answer.structured_content["error"]
    assert field in result["field"]
    assert fix in " ".join(result["fix"])
    assert answer.content[0].text.startswith("error: ")
    assert fix in answer.content[0].text


def test_the_main_facts_are_in_the_text(answered: tuple[Any, dict[str, Any]]) -> None:
    answer = answered[1]["recommend 0"]
    text, found = answer.content[0].text, answer.structured_content
    assert found["recipe"]["name"] in text
    assert f"{found['estimate']['memory_gib']['total']:.1f} of" in text
    assert "GiB" in text
    assert found["estimate"]["mfu_convention"] in text
    assert found["commands"]["meshwright"] in text


def test_the_same_over_http(answered: tuple[Any, dict[str, Any]], address: str) -> None:
    calls = {name: EXAMPLES[name] for name in ("recommend 0", "explain 0")} | {"wrong": A_PATH}
    tools, answers = anyio.run(asked, address, calls)
    assert [tool.name for tool in tools] == list(TOOLS)
    assert answers["recommend 0"].structured_content == answered[1]["recommend 0"].structured_content
    assert answers["explain 0"].content == answered[1]["explain 0"].content
    assert answers["wrong"].is_error
    assert "send the file's contents" in answers["wrong"].content[0].text


LIST = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
ACCEPT = {"Accept": "application/json, text/event-stream"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "box.example:99"}, 200),
        ({"Host": "evil.example"}, 421),
        ({"Host": "127.0.0.1.evil.example:80"}, 421),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://localhost:3000"}, 200),
    ],
)
def test_other_hosts_and_origins_are_refused(address: str, headers: dict[str, str], status: int) -> None:
    assert address.startswith("http://127.0.0.1:")
    assert httpx.post(address, json=LIST, headers=ACCEPT | headers).status_code == status
    if status != 200:
        assert httpx.get(address, headers=ACCEPT | headers).status_code == status
        assert httpx.delete(address, headers=ACCEPT | headers).status_code == status


def test_a_large_body_is_refused(address: str) -> None:
    body = json.dumps(LIST | {"params": {"x": "x" * BODY_BYTES}})
    answer = httpx.post(address, content=body, headers=ACCEPT | {"Content-Type": "application/json"})
    assert answer.status_code == 413


def test_a_search_that_takes_too_long_is_ended_and_the_next_is_answered() -> None:
    async def main() -> tuple[Any, Any]:
        desk = Executor(seconds=0.5, workers=1)
        await desk.warm()
        long = Call("size", {"model": "deepseek-v3", "goal": "pretrain", "gpu": "H100"})
        _, first = await asked(make_server(desk), {"long": long})
        desk.seconds = 60
        _, second = await asked(make_server(desk), {"next": EXAMPLES["explain 0"]})
        return first["long"], second["next"]

    ended, after = anyio.run(main)
    assert ended.is_error
    assert "0.5 s" in ended.content[0].text
    assert ended.structured_content["error"]["fix"]
    assert not after.is_error


def test_a_client_that_goes_away_before_its_answer_makes_no_fault() -> None:
    params = {"protocolVersion": "2025-03-26", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
    begin = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}
    ready = {"jsonrpc": "2.0", "method": "notifications/initialized"}
    with Popen([sys.executable, *COMMAND], env=ENV, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True) as server:
        assert server.stdin
        assert server.stdout
        assert server.stderr
        server.stdin.write(f"{json.dumps(begin)}\n{json.dumps(ready)}\n")
        server.stdin.flush()
        assert "instructions" in server.stdout.readline()
        server.stdout.close()
        server.stdin.write(f"{json.dumps(LIST)}\n" * 3)
        server.stdin.close()
        assert (server.wait(60), server.stderr.read()) == (0, "")


def test_an_unknown_tool_has_did_you_mean() -> None:
    async def main() -> None:
        async with Client(make_server(Executor())) as client:
            await client.call_tool("recomend", {})

    with pytest.raises(BaseException) as result:  # noqa: PT011  # a group of one
        anyio.run(main)
    found: Any = result.value
    while isinstance(found, BaseExceptionGroup):
        (found,) = found.exceptions
    assert isinstance(found, MCPError)
    assert "did you mean recommend" in str(found)
