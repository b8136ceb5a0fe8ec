"""One consumer card, a laptop to try on first, and a config of the trainer that was used before."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from meshwright.api.continued_run import with_fitting_layout
from meshwright.engine.epochs import with_validations
from meshwright.recipes import load, overrides

CHAT = [{"role": "user", "content": "How do I cancel?"}, {"role": "assistant", "content": "Press cancel. " * 20}]
AXOLOTL = """\
base_model: Qwen/Qwen3-8B
load_in_4bit: true
adapter: qlora
lora_r: 32
lora_alpha: 16
datasets:
  - path: chats.jsonl
    type: chat_template
sequence_len: 4096
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 3
optimizer: paged_adamw_8bit
learning_rate: 0.0002
"""
LLAMA_FACTORY = """\
model_name_or_path: Qwen/Qwen3-8B
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 16
quantization_bit: 4
dataset: my_chats
template: qwen3
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "chats.jsonl").write_text("\n".join(json.dumps({"id": i, "messages": CHAT}) for i in range(400)))
    (tmp_path / "ax.yml").write_text(AXOLOTL)
    (tmp_path / "lf.yaml").write_text(LLAMA_FACTORY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        ("data.validation_part=5%", "data.validation_part=0.05"),
        ("data.validation_part=5", "data.validation_part=0.05"),
        ("val_set_size=5%", "val_set_size=0.05"),
        ("peft.dropout=10", "peft.dropout=0.1"),
    ],
)
def test_a_share_in_percent_has_the_share_as_its_fix(meshwright: Any, typed: str, fix: str) -> None:
    command = ("estimate", "qwen3_8b_peft_config", "--gpus", "1xH100", "data.dataset=mock")
    refused = meshwright(*command, typed)
    assert refused.code == 2
    assert f"fix:   {fix}\n" in refused.err
    assert meshwright(*command, fix).code == 0


def command_of(refused: Any) -> list[str]:
    assert refused.code == 2
    return shlex.split(refused.err.partition("fix:   meshwright ")[2])


def test_the_command_for_a_llama_factory_config_trains_with_its_defaults(meshwright: Any, here: Path) -> None:
    command = command_of(meshwright("recommend", "lf.yaml", "--gpus", "3090"))
    assert {"peft.alpha=32.0", "optimizer.weight_decay=0.0", "optimizer.beta2=0.999"} <= set(command)
    assert "schedule.warmup_steps=0" in command
    plan = meshwright(*command).out
    assert "peft.alpha 16.0 → 32.0 (contract)" in plan
    assert "optimizer.weight_decay 0.1 → 0.0 (contract)" in plan


def test_the_command_for_an_axolotl_config_keeps_what_was_typed_beside_it(meshwright: Any, here: Path) -> None:
    price = ("--price", "0.25", "--currency", "EUR")
    refused = meshwright("recommend", "ax.yml", "--gpus", "3090", "--epochs", "2", "--seq", "2k", *price)
    command = command_of(refused)
    assert {"data.truncation=drop", "train.epochs=2", "--seq", "--price", "EUR", "lora_r=32"} <= set(command)
    assert not {"num_epochs=3", "sequence_len=4096"} & set(command)
    assert "the paging of optimizer=paged_adamw_8bit (" in refused.err
    answer = meshwright(*command)
    assert answer.code == 0, answer.err
    assert "2 epochs of chats.jsonl" in answer.out
    assert "EUR per GPU-hour" in answer.out
    own = command_of(meshwright("recommend", "ax.yml", "--gpus", "3090", "--dataset", "other.jsonl"))
    assert own.count("--dataset") == 1
    assert "chats.jsonl" not in own


def test_validation_data_that_is_named_is_used_a_few_times(capfd: pytest.CaptureFixture[str]) -> None:
    recipe = overrides.apply(load("qwen3_8b_peft_config"), ["data.validation_part=0.05", "train.steps=42"])
    assert with_validations(recipe, shown=True).train.eval_every == 8
    assert "train.eval_every 0 → 8: 6 validations in 42 steps; train.eval_every=0" in capfd.readouterr().err
    stated = overrides.apply(recipe, ["train.eval_every=20"])
    assert with_validations(stated, shown=False) is stated
    without = overrides.apply(recipe, ["data.validation_part=0"])
    assert with_validations(without, shown=False) is without


def test_a_run_of_two_replicas_continues_on_one_rank() -> None:
    fields = ["layout.strategy=fsdp2", "layout.dp_replicate=2", "layout.tp=1", "train.global_batch_size=8"]
    recipe = overrides.apply(load("qwen3_8b_peft_config"), [*fields, "layout.micro_batch_size=4"])
    assert with_fitting_layout(recipe, 1, ()).layout.dp_replicate == 1
    assert with_fitting_layout(recipe, 4, ()).layout.dp_replicate == 2
    assert with_fitting_layout(recipe, 4, ()).layout.micro_batch_size == 2
    assert with_fitting_layout(recipe, 1, ("layout.dp_replicate",)).layout.dp_replicate == 2
