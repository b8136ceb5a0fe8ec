"""Repairs of launch scripts, pasted into them and checked again."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

BRIDGE = "torchrun --nproc-per-node=8 {nodes} scripts/training/run_recipe.py --recipe {recipe} \\\n {rest}\n"
QWEN = {"nodes": "--nnodes=8", "recipe": "qwen3_235b_a22b_sft_config"}
BRIDGE_FILES = {
    "bridge.sh": (
        BRIDGE.format(
            **QWEN,
            rest="--dataset squad model.tensor_model_parallel_size=4 model.pipeline_model_parallel_size=8 "
            "model.expert_model_parallel_size=16 train.global_batch_size=32 train.micro_batch_size=2 \\\n "
            "model.sequence_parallel=false optimizer.learning_rate=5e-6 dataset.seq_length=2048 +model.magic=1",
        ),
        "8x8xH200",
    ),
    "b3.sh": (
        BRIDGE.format(
            nodes="",
            recipe="llama3_8b_pretrain_config",
            rest="--dataset llm-pretrain-mock model.tensor_model_parallel_size=2 training.global_batch_size=64 "
            "model.sequence_paralel=true model.nothing_like_it=3",
        ),
        "8xH200",
    ),
    "b5.sh": (
        BRIDGE.format(
            **QWEN,
            rest="--dataset squad checkpoint.pretrained_checkpoint=/ckpt/q model.sequence_parallel=false "
            "train.micro_batch_size=2",
        ),
        "8x8xH200",
    ),
}


def pasted(script: str, repair: list[str]) -> str:
    """The script as a user edits it: keys removed in the spelling of the file, others appended."""
    for text in repair:
        if text.startswith("without "):
            removed = re.escape(text.removeprefix("without "))
            script, count = re.subn(rf" {removed}(=\S+| [^-\s]\S*)?(?=\s)", "", script)
            assert count, text
        elif text.startswith("export "):
            script = f"{text}\n{script}"
        else:
            key = re.escape(re.split("[= ]", text)[0])
            script = re.sub(rf" {key}[= ]\S+", "", script).rstrip("\n") + f" {text}\n"
    return script


def test_a_repair_of_a_bridge_command_pasted_into_it_leaves_no_error(
    meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, (script, gpus) in BRIDGE_FILES.items():
        Path(name).write_text(script)
        first = meshwright("check", name, "--gpus", gpus, "--json").json
        repair = first["repair"]
        for finding in first["findings"]:  # the fix of a finding is about it
            if finding["severity"] == "error" and len(finding["fix"]) < len(repair["overrides"]):
                replaced = [f"without {finding['field']}"] if finding["rule"] == "key.unknown" else []
                fix = [*finding["fix"], *(one for one in replaced if one not in finding["fix"])]
                Path("one.sh").write_text(pasted(script, fix))
                after = meshwright("check", "one.sh", "--gpus", gpus, "--json").json["findings"]
                assert (finding["rule"], finding["field"]) not in {(f["rule"], f["field"]) for f in after}, finding
        Path(name).write_text(pasted(script, repair["overrides"]))
        after = meshwright("check", name, "--gpus", gpus, "--json").json
        assert after["ok"], (name, repair, after["findings"])
        assert after["estimate"]["step_s"] == pytest.approx(repair["step_s"]), name


MEGATRON = """#!/bin/bash
#SBATCH --nodes={nodes}
#SBATCH --gpus-per-node=4
#SBATCH --ntasks-per-node=1
export CUDA_DEVICE_MAX_CONNECTIONS=1
ARGS="
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192
    --position-embedding-type rope --rotary-base 500000 --swiglu --normalization RMSNorm --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --micro-batch-size 1 --global-batch-size {batch} --train-iters 1000 --eval-iters 1 --lr 3e-4 --lr-decay-style cosine
    --bf16 --use-distributed-optimizer --sequence-parallel
    --tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} {more}
    --data-path /data/x --tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Meta-Llama-3-8B
