"""A config of Accelerate whose numbers are not those of the job, together with the batch sizes of DeepSpeed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

CONFIG = """compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  deepspeed_config_file: ds.json
  deepspeed_multinode_launcher: standard
  zero3_init_flag: true
machine_rank: 0
num_machines: {machines}
num_processes: {processes}
"""
JOB = """#!/bin/bash
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun bash -c 'accelerate launch --config_file acc.yaml --machine_rank $SLURM_NODEID --main_process_ip $MASTER_ADDR \\
  train.py --per_device_train_batch_size 2 --gradient_accumulation_steps {steps} --max_steps 100 --bf16 --output_dir o'
"""
PROGRAM = """from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
Trainer(model=AutoModelForCausalLM.from_pretrained("meta-llama/Meta-Llama-3-8B"), args=args).train()
"""
ON = ("--gpus", "4x8xH100")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(PROGRAM)


def checked(meshwright: Any, processes: int, machines: int, batch: int, steps: int = 4, *, target: str, on: Any) -> Any:
    Path("acc.yaml").write_text(CONFIG.format(processes=processes, machines=machines))
    sizes = {"train_batch_size": batch, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": steps}
    Path("ds.json").write_text(json.dumps({**sizes, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}))
    Path("job.sbatch").write_text(JOB.format(steps=steps))
    return meshwright("check", target, *on, "--json").json


def errors(result: Any) -> list[tuple[str, list[str]]]:
    return [(one["rule"], one["fix"]) for one in result["findings"] if one["severity"] == "error"]


@pytest.mark.parametrize(("target", "on"), [("acc.yaml", ON), ("job.sbatch", ON), ("job.sbatch", ())])
def test_too_few_processes_are_named_and_not_the_batch_that_all_gpus_have(
    meshwright: Any, target: str, on: tuple[str, ...]
) -> None:
    found = checked(meshwright, 8, 4, 256, target=target, on=on)
    assert errors(found) == [("accelerate.processes", ["num_processes: 32"])]
    assert "train_batch_size=256 is that of 32 ranks" in found["findings"][0]["message"]
    assert not errors(checked(meshwright, 32, 4, 256, target=target, on=on))


def test_the_machines_of_a_config_are_compared_with_the_nodes_of_the_job(meshwright: Any) -> None:
    found = checked(meshwright, 8, 1, 256, target="job.sbatch", on=())
    assert [rule for rule, _ in errors(found)] == ["accelerate.machines", "accelerate.processes"]
    assert "num_machines=1, but the job has --nodes=4 (line 2)" in found["findings"][0]["message"]
    assert sorted(found["repair"]["overrides"]) == ["num_machines: 4", "num_processes: 32"]
    assert not found["repair"]["contract"]
    given = checked(meshwright, 8, 1, 256, target="acc.yaml", on=ON)
    assert errors(given) == [("accelerate.processes", ["num_processes: 32", "num_machines: 4"])]


def test_a_batch_that_fits_neither_number_is_divided_by_the_gpus_of_the_job(meshwright: Any) -> None:
    found = checked(meshwright, 8, 4, 384, target="job.sbatch", on=())
    assert [rule for rule, _ in errors(found)] == ["accelerate.processes", "deepspeed.batch-arithmetic"]
    assert errors(found)[1][1] == ['"gradient_accumulation_steps": 6', "--gradient_accumulation_steps 6"]
    assert not errors(checked(meshwright, 32, 4, 384, 6, target="job.sbatch", on=()))


def test_a_batch_of_the_processes_needs_other_sizes_on_all_gpus(meshwright: Any) -> None:
    found = checked(meshwright, 8, 4, 64, target="job.sbatch", on=())
    (idle,) = (one for one in found["findings"] if one["rule"] == "accelerate.processes")
    assert idle["severity"] == "warning"
    assert not idle["fix"]
    assert 'num_processes: 32 needs "gradient_accumulation_steps": 1 in ds.json too' in idle["message"]
    assert not errors(checked(meshwright, 32, 4, 64, 1, target="job.sbatch", on=()))
