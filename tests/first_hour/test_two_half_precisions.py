"""bf16 and fp16 both set beside a DeepSpeed config with "auto": one finding, whose fix works as typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

AXOLOTL = """base_model: meta-llama/Llama-3.1-8B-Instruct
datasets:
  - path: tatsu-lab/alpaca
    type: alpaca
adapter: lora
lora_r: 16
lora_alpha: 32
lora_target_linear: true
sequence_len: 2048
micro_batch_size: 1
gradient_accumulation_steps: 4
num_epochs: 1
learning_rate: 2e-4
gradient_checkpointing: true
flash_attention: true
deepspeed: ds.json
output_dir: out
"""
FACTORY = """model_name_or_path: meta-llama/Llama-3.1-8B-Instruct
stage: sft
do_train: true
finetuning_type: lora
dataset: identity
template: llama3
output_dir: out
deepspeed: ds.json
"""
TRAINER = (
    "torchrun --nproc_per_node 4 run_clm.py --model_name_or_path meta-llama/Llama-3.1-8B-Instruct --dataset_name "
    "wikitext --do_train --output_dir out --deepspeed ds.json --per_device_train_batch_size 1"
)
SWIFT = (
    "NPROC_PER_NODE=4 swift sft --model meta-llama/Llama-3.1-8B-Instruct --tuner_type lora --dataset "
    "AI-ModelScope/alpaca-gpt4-data-en --deepspeed ds.json --output_dir out"
)


@pytest.fixture
def check(meshwright: Any) -> Any:
    def run(file: str, text: str, bf16: Any = "auto", fp16: Any = "auto") -> list[dict[str, Any]]:
        sizes = ("gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu")
        halves = {"bf16": {"enabled": bf16}, "fp16": {"enabled": fp16}}
        config = {"zero_optimization": {"stage": 2}, **halves, **dict.fromkeys(sizes, "auto")}
        Path("ds.json").write_text(json.dumps(config))
        Path(file).write_text(text)
        found = meshwright("check", file, "--gpus", "4xL40S", "--json").json["findings"]
        words = ("bf16", "fp16")
        return [one for one in found if one["severity"] != "advice" and any(word in one["message"] for word in words)]

    return run


def test_axolotl_turns_auto_off_where_fp16_is_on(check: Any) -> None:
    (found,) = check("axolotl.yml", f"{AXOLOTL}bf16: auto\nfp16: true\n")
    assert (found["rule"], found["severity"], found["fix"]) == ("key.unused", "warning", ["without fp16"])
    assert "bf16: auto has no effect" in found["message"]
    assert "computes in fp16" in found["message"]
    assert not check("axolotl.yml", f"{AXOLOTL}bf16: auto\n")


def test_axolotl_turns_fp16_off_where_bf16_is_on(check: Any) -> None:
    (found,) = check("axolotl.yml", f"{AXOLOTL}bf16: true\nfp16: true\n")
    assert (found["rule"], found["fix"]) == ("key.unused", ["without fp16"])
    assert "fp16: true has no effect" in found["message"]


def test_axolotl_and_a_config_that_has_fp16_off_disagree_until_fp16_is_removed(check: Any) -> None:
    both = check("axolotl.yml", f"{AXOLOTL}bf16: auto\nfp16: true\n", fp16=False)
    assert {one["rule"] for one in both} == {"key.unused", "deepspeed.argument-mismatch"}
    assert not check("axolotl.yml", f"{AXOLOTL}bf16: auto\n", fp16=False)


@pytest.mark.parametrize("stated", ["auto", False])
@pytest.mark.parametrize(
    ("file", "text", "both", "fix"),
    [
        ("sft.yaml", FACTORY, "bf16: true\nfp16: true\n", "fp16: false"),
        ("run.sh", TRAINER, " --bf16 --fp16\n", "--fp16 false"),
        ("run.sh", SWIFT, " --bf16 true --fp16 true\n", "--fp16 false"),
    ],
)
def test_the_trainer_refuses_both_before_it_compares_them_with_the_config(
    check: Any, file: str, text: str, both: str, fix: str, stated: Any
) -> None:
    (found,) = check(file, text + both, fp16=stated)
    assert (found["rule"], found["fix"]) == ("value.invalid", [fix])
    typed = both.replace("fp16: true", fix).replace("--fp16 true", fix).replace("--fp16\n", f"{fix}\n")
    assert not check(file, text + typed, fp16=stated)


def test_a_stated_format_and_an_argument_for_the_other_are_one_error(check: Any) -> None:
    (found,) = check("run.sh", f"{TRAINER} --fp16\n", bf16=True)
    assert (found["rule"], found["fix"]) == ("deepspeed.argument-mismatch", ['"bf16": {"enabled": "auto"}'])
    assert not check("run.sh", f"{TRAINER} --fp16\n")


def test_two_formats_in_the_config_itself_are_an_error(check: Any) -> None:
    rules = {one["rule"] for one in check("run.sh", f"{TRAINER} --bf16\n", bf16=True, fp16=True)}
    assert "deepspeed.two-dtypes" in rules
