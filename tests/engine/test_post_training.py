"""Post-training: convert, generate, evaluate and model cards."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import pytest

from meshwright import api
from meshwright.engine.post_training.model_card import read_metrics
from meshwright.errors import InputError, MeshwrightError, OutputError


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a full fine-tuning run and an adapter run, each from its own tiny folder."""
    folders = {}
    for goal, nproc in (("sft", 2), ("peft", 1)):
        out = tmp_path_factory.mktemp(goal) / "run"
        steps = ["train.steps=2", "data.validation_part=0.1"]
        api.train(f"qwen3_8b_{goal}_config", tiny=True, nproc=nproc, quiet=True, out=str(out), overrides=steps)
        folders[goal] = out
    return folders


def logits(folder: Path) -> list[float]:
    import torch

    from meshwright.engine.post_training.open_checkpoint import load_model

    with torch.no_grad():
        return load_model(folder)(torch.arange(10, 20)[None]).logits[0, -1].tolist()


def test_converted_checkpoint_equals_the_exported_folder(runs: dict[str, Path], tmp_path: Path) -> None:
    result = api.convert(str(runs["sft"]), str(tmp_path / "model"))
    assert result.dtype == "float32"
    assert logits(tmp_path / "model") == logits(runs["sft"] / "model")
    assert logits(tmp_path / "model") != logits(runs["sft"] / "start")


def test_adapters_are_merged_from_a_run_and_from_their_folder(runs: dict[str, Path], tmp_path: Path) -> None:
    api.convert(str(runs["peft"]), str(tmp_path / "ours"), merge=True)
    api.convert(str(runs["peft"] / "model"), str(tmp_path / "theirs"), merge=True)
    adapted = logits(runs["peft"] / "model")
    assert logits(tmp_path / "ours") == pytest.approx(adapted, rel=1e-4, abs=1e-5)
    assert logits(tmp_path / "theirs") == pytest.approx(adapted, rel=1e-4, abs=1e-5)
    assert adapted != pytest.approx(logits(runs["peft"] / "start"), rel=1e-4, abs=1e-5)


def test_folder_is_converted_to_another_dtype_and_shard_size(runs: dict[str, Path], tmp_path: Path) -> None:
    result = api.convert(str(runs["sft"] / "model"), str(tmp_path / "small"), dtype="bf16", shard_gib=1e-4)
    assert result.dtype == "bfloat16"
    assert result.files > 1
    assert (tmp_path / "small" / "tokenizer.json").is_file()


def test_existing_folder_is_not_overwritten(runs: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(InputError, match="not empty"):
        api.convert(str(runs["sft"]), str(tmp_path))


def test_a_full_disk_of_temporary_files_names_their_variable(
    runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 5, 5))  # type: ignore[attr-defined]
    with pytest.raises(OutputError, match="is the folder of temporary files") as caught:
        api.evaluate(str(runs["peft"]))
    assert caught.value.field == "TMPDIR"
    assert caught.value.fix == ("export TMPDIR=FOLDER",)


@pytest.mark.parametrize("goal", ["sft", "peft"])
def test_generate_from_a_run(runs: dict[str, Path], goal: str) -> None:
    result = api.generate(str(runs[goal]), "hello", max_tokens=5)
    assert 0 < result.new_tokens <= 5
    assert result.chat  # the tokenizer has a template
    again = api.generate(str(runs[goal] / "model"), "hello", max_tokens=5)
    assert again.text == result.text


def test_sampling_follows_the_seed(runs: dict[str, Path]) -> None:
    model = str(runs["sft"] / "model")
    one, same, other = (
        api.generate(model, "hello", max_tokens=16, temperature=1.0, seed=seed, chat=False).text for seed in (1, 1, 2)
    )
    assert one == same
    assert one != other


def test_perplexity_is_the_same_on_any_number_of_ranks(runs: dict[str, Path]) -> None:
    import math

    one, two = (api.evaluate(str(runs["sft"]), samples=16, nproc=n) for n in (1, 2))
    assert one.held_out
    assert one.samples == two.samples == 16
    assert one.tokens == two.tokens > 0
    assert one.loss == pytest.approx(two.loss, rel=1e-5)
    assert one.perplexity == pytest.approx(math.exp(one.loss))


