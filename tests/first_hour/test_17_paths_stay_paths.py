"""A path stays a path: a folder that is named like a catalogue model, dataset or id is the folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from meshwright import notes

CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
NAME = "qwen3_600m"  # also a catalogue model


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a small model in a folder that is named like a catalogue model."""
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    notes.print_once.cache_clear()
    return tmp_path


@pytest.mark.parametrize("typed", ["./{}", "{}/", "~/{}", "{}/config.json", "{here}/{}", "../{parent}/{}"])
def test_a_path_is_the_folder_without_a_note(typed: str, here: Path, meshwright: Any) -> None:
    answer = meshwright(
        "estimate", typed.format(NAME, here=here, parent=here.name), "--gpus", "1xH100", "--goal=sft", "--json"
    )
    assert Path(answer.json["question"]["model"]).is_relative_to(here / NAME)
    assert answer.json["estimate"]["memory_gib"]["weights"] < 0.01  # the catalogue model has 2.2 GiB
    assert "catalogue model" not in answer.err


def test_a_bare_name_is_the_folder_and_says_so(here: Path, meshwright: Any) -> None:
    answer = meshwright("recommend", NAME, "--gpus", "1xH100", "--goal", "sft", "--json")
    assert answer.json["question"]["model"] == str(here / NAME)
    assert f"note: model {NAME} is the folder {here / NAME}, not the catalogue model" in answer.err
    other = meshwright("recommend", "Qwen3-0.6B", "--gpus", "1xH100", "--goal", "sft", "--json")
    assert other.json["question"]["model"] == NAME


def test_a_folder_without_a_model_leaves_the_name_and_says_so(here: Path, meshwright: Any) -> None:
    (here / NAME / "config.json").unlink()
    answer = meshwright("estimate", NAME, "--gpus", "1xH100", "--json")
    assert answer.json["question"]["model"] == NAME
    assert f"note: model {NAME} is the catalogue model; the folder {NAME} here has no config.json" in answer.err


def test_a_shipped_recipe_keeps_its_model_in_every_directory(here: Path, meshwright: Any) -> None:
    answer = meshwright("estimate", "qwen3_600m_sft_config", "--json")
    assert answer.json["estimate"]["memory_gib"]["weights"] > 1


def test_a_recipe_file_says_which_model_it_names(here: Path, meshwright: Any) -> None:
    text = 'base = "qwen3_600m_sft_config"\nmodel = "{}"\n'
    (here / "name.toml").write_text(text.format(NAME))
    (here / "path.toml").write_text(text.format(f"./{NAME}"))
    named, path = (meshwright("estimate", name, "--json") for name in ("name.toml", "path.toml"))
    assert named.json["estimate"]["memory_gib"]["weights"] > 1
    assert f"write ./{NAME} for the folder" in named.err
    assert path.json["estimate"]["memory_gib"]["weights"] < 0.01
    assert "note:" not in path.err


def test_an_export_of_a_namesake_is_the_folder(here: Path, meshwright: Any) -> None:
    (here / "llama3_8b").mkdir()
    (here / "llama3_8b" / "config.json").write_text(json.dumps({**CONFIG, "model_type": "llama", "head_dim": 16}))
    (here / "mine.toml").write_text('base = "llama3_8b_pretrain_config"\nmodel = "./llama3_8b"\n')
    answer = meshwright("export", "mine.toml", "--to", "torchtitan", "--gpus", "1xH100", "--json")
    assert answer.code == 2
    assert "torchtitan has no model of this shape" in answer.err


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("./qwen3_60m", "did you mean ./qwen3_600m?"),
        ("qwen3_60m/config.json", "did you mean qwen3_600m/config.json?"),
        ("models/qwen3_600m/", "there is no models"),
        ("a/b/qwen3_600m", "there is no a"),
    ],
)
def test_a_wrong_path_is_never_a_catalogue_model(typed: str, said: str, here: Path, meshwright: Any) -> None:
    answer = meshwright("estimate", typed, "--gpus", "1xH100")
    assert answer.code == 2
    assert said in answer.err


def test_train_takes_weights_tokenizer_and_config_from_the_folder(here: Path, meshwright: Any) -> None:
    from transformers import AutoConfig

    from meshwright.engine.tiny_folder import write_tiny_folder

    write_tiny_folder(AutoConfig.from_pretrained(here / NAME), here / NAME, 0)
    rows = [{"prompt": "hi", "response": "hello"}, {"prompt": "bye", "response": "see you"}]
    os.mkdir("squad")  # also the name of a registered dataset
    Path("squad", "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = ["train.steps=1", "train.global_batch_size=2", "data.seq_length=64", "precision.compute=fp32"]
    columns = ["data.columns.prompt=prompt", "data.columns.response=response"]
    options = ("--model", f"{NAME}/", "--dataset", "squad", "--json")
    answer = meshwright("train", "qwen3_600m_sft_config", *options, *settings, *columns)
    assert answer.code == 0, answer.err
    assert answer.json["model"] == str(here / NAME)
    assert answer.json["memory_gib"]["weights"] < 0.01
    assert f"note: dataset squad is {here / 'squad'}, not the registered dataset" in answer.err
