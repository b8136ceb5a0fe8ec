"""Programs with transformers' Trainer: dtype of the weights, sample length, early stopping, FSDP."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshwright import import_file
from meshwright.cli.run import run as run_command
from meshwright.models import all_specs
from meshwright.models.layer_classes import layer_class

PROGRAM = """
import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, EarlyStoppingCallback, Trainer, TrainingArguments

tok = AutoTokenizer.from_pretrained("Qwen/Qwen3-1.7B")
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-1.7B", DTYPE)
ds = load_dataset("json", data_files="alpaca.json", split="train")
ds = ds.map(lambda e: tok(e["instruction"], truncation=True, max_length=LENGTH))
args = TrainingArguments(output_dir="out", per_device_train_batch_size=1, gradient_accumulation_steps=16,
    num_train_epochs=1, learning_rate=1e-5, PRECISION, gradient_checkpointing=True, eval_strategy="steps",
    eval_steps=50, metric_for_best_model="eval_loss")
Trainer(model=model, args=args, train_dataset=ds, eval_dataset=ds, processing_class=tok, callbacks=[CALLBACK]).train()
"""


def write(folder: Path, name: str = "train.py", **parts: str) -> str:
    given = {
        "DTYPE": "dtype=torch.bfloat16",
        "LENGTH": "2048",
        "PRECISION": "bf16=True",
        "CALLBACK": "EarlyStoppingCallback(early_stopping_patience=3)",
        **parts,
    }
    text = PROGRAM
    for key, value in given.items():
        text = text.replace(key, value)
    (folder / name).write_text(text, encoding="utf-8")
    return name


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        run_command(list(words))
    code = int(ended.value.code or 0)
    out = capsys.readouterr()
    return code, out.out + out.err


@pytest.mark.parametrize("dtype", ["dtype=torch.bfloat16", 'torch_dtype="auto"', 'dtype="bfloat16"'])
def test_weights_of_a_plain_trainer_keep_their_dtype(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, text = run(capsys, "check", write(tmp_path, DTYPE=dtype), "--gpus", "1x4090")
    assert code == 0, text
    assert "W weights 3.2  G gradients 3.2  O optimizer 6.4" in text
    assert "weights, gradients and optimizer states are in bf16" in text
    assert ("assumed to be bf16" in text) == ("auto" in dtype)


def test_weights_in_float32_and_without_mixed_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, text = run(capsys, "check", write(tmp_path, DTYPE="dtype=torch.float32"), "--gpus", "1x4090")
    assert code == 1
    assert "W weights 6.4  G gradients 6.4  O optimizer 12.8" in text
    code, text = run(capsys, "check", write(tmp_path, PRECISION="seed=1"), "--gpus", "1x4090")
    assert code == 0
    assert "W weights 3.2" in text


def test_loss_scaling_of_fp16_weights_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    name = write(tmp_path, DTYPE="torch_dtype=torch.float16", PRECISION="fp16=True")
    code, text = run(capsys, "check", name, "--gpus", "1x4090")
    assert code == 1
    assert "accelerate.fp16-weights" in text
    assert 'torch_dtype="float32"' in text
    code, text = run(capsys, "check", write(tmp_path, DTYPE='dtype="float16"', PRECISION="seed=1"), "--gpus", "1x4090")
    assert code == 0
    assert "W weights 3.2" in text
    assert "states are in fp16" in text


def test_max_length_of_the_tokenizer_and_patience_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    found = import_file(write(tmp_path), gpus="1x4090").recipe
    assert (found.data.seq_length, found.train.early_stop_patience, found.train.eval_every) == (2048, 3, 50)
    assert (found.precision.master, found.precision.moments, found.precision.grads) == ("bf16", "bf16", "bf16")
    assert found.data.train_on == "all"
    found = import_file(write(tmp_path, CALLBACK="EarlyStoppingCallback(2, 0.01)"), gpus="1x4090").recipe
    assert (found.train.early_stop_patience, found.train.early_stop_delta) == (2, 0.01)
    assert (
        import_file(write(tmp_path, CALLBACK="EarlyStoppingCallback()"), gpus="1x4090").recipe.train.early_stop_patience
        == 1
    )
    code, text = run(capsys, "check", write(tmp_path), "--gpus", "1x4090")
    assert code == 0
    assert "TRL" not in text


def test_several_and_unknown_sample_lengths_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    several = write(tmp_path, LENGTH='512)).map(lambda e: tok(e["output"], max_length=1536')
    code, text = run(capsys, "import", several, "--gpus", "1x4090")
    assert code == 0
    assert "seq_length = 1536" in text
    assert "several lengths: 512 (line 9), 1536 (line 9)" in text
    code, text = run(capsys, "import", write(tmp_path, LENGTH="options.length"), "--gpus", "1x4090")
    assert "data.seq_length=4096 is assumed" in text
    assert "max_length=options.length (line 9)" in text


@pytest.mark.parametrize("wrong", ["Qwen3DecodeLayer", "Qwen2DecoderLayer", "Qwen3MoeDecoderLayer", "Qwen3Block"])
def test_a_class_to_wrap_that_the_model_does_not_have_is_an_error(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    lines = ("distributed_type: FSDP", "mixed_precision: bf16", "num_processes: 4", "num_machines: 1", "fsdp_config:")
    policy = "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"
    wrapped = "  fsdp_transformer_layer_cls_to_wrap: "
    (tmp_path / "go.sh").write_text("accelerate launch --config_file fsdp.yaml train.py\n", encoding="utf-8")
    (tmp_path / "fsdp.yaml").write_text("\n".join((*lines, policy, f"{wrapped}{wrong}", "")), encoding="utf-8")
    code, text = run(capsys, "check", "go.sh", "--gpus", "4xA100-40GB")
    assert code == 1
    assert f"qwen3_1p7b has no class {wrong}: its layers are Qwen3DecoderLayer" in text
    assert "fsdp_transformer_layer_cls_to_wrap: Qwen3DecoderLayer" in text
    for right in ("Qwen3DecoderLayer", "Qwen3DecoderLayer,Embedding", "Qwen3MLP"):
        (tmp_path / "fsdp.yaml").write_text("\n".join((*lines, policy, f"{wrapped}{right}", "")), encoding="utf-8")
        code, text = run(capsys, "check", "go.sh", "--gpus", "4xA100-40GB")
        assert "wrapped-class" not in text


def test_the_trainers_own_argument_names_the_class_to_wrap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = 'fsdp="full_shard auto_wrap", fsdp_config={"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}'
    code, text = run(capsys, "check", write(tmp_path, PRECISION=f"bf16=True, {options}"), "--gpus", "4xA100-40GB")
    assert code == 1
    assert "has no class LlamaDecoderLayer: its layers are Qwen3DecoderLayer" in text


def test_layer_classes_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    modules = (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")
    classes = {
        name for path in modules for name in re.findall(r"^class (\w+)\(", path.read_text("utf-8"), re.MULTILINE)
    }
    known = {layer_class(spec) for spec in all_specs() if spec.hf_class in classes}
    assert known - {""} <= classes
    assert len(known) > 10


FACTORY = """model_name_or_path: meta-llama/Llama-3.1-8B-Instruct
finetuning_type: lora
lora_rank: 8
dataset: pairs
template: llama3
cutoff_len: 2048
output_dir: saves/x
per_device_train_batch_size: 1
"""
AXOLOTL = """base_model: meta-llama/Llama-3.1-8B-Instruct
sequence_len: 2048
adapter: lora
lora_r: 8
micro_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-5
datasets:
  - path: pairs.jsonl
    type: chat_template