def test_folder_is_evaluated_on_the_given_dataset(runs: dict[str, Path], tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": "one two three four " * 20}) + "\n" for _ in range(40)))
    model = str(runs["sft"] / "model")
    found = api.evaluate(model, dataset=str(text), samples=8, nproc=1, overrides=["data.seq_length=64"])
    assert found.tokens == 8 * 64
    with pytest.raises(InputError, match="no dataset to evaluate on"):
        api.evaluate(model)


def test_model_card_contains_the_metrics(runs: dict[str, Path]) -> None:
    text = (runs["sft"] / "model" / "README.md").read_text()
    measured = read_metrics(runs["sft"])
    assert measured is not None
    assert text.startswith("---\nlibrary_name: transformers")
    assert f"{measured.steps[-1]['loss']:.4f} at step 2" in text
    assert 'goal = "sft"' in text
    assert (runs["peft"] / "model" / "README.md").read_text().startswith("---\nlibrary_name: peft")


def test_corrupt_checkpoint_is_not_converted(runs: dict[str, Path], tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "run"
    shutil.copytree(runs["sft"], copy)
    file = next((copy / "checkpoints").glob("step-*/rank-00000.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(MeshwrightError, match=r"corrupt|valid"):
        api.convert(str(copy / "checkpoints" / file.parent.name), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_path_without_a_checkpoint_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with pytest.raises(InputError, match="neither"):
        api.generate(str(tmp_path / "other"), "hello")
    with pytest.raises(InputError):
        api.generate(str(tmp_path / "missing"), "hello")


def test_untrusted_weights_are_not_opened(runs: dict[str, Path], tmp_path: Path) -> None:
    good = runs["sft"] / "model"
    outside, cut, pickled = (shutil.copytree(good, tmp_path / name) for name in ("outside", "cut", "pickled"))
    (outside / "model.safetensors").rename(tmp_path / "else.safetensors")
    named = {"metadata": {}, "weight_map": {"lm_head.weight": "../else.safetensors"}}
    (outside / "model.safetensors.index.json").write_text(json.dumps(named))
    (cut / "model.safetensors").write_bytes((good / "model.safetensors").read_bytes()[:-100])
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    for folder, reason in ((outside, "outside its folder"), (cut, "truncated"), (pickled, "can run code")):
        with pytest.raises(InputError, match=reason):
            api.convert(str(folder), str(tmp_path / "out"))
        with pytest.raises(InputError, match=reason):
            api.generate(str(folder), "a", max_tokens=1)
    assert not (tmp_path / "out").exists()


def test_merging_without_adapters_is_rejected(runs: dict[str, Path], tmp_path: Path) -> None:
    for source in (runs["sft"], runs["sft"] / "model"):
        with pytest.raises(InputError, match="no adapters to merge"):
            api.convert(str(source), str(tmp_path / "out"), merge=True)


def test_unwritable_folder_is_reported(runs: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MeshwrightError, match="cannot be written"):
        api.convert(str(runs["sft"] / "model"), str(tmp_path / "file" / "out"))


def test_training_data_is_not_evaluated_as_held_out() -> None:
    from meshwright.engine.data.held_out import held_out_set
    from meshwright.engine.post_training.perplexity import _no_held_out_data
    from meshwright.recipes import load
    from meshwright.recipes.types import Data

    recipe = load("qwen3_8b_sft_config")
    for fine in (Data(), Data(dataset="a", validation_part=0.1), Data(dataset="a", validation="b")):
        assert held_out_set(msgspec.structs.replace(recipe, data=fine)) is not None
    for data in (Data(dataset="chats.jsonl"), Data(blend={"mock": 1, "chats.jsonl": 1})):
        assert held_out_set(msgspec.structs.replace(recipe, data=data)) is None
        assert "trained on all of chats.jsonl" in str(_no_held_out_data(data, "run"))


def test_adapters_that_import_code_are_rejected(runs: dict[str, Path], tmp_path: Path) -> None:
    adapters = shutil.copytree(runs["peft"] / "model", tmp_path / "adapters")
    settings = json.loads((adapters / "adapter_config.json").read_text())
    harmful = {**settings, "megatron_config": {"tp": 1}, "megatron_core": "antigravity"}
    (adapters / "adapter_config.json").write_text(json.dumps(harmful))
    with pytest.raises(InputError, match="makes peft import"):
        logits(adapters)
