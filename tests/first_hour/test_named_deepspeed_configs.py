"""Commands that name their DeepSpeed config: an export and a job read the config that was written for them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

CONFIG = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
}
ACCELERATE = """distributed_type: DEEPSPEED
deepspeed_config:
  deepspeed_config_file: ds_config.json
  zero3_init_flag: true
num_machines: 1
num_processes: 8
"""
ARGUMENTS = (
    "--model_name_or_path meta-llama/Meta-Llama-3-8B --train_file /data/train.jsonl --block_size 4096 "
    "--per_device_train_batch_size 1 --gradient_accumulation_steps 4 --max_steps 1000 --learning_rate 3e-5 --bf16 "
    "--gradient_checkpointing --save_steps 100 --output_dir /data/out"
)
BARE = "deepspeed --num_gpus 8 train.py --deepspeed --deepspeed_config ds_config.json "
PAIR = "deepspeed --num_gpus 8 run_clm.py --deepspeed=ds_config.json "
BOTH = "accelerate launch --config_file acc.yaml run_clm.py --deepspeed ds_config.json "
NO_OFFLOAD = "layout.offload=none"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    Path("ds_config.json").write_text(json.dumps(CONFIG))
    Path("acc.yaml").write_text(ACCELERATE)

    def written(command: str) -> str:
        Path("run.sh").write_text(f"#!/bin/bash\n{command}{ARGUMENTS}\n")
        return "run.sh"

    return written


def config_of(folder: str, ends: str) -> dict[str, Any]:
    """Return the DeepSpeed config that the command in a folder names: a file of that folder."""
    text = next(Path(folder).glob(f"*{ends}")).read_text()
    line = next(one for one in text.splitlines() if ".py --" in one and "torchrun" in one)
    words = shlex.split(line.removesuffix("&"))
    flags = [n for n, one in enumerate(words) if one.startswith("--deepspeed") and one != "--deepspeed"]
    flags = flags or [words.index("--deepspeed")]
    name = words[flags[0]].partition("=")[2] or words[flags[0] + 1]
    assert not any(one.name == "True" for one in Path(folder).iterdir())
    found: dict[str, Any] = json.loads((Path(folder) / name).read_text())
    return found


@pytest.mark.parametrize("command", [BARE, PAIR, BOTH])
def test_an_exported_command_reads_the_exported_config(meshwright: Any, script: Any, command: str) -> None:
    meshwright("export", script(command), "--to", "deepspeed", "--gpus", "8xH100", "--out", "out", NO_OFFLOAD)
    assert config_of("out", ".sh")["zero_optimization"].get("offload_optimizer", {}).get("device", "none") == "none"


@pytest.mark.parametrize("command", [BARE, PAIR, BOTH])
def test_a_job_reads_the_config_in_its_folder(meshwright: Any, script: Any, command: str) -> None:
    options = ("--scheduler", "slurm", "--gpus", "8xH100", "--time", "8:00:00", "--write", "jobs")
    meshwright("launch", script(command), *options, NO_OFFLOAD)
    assert config_of("jobs", ".sbatch")["zero_optimization"]["stage"] == 3


def test_the_trainer_is_not_given_the_config_of_accelerate(meshwright: Any, script: Any) -> None:
    meshwright("export", script(BOTH), "--to", "accelerate", "--gpus", "8xH100", "--out", "out")
    assert config_of("out", ".sh") == CONFIG


def test_the_requeue_of_a_script_is_kept(meshwright: Any, script: Any) -> None:
    options = ("--scheduler", "slurm", "--gpus", "8xH100", "--time", "8:00:00", "--write", "jobs")
    file = script(BARE)
    Path(file).write_text(Path(file).read_text().replace("bash\n", "bash\n#SBATCH --requeue\n#SBATCH --mem=0\n"))
    assert "not kept: #SBATCH --mem=0 of run.sh" in meshwright("launch", file, *options).err
