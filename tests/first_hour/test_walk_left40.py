"""Commands agree on repairs; values, GPUs and options that people type are understood or refused with the right fix."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

MEGATRON = """torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 \\
 --ffn-hidden-size 14336 --swiglu --group-query-attention --num-query-groups 8 --seq-length 8192 \\
 --max-position-embeddings 8192 --position-embedding-type rope --normalization RMSNorm --vocab-size 128256 \\
 --untie-embeddings-and-output-weights --micro-batch-size 1 --global-batch-size 127 --sequence-parallel \\
 --tensor-model-parallel-size 3 --bf16 --train-iters 1000 --lr 3e-4 --mock-data --tokenizer-type NullTokenizer
"""
TITAN = """[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
global_batch_size = 127
seq_len = 8192
steps = 1000
[optimizer]
lr = 3e-4
[parallelism]
tensor_parallel_degree = 3
"""
ACCELERATE = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
mixed_precision: bf16
num_machines: 1
num_processes: 8
parallelism_config:
  parallelism_config_tp_size: 3
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "text", "options"),
    [
        ("m.sh", MEGATRON, ()),
        ("t.toml", TITAN, ()),
        ("acc.yaml", ACCELERATE, ("--model", "llama3-8b", "--goal", "pretrain", "train.steps=1000")),
    ],
)
def test_launch_prints_the_repair_of_check(
    meshwright: Any, here: Path, name: str, text: str, options: tuple[str, ...]
) -> None:
    (here / name).write_text(text)
    on = (name, "--gpus", "8xH100", *options)
    repair = meshwright("check", *on, "--json").json["repair"]["overrides"]
    refused = meshwright("launch", *on, "--scheduler", "torchrun").err
    assert f"in {name}: {'  '.join(repair)}" in refused
    fix = refused.rpartition("fix:")[2].strip()
    if not fix.startswith("in "):
        assert meshwright("launch", *on, "--scheduler", "torchrun", *shlex.split(fix)).code == 0
