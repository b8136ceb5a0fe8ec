"""Remedies of doctor for a run whose file is named: in the keys of that file, with those that check finds for it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

COMMON = (
    "compute_environment: LOCAL_MACHINE\nmachine_rank: 0\nmixed_precision: bf16\nnum_machines: 1\nnum_processes: 4\n"
)
CONFIGS = {
    "deepspeed": """distributed_type: DEEPSPEED
deepspeed_config:
  gradient_accumulation_steps: 4
  offload_optimizer_device: none
  offload_param_device: none
  zero3_init_flag: true
  zero_stage: 3
""",
    "fsdp1": """distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_offload_params: false
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_use_orig_params: true
""",
}
PROGRAM = """import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

ds = load_dataset("some/data", split="train")
model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.1-8B-Instruct", torch_dtype=torch.bfloat16)
cfg = SFTConfig(output_dir="out", per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=735,
    gradient_checkpointing=True, learning_rate=1e-5, bf16=True, max_length=8192, packing=True, save_steps=200)
SFTTrainer(model=model, args=cfg, train_dataset=ds).train()
"""
LOG = """{'loss': 1.4213, 'grad_norm': 3.214, 'learning_rate': 4.1e-06, 'num_tokens': 1048576.0, 'epoch': 0.03}
  1%|▏         | 10/735 [05:12<6:17:33, 31.25s/it][rank2]: Traceback (most recent call last):
[rank2]:   File "/venv/trl/trainer/sft_trainer.py", line 1307, in training_step
[rank2]:     return torch._C._nn.cross_entropy_loss(
[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 7.83 GiB. GPU 2 has a total capacity of \
39.39 GiB of which 5.21 GiB is free. Including non-PyTorch memory, this process has 34.17 GiB memory in use. Of the \
allocated memory 31.02 GiB is allocated by PyTorch, and 1.64 GiB is reserved by PyTorch but unallocated.
"""
GPUS = ("--gpus", "4xA100-40")


def run_of(engine: str) -> None:
    """Write a job, its program and config, and the log of a run that was out of memory."""
    Path("run.sh").write_text("accelerate launch --config_file acc.yaml --num_processes 4 sft.py\n")
    Path("acc.yaml").write_text(CONFIGS[engine] + COMMON)
    Path("sft.py").write_text(PROGRAM)
    Path("train.log").write_text(LOG)


@pytest.mark.parametrize(
    ("engine", "offload"),
    [("deepspeed", "offload_optimizer_device: cpu"), ("fsdp1", "fsdp_config: {fsdp_offload_params: true}")],
)
def test_a_full_gpu_has_the_fix_of_check(meshwright: Any, engine: str, offload: str) -> None:
    run_of(engine)
    checked = meshwright("check", "run.sh", *GPUS).out
    fix = re.search(r"\(memory\.peak\)  fix: (.*)", checked)
    assert fix is not None, checked
    assert offload in fix[1]
    found = meshwright("doctor", "train.log", "--recipe", "run.sh", *GPUS).out
    assert offload in found
    assert "meshwright recommend" not in found
    if engine == "deepspeed":  # next to it, the arguments of the program
        assert "sft.py: per_device_train_batch_size=1 sft.py: gradient_accumulation_steps=8" in found


def test_a_plan_in_place_of_remedies_is_for_the_engine_of_the_run(meshwright: Any) -> None:
    run_of("fsdp1")
    found = meshwright("doctor", "train.log", "--recipe", "run.sh", *GPUS, "data.seq_length=131072").out
    command = re.search(r"meshwright (recommend .*?)  no combination", found)
    assert command is not None, found
    assert "--engine fsdp1" in command[1]
    assert "data.seq_length=131072" in command[1]
