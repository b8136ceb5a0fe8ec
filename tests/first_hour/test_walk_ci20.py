"""A tech lead puts `check` into the CI of a team."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

DEEP = "[" * 100_000
TOO_DEEP = "is nested too deeply"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ("check", "deep.json"),
        ("check", "deep.json", "--framework", "deepspeed"),
        ("estimate", "deep.json", "--gpus", "8xH100"),
        ("import", "deep.json"),
        ("doctor", "deep.json"),
        ("calibrate", "deep.json"),
        ("models", "deep.json"),
        ("samples", "llama3_8b_sft_config", "--dataset", "deep.json", "data.tokenizer=bytes"),
    ],
    ids=" ".join,
)
def test_json_that_is_nested_too_deeply_is_bad_input(meshwright: Any, words: tuple[str, ...]) -> None:
    Path("deep.json").write_text(DEEP)
    answer = meshwright(*words, "--json")
    assert answer.code == 2, answer.err
    assert TOO_DEEP in json.loads(answer.out)["error"]["message"]


@pytest.mark.parametrize("text", ['{"a":' * 100_000, DEEP + "]" * 100_000, '[{"messages":' + DEEP])
def test_any_deep_json_file_is_bad_input(meshwright: Any, text: str) -> None:
    Path("deep.json").write_text(text)
    answer = meshwright("check", "deep.json")
    assert (answer.code, TOO_DEEP in answer.err) == (2, True)


def test_one_deep_row_of_a_dataset_is_a_finding_with_its_line(meshwright: Any) -> None:
    Path("chats.jsonl").write_text('{"text": "a"}\n' + DEEP + "\n")
    answer = meshwright("check", "chats.jsonl")
    assert answer.code == 1
    assert f"chats.jsonl:2: {TOO_DEEP}" in answer.out


@pytest.mark.parametrize(("name", "text"), [("metrics.jsonl", '{"step":' + DEEP), ("trainer_state.json", DEEP)])
def test_a_run_folder_with_deep_json_is_bad_input(meshwright: Any, name: str, text: str) -> None:
    Path("run").mkdir()
    Path("run", name).write_text(text + "\n")
    for verb in ("doctor", "calibrate"):
        assert meshwright(verb, "run").code == 2
