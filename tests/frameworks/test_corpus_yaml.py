"""Config files that the frameworks' own repositories ship: read without false errors, and their defects found."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from benchmarks import corpora
from benchmarks.corpora import commands, config_files, torchtitan_configs
from benchmarks.corpora.__main__ import corpus_named, main

from meshwright import check
from meshwright.errors import InputError

CORPORA = {**config_files.CORPORA, **commands.CORPORA, **torchtitan_configs.CORPORA}
SAMPLE = 8  # files of each corpus in the default run
FALSE, UNREAD = 0.01, 0.05  # shares of files

TRAINING = """
recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {global_batch_size: 32, local_batch_size: 4, max_steps: 100}
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: meta-llama/Llama-3.2-1B
peft:
  _target_: nemo_automodel.components._peft.lora.PeftConfig
  target_modules: "*_proj"
  dim: 8
distributed: {strategy: fsdp2, tp_size: 1}
dataset:
  _target_: nemo_automodel.components.datasets.llm.squad.make_squad_dataset
  dataset_name: rajpurkar/squad
  split: train
optimizer: {_target_: torch.optim.AdamW, lr: 1.0e-4}
fp8: {enabled: false}
"""
DEFECTS = {
    "automodel.target-unknown": (
        ("lora.PeftConfig", "lora.PeftConfg"),
        ("squad.make_squad_dataset", "squadd.make_squad_dataset"),
        ("nemo_automodel.NeMo", "nemo_automodell.NeMo"),
        ("torch.optim.AdamW", "torch.optim.AdamWW"),
    ),
    "value.invalid": (("dim: 8", "dim: eight"),),
    "automodel.recipe-unknown": (("ForNextTokenPrediction", "ForNextTokenPredicton"),),
    "automodel.target-keyword": (
        ("dim: 8", "dimm: 8"),
        ("split: train", "splitt: train"),
        ("enabled: false", "enable: false"),
    ),
}


@pytest.mark.parametrize("name", CORPORA)
def test_files_of_the_sample_have_no_false_errors(name: str) -> None:
    entries = corpora.kept_entries(name)
    step = max(1, len(entries) // SAMPLE)
    outcomes = corpora.run_kept(corpus_named(name), entries[::step])
    assert len([one for one in outcomes if one.unread]) <= 1, [(one.path, one.unread) for one in outcomes]
    assert [(one.path, one.false_errors) for one in outcomes if one.false_errors] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", CORPORA)
def test_files_that_the_owners_ship(name: str) -> None:
    outcomes = corpora.run_kept(corpus_named(name), corpora.kept_entries(name))
    false = [(one.path, one.false_errors) for one in outcomes if one.false_errors]
    unread = [(one.path, one.unread) for one in outcomes if one.unread]
    assert len(false) <= FALSE * len(outcomes), false
    assert len(unread) <= UNREAD * len(outcomes), unread


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CORPORA if corpus_named(name).defects])
def test_injected_defects_are_reported(name: str) -> None:
    found = corpora.inject(corpus_named(name), corpora.kept_entries(name), 35)
    missed = [one for kind in found.values() for one in kind["missed"]]
    assert len(missed) <= 0.1 * sum(kind["injected"] for kind in found.values()), missed


def test_a_training_without_defects_has_no_error(tmp_path: Path) -> None:
    assert _errors(tmp_path, TRAINING) == []


@pytest.mark.parametrize(
    ("rule", "change"), [(rule, change) for rule, changes in DEFECTS.items() for change in changes], ids=str
)
def test_names_are_resolved_against_the_source(tmp_path: Path, rule: str, change: tuple[str, str]) -> None:
    assert rule in _errors(tmp_path, TRAINING.replace(*change))


def test_attention_of_automodel_itself(tmp_path: Path) -> None:
    for name, found in {"ffpa": [], "magi": [], "fpa": ["automodel.target-keyword"]}.items():
        named = TRAINING.replace("peft:", f"  attn_implementation: {name}\npeft:", 1)
        assert _errors(tmp_path, named) == found, name


def test_one_command_checks_all_checkouts_and_names_those_that_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "KempnerForge" / "configs" / "train"
    place.mkdir(parents=True)
    (place / "a.toml").write_text("[model]\ndim = 4096\n[train]\nbatch_size = 4\n[distributed]\ntp = 1\n")
    words = ["--checkouts", str(tmp_path), "--commit", "abc1234", "--corpus", "kempnerforge", "--corpus", "trl"]
    monkeypatch.setattr(sys, "argv", ["corpora", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert "kempnerforge abc1234: 1 files, 1 read, 0 with errors" in capsys.readouterr().out
    assert "trl: git clone https://github.com/huggingface/trl" in str(ended.value.code)
    assert corpora.recorded_commit("trl") in str(ended.value.code)


def test_gpus_come_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "training.yaml"
    path.write_text("# automodel training.yaml --nproc-per-node 8\n" + TRAINING.replace("tp_size: 1", "tp_size: 3"))
    # a command for one node may be one of several, but no number of 8-GPU nodes has groups of 3
    assert check(str(path)).cluster is None
    path.write_text(TRAINING.replace("tp_size: 1", "tp_size: 3") + "ci: {nodes: 1, nproc_per_node: 8}\n")
    assert "automodel.mesh" in {one.rule for one in check(str(path)).findings if one.severity == "error"}


def test_no_error_rests_on_an_assumed_length(tmp_path: Path) -> None:
    text = TRAINING.replace("Llama-3.2-1B", "Llama-3.1-8B").replace("local_batch_size: 4", "local_batch_size: 32")
    path = tmp_path / "training.yaml"
    path.write_text(text[: text.index("peft:")] + text[text.index("distributed:") :])
    found = check(str(path), gpus="1xA100-40").findings
    memory = [one for one in found if one.rule.startswith("memory.")]
    assert memory
    assert all(one.severity == "warning" and "assumed" in one.message for one in memory if one.rule == "memory.peak")


AXOLOTL = """
base_model: NousResearch/Llama-3.2-1B
datasets:
  - path: teknium/GPT4-LLM-Cleaned
    type: alpaca
