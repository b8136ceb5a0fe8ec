"""Fine-tuning programs that quantize, or add adapters, only with an option of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
import argparse
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--lora_r", type=int, default=16)
parser.add_argument("--lr", type=float, default=2e-4)
parser.add_argument("--use_peft", action="store_true")
parser.add_argument("--load_in_4bit", action="store_true")
args = parser.parse_args()

bnb = BitsAndBytesConfig(load_in_4bit=True) if args.load_in_4bit else None
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-14B", quantization_config=bnb, torch_dtype=torch.bfloat16)
ADAPT
config = TrainingArguments(
    output_dir="out", per_device_train_batch_size=4, gradient_accumulation_steps=4, bf16=True,
    gradient_checkpointing=True, learning_rate=args.lr,
)
tokens = tokenizer(text, max_length=8192)
Trainer(model=model, args=config, train_dataset=None).train()
"""
ADAPTS = {
    "block": "if args.use_peft:\n    model = get_peft_model(model, LoraConfig(r=args.lora_r, lora_alpha=32))",
    "value": "peft = LoraConfig(r=args.lora_r) if args.use_peft else None\nmodel = get_peft_model(model, peft)",
    "use": "peft = LoraConfig(r=args.lora_r)\nif args.use_peft:\n    model = get_peft_model(model, peft)",
    "function": "def adapt(model):\n    return get_peft_model(model, LoraConfig(r=args.lora_r))\n\n"
    "if args.use_peft and args.lora_r > 0:\n    model = adapt(model)",
}


def _check(meshwright: Any, options: str, adapt: str = ADAPTS["block"]) -> dict[str, Any]:
    Path("sft.py").write_text(PROGRAM.replace("ADAPT", adapt))
    Path("run.sh").write_text(f"torchrun --nproc_per_node 2 sft.py {options}\n")
    found: dict[str, Any] = json.loads(meshwright("check", "run.sh", "--gpus", "2xRTX5090", "--json").out)
    return found


def _weights(found: dict[str, Any]) -> float:
    return float(found["estimate"]["memory_gib"]["weights"])


def test_weights_are_in_4_bits_only_with_the_option_that_quantizes_them(meshwright: Any) -> None:
    plain, quantized = (_weights(_check(meshwright, f"--use_peft {one}")) for one in ("", "--load_in_4bit"))
    assert plain == pytest.approx(14.77e9 * 2 / 2**30, rel=0.05)
    assert quantized < 0.4 * plain


@pytest.mark.parametrize("adapt", ADAPTS.values(), ids=ADAPTS)
def test_a_rank_without_the_option_that_adds_adapters_trains_all_weights(adapt: str, meshwright: Any) -> None:
    found = _check(meshwright, "--lora_r 64", adapt)
    rules = {one["rule"]: one for one in found["findings"]}
    assert rules["memory.state"]["severity"] == "error"
    assert "--lora_r has no effect without" in rules["key.unused"]["message"]
    assert "all weights are trained" in rules["key.unused"]["message"]
    assert "key.unused" not in {one["rule"] for one in _check(meshwright, "--lora_r 64 --use_peft", adapt)["findings"]}


def test_the_fix_of_an_unused_rank_is_the_option_that_adds_adapters(meshwright: Any) -> None:
    unused = next(one for one in _check(meshwright, "--lora_r 64")["findings"] if one["rule"] == "key.unused")
    assert unused["fix"] == ["--use_peft"]


def test_quantized_weights_without_the_option_that_adds_adapters_are_refused(meshwright: Any) -> None:
    found = _check(meshwright, "--load_in_4bit")
    assert any("needs --use_peft" in one["message"] for one in found["findings"] if one["severity"] == "error")


def test_a_value_in_the_code_of_a_program_is_not_fixed_by_a_flag_that_its_parser_refuses(meshwright: Any) -> None:
    found = _check(meshwright, "--use_peft --load_in_4bit")
    peak = next(one for one in found["findings"] if one["rule"] == "memory.peak")
    assert peak["fix"][0].startswith("sft.py: per_device_train_batch_size=1, gradient_accumulation_steps=16")


def test_a_peak_with_an_assumed_length_is_not_called_within_the_error(meshwright: Any) -> None:
    adapt = ADAPTS["block"].replace("lora_alpha=32", 'target_modules="all-linear"')
    Path("sft.py").write_text(PROGRAM.replace("ADAPT", adapt).replace(", max_length=8192", ""))
    Path("run.sh").write_text("torchrun --nproc_per_node 2 sft.py --use_peft --lora_r 32\n")
    found = json.loads(meshwright("check", "run.sh", "--gpus", "2xRTX5090", "--json").out)
    message = next(one["message"] for one in found["findings"] if one["rule"] == "memory.peak")
    assert "within the error" not in message
    assert "data.seq_length=4096, which is assumed" in message


def test_a_config_of_accelerate_alone_names_the_way_to_check_it_with_its_program(meshwright: Any) -> None:
    Path("fsdp.yaml").write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 2\n")
    found = json.loads(meshwright("check", "fsdp.yaml", "--json").out)
    assert any("accelerate launch --config_file fsdp.yaml PROGRAM.py" in note for note in found["notes"])


@pytest.mark.parametrize(("storage", "version", "is_refused"),
    [("", 1, True), (", bnb_4bit_quant_storage=torch.bfloat16", 1, False), ("", 2, False)])  # fmt: skip
def test_4_bit_weights_in_bytes_are_refused_with_fsdp(
    storage: str, version: int, is_refused: bool, meshwright: Any
) -> None:
    program = PROGRAM.replace("ADAPT", ADAPTS["block"]).replace("load_in_4bit=True", f"load_in_4bit=True{storage}")
    Path("sft.py").write_text(program)
    Path("fsdp.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 2\n"
        f"fsdp_config:\n  fsdp_version: {version}\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
    )
    Path("run.sh").write_text("accelerate launch --config_file fsdp.yaml sft.py --use_peft --load_in_4bit\n")
    found = json.loads(meshwright("check", "run.sh", "--gpus", "2xRTX5090", "--json").out)
    refused = [one for one in found["findings"] if one["field"].endswith("bnb_4bit_quant_storage")]
    assert bool(refused) == is_refused
    if refused:
        assert refused[0]["fix"] == ["bnb_4bit_quant_storage=torch.bfloat16"]
        assert refused[0]["file"] == "sft.py"
