"""SLURM scripts whose srun starts the program once per rank: the ranks have to come from somewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

HEAD = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
"""
ADDRESS = "export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1) MASTER_PORT=29500\n"
TRAINER = """from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
Trainer(model=AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B"), args=args).train()
"""
OF_SLURM = "import os\n\nos.environ['RANK'] = os.environ['SLURM_PROCID']\n" + TRAINER
FLAGS = "--per_device_train_batch_size 1 --bf16 --max_steps 100 --output_dir out"
START = f"srun python train.py {FLAGS}"
RANKS = "RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS"
FIX = f"srun bash -c '{RANKS} exec python …'"


def findings(meshwright: Any, text: str) -> list[dict[str, Any]]:
    Path("job.sbatch").write_text(text)
    found = meshwright("check", "job.sbatch", "--gpus", "2x8xH100", "--json").json["findings"]
    return [one for one in found if one["rule"] == "launch.ranks"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAINER)


def test_a_program_without_ranks_is_several_trainings(meshwright: Any) -> None:
    (found,) = findings(meshwright, HEAD + START)
    assert "nothing sets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR: 16 separate trainings" in found["message"]
    assert found["fix"][-1] == FIX
    repaired = START.replace("srun python", FIX.partition("python")[0] + "python") + "'"
    assert not findings(meshwright, HEAD + ADDRESS + repaired)


def test_ranks_that_the_batch_shell_expands_are_those_of_one_task(meshwright: Any) -> None:
    (found,) = findings(meshwright, f"{HEAD}{ADDRESS}export {RANKS}\n{START}")
    assert "RANK=$SLURM_PROCID is expanded before them" in found["message"]


@pytest.mark.parametrize(
    ("text", "program"),
    [
        (HEAD + ADDRESS + START, OF_SLURM),
        (HEAD + "source cluster_env.sh\n" + START, TRAINER),
        (HEAD + "#SBATCH --container-image=nemo.sqsh\n" + START, TRAINER),
        (HEAD.replace("=8", "=1").replace("nodes=2", "nodes=1") + START, TRAINER),
    ],
)
def test_programs_that_may_have_ranks_are_not_reported(meshwright: Any, text: str, program: str) -> None:
    Path("train.py").write_text(program)
    assert not findings(meshwright, text)
