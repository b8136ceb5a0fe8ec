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
    words += " --max_steps 9 --per_device_train_batch_size 1"
    (folder / "run.slurm").write_text(f"torchrun --nproc_per_node 4 run_clm.py {words}\n")
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


DEEPSPEED = (
    """{"bf16": {"enabled": true}, "zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto"}"""
)
COMMAND = "torchrun --nproc_per_node 4 PROGRAM --model_name_or_path meta-llama/Llama-3.2-1B --train_file chats.jsonl"
COMMAND += " --deepspeed ds.json --output_dir out --max_steps 9 --per_device_train_batch_size 1 --bf16\n"


def command(folder: Path, program: str = "run_clm.py", before: str = "") -> None:
    """Write a script that starts a program, which need not be here."""
    (folder / "ds.json").write_text(DEEPSPEED)
    (folder / "run_clm.py").write_text("from transformers import Trainer\n")
    (folder / "pkg").mkdir()
    (folder / "pkg/train.py").write_text("from transformers import Trainer\n")
    (folder / "run.slurm").write_text(f"{before}{COMMAND.replace('PROGRAM', program)}")


@pytest.mark.parametrize(
    ("program", "before", "start"),
    [
        ("-m pkg.train", "", "HERE"),
        ("/home/me/sft.py", "cd /scratch/me/run\n", "/scratch/me/run"),
        ("run_clm.py", "cd /scratch/me/run\n", "/scratch/me/run"),
        ("missing.py", "", ""),
        ("/home/me/sft.py", "", ""),
        ("-m trl.scripts.sft", "", ""),
    ],
)
def test_a_job_starts_a_program_that_is_elsewhere_as_its_script_does(
    meshwright: Any, folder: Path, program: str, before: str, start: str
) -> None:
    command(folder, program, before)
    answer = meshwright("launch", "finetune/run.slurm", *SLURM, "jobs")
    assert answer.code == 0, answer.err
    job = Path("jobs/run.sbatch").read_text()
    config = Path("jobs/ds_config.json").resolve()
    assert f"--deepspeed {config} " in job
    assert f"cd {config.parent} " not in job
    if start:
        start = start.replace("HERE", str(folder))
        assert f"\ncd {start} || exit 2\n" in job
        assert f" starts in {start}, as finetune/run.slurm starts it" in answer.err
        is_here = start == str(folder)
        assert f"--train_file {f'{folder}/' if is_here else ''}chats.jsonl " in job
    else:
        assert "\ncd " not in job  # sbatch starts it in the folder of submission
        assert "run sbatch in the folder" in answer.err


@pytest.mark.parametrize(("image", "option"), [("x.sqsh", "--container-workdir="), ("x.sif", "--pwd ")])
def test_a_container_starts_the_program_in_its_folder(meshwright: Any, folder: Path, image: str, option: str) -> None:
    command(folder)
    answer = meshwright("launch", "finetune/run.slurm", *SLURM, "jobs", "--image", image)
    job, jobs = Path("jobs/run.sbatch").read_text(), Path("jobs").resolve()
    assert f"{option}{folder} " in job
    assert f"{folder}:{folder}" in job
    assert f"{jobs}:{jobs}" in job
    assert f"{folder}/run_clm.py --model_name_or_path" in job
    assert f"--deepspeed {jobs}/ds_config.json " in job
    assert f"run_clm.py starts in {folder}" in answer.err


def test_a_container_of_the_script_names_the_folder(meshwright: Any, folder: Path) -> None:
    command(folder, before="srun --container-image=x.sqsh --container-mounts=$PWD:/work --container-workdir=/work ")
    answer = meshwright("launch", "finetune/run.slurm", *SLURM, "jobs", "--image", "x.sqsh")
    assert "--mount '$PWD:/work' mounts what its container has" in answer.err
    job = Path("jobs/run.sbatch").read_text()
    assert "--container-workdir=/work " in job
    assert "/work:/work" not in job
    assert " run_clm.py --model_name_or_path meta-llama/Llama-3.2-1B --train_file chats.jsonl " in job


@pytest.mark.parametrize(
    ("scheduler", "starts", "config"),
    [
        (("kubernetes", "--image", "x"), "workingDir: /opt/proj\n", "- /meshwright/ds_config.json\n"),
        (("skypilot",), "  cd /opt/proj\n", "--deepspeed /tmp/meshwright_files/ds_config.json "),
    ],
)
def test_a_machine_elsewhere_starts_the_program_in_the_named_folder(
    meshwright: Any, folder: Path, scheduler: tuple[str, ...], starts: str, config: str
) -> None:
    command(folder)
    Path("chats.jsonl").write_text((folder / "chats.jsonl").read_text())
    words = ("launch", "finetune/run.slurm", "--scheduler", *scheduler, "--gpus", "4xA100-80", "--write")
    unknown = meshwright(*words, "unknown")
    assert "run_clm.py does not start where finetune/run.slurm starts it: add --framework-dir PATH" in unknown.err
    named = meshwright(*words, "jobs", "--framework-dir", "/opt/proj")
    assert named.code == 0, named.err
    assert "does not start where" not in named.err
    assert "(--deepspeed)" not in named.err
    assert "(data)" not in named.err
    job = Path("jobs/run.yaml").read_text()
    assert starts in job
    assert config in job
    assert "/opt/proj/run_clm.py" in job
    assert str(folder) not in job
