"""A config of Accelerate with DeepSpeed's keys beside a program of the Trainer: both state the same values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

CONFIG = """compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  zero_stage: 3
  offload_optimizer_device: {offload}
{lines}mixed_precision: {precision}
num_machines: 1
num_processes: 4
"""
PROGRAM = """from datasets import load_dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
{imports}

data = load_dataset("json", data_files="chats.jsonl", split="train")
model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.1-8B-Instruct")
args = {arguments}(
    output_dir="out",
    per_device_train_batch_size={micro},
    max_steps=100,
    gradient_checkpointing=True,
{given})
{after}{trainer}(model=model, args=args, train_dataset=data).train()
"""
RULE = "accelerate.argument-mismatch"


@pytest.fixture
def check(meshwright: Any) -> Any:
    def run(
        lines: str = "",
        given: str = "",
        *,
        precision: str = "'no'",
        arguments: str = "SFTConfig",
        launcher: str = "--config_file zero3.yaml",
        after: str = "",
        micro: int = 1,
        offload: str = "cpu",
    ) -> list[dict[str, Any]]:
        stated = "".join(f"  {one}\n" for one in lines.splitlines())
        Path("zero3.yaml").write_text(CONFIG.format(offload=offload, lines=stated, precision=precision))
        words = "".join(f"    {one},\n" for one in given.split())
        trl = arguments == "SFTConfig"
        names = {"trainer": "SFTTrainer" if trl else "Trainer"}
        names["imports"] = "from trl import SFTConfig, SFTTrainer\n" if trl else ""
        program = PROGRAM.format(arguments=arguments, given=words, after=after, micro=micro, **names)
        Path("sft.py").write_text(program)
        Path("run.sh").write_text(f"accelerate launch {launcher} --num_processes 4 sft.py\n")
        found = meshwright("check", "run.sh", "--gpus", "4xA100-80", "--json").json["findings"]
        return [one for one in found if one["severity"] == "error"]

    return run


@pytest.mark.parametrize(
    ("lines", "given", "fix"),
    [
        ("gradient_accumulation_steps: 4", "gradient_accumulation_steps=8", "gradient_accumulation_steps: auto"),
        ("gradient_clipping: 0.5", "max_grad_norm=1.0", "gradient_clipping: auto"),
        ("gradient_accumulation_steps: 4", "", "sft.py: gradient_accumulation_steps=4"),
        ("gradient_clipping: 0.5", "", "sft.py: max_grad_norm=0.5"),
    ],
)
def test_values_that_the_trainer_refuses_are_errors(check: Any, lines: str, given: str, fix: str) -> None:
    (error,) = check(lines, given)
    assert (error["rule"], error["file"]) == (RULE, "zero3.yaml")
    fixed = error["fix"][0]
    assert fixed in (fix, f"deepspeed_config: {{{fix}}}")
    if "auto" in fix:
        assert not check(fix, given)
    else:
        assert not check(lines, fix.removeprefix("sft.py: "))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_format_that_the_trainer_has_off_is_an_error(check: Any, precision: str) -> None:
    (error,) = check(precision=precision, arguments="TrainingArguments")
    name = "fp16" if precision == "fp16" else "bf16"
    assert (error["rule"], error["fix"]) == (RULE, [f"sft.py: {name}=True"])
    assert not check(precision=precision, arguments="TrainingArguments", given=f"{name}=True")


@pytest.mark.parametrize(
    "case",
    [
        {"lines": "gradient_accumulation_steps: 8", "given": "gradient_accumulation_steps=8"},
        {"lines": "gradient_accumulation_steps: auto", "given": "gradient_accumulation_steps=8"},
        {"given": "gradient_accumulation_steps=8 max_grad_norm=0.5"},
        {"lines": "gradient_accumulation_steps: 1\ngradient_clipping: 1.0"},
        {"lines": "gradient_clipping: 0.0", "given": "max_grad_norm=0.3"},  # Accelerate leaves it out
        {"precision": "bf16"},  # TRL's default
        {"precision": "fp16", "given": "bf16=True", "arguments": "TrainingArguments"},
        {"precision": "bf16", "given": "bf16_full_eval=True", "arguments": "TrainingArguments"},
        {"lines": "gradient_accumulation_steps: 4", "given": "**more"},
        {"lines": "gradient_accumulation_steps: 4", "after": "args.gradient_accumulation_steps = 4\n"},
    ],
)
def test_values_that_agree_or_may_agree_are_no_errors(check: Any, case: dict[str, Any]) -> None:
    assert RULE not in {one["rule"] for one in check(**case)}


def test_an_option_of_the_launcher_is_fixed_with_a_number(check: Any) -> None:
    options = "--use_deepspeed --zero_stage 3 --offload_optimizer_device cpu --gradient_accumulation_steps"
    (error,) = check(given="gradient_accumulation_steps=8", launcher=f"{options} 4")
    assert error["fix"] == ["accelerate launch --gradient_accumulation_steps 8"]
    assert not check(given="gradient_accumulation_steps=8", launcher=f"{options} 8")


def test_a_smaller_micro_batch_changes_the_steps_in_both_files(check: Any) -> None:
    big = {"given": "gradient_accumulation_steps=2 max_length=8192", "micro": 8, "offload": "none"}
    (error,) = check("gradient_accumulation_steps: 2", **big)
    assert error["rule"] == "memory.peak"
    in_config = next(one for one in error["fix"] if one.startswith("deepspeed_config: "))
    in_code = next(one for one in error["fix"] if one.startswith("sft.py: ")).removeprefix("sft.py: ")
    steps = in_code.partition("gradient_accumulation_steps=")[2]
    assert f"gradient_accumulation_steps: {steps}" in in_config
    assert int(steps) > 2


def test_a_program_with_its_own_loop_may_differ(check: Any, meshwright: Any) -> None:
    check("gradient_accumulation_steps: 4")
    Path("loop.py").write_text("from accelerate import Accelerator\naccelerator = Accelerator()\n")
    words = "--model_name_or_path meta-llama/Llama-3.1-8B --per_device_train_batch_size 1"
    words += " --gradient_accumulation_steps 8 --num_train_epochs 1"
    Path("run.sh").write_text(f"accelerate launch --config_file zero3.yaml loop.py {words}\n")
    assert RULE not in meshwright("check", "run.sh", "--gpus", "4xA100-80").out