"""
SWIFT = "swift rlhf --model Qwen/Qwen3-8B --dataset pairs.jsonl --max_length 2048"


@pytest.mark.parametrize(
    ("name", "text", "trains", "setting"),
    [
        ("lf.yaml", f"{FACTORY}stage: dpo\n", "trains with DPO", "stage: dpo"),
        ("lf.yaml", f"{FACTORY}stage: dpo\npref_loss: orpo\n", "trains with ORPO", "stage: dpo, pref_loss: orpo"),
        ("lf.yaml", f"{FACTORY}stage: kto\n", "trains with KTO", "stage: kto"),
        ("lf.yaml", f"{FACTORY}stage: rm\n", "trains a reward model", "stage: rm"),
        ("axo.yml", f"{AXOLOTL}rl: orpo\n", "trains with ORPO", "rl: orpo"),
        ("axo.yml", f"{AXOLOTL}reward_model: true\n", "trains a reward model", "reward_model: true"),
        ("go.sh", f"{SWIFT} --rlhf_type kto\n", "trains with ms-swift's KTO", "rlhf_type: kto"),
        ("go.sh", f"{SWIFT} --rlhf_type rm\n", "trains a reward model with ms-swift", "rlhf_type: rm"),
        ("go.sh", f"{SWIFT}\n", "trains with ms-swift's DPO", "rlhf, by default dpo"),
    ],
)
def test_losses_of_preferences_and_rewards_are_named(
    name: str,
    text: str,
    trains: str,
    setting: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text, encoding="utf-8")
    for verb in ("import", "recommend"):
        code, printed = run(capsys, verb, name, "--gpus", "1x4090")
        assert code == 2
        assert trains in printed
        assert "the fix plans supervised fine-tuning of the same model" in printed
        assert "--goal peft --gpus 1x4090" in printed
    code, printed = run(capsys, "train", name, "--tiny")
    assert code == 2
    assert trains in printed
    code, printed = run(capsys, "check", name, "--gpus", "1x4090")
    assert code == 0
    plain = trains.replace("ms-swift's ", "").removesuffix(" with ms-swift")
    assert f"{setting}: it {plain}, which is not supported (only supervised fine-tuning is)" in printed
    assert "not in the catalogue" not in printed


@pytest.mark.parametrize(
    ("command", "name", "text"),
    [
        ("llamafactory-cli train lf.yaml", "lf.yaml", f"{FACTORY}stage: kto\n"),
        ("axolotl train axo.yml", "axo.yml", f"{AXOLOTL}rl: kto\n"),
    ],
)
def test_import_of_a_script_names_the_loss_of_its_config(
    command: str,
    name: str,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "go.sh").write_text(f"{command}\n", encoding="utf-8")
    code, printed = run(capsys, "import", "go.sh", "--gpus", "1x4090")
    assert code == 2
    assert "trains with KTO" in printed
    assert "--goal peft --gpus 1x4090" in printed


def test_early_stopping_without_validation_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    name = write(tmp_path)
    text = (tmp_path / name).read_text(encoding="utf-8")
    (tmp_path / name).write_text(text.replace('eval_strategy="steps",\n    eval_steps=50, ', ""), encoding="utf-8")
    code, printed = run(capsys, "check", name, "--gpus", "1x4090")
    assert code == 1
    assert "early_stopping_patience=3 compares evaluations, and eval_strategy (not set: no) has none" in printed
