"""Short answers to words that users typed: a second model, help, trackers, keys of other programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.engine.checkpoint.contract import check_contract
from meshwright.engine.data.tokenizers import eos_fix
from meshwright.errors import InputError

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (
            ("recommend", "llama3-8b", "qwen2.5-7b", "--gpus", "8xH100", "--goal", "sft"),
            "meshwright compare llama3-8b qwen2.5-7b --gpus 8xH100 --goal sft",
        ),
        (("help", "train"), "meshwright train --help"),
        (("help",), "meshwright --help"),
        (("train", "llama3_8b_sft_config", "--tiny", "metrics.tensorboard=true"), "--tensorboard"),
        (("evaluate", ".", "--base", "--checkpoint", "best"), "without --checkpoint"),
    ],
)
def test_the_fix_is_what_was_meant(meshwright: Any, words: tuple[str, ...], fix: str) -> None:
    refused = meshwright(*words)
    assert refused.code == 2
    assert refused.err.partition("fix:")[2].strip().split(" | ")[0] == fix


def test_a_rope_base_under_the_name_of_megatron_has_no_effect_and_says_so(meshwright: Any) -> None:
    Path("config.json").write_text(json.dumps({**CONFIG, "rotary_base": 500000}))
    asked = ("recommend", "config.json", "--gpus", "1xH100", "--goal", "pretrain")
    assert "no rotary_base (did you mean rope_theta?)" in meshwright(*asked).err
    Path("config.json").write_text(json.dumps({**CONFIG, "rope_theta": 500000}))
    assert "did you mean" not in meshwright(*asked).err


def test_an_encoder_with_a_decoder_is_refused_before_it_is_built(
    meshwright: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright.models.inspection._described", lambda config: pytest.fail("it was built"))
    Path("config.json").write_text(json.dumps({"model_type": "whisper", "d_model": 64, "encoder_layers": 2}))
    refused = meshwright("recommend", "config.json", "--gpus", "1xH100", "--goal", "sft")
    assert "model_type=whisper: no decoder" in refused.err


def test_another_model_in_a_run_folder_is_named_before_its_steps() -> None:
    saved = {"train.steps": 10, "model": "llama3_8b", "goal": "sft"}
    with pytest.raises(InputError) as refused:
        check_contract(saved, {"train.steps": 20, "model": "qwen25_7b", "goal": "sft"}, accepted=False)
    assert "in the run folder: model was" in str(refused.value)


def test_a_bare_tokenizer_gets_the_file_that_its_fix_writes(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"</s>": 0}}}))
    fix = eos_fix(str(tmp_path))
    assert fix.endswith(f"> {tmp_path / 'tokenizer_config.json'}")
    assert json.loads(fix.partition("'")[2].rpartition("'")[0])["eos_token"] == "</s>"
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert eos_fix(str(tmp_path)) == "set eos_token in its tokenizer_config.json"


def test_the_folder_of_runs_is_ignored_by_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.engine import train

    monkeypatch.chdir(tmp_path)
    train._ignore_runs()
    assert Path("runs/.gitignore").read_text() == "*\n"
    Path("runs/.gitignore").unlink()
    train._ignore_runs()
    assert not Path("runs/.gitignore").exists()


def test_labels_that_are_numbers_are_not_offered_as_answers(meshwright: Any) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table({"text": ["one", "two", "three"], "label": [0, 1, 0]}), "t.parquet")
    asked = ("check", "llama3_8b_sft_config", "data.dataset=t.parquet")

    def found(*fix: str) -> list[dict[str, Any]]:
        every = meshwright(*asked, *fix, "--json").json["findings"]
        return [one for one in every if one["rule"] in ("data.unused-answers", "data.rows")]

    [unused] = found()
    assert "contains numbers" in unused["message"]
    assert found(*unused["fix"]) == []
