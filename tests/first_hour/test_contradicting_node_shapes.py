"""A job file that requests 8 GPUs per node, checked for nodes of 4: one of the two is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

JOB = """#!/bin/bash
#SBATCH --nodes=24
#SBATCH --gres=gpu:8
srun torchrun --nnodes 24 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint $H:29500 pretrain_gpt.py \\
  --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 \\
  --micro-batch-size 1 --global-batch-size 192 --train-iters 1000 --lr 1e-4 --bf16 --tokenizer-type NullTokenizer \\
  --vocab-size 32000 --mock-data --tensor-model-parallel-size 4
"""


def launches(answer: dict[str, Any]) -> list[tuple[str, str]]:
    return [(one["rule"], one["severity"]) for one in answer["findings"] if one["rule"].startswith("launch.")]


def test_nodes_of_another_size_than_the_job_requests_are_an_error_that_names_both(meshwright: Any) -> None:
    Path("job.sbatch").write_text(JOB)
    shown = meshwright("check", "job.sbatch", "--gpus", "24x4xA100-40", "--json").json
    assert launches(shown) == [("launch.gpus", "error")]
    found = next(one for one in shown["findings"] if one["rule"] == "launch.gpus")
    assert "--gres=gpu:8 requests 8 GPUs per node" in found["message"]
    assert "24x4xA100-40 has 4 GPUs" in found["message"]
    Path("job.sbatch").write_text(JOB.replace("gres=gpu:8", found["fix"][0].partition("--")[2]))
    assert not launches(meshwright("check", "job.sbatch", "--gpus", "24x4xA100-40", "--json").json)


def test_a_type_alone_contradicts_no_node(meshwright: Any) -> None:
    Path("job.sbatch").write_text(JOB)
    shown = meshwright("check", "job.sbatch", "--gpus", "A100-40", "--json").json
    assert launches(shown) == [("launch.idle", "warning")]