adapter: lora
lora_r: 16
lora_target_modules: [q_proj, v_proj]
sequence_len: 2048
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 2
num_epochs: 1
optimizer: adamw_8bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
gradient_checkpointing: true
"""
FACTORY = """
model_name_or_path: Qwen/Qwen3-4B
stage: sft
do_train: true
finetuning_type: lora
lora_target: all
dataset: alpaca_en_demo
template: qwen3
cutoff_len: 2048
per_device_train_batch_size: 1
learning_rate: 1.0e-4
warmup_ratio: 0.1
bf16: true
"""
SWIFT = """#!/bin/bash
NPROC_PER_NODE=8 swift sft --model Qwen/Qwen2.5-7B-Instruct --tuner_type lora --dataset a#500 b#500 \\
    --torch_dtype bfloat16 --per_device_train_batch_size 1 --learning_rate 1e-4 --lora_rank 8 --deepspeed zero3 \\
    --target_modules all-linear --max_length 2048 --output_dir output
"""
FRONT_ENDS = {
    "axolotl": ("train.yaml", AXOLOTL),
    "llama-factory": ("train.yaml", FACTORY),
    "ms-swift": ("train.sh", SWIFT),
}
WRONG = [
    ("axolotl", "sequence_len: 2048", "sequence_length: 2048", "key.unknown", "sequence_len: 2048"),
    ("axolotl", "micro_batch_size: 2", "micro_batch_size: two", "value.invalid", ""),
    ("axolotl", "type: alpaca", "typ: alpaca", "key.unknown", ""),
    ("axolotl", "optimizer: adamw_8bit", "optimizer: adamw_8bitt", "value.invalid", "optimizer: adamw_8bit"),
    ("llama-factory", "cutoff_len", "cutof_len", "key.unknown", "cutoff_len: 2048"),
    ("llama-factory", "stage: sft", "stage: sfft", "value.invalid", "stage: sft"),
    ("ms-swift", "--lora_rank 8", "--lora_rnak 8", "key.unknown", "--lora_rank 8"),
    ("ms-swift", "--max_length 2048", "--max_length long", "value.invalid", ""),
]


@pytest.mark.parametrize("name", FRONT_ENDS)
def test_front_ends_are_read_with_their_memory(tmp_path: Path, name: str) -> None:
    path = tmp_path / FRONT_ENDS[name][0]
    path.write_text(FRONT_ENDS[name][1])
    result = check(str(path), gpus="8xH100")
    assert (result.framework, [one.rule for one in result.findings if one.severity == "error"]) == (name, [])
    assert result.recipe.goal == "peft"
    assert result.recipe.data.seq_length == 2048
    assert result.estimate is not None
    assert result.estimate.memory.total < 80


@pytest.mark.parametrize(("name", "right", "wrong", "rule", "fix"), WRONG)
def test_front_ends_keys_and_values(tmp_path: Path, name: str, right: str, wrong: str, rule: str, fix: str) -> None:
    path = tmp_path / FRONT_ENDS[name][0]
    assert right in FRONT_ENDS[name][1]
    path.write_text(FRONT_ENDS[name][1].replace(right, wrong))
    errors = [one for one in check(str(path), gpus="8xH100").findings if one.severity == "error"]
    assert [one.rule for one in errors] == [rule]
    assert not fix or errors[0].fix == (fix,)


REGISTRY = """
from . import model_registry


def my_8b() -> Trainer.Config:
    model_spec = model_registry("8B")
    return Trainer.Config(
        model_spec=model_spec,
        optimizer=default_adamw(lr=3e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=200),
        training=TrainingConfig(
            num_tokens_per_microbatch_per_dp_rank=2 * 8192,
            max_context_length=8192,
            steps=1000,
        ),
        activation_checkpoint=FullAC.Config(),
    )


def my_8b_tp() -> Trainer.Config:
    config = my_8b()
    config.parallelism.tensor_parallel_degree = 3
    config.training.stepss = 10
    return config
"""


def test_config_functions_of_torchtitan_are_read(tmp_path: Path) -> None:
    path = tmp_path / "llama3" / "config_registry.py"
    path.parent.mkdir()
    path.write_text(REGISTRY)
    result = check(str(path), gpus="8xH100")
    assert (result.recipe.name, result.model is not None and result.model.name) == ("my_8b", "llama31_8b")
    assert (result.recipe.data.seq_length, result.recipe.layout.micro_batch_size) == (8192, 2)
    assert (result.recipe.layout.recompute, result.recipe.optimizer.lr) == ("full", 3e-4)
    errors = {one.rule: one for one in result.findings if one.severity == "error"}
    assert "did you mean training.steps?" in errors["key.unknown"].message
    assert errors["heads.attention"].line == 22  # of the second function


def _errors(folder: Path, text: str) -> list[str]:
    path = folder / "training.yaml"
    path.write_text(text)
    try:
        return [one.rule for one in check(str(path), framework="automodel").findings if one.severity == "error"]
    except InputError as error:
        return [error.reason]
