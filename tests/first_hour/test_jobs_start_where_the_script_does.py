"""Jobs and scripts written from the user's own program start it where the user's script does: its files are there."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

CONFIG = """compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  zero_stage: 3
mixed_precision: bf16
num_machines: 1
num_processes: 4
"""
PROGRAM = """from datasets import load_dataset
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

data = load_dataset("json", data_files="chats.jsonl", split="train")
model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.2-1B-Instruct")
args = SFTConfig(output_dir="out", per_device_train_batch_size=1, max_steps=100, save_steps=10, DEEPSPEED)
SFTTrainer(model=model, args=args, train_dataset=data).train()
"""
SCRIPT = """#!/bin/bash
module load cuda/12.4
source ~/venvs/trl/bin/activate
export HF_HOME=/scratch/$USER/hf
accelerate launch --config_file zero3.yaml sft.py
"""
ROW = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good morning"}]}
SLURM = ("--scheduler", "slurm", "--gpus", "4xA100-80", "--time", "8:00:00", "--write")


@pytest.fixture
def folder(here: Path) -> Path:
    found = here / "finetune"
    found.mkdir()
    (found / "zero3.yaml").write_text(CONFIG)
    (found / "sft.py").write_text(PROGRAM.replace(", DEEPSPEED", ""))
    (found / "chats.jsonl").write_text(f"{json.dumps(ROW)}\n" * 200)
    (found / "run.slurm").write_text(SCRIPT)
    return found


@pytest.mark.parametrize("script", ["finetune/run.slurm", "run.slurm"])
def test_a_job_starts_the_program_where_its_relative_paths_are(
    meshwright: Any, folder: Path, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "/" not in script:
        monkeypatch.chdir(folder)
    answer = meshwright("launch", script, *SLURM, "jobs")
    assert answer.code == 0, answer.err
    job = Path("jobs/run.sbatch").read_text()
    assert f"\ncd {folder} || exit 2\n" in job
    assert f"{folder}/sft.py" in job
    assert f"sft.py starts in {folder}, as {script} starts it" in answer.err
    assert "data.dataset" not in answer.err


def test_a_job_of_a_named_folder_starts_there(meshwright: Any, folder: Path) -> None:
    assert meshwright("launch", "finetune/run.slurm", *SLURM, "jobs", "--framework-dir", "finetune").code == 0
    assert f"\ncd {folder} || exit 2\n" in Path("jobs/run.sbatch").read_text()
    started = meshwright("launch", "finetune/run.slurm", "--scheduler", "torchrun", "--gpus", "4xA100-80",
                         "--write", "other")  # fmt: skip
    assert started.out.startswith(f"cd {folder} && ")


def test_other_data_are_named_as_the_code_reads_them(meshwright: Any, folder: Path) -> None:
    (folder / "other.jsonl").write_text((folder / "chats.jsonl").read_text())
    answer = meshwright("launch", "finetune/run.slurm", *SLURM, "jobs", "--dataset", "finetune/other.jsonl")
    assert f"sft.py: data_files='{folder}/other.jsonl'" in answer.err
    assert "train_file" not in answer.err


def test_an_exported_script_starts_the_program_as_the_users_does(meshwright: Any, folder: Path) -> None:
    answer = meshwright("export", "finetune/run.slurm", "--to", "accelerate", "--gpus", "4xA100-80", "--out", "written")
    assert answer.code == 0, answer.err
    assert "the full path of this machine is written" not in answer.out
    assert f"run.sh starts the program in {folder}" in answer.out
    script = Path("written/run.sh").read_text()
    setup = SCRIPT.splitlines()[1:4]
    assert [line for line in script.splitlines() if line in setup] == setup
    tools = Path("tools")
    tools.mkdir()
    (tools / "torchrun").write_text('#!/bin/bash\n[ -f chats.jsonl ] && echo "$PWD ${@: -1}"\n')
    (tools / "torchrun").chmod(0o755)
    env = {"PATH": f"{tools.resolve()}:{os.environ['PATH']}", "USER": "me", "HOME": str(folder)}
    done = subprocess.run(["bash", "written/run.sh"], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(folder), f"{folder}/sft.py"]


def test_a_config_that_the_code_opens_is_to_be_named_there(meshwright: Any, folder: Path, here: Path) -> None:
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto"}
    (folder / "ds.json").write_text(json.dumps(config))
    (folder / "sft.py").write_text(PROGRAM.replace("DEEPSPEED", 'deepspeed="ds.json"'))
    (folder / "run.slurm").write_text("torchrun --nproc_per_node 4 sft.py\n")
    same = meshwright("launch", "finetune/run.slurm", *SLURM, "same")
    assert same.code == 0, same.err
    assert "warning: sft.py opens" not in same.err
    other = meshwright("launch", "finetune/run.slurm", *SLURM, "jobs", "layout.offload=optimizer")
    assert f"sft.py opens ds.json in {folder}, not the written one: set deepspeed='{here}/jobs/ds.json'" in other.err


@pytest.mark.parametrize("dataset", [(), ("--dataset", "finetune/other.jsonl")])
@pytest.mark.parametrize("is_there", [True, False])
def test_paths_are_those_of_the_folder_in_which_the_program_starts(
    meshwright: Any, folder: Path, dataset: tuple[str, ...], is_there: bool
) -> None:
    """The current folder has files of the same names, which the program does not open."""
    words = "--model_name_or_path meta-llama/Llama-3.2-1B --train_file chats.jsonl --tokenizer_name ./tok"
    (folder / "run.slurm").write_text(
        f"torchrun --nproc_per_node 4 run_clm.py {words} --max_steps 9 --per_device_train_batch_size 1\n"
    )
    (folder / "run_clm.py").write_text("from transformers import Trainer\n")
    for path in (folder / "other.jsonl", Path("chats.jsonl")):
        path.write_text((folder / "chats.jsonl").read_text())
    ((folder if is_there else Path()) / "tok").mkdir()
    answer = meshwright("launch", "finetune/run.slurm", *SLURM, "jobs", *dataset)
    assert answer.code == 0, answer.err
    job = Path("jobs/run.sbatch").read_text()
    assert f"--train_file {folder}/{'other' if dataset else 'chats'}.jsonl" in job
    assert f"--tokenizer_name {folder / 'tok' if is_there else './tok'} " in job
    assert ("./tok is not on this machine" in answer.err) is not is_there
    if not is_there:
        assert f"the job looks for it in {folder}: write its full path" in answer.err
