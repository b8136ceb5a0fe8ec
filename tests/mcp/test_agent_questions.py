"""Questions put to an agent, sent as a language model writes the call, through the real server; answers by the API."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tests.mcp.conftest import Call, over_stdio

import meshwright as mw
from meshwright.mcp.compact import DIGITS
from meshwright.mcp.executor import reply

DOCS = Path(__file__).parents[2] / "docs"
PLAN_TOKENS = 1500
CHARACTERS_PER_TOKEN = 4


def _module(name: str) -> Any:
    sys.path.insert(0, str(DOCS))
    try:
        spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(DOCS))


asked = _module("agent_questions")
page = _module("agents_page")
QUESTIONS = {one.text: one for one in asked.QUESTIONS}


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("files")
    (folder / "train.sh").write_text(asked.SCRIPT)
    return over_stdio({text: Call(one.tool, one.arguments) for text, one in QUESTIONS.items()}, folder)


def expected(python: str, folder: Path) -> Any:
    for name, text in (("train.sh", asked.SCRIPT), ("config.json", json.dumps(asked.CONFIG)), ("run.log", asked.LOG)):
        (folder / name).write_text(text)
    names = {"script": "train.sh", "config": "config.json", "log": "run.log"}
    return eval(python, {"mw": mw, **{name: str(folder / file) for name, file in names.items()}})  # a table of ours


def test_there_are_enough_questions() -> None:
    assert len(QUESTIONS) == len(asked.QUESTIONS) >= 25
    assert len({one.tool for one in asked.QUESTIONS}) >= 12
    assert sum(bool(one.fix) for one in asked.QUESTIONS) >= 6


@pytest.mark.parametrize("text", [text for text, one in QUESTIONS.items() if not one.fix])
def test_the_answer_is_that_of_the_python_api(
    text: str, answered: tuple[Any, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    one, (tools, answers) = QUESTIONS[text], answered
    answer = answers[text]
    assert not answer.is_error, answer.content[0].text
    schemas = {tool.name: tool.output_schema for tool in tools}
    jsonschema.validate(answer.structured_content, schemas[one.tool])
    found, wanted = page.figure(answer.structured_content, one.path), expected(one.python, tmp_path)
    if isinstance(found, bool | str):
        assert found == wanted
    else:
        assert math.isclose(found, float(wanted), rel_tol=10.0 ** (1 - DIGITS))


@pytest.mark.parametrize("text", [text for text, one in QUESTIONS.items() if one.fix])
def test_a_wrong_call_is_refused_once_with_the_exact_form(text: str, answered: tuple[Any, dict[str, Any]]) -> None:
    one, answer = QUESTIONS[text], answered[1][text]
    assert answer.is_error
    error = answer.structured_content["error"]
    assert one.fix in error["fix"]
    assert error["field"]
    assert answer.content[0].text.startswith("error: ")
    assert answer.content[0].text.count("fix: ") == 1
    assert len(answer.content[0].text) < 600


CORRECTED = {
    "Fine-tune Llama 3 8B with 4k tokens and tp 2 on 8 H100s.": {
        "model": "llama3-8b",
        "gpus": "8xH100",
        "goal": "sft",
        "seq": 4096,
        "overrides": ["layout.tp=2"],
    }
}


@pytest.mark.parametrize("text", CORRECTED)
def test_what_the_fix_says_works(text: str) -> None:
    assert not reply(QUESTIONS[text].tool, CORRECTED[text]).failed


@pytest.mark.parametrize(
    "arguments",
    [
        {"target": "llama3-70b", "gpus": "64xH100", "goal": "pretrain"},
        {"target": "deepseek-v3", "gpus": "1024xGB200", "goal": "pretrain", "tokens": "15T", "price": 3},
        {"target": "qwen3-30b-a3b", "gpus": "4x8xH100", "goal": "pretrain"},
    ],
)
def test_a_plan_is_small_and_has_bands_assumptions_and_next_calls(arguments: dict[str, Any]) -> None:
    found = reply("plan", arguments)
    size = len(json.dumps(found.answer, ensure_ascii=False)) + len(found.text)
    assert size / CHARACTERS_PER_TOKEN <= PLAN_TOKENS, size / CHARACTERS_PER_TOKEN
    first = found.answer["plans"][0]
    low, high = first["step_band_s"]
    assert low < first["step_s"] < high
    assert found.answer["assumed"]
    (following,) = found.answer["next"]
    again = reply(following["tool"], following["arguments"])
    assert math.isclose(again.answer["estimate"]["step_s"], first["step_s"], rel_tol=1e-3)


def test_every_next_call_is_answered() -> None:
    first = [("recommend", {"model": "llama3-70b", "gpus": "1xH100", "goal": "pretrain"})]
    first += [("recommend", {"model": "llama3-8b", "gpus": "8xH100", "goal": "sft"})]
    first += [("check", {"target": "llama3_70b_pretrain_config", "gpus": "16xA100-80"}), ("rules", {"query": "heads"})]
    first += [("models", {"query": "moe"}), ("gpus", {"query": "a100"}), ("recipes", {"query": "llama3 8b"})]
    first += [("size", {"model": "llama3-8b", "goal": "sft", "gpu": "H100", "max_gpus": 16})]
    for tool, arguments in first:
        calls = reply(tool, arguments).answer["next"]
        assert calls, tool
        for one in calls:
            again = reply(one["tool"], one["arguments"])
            assert not again.failed, (one, again.text)


LOOSE: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("recommend", {"arguments": {"model": "llama3-8b", "gpus": "8xH100", "goal": "sft"}}, ""),
    ("compare", {"targets": ["llama3_8b_pretrain_config", "llama3_8b_sft_config"], "gpus": "8xH100"}, ""),
    ("recommend", {}, 'model: "llama3-8b", gpus: "8xH100", goal: "pretrain"'),
    ("doctor", {"log": ""}, 'log: "the contents of the file"'),
    ("models", {"query": "zzz"}, 'query: "qwen3 moe"'),
    ("gpus", {"query": "zzz"}, 'query: "H100"'),
)


@pytest.mark.parametrize(("tool", "arguments", "fix"), LOOSE)
def test_a_call_is_understood_or_has_its_fix(tool: str, arguments: dict[str, Any], fix: str) -> None:
    found = reply(tool, arguments)
    assert found.failed is bool(fix), found.text
    assert not fix or fix in found.answer["error"]["fix"]


def test_a_path_is_opened_on_standard_input_and_refused_over_http(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("config.json").write_text(json.dumps(asked.CONFIG))
    Path("run.log").write_text(asked.LOG)
    call = {"model": "~/config.json", "gpus": "8xH100", "goal": "sft"}
    assert not reply("recommend", call, files=True).failed
    refused = reply("recommend", call)
    assert refused.failed
    assert "send the file's contents" in refused.text
    for name in ("run", "log", "path"):  # as a path, whatever the argument is called
        found = reply("doctor", {name: "run.log", "gpus": "8xH100"}, files=True)
        assert not found.failed, found.text
    missing = reply("check", {"target": "./trian.sh"}, files=True)
    assert missing.failed
    assert "no such file" in missing.text
