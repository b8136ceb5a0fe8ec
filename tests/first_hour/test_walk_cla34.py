"""A lab with 24 nodes of H200 plans, checks and launches its own 34B model."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from pathlib import Path

import pytest

from meshwright.cli.run import run as run_command
from meshwright.planner.deadline import MAX_REFINED_COUNTS, refine_deadline

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 7168,
    "intermediate_size": 20480,
    "num_attention_heads": 56,
    "num_key_value_heads": 8,
    "num_hidden_layers": 56,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-05,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
CLUSTER = """name = "lab"
gpu = "H200"
nodes = 24
gpus_per_node = 8
network_gb_s_per_node = "3200 Gb/s"
"""
SCRIPT = """#!/bin/bash
#SBATCH --nodes=4
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=1
MORE
export CUDA_DEVICE_MAX_CONNECTIONS=1
MOUNTS=/lustre:/lustre,PLACES
srun --container-image=/lustre/images/train.sqsh --container-mounts=$MOUNTS torchrun --nnodes 4 --nproc-per-node 8 \\
  pretrain_gpt.py --use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 \\
  --num-attention-heads 32 --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm \\
  --disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights \\
  --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer --bf16 --seq-length 4096 \\
  --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 64 --train-iters 1000 --lr 3e-4 \\
  --tokenizer-type NullTokenizer --vocab-size 128256 --mock-data --save /lustre/ckpt --load /lustre/ckpt \\
  --save-interval 100 FLAGS
"""


def printed(*words: str) -> str:
    """Return what a command prints, errors included."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), contextlib.suppress(SystemExit):
        run_command(list(words))
    return out.getvalue()


def script(path: Path, places: str = "/a:/b", more: str = "", flags: str = "--log-interval 10") -> Path:
    """Write a user's batch script."""
    text = SCRIPT.replace("PLACES", places).replace("MORE", more).replace("FLAGS", flags)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with the lab's model and cluster."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab34b").mkdir()
    (tmp_path / "lab34b" / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    (tmp_path / "lab.toml").write_text(CLUSTER, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(("tokens", "days", "most"), [("1.5T", "46", 144), ("1.5T", "46", 150), ("1.2T", "38", 192)])
def test_size_finds_the_smallest_count_in_time_between_its_coarse_counts(tokens: str, days: str, most: int) -> None:
    words = ("lab34b", "--goal", "pretrain", "--gpus", "lab.toml", "--seq", "8k", "--tokens", tokens, "--days", days)
    answer = json.loads(printed("size", *words, "train.global_batch_size=576", "--max-gpus", str(most), "--json"))
    assert answer["in_time"]["gpus"] == 144
    assert answer["in_time"]["nodes"] == "18x8"
    assert max(answer["tried"]) == most // 8 * 8


def test_refining_a_deadline_tries_few_counts_and_those_that_divide_the_batch_first() -> None:
    asked: list[int] = []

    def days_on(count: int) -> float:
        asked.append(count)
        return 10_000 / count

    coarse = {count: 10_000 / count for count in (512, 1024, 2048)}
    tried = refine_deadline(coarse, 8.0, 8, 4096, 4096, days_on)
    assert len(tried) <= MAX_REFINED_COUNTS
    assert min(count for count in tried if 10_000 / count <= 8.0) <= 1280
    assert refine_deadline({}, 8.0, 8, 4096, 4096, days_on) == []


@pytest.mark.parametrize(
    ("place", "written"),
    [
        ("$PWD:/workspace", "${SLURM_SUBMIT_DIR:-$PWD}:/workspace"),
        ("$(pwd):/workspace", "${SLURM_SUBMIT_DIR:-$PWD}:/workspace"),
        ("${HOME}/.cache:/root/.cache:ro", "${HOME}/.cache:/root/.cache:ro"),
        ("/scratch/$USER", "/scratch/$USER:/scratch/$USER"),
        ("/data", "/data:/data"),
    ],
)
def test_launch_takes_the_mounts_that_it_advises(here: Path, place: str, written: str) -> None:
    script(here / "job.sbatch", place)
    words = ("launch", "job.sbatch", "--scheduler", "slurm", "--gpus", "4x8xH200")
    advice = re.search(r"container; (--image .*) keeps the container", printed(*words))
    assert advice is not None
    answer = printed(*words, *shlex.split(advice[1]))
    assert f"/lustre:/lustre,{written}" in answer
    assert "error:" not in answer


def test_a_mount_with_a_variable_is_refused_where_no_shell_expands_it(here: Path) -> None:
    script(here / "job.sbatch")
    words = ("job.sbatch", "--scheduler", "kubernetes", "--gpus", "4x8xH200", "--image", "a/b")
    assert "only a SLURM job expands" in printed("launch", *words, "--mount", "$PWD:/workspace")
