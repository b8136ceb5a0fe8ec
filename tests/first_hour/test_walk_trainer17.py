"""Command lines of the Hugging Face Trainer: length, warmup, schedule and data are read, none is lost silently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

MEGATRON = """torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 \\
  --ffn-hidden-size 11008 --swiglu --group-query-attention --num-query-groups 32 --normalization RMSNorm \\
  --position-embedding-type rope --untie-embeddings-and-output-weights --disable-bias-linear --seq-length 4096 \\
  --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 64 --train-iters 100 --lr 1e-4 --bf16 \\
  --tokenizer-type HuggingFaceTokenizer --tokenizer-model /lustre/tok --vocab-size 32000 \\
  --data-path 0.7 /lustre/c4 0.3 /lustre/code --split 99,1,0
"""
TITAN = """[model]
name = "llama3"
flavor = "70B"
[optimizer]
lr = 1.5e-4
[training]
local_batch_size = 8
global_batch_size = 512
seq_len = 8192
steps = 1000
dataset = "c4"
[parallelism]
tensor_parallel_degree = 8
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "Interleaved1F1B"
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_typed_dataset_replaces_the_blend_of_a_file(meshwright: Any) -> None:
    Path("pretrain.sh").write_text(MEGATRON)
    run = meshwright("recommend", "pretrain.sh", "--gpus", "8xH100", "--json").json["commands"]["meshwright"]
    assert "--dataset" not in run  # the file's blend is what trains
    kept = meshwright("import", "pretrain.sh", "--gpus", "8xH100").out
    assert "c4" in kept
    typed = meshwright("import", "pretrain.sh", "--gpus", "8xH100", "data.dataset=mock").out
    assert "c4" not in typed
    words = ("train", "pretrain.sh", "--dataset", "mock", "--tiny", "train.steps=1", "--out", "run")
    assert meshwright(*words).code == 0


def test_another_engine_gets_the_unequal_stages_of_torchtitan(meshwright: Any) -> None:
    Path("titan.toml").write_text(TITAN)
    assert meshwright("check", "titan.toml", "--gpus", "16x8xH100").code == 0
    read = meshwright("import", "titan.toml", "--gpus", "16x8xH100", "--out", "ours.toml")
    assert "stage_layers = [10, 11, 10, 10, 10, 10, 10, 9]" in Path("ours.toml").read_text()
    assert "layout.stage_layers=[10,11,10,10,10,10,10,9]: as torchtitan splits the layers" in read.out + read.err
    assert "even-split" not in meshwright("check", "ours.toml").out


def test_the_fix_of_a_mount_names_the_typed_path(meshwright: Any) -> None:
    words = ("launch", "llama3_8b_pretrain_config", "--scheduler", "slurm", "--gpus", "8xH100", "--image", "x.sqsh")
    assert "--mount /lustre:/lustre" in meshwright(*words, "--mount", "/lustre", "--write", "jobs").err
