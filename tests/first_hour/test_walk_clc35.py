"""What users typed with scripts of a cluster with modules and conda, and with programs of transformers' Trainer."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

HEADER = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --time=24:00:00
#SBATCH --requeue
"""
MEGATRON = """srun torchrun --nnodes 2 \\
   --nproc_per_node 4 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29500 pretrain_gpt.py \\
  --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention \\
  --num-query-groups 8 --seq-length 4096 --max-position-embeddings 8192 --position-embedding-type rope --swiglu \\
  --rotary-base 500000 --disable-bias-linear --untie-embeddings-and-output-weights --normalization RMSNorm \\
  --tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Llama-3.1-8B --vocab-size 128256 \\
  --micro-batch-size 1 --global-batch-size 64 --train-iters 20000 --lr 3e-4 --bf16 --use-distributed-optimizer \\
  --tensor-model-parallel-size 4 --data-path /data/text_document --save /ckpt/run --load /ckpt/run --save-interval 500
"""
LAUNCH = ["--gpus", "2x4xH100", "--scheduler", "slurm", "--time", "24:00:00", "--framework-dir", "/opt/Megatron-LM"]


def written(folder: Path, setup: str, start: str = MEGATRON) -> None:
    (folder / "train.sh").write_text(
        f"{HEADER}{setup}HEAD=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)\n{start}"
    )


def launched(meshwright: Any, *arguments: str) -> str:
    answer = meshwright(*arguments)
    assert answer.code == 0, answer.err
    return str(answer.out + answer.err)


def test_a_job_keeps_the_setup_of_the_users_script_in_its_order(
    meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "env.sh").write_text("export NCCL_DEBUG=WARN\n")
    setup = (
        "module load cuda/12.4 gcc/12",
        "source ~/miniconda3/etc/profile.d/conda.sh",
        "ENVS=/opt/envs",
        "conda activate $ENVS/megatron",
        "load_more() {\n    ml nccl\n}",
        "load_more",
        "if [ -f ~/.bashrc ]; then\n    . ~/.bashrc\nfi",
        "spack load nccl || { echo 'no nccl' >&2; exit 1; }",
        'eval "$(micromamba shell hook -s bash)" && micromamba activate tools',
        "export PATH=/opt/tools/bin:$PATH",
        "export HF_HOME=$SCRATCH/hf",
        "ulimit -n 65536",
    )
    written(tmp_path, "\n".join(setup) + "\n. env.sh\n")
    answer = launched(meshwright, "launch", "train.sh", *LAUNCH, "--write", "jobs")
    text = (tmp_path / "jobs" / "train.sbatch").read_text()
    places = [text.index(f"\n{one}\n") for one in setup]
    assert places == sorted(places)
    assert f". {tmp_path / 'env.sh'}\n" in text  # the job may be submitted in another folder
    assert places[-1] < text.index(f"cd {tmp_path / 'jobs'}") < text.index("srun")
    assert "scontrol show hostnames $SLURM" not in text  # the job has a rendezvous of its own
    assert "not kept: train.sh" not in answer
    assert subprocess.run(["bash", "-n", "jobs/train.sbatch"], check=False).returncode == 0


def test_commands_that_a_job_does_not_keep_are_listed(
    meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, 'module load cuda\nrsync -a /data/ "$TMPDIR"\necho starting\n')
    with (tmp_path / "train.sh").open("a") as script:
        script.write("wait\npython tools/convert.py --load /ckpt/run\n")
    answer = launched(meshwright, "launch", "train.sh", *LAUNCH, "--write", "jobs")
    assert """not kept: train.sh:8 rsync -a /data/ "$TMPDIR": it runs before the training; --setup 'rsync""" in answer
    assert "python tools/convert.py --load /ckpt/run: it runs after the training" in answer
    assert "echo starting" not in answer
    answer = launched(
        meshwright, "launch", "train.sh", "--gpus", "2x4xH100", "--scheduler", "torchrun", "--head", "node1",
        "--framework-dir", "/opt/Megatron-LM",
    )  # fmt: skip
    assert "not kept: train.sh:7 module load cuda: run it in the shell before the command" in answer


def test_setup_inside_the_command_of_the_training_is_kept(
    meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    inner = MEGATRON.removeprefix("srun ").rstrip()
    written(tmp_path, "", f"srun bash -c 'source ~/venv/bin/activate; ulimit -l unlimited; {inner}'\n")
    launched(meshwright, "launch", "train.sh", *LAUNCH, "--write", "jobs")
    text = (tmp_path / "jobs" / "train.sbatch").read_text()
    assert "\nsource ~/venv/bin/activate\nulimit -l unlimited\n" in text