"
srun torchrun --nproc_per_node 4 --nnodes $SLURM_NNODES --rdzv_backend c10d --rdzv_endpoint $HOST pretrain_gpt.py $ARGS
"""
STEP = (
    " [2026-11-10 12:00:10] iteration {step:8d}/    1000 | elapsed time per iteration (ms): 9000.0 | learning rate: "
    "3.0E-04 | global batch size:   128 | lm loss: 5.0E+00 | loss scale: 1.0 | grad norm: 0.9 |\n"
)
WORLD = "using world size: 48, data-parallel{} 12, "
LAYOUT_LINES = (  # of Megatron-LM from 2021 to today
    WORLD.format("-size:") + "tensor-model-parallel size: 2, pipeline-model-parallel size: 2 ",
    WORLD.format(" size:") + "context-parallel size: 1 tensor-model-parallel size: 2, pipeline-model-parallel size: 2 ",
    WORLD.format(" size:") + "context-parallel size: 1, hierarchical context-parallel sizes: Nonetensor-model-parallel "
    "size: 2, encoder-tensor-model-parallel size: 4, pipeline-model-parallel size: 2, "
    "encoder-pipeline-model-parallel size: 0",
    WORLD.format(" size:") + "context-parallel size: 1, hierarchical context-parallel sizes: None, "
    "tensor-model-parallel size: 2, pipeline-model-parallel size: 2",
)


def test_doctor_reads_the_layout_that_megatron_prints_and_compares_it_with_the_file(
    meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mega.sbatch").write_text(MEGATRON.format(nodes=12, tp=4, pp=4, batch=120, more=""))
    Path("same.sbatch").write_text(MEGATRON.format(nodes=12, tp=2, pp=2, batch=128, more=""))
    steps = "".join(STEP.format(step=step) for step in range(10, 200, 10))
    for line in LAYOUT_LINES:
        Path("mega.log").write_text(f"{line}\n{steps}")
        found = meshwright("doctor", "mega.log", "--recipe", "mega.sbatch", "--gpus", "12x4xA100-80")
        assert "does not state the layout" not in found.out, line
        text = "tp=2, pp=2, global_batch_size=128 in the log, tp=4, pp=4, global_batch_size=120 in mega.sbatch"
        assert f"the log contradicts mega.sbatch: {text}" in found.out, line
    same = meshwright("doctor", "mega.log", "--recipe", "same.sbatch", "--gpus", "12x4xA100-80")
    assert "contradicts" not in same.out
    other = meshwright("doctor", "mega.log", "--recipe", "same.sbatch", "--gpus", "6x4xA100-80")
    assert (other.code, "the log is from 48 GPUs" in other.err) == (2, True)


def test_a_repair_is_printed_without_quotes_for_a_string_and_literal_quotes_are_reported(
    meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    gpus = ("--gpus", "12x4xA100-80")
    script = MEGATRON.format(nodes=12, tp=4, pp=6, batch=120, more="")
    array = script.replace('ARGS="', "ARGS=(").replace('3-8B\n"', "3-8B\n)").replace("$ARGS", '"${ARGS[@]}"')
    layouts = {}
    for name, text in (("string", script), ("array", array)):
        Path(f"{name}.sbatch").write_text(text)
        found = meshwright("check", f"{name}.sbatch", *gpus, "--json").json
        fixes = [fix for one in found["findings"] for fix in one["fix"]]
        layouts[name] = next(one for one in fixes if one.startswith("--pipeline-model-parallel-layout"))
    assert layouts["array"] == layouts["string"].replace(" ", " '") + "'"
    for written, codes in ((layouts["string"], ("ok", "error")), (layouts["array"], ("error", "ok"))):
        more = MEGATRON.format(nodes=12, tp=4, pp=6, batch=120, more=written)
        Path("string.sbatch").write_text(more)
        Path("array.sbatch").write_text(
            more.replace('ARGS="', "ARGS=(").replace('3-8B\n"', "3-8B\n)").replace("$ARGS", '"${ARGS[@]}"')
        )
        for name, code in zip(("string", "array"), codes, strict=True):
            if name == "array" and code == "error":  # a bar without quotes is a pipe
                continue
            found = meshwright("check", f"{name}.sbatch", *gpus)
            assert (found.code == 0) == (code == "ok"), found.out
            assert ("launch.literal-quotes" in found.out) == (code == "error"), found.out
            assert code == "ok" or f"fix: {layouts['string']}" in found.out


def test_a_node_rank_that_the_batch_script_expands_is_reported(
    meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    gpus = ("--gpus", "12x4xA100-80")
    rendezvous = "--rdzv_backend c10d --rdzv_endpoint $HOST"
    ranked = "--node_rank $SLURM_NODEID --master_addr $HOST --master_port 6000"
    script = "HOST=$(hostname)\n".join(MEGATRON.format(nodes=12, tp=4, pp=4, batch=120, more="").split("export ", 1))
    right = script.replace("HOST=$(hostname)\n", "HOST=$(hostname)\nexport ")
    wrong = right.replace(rendezvous, ranked)
    inner = wrong.replace("srun torchrun", "srun bash -c 'torchrun").replace("$ARGS\n", '\'"$ARGS"\n')
    for text, reported in ((right, False), (wrong, True), (inner, False)):
        Path("mega.sbatch").write_text(text)
        found = meshwright("check", "mega.sbatch", *gpus)
        assert ("all 12 nodes get rank 0" in found.out) == reported, found.out
        assert reported == ("fix: torchrun --rdzv-backend=c10d --rdzv-endpoint=$(hostname):6000" in found.out)
