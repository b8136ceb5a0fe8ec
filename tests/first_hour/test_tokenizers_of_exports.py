"""The tokenizer of an exported job: a config.json is none, and no framework is given one as its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

SIZES = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 8}
CONFIG = {"model_type": "llama", "intermediate_size": 8192, "vocab_size": 100352, **SIZES}
SCRIPT = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192 "
    "--num-attention-heads 16 --group-query-attention --num-query-groups 8 --swiglu --vocab-size 100352 "
    "--seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 64 --bf16 --lr 3e-4 "
    "--train-iters 9000 --data-path /far/text_document --disable-bias-linear --tokenizer-type {kind} "
    "--tokenizer-model {model}\n"
)


@pytest.fixture
def exported(here: Path, meshwright: Any) -> Any:
    """Export a model that is named by its config alone, on data of another machine."""
    Path("own.json").write_text(json.dumps(CONFIG))

    def call(framework: str, *words: str) -> Any:
        rows = "rows.jsonl" if framework in ("accelerate", "deepspeed") else "/far/text_document"
        Path("rows.jsonl").write_text('{"text": "one two"}\n' * 40)
        typed = ("export", "own.json", "--goal", "pretrain", "--to", framework, "--gpus", "8xH100")
        return meshwright(*typed, f"data.dataset={rows}", "data.seq_length=2048", *words, "--json").json

    return call


@pytest.mark.parametrize("framework", ["megatron-lm", "megatron-bridge", "automodel", "accelerate", "deepspeed"])
def test_the_config_of_a_model_is_no_tokenizer(exported: Any, framework: str) -> None:
    refused = exported(framework)
    (finding,) = (one for one in refused["findings"] if one["rule"] == "data.no-tokenizer")
    assert (refused["ok"], finding["severity"], finding["fix"]) == (False, "error", ["data.tokenizer=FOLDER"])
    assert "own.json is the config of a model" in finding["message"]
    fixed = exported(framework, "data.tokenizer=/far/tok")
    assert not [one for one in fixed["findings"] if one["rule"] == "data.no-tokenizer"]
    assert "/far/tok" in "".join(fixed["files"].values())


def test_torchtitan_names_a_folder_for_the_tokenizer(exported: Any) -> None:
    answer = exported("torchtitan")
    (finding,) = (one for one in answer["findings"] if one["rule"] == "data.no-tokenizer")
    assert (finding["severity"], finding["fix"]) == ("warning", ["data.tokenizer=FOLDER"])
    assert 'hf_assets_path = "./assets/hf/own"' in answer["files"]["config.toml"]
    assert not [one for one in answer["unmapped"] if one["field"] == "data.tokenizer"]


@pytest.mark.parametrize("framework", ["megatron-lm", "automodel", "torchtitan", "kempnerforge"])
@pytest.mark.parametrize(("typed", "folder"), [("/far/tok/tokenizer.json", "/far/tok"), ("own.json", "FOLDER")])
def test_a_file_is_never_written_as_a_tokenizer(exported: Any, framework: str, typed: str, folder: str) -> None:
    refused = exported(framework, f"data.tokenizer={typed}")
    (finding,) = (one for one in refused["findings"] if one["rule"] == "data.no-tokenizer")
    assert (finding["severity"], finding["fix"]) == ("error", [f"data.tokenizer={folder}"])
    lines = [line for text in refused["files"].values() for line in text.splitlines() if "okenizer" in line]
    assert not [line for line in lines if typed in line and not line.startswith("#")]


def test_random_tokens_need_no_tokenizer(here: Path, meshwright: Any) -> None:
    Path("own.json").write_text(json.dumps(CONFIG))
    for framework in ("megatron-lm", "megatron-bridge", "automodel"):
        typed = ("export", "own.json", "--goal", "pretrain", "--to", framework, "--gpus", "8xH100", "--json")
        answer = meshwright(*typed).json
        assert answer["ok"], framework
        text = "".join(answer["files"].values())
        assert ("tokenizer: null" if framework == "automodel" else "NullTokenizer") in text


@pytest.mark.parametrize(
    ("kind", "model", "fix"),
    [
        ("HuggingFaceTokenizer", "own.json", "--tokenizer-model FOLDER"),
        ("HuggingFaceTokenizer", "/far/tok/tokenizer.json", "--tokenizer-model /far/tok"),
        ("HuggingFaceTokenizer", "/far/tok", ""),
        ("TikTokenizer", "/far/vocab.json", ""),
    ],
)
def test_check_reports_a_json_file_as_the_tokenizer(
    here: Path, meshwright: Any, kind: str, model: str, fix: str
) -> None:
    Path("own.json").write_text(json.dumps(CONFIG))
    Path("train.sh").write_text(SCRIPT.format(kind=kind, model=model))
    found = meshwright("check", "train.sh", "--gpus", "8xH100", "--json").json["findings"]
    fixes = [one["fix"] for one in found if one["rule"] == "data.no-tokenizer"]
    assert fixes == ([[fix]] if fix else [])
