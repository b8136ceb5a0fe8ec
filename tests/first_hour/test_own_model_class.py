"""A config with a renamed model type, and a model of a user's own class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright import models
from meshwright.cli.run import run as run_command
from meshwright.models.class_names import unknown_class

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 128}  # fmt: skip
FEW = ("train.steps=2", "train.global_batch_size=2", "data.seq_length=32", "data.tokenizer=bytes")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("\n\n".join("a model learns to write a text. " * 9 for _ in range(6)))
    return tmp_path


def main(words: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        run_command(words)
    return int(ended.value.code or 0)


def write_config(name: str, **values: Any) -> None:
    Path(name).mkdir()
    Path(name, "config.json").write_text(json.dumps({**SMALL, **values}))


@pytest.mark.parametrize(
    ("class_name", "model_type"),
    [
        ("LlamaForCausalLM", "llama"),
        ("Qwen3ForCausalLM", "qwen3"),
        ("MixtralForCausalLM", "mixtral"),
        ("GPT2LMHeadModel", "gpt2"),
        ("Qwen3_5ForCausalLM", "qwen3_5_text"),
        ("OlmoeForCausalLM", "olmoe"),
    ],
)
@pytest.mark.parametrize("renamed", ["phdnet", None])
def test_a_renamed_type_is_read_as_the_one_of_its_class(class_name: str, model_type: str, renamed: str | None) -> None:
    write_config("unk", architectures=[class_name], **({"model_type": renamed} if renamed else {}))
    assert models.load_config("unk")["model_type"] == model_type


@pytest.mark.parametrize("known", ["llama", "bert", "t5", "kimi_k2"])
def test_a_known_type_keeps_its_name(known: str) -> None:
    write_config("own", architectures=["MistralForCausalLM"], model_type=known)
    assert models.load_config("own")["model_type"] == known


@pytest.mark.slow
def test_a_renamed_type_trains_as_it_is_inspected(capfd: pytest.CaptureFixture[str]) -> None:
    write_config("unk", architectures=["LlamaForCausalLM"], model_type="phdnet")
    assert main(["inspect", "unk"]) == 0
    assert '"model_type": "llama", which is read, built and written' in capfd.readouterr().err
    train = ["train", "unk", "--dataset", "data", "--nproc", "1", "--out", "ru", "--goal", "pretrain", *FEW]
    assert main(train) == 0
    written = json.loads(Path("ru/model/config.json").read_text())
    assert (written["model_type"], written["architectures"]) == ("llama", ["LlamaForCausalLM"])
    longer = ["train.steps=3" if word.startswith("train.steps=") else word for word in train]
    assert main([*longer, "--accept-changes"]) == 0
    # the folder keeps working under the name that the user gave it
    Path("ru/model/config.json").write_text(json.dumps({**written, "model_type": "phdnet"}))
    assert main(["generate", "ru/model", "a model", "--raw", "--max-tokens", "3"]) == 0


def test_weights_of_an_own_class_are_refused_elsewhere(capfd: pytest.CaptureFixture[str]) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained("own")
    config = json.loads(Path("own/config.json").read_text())
    Path("own/config.json").write_text(json.dumps({**config, "architectures": ["Own"]}))
    from meshwright.engine.data.tokenizers import load_tokenizer

    load_tokenizer("bytes").save_pretrained("own")
    for command in (["generate", "own", "the", "--raw"], ["convert", "own", "hf", "--dtype", "bf16"]):
        assert main(command) == 2
        shown = capfd.readouterr().err
        assert "its weights are of the class Own, which transformers does not have" in shown
        assert '"architectures": ["LlamaForCausalLM"]' in shown
    assert main(["inspect", "own"]) == 0
    assert "its class Own is not one of transformers" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "LLaMAForCausalLM", "LlamaForSequenceClassification"])
def test_classes_of_transformers_are_known(name: str) -> None:
    assert unknown_class({"model_type": "llama", "architectures": [name]}) is None


def test_every_shipped_model_has_a_known_class() -> None:
    configs = {name: models.config_named(name) for name in models.names()}
    assert not {name: own for name, config in configs.items() if (own := unknown_class(config))}


def test_the_exported_model_of_a_pretraining_run_gets_a_plain_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from meshwright.engine.post_training import open_checkpoint
    from meshwright.engine.post_training.open_checkpoint import FoundCheckpoint, is_pretrained_only

    Path("r2/checkpoints/step-00000060").mkdir(parents=True)
    Path("r2/model").mkdir()
    Path("other/model").mkdir(parents=True)
    for goal in ("pretrain", "sft"):
        recipe = SimpleNamespace(goal=goal)
        monkeypatch.setattr(open_checkpoint, "recipe_of", lambda path, recipe=recipe: (recipe, {}))
        for kind, path in (("model", "r2/model"), ("checkpoint", "r2/checkpoints/step-00000060")):
            assert is_pretrained_only(FoundCheckpoint(kind, Path(path))) == (goal == "pretrain")  # type: ignore[arg-type]
        assert not is_pretrained_only(FoundCheckpoint("model", Path("other/model")))


def test_copied_data_keep_the_best_loss() -> None:
    from types import SimpleNamespace

    from meshwright.engine.evaluation import Validation, ValidationState

    def restored(name: str, same_data: bool) -> int | None:
        validation = Validation.__new__(Validation)
        data = SimpleNamespace(validation="", validation_part=0.1)
        validation.recipe = SimpleNamespace(data=data, train=SimpleNamespace(eval_every=1))  # type: ignore[assignment]
        validation.name, validation.source, validation.first = name, SimpleNamespace(size=4), False
        validation.state = ValidationState(dataset=name, samples=4)
        record: Any = SimpleNamespace(step=3, loss=1.0)
        saved = ValidationState(dataset="data (10% held out)", samples=4, best_step=3, best_loss=1.0, records=[record])
        validation.restore(saved, False, same_data)
        return validation.state.best_step

    assert restored("data_copy (10% held out)", same_data=True) == 3
    assert restored("data (10% held out)", same_data=False) == 3
    assert restored("data_copy (10% held out)", same_data=False) is None
    assert restored("data_copy (20% held out)", same_data=True) is None


def test_the_real_held_out_share_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    import numpy as np

    from meshwright.engine.data.open_dataset import _note_real_share
    from meshwright.engine.data.shards import Segment, Stream, split_spans

    ends = np.arange(10, 61, 10)
    stream = Stream([Segment(np.zeros(60, dtype=np.uint16), ends)], "six")
    _note_real_share(stream, "six", split_spans(stream, 0.1)[1], 0.1)
    assert "holds out whole documents, the last 1 of 6: 16.7% of the tokens" in capfd.readouterr().err


def test_a_missing_tokenizer_names_the_bytes() -> None:
    from meshwright.engine.data.tokenizers import load_tokenizer
    from meshwright.errors import InputError

    Path("empty").mkdir()
    with pytest.raises(InputError) as refused:
        load_tokenizer("empty")
    assert any("data.tokenizer=bytes" in fix for fix in refused.value.fix)


def test_the_refused_contract_names_the_option() -> None:
    from meshwright.engine.checkpoint.contract import check_contract
    from meshwright.errors import InputError

    with pytest.raises(InputError) as refused:
        check_contract({"train.steps": 3}, {"train.steps": 4}, False)
    assert any("--accept-changes" in fix for fix in refused.value.fix)


@pytest.mark.parametrize("key", ["train.rampup_batch_size", "batch_ramp", "batch_size_rampup"])
def test_no_batch_ramp_is_said(key: str, capfd: pytest.CaptureFixture[str]) -> None:
    write_config("cfg", architectures=["LlamaForCausalLM"], model_type="llama")
    assert main(["check", "./cfg", "--gpus", "2xH100", f"{key}=4"]) == 2
    assert "the batch does not grow" in capfd.readouterr().err
