"""A plan for a cluster is tried with --tiny on a laptop, which has neither its data nor its weights."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.recipes.types import Recipe

PLAN = """name = "plan"
model = "qwen3_600m"
goal = "GOAL"
cluster = "4xA100-80"

[data]
DATA
seq_length = 2048

[train]
global_batch_size = 8
steps = 1000
"""
CHECKPOINT = '\n[checkpoint]\npretrained = "/models/qwen3"\n'


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Recipe]:
    found: list[Recipe] = []

    def train(recipe: Recipe, *_: Any) -> Any:
        found.append(recipe)
        return SimpleNamespace(outcome=None)  # as on ranks other than 0

    monkeypatch.setattr("meshwright.engine.train.train", train)
    return found


def plan(data: str, goal: str = "sft", rest: str = CHECKPOINT) -> None:
    Path("plan.toml").write_text(PLAN.replace("GOAL", goal).replace("DATA", data) + rest)


@pytest.mark.parametrize(
    ("goal", "data"),
    [
        ("sft", 'dataset = "/data/chats.jsonl"'),
        ("sft", 'dataset = "data/chats.jsonl"'),
        ("pretrain", 'dataset = "data/corpus"'),
        ("sft", 'blend = {"/data/a.jsonl" = 0.3, "/data/b.jsonl" = 0.7}'),
    ],
)
def test_a_trial_needs_no_path_of_the_cluster(meshwright: Any, started: list[Recipe], goal: str, data: str) -> None:
    others = 'validation = "/data/val.jsonl"\ntokenizer = "/models/tok"\nchat_template = "/models/chat.jinja"'
    weights = f"/models/{len(data)}"  # a note is printed once
    plan(f"{data}\n{others}", goal, CHECKPOINT.replace("/models/qwen3", weights))
    answer = meshwright("train", "plan.toml", "--tiny")
    (recipe,) = started
    assert (recipe.data.dataset, recipe.data.blend, recipe.checkpoint.pretrained) == ("mock", {}, "")
    assert (recipe.data.validation, recipe.data.tokenizer, recipe.data.chat_template) == ("", "", "")
    assert "is not on this machine: --tiny uses random tokens" in answer.err
    assert f"checkpoint.pretrained: {weights} is not on this machine: --tiny uses random weights" in answer.err


def test_what_is_here_is_used(meshwright: Any, started: list[Recipe]) -> None:
    Path("chats.jsonl").write_text(json.dumps({"prompt": "a", "response": "b"}) + "\n")
    plan('dataset = "chats.jsonl"', rest="")
    answer = meshwright("train", "plan.toml", "--tiny")
    assert started[0].data.dataset == "chats.jsonl"
    assert "is not on this machine" not in answer.err


@pytest.mark.parametrize(
    ("data", "words", "fix"),
    [
        ('dataset = "chats.jsnl"', (), "data.dataset=./chats.jsonl"),  # mistyped
        ('dataset = "chats.jsonl"', ("--dataset", "/data/x.jsonl"), "--dataset mock"),
        ('dataset = "chats.jsonl"', ("checkpoint.pretrained=/models/q",), "checkpoint.pretrained=random"),
        ('dataset = "chats.jsonl"', ("data.tokenizer=/models/q",), "data.tokenizer=bytes"),
    ],
)
def test_a_path_that_the_user_means_is_an_error_with_its_fix(
    meshwright: Any, started: list[Recipe], data: str, words: tuple[str, ...], fix: str
) -> None:
    Path("chats.jsonl").write_text(json.dumps({"prompt": "a", "response": "b"}) + "\n")
    plan(data, rest="")
    answer = meshwright("train", "plan.toml", "--tiny", *words)
    assert answer.code == 2
    assert not started
    (line,) = [one for one in answer.err.splitlines() if one.startswith("fix:")]
    assert fix in line
