"""Whatever is typed: one clear error, the right exit code, no traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

GOOD = {"model": "llama3-8b", "gpus": "8xH100", "goal": "sft"}


def refused(meshwright: Any, *words: str) -> dict[str, Any]:
    answer = meshwright(*words, "--json")
    assert answer.code == 2, answer.out
    assert answer.err.startswith("error: ")
    assert answer.err.count("error: ") == 1
    assert "Traceback" not in answer.err
    error: dict[str, Any] = answer.json["error"]
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("field", "value", "hint"),
    [
        ("model", "lama3-8b", "llama3_8b"),
        ("model", "llama3", "llama3_8b"),
        ("model", "", ""),
        ("gpus", "8xH10O", "H100"),
        ("gpus", "0xH100", ""),
        ("gpus", "-8xH100", ""),
        ("gpus", "7.5xH100", ""),
        ("gpus", "0", ""),
        ("gpus", "-3", ""),
        ("gpus", "7.5", ""),
        ("gpus", "many", ""),
        ("gpus", "missing.toml", ""),
        ("goal", "grpo", "sft"),
        ("goal", "pretain", "pretrain"),
    ],
)
def test_wrong_answers_to_the_three_questions(meshwright: Any, field: str, value: str, hint: str) -> None:
    asked = GOOD | {field: value}
    error = refused(meshwright, "recommend", asked["model"], f"--gpus={asked['gpus']}", f"--goal={asked['goal']}")
    assert hint in error["message"] + " ".join(error["fix"])


@pytest.mark.parametrize("seq", ["long", "0", "-1", "8.5", "8192x", "", "1e4"])
def test_sequence_length_must_be_a_number(meshwright: Any, seq: str) -> None:
    error = refused(meshwright, "recommend", "llama3-8b", "--gpus=8xH100", "--goal=sft", f"--seq={seq}")
    assert error["field"] == "seq"


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("layout.tpp=2", "layout.tp"),
        ("model.tensor_parallel_size=2", "layout.tp=2"),
        ("layout.tp=two", "layout.tp"),
        ("layout.tp=0", "layout.tp"),
        ("layout.tp=2.5", "layout.tp"),
        ("layout.recompute=al", "full"),
        ("layout.tp", "="),
        ("+layout.tp=2", ""),
        ("layout.tp=", "layout.tp"),
        ("nonsense=1", ""),
    ],
)
def test_wrong_overrides(meshwright: Any, override: str, hint: str) -> None:
    error = refused(meshwright, "recommend", "llama3-8b", override, "--gpus=8xH100", "--goal=sft")
    assert hint in error["message"] + " ".join(error["fix"]) + error["field"]


def test_unknown_engine_option_and_command(meshwright: Any) -> None:
    assert "megatron" in " ".join(
        refused(meshwright, "recommend", "llama3-8b", "--gpus=8", "--goal=sft", "--engine=megatro")["fix"]
    )
    refused(meshwright, "recommend", "llama3-8b", "--gpu=8")
    refused(meshwright, "reccommend", "llama3-8b")
    refused(meshwright, "recipes", "--goal=train")
    refused(meshwright, "recipe", "llama3_8b_sft_confg")
    refused(meshwright, "check", "no_such_file.toml")
    refused(meshwright, "rules", "memory.peek")
    assert meshwright("rules", "no-such-rule", "--json").json["rules"] == []


@pytest.mark.parametrize("framework", ["megatron-lm", "torchtitan", "accelerate"])
def test_a_framework_does_not_apply_to_a_recipe(meshwright: Any, framework: str) -> None:
    error = refused(meshwright, "check", "llama3_8b_sft_config", f"--framework={framework}")
    assert error["field"] == "framework"


def test_frameworks_have_did_you_mean(meshwright: Any) -> None:
    assert (
        "--framework torchtitan" in refused(meshwright, "check", "llama3_8b_sft_config", "--framework=torchtitn")["fix"]
    )
    assert meshwright("check", "llama3_8b_sft_config", "--framework=meshwright").code == 0


def test_did_you_mean_repeats_nothing(meshwright: Any) -> None:
    asked = ("recommend", "llama3-8b", "--gpus=8xH100", "--goal=sft", "optimizer.lrr=1")
    fix = refused(meshwright, *asked)["fix"]
    assert fix[0] == "optimizer.lr=1"
    assert len(set(fix)) == len(fix)


def test_a_config_with_a_mark_of_its_byte_order_and_a_length_in_millions_are_read(
    meshwright: Any, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(CONFIG).encode())
    asked = (str(tmp_path / "config.json"), "--gpus=8xH100", "--goal=pretrain", "--seq=1M")
    assert '"seq_length": 1048576' in meshwright("recommend", *asked, "--json").out


def test_missing_answers_without_a_terminal(meshwright: Any) -> None:
    assert "--goal" in refused(meshwright, "recommend", "llama3-8b", "--gpus=8xH100")["message"]
    assert "MODEL" in refused(meshwright, "recommend")["message"]


CONFIG = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
CONFIG |= {"num_attention_heads": 4, "vocab_size": 1000}


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        (json.dumps(CONFIG)[:-20].encode(), "JSON"),
        (b"not json at all", "JSON"),
        (b"[1, 2, 3]", "object"),
        (b"\x89PNG\r\n\x1a\n\x00\x00\xff\xfe", ""),
        (b'{"a": "' + b"x" * 6_000_000 + b'"}', ""),
        (json.dumps(CONFIG | {"model_type": "hyperformer"}).encode(), "hyperformer"),
        (json.dumps({k: v for k, v in CONFIG.items() if k != "model_type"}).encode(), "model_type"),
        (json.dumps({k: v for k, v in CONFIG.items() if k != "hidden_size"}).encode(), ""),
        (json.dumps(CONFIG | {"num_hidden_layers": -1}).encode(), "num_hidden_layers"),
        (json.dumps(CONFIG | {"num_attention_heads": "four"}).encode(), "num_attention_heads"),
        (b"", ""),
        (b"null", ""),
        (b"{" * 100_000, ""),
    ],
    ids=[
        "truncated",
        "text",
        "list",
        "binary",
        "huge",
        "unknown",
        "untyped",
        "no width",
        "negative",
        "string",
        "empty",
        "null",
        "deep",
    ],
)
def test_a_config_json_that_cannot_be_read(meshwright: Any, tmp_path: Path, content: bytes, hint: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    error = refused(meshwright, "recommend", str(path), "--gpus=8xH100", "--goal=sft")
    assert hint in error["message"] + error["field"]


def test_a_folder_without_config(meshwright: Any, tmp_path: Path) -> None:
    assert "config.json" in refused(meshwright, "recommend", str(tmp_path), "--gpus=8xH100", "--goal=sft")["message"]


@pytest.mark.parametrize(
    "content",
    [
        "base = 3",
        "layout = 1",
        "[layout]\ntpp = 2",
        "[layout]\ntp = 'a'",
        "name = 'x'\nnot toml",
        "\x00\x01",
        "[nolayout]\na=1",
    ],
)
def test_a_recipe_file_that_cannot_be_read(meshwright: Any, tmp_path: Path, content: str) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(content)
    refused(meshwright, "check", str(path))
