"""A model of one's own: config.json works in every command, .txt has documents, wrong paths fail at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshwright import notes

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}
CORPUS = "\n\n".join(f"Document {i} has a few words about the number {i}." for i in range(20))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a config.json and a text."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "my_arch.json").write_text(json.dumps(CONFIG))
    (tmp_path / "corpus.txt").write_text(CORPUS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    notes.print_once.cache_clear()
    return tmp_path


@pytest.mark.parametrize("typed", ["./config.json", "config.json", "my_arch.json", "."])
@pytest.mark.parametrize("command", [["estimate"], ["plan", "--gpus", "8xH100"], ["check"]])
def test_a_config_works_where_a_recipe_does(typed: str, command: list[str], here: Path, meshwright: Any) -> None:
    answer = meshwright(command[0], typed, *command[1:], "--json")
    assert answer.code == 0, answer.err
    assert "goal pretrain (the default without weights; --goal sft or peft)" in answer.err
    assert ("--gpus CLUSTER for another" in answer.err) == ("--gpus" not in command)
    found = answer.json["plans"][0] if command[0] == "plan" else answer.json
    assert found["estimate"]["memory_gib"]["weights"] < 0.1


@pytest.mark.parametrize("goal", ["pretrain", "sft", "peft"])
def test_the_goal_can_be_given(goal: str, here: Path, meshwright: Any) -> None:
    answer = meshwright("check", "config.json", "--goal", goal, "--gpus", "8xH100", "--json")
    assert answer.json["recipe"].endswith(f"_{goal}")
    assert "the default" not in answer.err


def test_export_and_launch_take_it(here: Path, meshwright: Any) -> None:
    exported = meshwright("export", "config.json", "--to", "megatron-lm", "--gpus", "8xH100", "--json")
    assert any("--num-layers 2" in text for text in exported.json["files"].values())
    launched = meshwright("launch", "config.json", "--scheduler", "torchrun", "--gpus", "8xH100")
    assert f"--model {here / 'config.json'}" in launched.out
    named = meshwright("launch", "llama3-8b", "--goal", "sft", "--scheduler", "torchrun", "--gpus", "8xH100")
    assert "train llama3_8b_sft_config" in named.out


def test_a_catalogue_model_needs_a_goal_and_a_recipe_keeps_its_own(here: Path, meshwright: Any) -> None:
    answer = meshwright("train", "llama3-8b")
    assert answer.code == 2
    assert "llama3_8b is a model: add a goal, or name a recipe" in answer.err
    other = meshwright("check", "llama3_8b_sft_config", "--goal", "peft")
    assert (other.code, "is a recipe for sft" in other.err) == (2, True)


def test_training_it_says_where_weights_and_documents_come_from(here: Path, meshwright: Any) -> None:
    settings = ["train.steps=2", "train.global_batch_size=2", "data.seq_length=32", "precision.compute=fp32"]
    options = ("--dataset", "corpus.txt", "--out", "run", "--json")
    answer = meshwright("train", "config.json", *options, *settings, "data.tokenizer=bytes")
    assert answer.code == 0, answer.err
    assert answer.json["model"] == str(here / "config.json")
    assert answer.json["goal"] == "pretrain"
    assert "has no weights: training starts from random weights" in answer.err
    assert "corpus.txt: 20 documents (each ends at a blank line; data.documents)" in answer.err
    notes.print_once.cache_clear()
    tuned = meshwright("check", "run/model", "--gpus", "1xH100", "--json")  # weights: fine-tuning is the default
    assert tuned.json["recipe"] == "model_sft"
    notes.print_once.cache_clear()
    tiny = meshwright("train", "config.json", "--tiny", "--dataset", "corpus.txt", "train.steps=1", "--json")
    assert tiny.code == 0, tiny.err
    assert "--tiny reads text with the byte-level tokenizer" in tiny.err


def test_tiny_keeps_the_vocabulary_of_its_data(here: Path) -> None:
    from meshwright.engine.data.byte_level import write_byte_tokenizer
    from meshwright.engine.data.tokenize import tokenize
    from meshwright.engine.model_families import family_of
    from meshwright.engine.tiny import tiny_recipe, with_data_vocab
    from meshwright.recipes.index import load

    pairs = [a + b for a in "abcdefghij" for b in "abcdefghij"]
    write_byte_tokenizer(here / "tokenizer", pairs=pairs)
    (here / "pairs.txt").write_text(" ".join(pairs) * 20)
    tokenize([str(here / "pairs.txt")], str(here / "tokenizer"), str(here / "tokens"))
    recipe = load("llama3_8b_pretrain_config")
    published = family_of(recipe).config_for(recipe)
    for dataset, tokenizer, vocab in (("tokens", "", 345), ("pairs.txt", "tokenizer", 348), ("corpus.txt", "", 256)):
        named = {"data.dataset": dataset, "data.tokenizer": tokenizer}
        small = tiny_recipe(recipe, published, 1, named)
        assert with_data_vocab(*small, published.vocab_size)[1].vocab_size >= min(vocab, 340)
    assert with_data_vocab(*tiny_recipe(recipe, published, 1, {}), published.vocab_size)[1].vocab_size == 256


WRONG = [
    (["train", "./confg.json"], "did you mean"),
    (["train", "llama3_8b_sft_config", "--model", "./confg"], "did you mean ./config.json?"),
    (["train", "llama3_8b_pretrain_config", "--dataset", "corpus.text"], "did you mean ./corpus.txt?"),
    (["train", "llama3_8b_sft_config", "--dataset", "data/chats.jsonl"], "there is no data"),
    (["train", "llama3_8b_pretrain_config", "--dataset", "mock", "data.tokenizer=./tok"], "data.tokenizer=./tok"),
    (
        ["train", "llama3_8b_sft_config", "--dataset", "mock", "checkpoint.pretrained=./weights"],
        "checkpoint.pretrained",
    ),
    (["train", "llama3_8b_pretrain_config", "--dataset", "mock", "--out", "corpus.txt/run"], "corpus.txt is a file"),
    (["bench", "confg.json"], "did you mean"),
    (["dryrun", "confg.json", "--gpus", "8xH100"], "did you mean"),
    (["generate", "./runs/mine", "hello"], "there is no runs"),
    (["evaluate", "corpus"], "did you mean ./corpus.txt?"),
    (["convert", "corpuss.txt", "out"], "did you mean ./corpus.txt?"),
    (["tokenize", "corpuss.txt", "--tokenizer", "bytes", "--out", "tokens"], "did you mean ./corpus.txt?"),
]


def test_wrong_paths_fail_before_torch_is_imported(here: Path) -> None:
    code = (
        "import contextlib, io, json, sys\n"
        "from meshwright.cli.run import run\n"
        "for words, said in json.loads(sys.argv[1]):\n"
        "    err = io.StringIO()\n"
        "    with contextlib.redirect_stderr(err):\n"
        "        try: run(words)\n"
        "        except SystemExit as ended: code = ended.code\n"
        "    assert code == 2 and said in err.getvalue(), (words, code, err.getvalue())\n"
        "    assert 'torch' not in sys.modules, words\n"
    )
    done = subprocess.run([sys.executable, "-c", code, json.dumps(WRONG)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
