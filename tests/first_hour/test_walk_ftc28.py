"""Fine-tuning files that the front ends refuse at start, as their owners check them."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.cli.run import run

FSDP = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LAYER
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_version: 2
mixed_precision: bf16
num_machines: 1
num_processes: 8
"""
TRL = """#!/bin/bash
accelerate launch --config_file fsdp.yaml -m trl.scripts.sft \\
  --model_name_or_path MODEL --dataset_name /data/instr --max_length 4096 \\
  --per_device_train_batch_size 1 --gradient_checkpointing --learning_rate 2e-4 --use_peft --lora_r 32 \\
  --bf16 --use_liger_kernel True --num_train_epochs 3 --output_dir out \\
  MORE
"""


def check(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        run(["check", *words])
    return int(str(ended.value.code)), capsys.readouterr().out


def write_trl(model: str, layer: str = "LlamaDecoderLayer", more: str = "--logging_steps 10") -> None:
    Path("fsdp.yaml").write_text(FSDP.replace("LAYER", layer), encoding="utf-8")
    Path("run.sh").write_text(TRL.replace("MODEL", model).replace("MORE", more), encoding="utf-8")


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("model", "right"),
    [
        ("google/gemma-3-12b-it", "Gemma3DecoderLayer"),
        ("Qwen/Qwen3-VL-8B-Instruct", "Qwen3VLTextDecoderLayer"),
        ("Qwen/Qwen3-8B", "Qwen3DecoderLayer"),
    ],
)
def test_a_layer_class_of_another_model_is_an_error(model: str, right: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_trl(model)
    code, printed = check(capsys, "run.sh", "--gpus", "8xL40S")
    assert code == 1
    assert "fsdp.yaml:5" in printed
    assert f"has no class LlamaDecoderLayer: its layers are {right}" in printed
    write_trl(model, right)
    code, printed = check(capsys, "run.sh", "--gpus", "8xL40S")
    assert code == 0, printed


def test_layers_of_a_vision_encoder_may_be_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    write_trl("google/gemma-3-12b-it", "Gemma3DecoderLayer,SiglipEncoderLayer")
    code, printed = check(capsys, "run.sh", "--gpus", "8xL40S")
    assert code == 0, printed


ZERO = """{
  "bf16": {"enabled": "auto"},
  "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
  "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
  "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
  "gradient_accumulation_steps": STEPS,
  "train_batch_size": BATCH,
  "train_micro_batch_size_per_gpu": "auto"
}
"""
DEEPSPEED = """#!/bin/bash
deepspeed --num_gpus 8 run_sft.py --model_name_or_path google/gemma-3-12b-pt --deepspeed ds.json --bf16 True \\
  --per_device_train_batch_size 2 --gradient_accumulation_steps 4 --use_liger_kernel True --learning_rate 1e-5 \\
  --num_train_epochs 2 --gradient_checkpointing True --max_seq_length 8192 --save_steps 100 --output_dir /scratch/cpt
"""


def test_deepspeed_starts_without_warmup(capsys: pytest.CaptureFixture[str]) -> None:
    Path("ds.json").write_text(ZERO.replace("STEPS", '"auto"').replace("BATCH", '"auto"'), encoding="utf-8")
    Path("run.sh").write_text(DEEPSPEED, encoding="utf-8")
    code, printed = check(capsys, "run.sh", "--gpus", "8xL40S")
    assert code == 0, printed
    assert "warmup_num_steps" not in printed
