"""A fine-tuning engineer brings TRL and Trainer scripts: what they state is what is estimated, exported and trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright import check

ROWS = [
    {"messages": [{"role": "user", "content": f"Where is order {n}?"}, {"role": "assistant", "content": "There. " * n}]}
    for n in range(1, 81)
]
TRL = """import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

MODEL = "Qwen/Qwen3-8B"
bnb = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
model = AutoModelForCausalLM.from_pretrained(MODEL, quantization_config=bnb)
ds = load_dataset("json", data_files="chats.jsonl", split="train")
peft_config = LoraConfig(r=64, lora_alpha=16, target_modules=["q_proj", "v_proj"])
args = SFTConfig(
    output_dir="out",
    num_train_epochs=3,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=4,
    gradient_checkpointing=True,
    bf16=True,
    max_length=4096,
    packing=True,
    assistant_only_loss=True,
)
SFTTrainer(model=model, args=args, train_dataset=ds, peft_config=peft_config).train()
"""
GPUS = "2xRTX6000Ada"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def trl(*lines: str, name: str = "train.py", without: str = "") -> str:
    """Write the TRL script with more arguments; return its name."""
    text = "".join(line for line in TRL.splitlines(True) if not without or without not in line)
    Path(name).write_text(
        text.replace("    output_dir=", "".join(f"    {one},\n" for one in lines) + "    output_dir=")
    )
    return name


@pytest.mark.parametrize("line", ["use_liger_kernel=True", "use_liger=True"])
def test_fused_loss_of_liger_materializes_no_full_logits(line: str) -> None:
    plain = check(trl(name="plain.py"), gpus=GPUS).estimate.memory
    fused = check(trl(line), gpus=GPUS).estimate.memory
    assert plain.logits > 25
    assert fused.total < 20


def test_liger_without_its_fused_loss_has_full_logits() -> None:
    script = trl("use_liger_kernel=True", 'liger_kernel_config={"fused_linear_cross_entropy": False}')
    assert check(script, gpus=GPUS).estimate.memory.logits > 25


def test_liger_survives_import_and_export(meshwright: Any) -> None:
    script = trl("use_liger_kernel=True")
    assert 'loss = "fused_linear"' in meshwright("import", script, "--gpus", GPUS).out
    exported = meshwright("export", script, "--to", "accelerate", "--gpus", GPUS, "--out", "acc")
    assert "use_liger_kernel" not in exported.out
    assert "use_liger_kernel=True" in Path("acc/train_args.py").read_text()


def test_reason_why_an_argument_is_not_carried_is_a_whole_sentence(meshwright: Any) -> None:
    script = trl("max_train_samples=20", 'report_to="wandb"')
    errors = meshwright("import", script, "--gpus", GPUS).err
    assert "write data.split=train[:20]" in errors
    assert "write --wandb" in errors
