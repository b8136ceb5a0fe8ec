"""A student's own config.json: mistyped keys, numbers as text, and keys of the file typed in a command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.engine.data.text_errors import bad_lines_error
from meshwright.recipes.types import Data

DENSE = {
    "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24,
    "num_attention_heads": 10, "num_key_value_heads": 2, "head_dim": 96, "vocab_size": 32000, "rope_theta": 500000.0,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(left_out: str, changes: dict[str, Any]) -> None:
    values = {key: value for key, value in DENSE.items() if key != left_out}
    Path("config.json").write_text(json.dumps(values | changes))


@pytest.mark.parametrize(
    ("left_out", "changes", "fix"),
    [
        ("", {"hidden_size": "1024"}, '"hidden_size": 1024'),
        ("", {"num_hidden_layers": 24.0}, '"num_hidden_layers": 24'),
        ("intermediate_size", {"intermedate_size": 2816}, '"intermediate_size": 2816'),
        ("num_key_value_heads", {"num_key_value_head": 2}, '"num_key_value_heads": 2'),
        ("", {"num_key_value_heads": 3}, '"num_key_value_heads": 2'),
    ],
)
def test_a_wrong_value_has_the_line_to_write(left_out: str, changes: dict[str, Any], fix: str, meshwright: Any) -> None:
    write(left_out, changes)
    answer = meshwright("inspect", "./config.json", "--json")
    assert answer.code == 2
    assert fix in answer.json["error"]["fix"]
    found = json.loads(f"{{{fix}}}")
    write("", found)
    assert meshwright("inspect", "./config.json").code == 0


def test_a_default_is_not_shown_as_a_value_of_the_file(meshwright: Any) -> None:
    write("num_key_value_heads", {})
    error = meshwright("inspect", "./config.json").err
    assert "num_key_value_heads=32, the default of a file without num_key_value_heads" in error


@pytest.mark.parametrize("key", ["rope_tetha", "rope_thetta", "rope_base", "theta"])
def test_an_unknown_key_of_the_rotary_positions_is_named(key: str, meshwright: Any) -> None:
    write("rope_theta", {key: 500000.0})
    assert f"qwen3 models have no {key}" in meshwright("inspect", "./config.json").err


@pytest.mark.parametrize("section", ["", "architecture.", "model."])
@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("num_hidden_layers", "architecture.layers"),
        ("num_key_value_heads", "architecture.kv_heads"),
        ("intermediate_size", "architecture.ffn"),
    ],
)
def test_a_key_of_the_file_typed_in_a_command_is_a_field(section: str, key: str, ours: str, meshwright: Any) -> None:
    write("", {})
    words = ("estimate", "./config.json", "--gpus", "2xH100", "--goal", "pretrain")
    answer = meshwright(*words, f"{section}{key}=10", "--json")
    assert answer.json["error"]["fix"] == [f"{ours}=10"]
    assert meshwright(*words, f"{ours}=10").code == 0


def test_tokenizing_conversations_offers_training_on_them_not_to_skip_them_all(meshwright: Any) -> None:
    Path("chats.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n' * 2)
    answer = meshwright("tokenize", "chats.jsonl", "--tokenizer", "bytes", "--out", "tokens", "--json")
    assert answer.code == 2
    fix = answer.json["error"]["fix"]
    assert "train with --goal sft --dataset chats.jsonl, if its rows are conversations" in fix
    assert not any("skip" in one or "correct" in one for one in fix)


def test_a_table_without_the_column_is_not_tokenized_without_its_rows() -> None:
    line = "data/a.parquet: has no 'text'; it has content, id (of type int64)"
    error = bad_lines_error([line], Path("data"), Data(tokenizer="tok"))
    assert "data.columns.text=content" in error.fix
    assert not any("--skip-bad-lines" in one for one in error.fix)
