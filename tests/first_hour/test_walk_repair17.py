"""What a cluster engineer did with scripts and logs of 13B and 70B runs: repair, dry-run, compare, diagnose."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from tests.first_hour.test_walk_repair16 import pasted

MEGATRON = (
    "#!/bin/bash\n{env}torchrun --nproc_per_node 8 --nnodes 16 pretrain_gpt.py --seq-length {seq} "
    "--max-position-embeddings {seq} --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights --global-batch-size 1000 --train-iters 1000 --lr 3e-4 "
    "--min-lr 3e-5 --bf16 --use-distributed-optimizer --sequence-parallel --tokenizer-type HuggingFaceTokenizer "
    "--tokenizer-model /d/tok --data-path /d/c4 --attention-dropout 0 --hidden-dropout 0 {more}\n"
)
LLAMA_13B = (
    "--num-layers 40 --hidden-size 5120 --num-attention-heads 40 --ffn-hidden-size 13824 --vocab-size 32000 "
    "--recompute-activations"
)
LLAMA_8B = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8 "
    "--ffn-hidden-size 14336 --vocab-size 128256 --rotary-base 500000"
)
CONNECTIONS = "export CUDA_DEVICE_MAX_CONNECTIONS=1\n"
DEGREES = "--tensor-model-parallel-size {} --pipeline-model-parallel-size {} --micro-batch-size {}"
VIRTUAL = "--num-layers-per-virtual-pipeline-stage"
SCRIPTS = {  # script, and the step time of a repair that keeps the batch
    "p1000.sh": (CONNECTIONS, 4096, f"{LLAMA_13B} {DEGREES.format(4, 4, 2)} {VIRTUAL} 2", 7.5),
    "one_error.sh": (CONNECTIONS, 4096, f"{LLAMA_13B} {DEGREES.format(2, 2, 1)}", 7.0),
    "s70.sh": ("", 8192, f"{LLAMA_8B} {DEGREES.format(2, 2, 1)} {VIRTUAL} 4", 9.0),
}


def test_the_repair_of_a_script_is_a_fast_one_and_offers_a_batch_that_divides(
    meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    gpus = ("--gpus", "16x8xH100")
    for name, (env, seq, more, longest) in SCRIPTS.items():
        script = MEGATRON.format(env=env, seq=seq, more=more)
        Path(name).write_text(script)
        found = meshwright("check", name, *gpus, "--json").json
        repair = found["repair"]
        assert repair["step_s"] < longest, (name, repair)
        assert not repair["contract"], name
        assert any("--global-batch-size 1024" in note for note in found["notes"]), (name, found["notes"])
        Path(name).write_text(pasted(script, repair["overrides"]))
        after = meshwright("check", name, *gpus, "--json").json
        assert after["ok"], (name, repair, after["findings"])
        assert after["estimate"]["step_s"] == pytest.approx(repair["step_s"]), name


def test_a_repair_that_is_much_slower_than_another_layout_says_so_with_the_command(meshwright: Any) -> None:
    words = (
        "llama3_8b_pretrain_config",
        "--gpus",
        "16x8xH100",
        "layout.recompute=full",
        "train.global_batch_size=1000",
    )
    found = meshwright("check", *words, "layout.tp=8", "layout.pp=3", "--json").json
    note = next(one for one in found["notes"] if "as long per step as the fastest layout" in one)
    command = shlex.split(note.rpartition(": meshwright ")[2])
    assert "train.global_batch_size=1000" in command
    planned = meshwright(*command, "--json").json
    assert planned["estimate"]["step_s"] < found["repair"]["step_s"] / 1.3
