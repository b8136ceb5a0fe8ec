"""--goal cpt with another framework's file: the file names the weights that the training starts from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

MEGATRON = """export CUDA_DEVICE_MAX_CONNECTIONS=1
torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 \\
  --num-attention-heads 32 --group-query-attention --num-query-groups 8 --seq-length 8192 --swiglu --bf16 \\
  --max-position-embeddings 8192 --position-embedding-type rope --rotary-base 500000 --normalization RMSNorm \\
  --disable-bias-linear --untie-embeddings-and-output-weights --tensor-model-parallel-size 2 --sequence-parallel \\
  --micro-batch-size 1 --global-batch-size 128 --train-iters 5000 --lr 3e-5 --use-distributed-optimizer \\
  --tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Meta-Llama-3-8B --data-path /data/text \\
  --save /ckpt/out --load /ckpt/out --save-interval 100 {weights}
"""
TITAN = """[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/hf/Llama-3.1-8B"
[training]
local_batch_size = 1
global_batch_size = 64
seq_len = 8192
steps = 1000
[checkpoint]
enable = true
initial_load_in_hf = true
initial_load_path = "/models/llama"
"""
CLM = """torchrun --nproc_per_node 8 run_clm.py --model_name_or_path Qwen/Qwen3-8B --train_file /data/train.jsonl \\
  --block_size 4096 --per_device_train_batch_size 1 --max_steps 1000 --bf16 --gradient_checkpointing --fsdp full_shard
"""


def written(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


@pytest.mark.parametrize(
    ("name", "text"),
    [("run.sh", MEGATRON.format(weights="--pretrained-checkpoint /ckpt/llama")), ("titan.toml", TITAN)],
)
@pytest.mark.parametrize("goal", ["cpt", "continued pretraining"])
def test_a_file_that_names_its_weights_keeps_them(
    meshwright: Any, tmp_path: Path, name: str, text: str, goal: str
) -> None:
    typed = (written(tmp_path, name, text), "--gpus", "8xH100", "--goal", goal, "--json")
    assert meshwright("recommend", *typed).json["recipe"]["goal"] == "pretrain"
    assert meshwright("check", *typed).code == 0


def test_a_file_without_weights_still_needs_them(meshwright: Any, tmp_path: Path) -> None:
    file = written(tmp_path, "run.sh", MEGATRON.format(weights=""))
    assert "needs the weights to start from" in meshwright("recommend", file, "--gpus", "8xH100", "--goal", "cpt").err


@pytest.mark.parametrize("goal", ["pretrain", "cpt"])
def test_run_clm_on_plain_text_is_continued_pretraining(meshwright: Any, tmp_path: Path, goal: str) -> None:
    typed = (written(tmp_path, "run.sh", CLM), "--gpus", "8xH100", "--goal", goal, "--json")
    answer = meshwright("check", *typed)
    assert any("trains all tokens of its texts from existing weights" in one for one in answer.json["notes"])
    assert meshwright("recommend", *typed).code == 0


def test_the_card_that_was_taken_for_a_name_of_several_is_stated(meshwright: Any, tmp_path: Path) -> None:
    job = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --gres=gpu:{gpu}:4\n"
    text = MEGATRON.format(weights="").replace("--nproc_per_node 8", "--nnodes 2 --nproc_per_node 4")
    file = written(tmp_path, "job.sh", job.format(gpu="a100") + text)
    means = "A100 means the SXM4 card with 80 GB"
    assert any(means in one for one in meshwright("check", file, "--json").json["notes"])
    assert means in meshwright("estimate", file).out
    assert means not in meshwright("check", file, "--gpus", "2x4xA100-40").out
    file = written(tmp_path, "job.sh", job.format(gpu="h100") + text)
    assert "means the" not in meshwright("check", file).out
