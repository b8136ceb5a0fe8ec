"""Fixes of an accelerate job whose config names a DeepSpeed config: both have the sizes of a batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

YAML = """distributed_type: DEEPSPEED
deepspeed_config:
  deepspeed_config_file: ds_config.json
  zero3_init_flag: true
num_machines: 24
num_processes: 96
"""
JOB = """#!/bin/bash
#SBATCH --nodes=24
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
srun bash -c 'accelerate launch --config_file acc.yaml --num_machines 24 --num_processes 96 \\
  --machine_rank $SLURM_PROCID --main_process_ip $HEAD --main_process_port 29500 run_clm.py \\
  --model_name_or_path Qwen/Qwen3-14B --train_file /data/train.jsonl --do_train --bf16 --block_size 4096 \\
  --per_device_train_batch_size 4 --gradient_accumulation_steps {steps} --max_steps 1000 --learning_rate 3e-5 \\
  --output_dir /data/out --gradient_checkpointing'
"""
CONFIG = {
    "train_batch_size": 384,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
}


@pytest.fixture
def check(meshwright: Any, tmp_path: Path) -> Any:
    def run(job: str, config: dict[str, Any]) -> dict[str, dict[str, Any]]:
        (tmp_path / "acc.yaml").write_text(YAML)
        (tmp_path / "ds_config.json").write_text(json.dumps(config, indent=2))
        (tmp_path / "job.sbatch").write_text(job)
        answer = meshwright("check", str(tmp_path / "job.sbatch"), "--gpus", "24x4xA100-40", "--json").json
        return {one["rule"]: one for one in answer["findings"] if one["severity"] == "error"}

    return run


def test_a_smaller_micro_batch_is_set_in_both_files(check: Any) -> None:
    job = JOB.format(steps=1)
    errors = check(job, CONFIG)
    assert list(errors) == ["memory.peak"]
    fix = errors["memory.peak"]["fix"]
    in_job, in_config = [one for one in fix if one.startswith("--")], [one for one in fix if one.startswith('"')]
    assert len(in_job) == len(in_config) == 2
    for flag in in_job:
        name, value = flag.split()
        job = job.replace(f"{name} {4 if 'batch' in name else 1}", f"{name} {value}")
    assert check(job, CONFIG | json.loads(f"{{{','.join(in_config)}}}")) == {}


def test_a_fix_of_a_repeated_size_is_a_flag_of_the_command(check: Any) -> None:
    errors = check(JOB.format(steps=2), CONFIG | {"gradient_accumulation_steps": 2})
    assert errors["deepspeed.batch-arithmetic"]["fix"] == [
        '"gradient_accumulation_steps": 1',
        "--gradient_accumulation_steps 1",
    ]
