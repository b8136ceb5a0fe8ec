"""A newcomer fine-tunes at home and checks a colleague's LLaMA-Factory, TRL and Unsloth files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.similar import misspelled

FACTORY = """\
model_name_or_path: google/gemma-3-4b-it
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: support_chats
template: gemma3
cutoff_len: 2048
output_dir: saves
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
bf16: true
"""


def test_keys_that_llama_factory_refuses_are_errors_with_the_key_that_is_meant(meshwright: Any, tmp_path: Path) -> None:
    file = tmp_path / "lf.yaml"
    file.write_text(f"{FACTORY}lora_alfa: 16\n", encoding="utf-8")
    answer = meshwright("check", str(file), "--gpus", "2x4090")
    assert answer.code == 1
    assert "LLaMA-Factory has no lora_alfa; did you mean lora_alpha?" in answer.out
    assert "fix: lora_alpha: 16" in answer.out


@pytest.mark.parametrize(("typed", "meant"), [("lora_alfa", "lora_alpha"), ("lora_alpa", "lora_alpha")])
def test_a_key_spelled_by_its_sound_is_a_typing_error(typed: str, meant: str) -> None:
    assert misspelled(typed, ("lora_alpha", "lora_rank", "lora_dropout")) == [meant]
