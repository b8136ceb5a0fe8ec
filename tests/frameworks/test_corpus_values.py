"""Defects of kinds that no signature refuses: negative sizes, contradictions, missing keys, tables for numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright import check

AXOLOTL = """
base_model: Qwen/Qwen3-8B
adapter: lora
lora_r: 16
lora_alpha: 32
lora_target_linear: true
datasets:
  - {path: mhenrichsen/alpaca_2k_test, type: alpaca}
sequence_len: 2048
micro_batch_size: 1
gradient_accumulation_steps: 4
num_epochs: 1
learning_rate: 0.0002
bf16: true
fp16: false
output_dir: out
"""
FACTORY = """
model_name_or_path: Qwen/Qwen3-8B
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
dataset: identity
template: qwen3
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
bf16: true
output_dir: out
"""
AUTOMODEL = """
recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {global_batch_size: 32, local_batch_size: 4, num_epochs: 2}
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: meta-llama/Llama-3.2-1B
  attn_implementation: sdpa
  trust_remote_code: false
distributed: {strategy: fsdp2, tp_size: 1}
dataset:
  _target_: nemo_automodel.components.datasets.llm.squad.make_squad_dataset
  dataset_name: rajpurkar/squad
  split: train
optimizer: {_target_: torch.optim.AdamW, lr: 1.0e-4}
"""
FILES = {"axolotl": AXOLOTL, "llama-factory": FACTORY, "automodel": AUTOMODEL}
DEFECTS = [
    ("axolotl", "micro_batch_size: 1", "micro_batch_size: -1", "micro_batch_size"),
    ("axolotl", "num_epochs: 1", "num_epochs: -1", "num_epochs"),
    ("axolotl", "lora_r: 16", "lora_r: {a: 1}", "lora_r"),
    ("axolotl", "learning_rate: 0.0002\n", "", "learning_rate"),
    ("axolotl", "datasets:\n  - {path: mhenrichsen/alpaca_2k_test, type: alpaca}\n", "", "datasets"),
    ("llama-factory", "cutoff_len: 2048", "cutoff_len: -2048", "cutoff_len"),
    ("llama-factory", "lora_rank: 8", "lora_rank: 0", "lora_rank"),
    ("llama-factory", "bf16: true", "bf16: true\nfp16: true", "fp16"),
    ("llama-factory", "dataset: identity\n", "", "dataset"),
    ("automodel", "num_epochs: 2", "num_epochs: -2", "step_scheduler.num_epochs"),
    ("automodel", "trust_remote_code: false", "trust_remote_code: maybe", "model.trust_remote_code"),
    ("automodel", "trust_remote_code: false", "trust_remot_code: false", "model.trust_remot_code"),
    ("automodel", "implementation: sdpa", "implementation: sdap", "model.attn_implementation"),
    ("automodel", "  pretrained_model_name_or_path: meta-llama/Llama-3.2-1B\n", "", "model._target_"),
    ("automodel", "optimizer: {_target_: torch.optim.AdamW, lr: 1.0e-4}\n", "", "recipe"),
    ("automodel", "  _target_: nemo_automodel.comp", "  _trget_: nemo_automodel.comp", "dataset._trget_"),
]


def errors(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(text)
    return {one.field for one in check("config.yaml").findings if one.severity == "error"}


@pytest.mark.parametrize("name", FILES)
def test_files_without_a_defect(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert errors(FILES[name], tmp_path, monkeypatch) == set()


@pytest.mark.parametrize(("name", "right", "wrong", "field"), DEFECTS)
def test_a_defect_is_an_error_at_its_key(
    name: str, right: str, wrong: str, field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert right in FILES[name]
    assert field in errors(FILES[name].replace(right, wrong), tmp_path, monkeypatch)


def test_epochs_do_not_count_with_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = AXOLOTL.replace("num_epochs: 1", "num_epochs: 0\nmax_steps: 10")
    assert errors(text, tmp_path, monkeypatch) == set()
