"""Errors, notes and results as a Python program meets them: parameters, not options of the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import meshwright as package
from meshwright import notes
from meshwright.api.python_words import OPTION, rewritten
from meshwright.errors import MeshwrightError

CALLS: tuple[tuple[Callable[[], Any], str], ...] = (
    (lambda: package.recommend("llama3-8b"), 'gpus="8xH100"'),
    (lambda: package.recommend("llama3-8b", "8xH100"), 'goal="sft"'),
    (lambda: package.recommend("llama3-8b", "8xH100", "sftt"), 'goal="sft"'),
    (lambda: package.recommend("llama3-8b", "8xH100", "sft", currency="EUR"), 'price=2.50, currency="EUR"'),
    (lambda: package.recommend("llama3-8b", "8xH100", "sft", price="x"), 'price="2.10EUR"'),
    (lambda: package.plan("llama3-8b", "8xH100", "sft", top=-1), "top=5"),
    (lambda: package.size("llama3-8b", gpu="H100", goal="pretrain", tokens="many"), 'tokens="15T"'),
    (lambda: package.compare("llama3-8b"), 'gpus="8xH100"'),
    (lambda: package.export("llama3-8b", to="nemo"), 'to="megatron-bridge"'),
    (lambda: package.train("llama3_8b_pretrain_config", dataset="no.txt"), 'dataset="mock"'),
    (lambda: package.tokenize(["no"], tokenizer="gpt2", out="out"), 'tokenizer="bytes"'),
)


@pytest.mark.parametrize(("call", "fix"), CALLS)
def test_an_error_names_parameters(
    call: Callable[[], Any], fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(MeshwrightError) as error:
        call()
    assert fix in error.value.fix
    assert not OPTION.search(" ".join([error.value.field, *(one for one in error.value.fix if "hf " not in one)]))


def test_the_command_line_keeps_its_options(meshwright: Any) -> None:
    assert "--goal sft" in meshwright("recommend", "llama3-8b", "--gpus", "8xH100").err


def test_notes_name_parameters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
              "num_attention_heads": 4, "vocab_size": 300, "max_position_embeddings": 256}  # fmt: skip
    (tmp_path / "own.json").write_text(str(config).replace("'", '"'))
    notes.print_once.cache_clear()
    package.estimate(str(tmp_path / "own.json"))
    printed = capsys.readouterr().err
    assert "gpus=CLUSTER for another" in printed
    assert "--g" not in printed


def test_the_parameters_of_a_model_have_a_total() -> None:
    counts = package.inspect("qwen3-30b-a3b").parameters
    assert counts["total"] == sum(count for part, count in counts.items() if part not in ("total", "active"))
    assert counts["active"] < counts["total"]


def test_the_option_that_turns_a_parameter_off_is_its_false() -> None:
    from meshwright.api.inputs import fields_of
    from meshwright.api.run_requests import Generate
    from meshwright.engine.post_training.generate import SENT_AS_TURN

    assert "; chat=False sends it as plain text" in rewritten(SENT_AS_TURN, fields_of(Generate))


def test_epochs_are_a_parameter_as_they_are_an_option() -> None:
    plan = package.recommend("qwen3-0.6b", "1xH100", "sft", epochs=2)
    assert plan.recipe.train.epochs == 2
    with pytest.raises(MeshwrightError, match="contradicts epochs=2"):
        package.recommend("qwen3-0.6b", "1xH100", "sft", epochs=2, overrides={"train.epochs": 3})
