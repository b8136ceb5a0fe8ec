"""Checks of a colleague's scripts: launchers, model sizes and several errors at once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """#!/bin/bash
#SBATCH --nodes=24
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
export CUDA_DEVICE_MAX_CONNECTIONS=1
#ENV
srun torchrun --nproc_per_node 4 --nnodes 24 --rdzv-backend c10d --rdzv-endpoint $H:29500 \\
  pretrain_gpt.py --num-layers 40 --hidden-size 5120 --ffn-hidden-size 17408 --num-attention-heads 40 \\
  --group-query-attention --num-query-groups 8 --kv-channels 128 --qk-layernorm --seq-length 8192 \\
  --max-position-embeddings 8192 --position-embedding-type rope --rotary-base 1000000 --normalization RMSNorm \\
  --norm-epsilon 1e-6 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --vocab-size 151936 \\
  --attention-dropout 0 --hidden-dropout 0 --tensor-model-parallel-size 2 --context-parallel-size 2 \\
  --sequence-parallel --use-distributed-optimizer --micro-batch-size 1 --global-batch-size 384 --train-iters 19074 \\
  --lr 2e-5 --min-lr 2e-6 --lr-decay-style cosine --lr-warmup-iters 200 --weight-decay 0.1 --clip-grad 1.0 --bf16 \\
  --data-path /data/own_text_document --tokenizer-type HuggingFaceTokenizer --tokenizer-model Qwen/Qwen3-14B-Base \\
  --split 99,1,0 --load /ckpt/base --save /ckpt/cpt --save-interval 100 --finetune
"""
GPUS = ("--gpus", "24x4xA100-80")


def _check(meshwright: Any, tmp_path: Path, text: str, *words: str, name: str = "run.sh") -> dict[str, Any]:
    path = tmp_path / name
    path.write_text(text)
    found: dict[str, Any] = meshwright("check", str(path), *words, "--json").json
    return found


def _rules(answer: dict[str, Any]) -> list[tuple[str, str, int, list[str]]]:
    return [(one["rule"], one["severity"], one["line"], one["fix"]) for one in answer["findings"]]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("", "", []),
        ("_node 4", "_node 8", [("launch.gpus", "error", 7, ["torchrun --nproc-per-node 4"])]),
        ("--nodes=24", "--nodes=12", [("launch.nodes", "error", 2, ["#SBATCH --nodes=24"])]),
        ("--nnodes 24", "--nnodes $SLURM_NNODES", []),
        ("--nnodes 24", "--nnodes $NODES", []),
        ("--nodes=24\n", "--nodes=4-24\n", []),
        ("per-node=1\n", "per-node=4\n", [("launch.tasks", "error", 3, ["#SBATCH --ntasks-per-node=1"])]),
        ("srun torchrun", "srun --ntasks=24 torchrun", []),
        ("--gpus-per-node=4", "--gres=gpu:2", [("launch.gpus", "error", 7, ["#SBATCH --gres=gpu:4"])]),
        ("#ENV", "export NCCL_IB_DISABLE=1", [("launch.environment", "warning", 6, ["unset NCCL_IB_DISABLE"])]),
        ("#ENV", "export NCCL_SOCKET_IFNAME=lo", [("launch.environment", "warning", 6, ["unset NCCL_SOCKET_IFNAME"])]),
        ("#ENV", "export NCCL_SOCKET_IFNAME=ib0 NCCL_IB_DISABLE=0", []),
        (
            "--weight-decay",
            "--lr-decay-iters 5000 --weight-decay",
            [("learning_rate.decay-ends-early", "warning", 14, ["without --lr-decay-iters"])],
        ),
        ("--weight-decay", "--lr-decay-iters 15000 --weight-decay", []),
    ],
)
def test_a_script_that_contradicts_its_job_is_reported(
    meshwright: Any, tmp_path: Path, old: str, new: str, expected: list[Any]
) -> None:
    assert _rules(_check(meshwright, tmp_path, SCRIPT.replace(old, new) if old else SCRIPT, *GPUS)) == expected


RENDEZVOUS = "--rdzv-backend c10d --rdzv-endpoint $H:29500"
STATIC = "--master_addr $H --master_port 6000"
C10D = "torchrun --rdzv-backend=c10d --rdzv-endpoint=$H:6000"


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({}, C10D),
        ({"srun torchrun": "srun apptainer exec --nv t.sif python -m torch.distributed.run"}, C10D),
        ({"--nnodes 24": "--nnodes $SLURM_NNODES"}, C10D),
        ({STATIC: f"{STATIC} --node_rank 0"}, C10D),
        ({STATIC: f"{STATIC} --node_rank=$SLURM_NODEID"}, C10D),
        ({STATIC: "--rdzv_endpoint $H:6000 --rdzv_backend=static"}, "torchrun --rdzv-backend=c10d"),
        ({STATIC: f"{STATIC} $MORE"}, ""),
        ({STATIC: f"{STATIC} --node_rank $RANK_OF_NODE"}, ""),
        ({"#ENV": "export PET_RDZV_BACKEND=c10d"}, ""),
        ({"srun torchrun": "srun --nodes=1 -w $NODE torchrun"}, ""),
        ({"srun torchrun": "ft_launcher"}, ""),
        ({"srun torchrun": "srun ft_launcher"}, ""),
        ({"srun torchrun": "torchrun"}, ""),
        ({STATIC: f"{STATIC} --standalone"}, ""),
    ],
)
def test_nodes_that_srun_starts_with_one_rank_are_reported(
    meshwright: Any, tmp_path: Path, changes: dict[str, str], fix: str
) -> None:
    text = SCRIPT.replace(RENDEZVOUS, STATIC)
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    found = [one for one in _check(meshwright, tmp_path, text, *GPUS)["findings"] if one["rule"] == "launch.node-rank"]
    assert [(one["severity"], one["fix"]) for one in found] == ([("error", [fix])] if fix else [])


def test_more_processes_than_the_given_gpus_is_an_error(meshwright: Any, tmp_path: Path) -> None:
    text = SCRIPT.replace("#SBATCH --gpus-per-node=4\n", "")
    answer = _check(meshwright, tmp_path, text, "--gpus", "24x2xA100-80")
    assert ("launch.gpus", "error", 6, ["torchrun --nproc-per-node 2"]) in _rules(answer)
    fewer = _check(meshwright, tmp_path, text, "--gpus", "48x4xA100-80")
    assert not [one for one in _rules(fewer) if one[0].startswith("launch.")]
    assert any("has 192 GPUs" in note for note in fewer["notes"])


def test_a_long_run_without_checkpoints_is_reported(meshwright: Any, tmp_path: Path) -> None:
    unsaved = SCRIPT.replace("--save /ckpt/cpt --save-interval 100 ", "")
    (one,) = _check(meshwright, tmp_path, unsaved, *GPUS)["findings"]
    assert (one["rule"], one["severity"]) == ("saving.never", "warning")
    assert one["fix"][0].startswith("--save checkpoints --save-interval ")
    assert not _check(meshwright, tmp_path, unsaved.replace("-iters 19074", "-iters 900"), *GPUS)["findings"]


@pytest.mark.parametrize(
    ("old", "new", "fix"),
    [
        ("--rotary-base 1000000", "--rotary-base 10000", "--rotary-base 1000000"),
        ("size 17408", "size 17480", "--ffn-hidden-size 17408"),
        ("--num-layers 40", "--num-layers 39", "--num-layers 40"),
    ],
)
def test_a_model_that_differs_from_the_named_one_is_reported(
    meshwright: Any, tmp_path: Path, old: str, new: str, fix: str
) -> None:
    text = SCRIPT.replace(old, new)
    (given,) = _check(meshwright, tmp_path, text, *GPUS, "--model", "Qwen3-14B")["findings"]
    assert (given["rule"], given["severity"], given["fix"]) == ("model.differs", "warning", [fix])
    assert "differs from qwen3_14b" in given["message"]
    assert given["line"] > 7
    (named,) = _check(meshwright, tmp_path, text, *GPUS)["findings"]
    assert (named["rule"], named["severity"], named["fix"]) == ("model.differs-from-name", "advice", [fix])


def test_a_small_model_with_the_tokenizer_of_another_is_no_finding(meshwright: Any, tmp_path: Path) -> None:
    sizes = {"layers 40": "layers 12", "size 5120": "size 768", "size 17408": "size 3072", "heads 40": "heads 16"}
    text = SCRIPT
    for old, new in sizes.items():
        text = text.replace(old, new)
    assert not [one for one in _rules(_check(meshwright, tmp_path, text, *GPUS)) if one[0].startswith("model.")]


TOML = """
[job]
dump_folder = "./outputs"
[model]
name = "llama3"
flavor = "8B"
converters = ["float8"]
hf_assets_path = "./assets/hf/Llama-3.1-8B"
[optimizer]
name = "AdamW"
lr = 3e-4
[lr_scheduler]
warmup_steps = 500
[training]
local_batch_size = 4
global_batch_size = 500
seq_len = 32768
steps = 14306
dataset = "c4"
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
context_parallel_degree = 5
[checkpoint]
enable = true
[activation_checkpoint]
mode = "full"
[float8]
enable_fsdp_float8_all_gather = true
"""


def _pasted(text: str, settings: list[str]) -> str:
    """Return the TOML file with the settings of a repair."""
    tables: dict[str, dict[str, str]] = {}
    for line in text.splitlines():
        if line.startswith("["):
            table = tables.setdefault(line.strip("[]"), {})
        elif line:
            key, _, value = line.partition(" = ")
            table[key] = value
    for one in settings:
        if one.startswith("without "):
            name, _, key = one.removeprefix("without ").rpartition(".")
            tables.pop(one.removeprefix("without "), None)
            tables.get(name, {}).pop(key, None)
        else:
            path, _, value = one.partition(" = ")
            name, _, key = path.rpartition(".")
            tables.setdefault(name, {})[key] = value
    return "\n".join(f"[{name}]\n" + "\n".join(f"{k} = {v}" for k, v in t.items()) for name, t in tables.items())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"context_parallel_degree = 5": "context_parallel_degree = 3", '"full"': '"ful"'},
        {'"AdamW"': '"Adamw"', "seq_len = 32768": "seq_len = 4097", "degree = 8": "degree = 5"},
    ],
)
def test_the_repair_of_several_errors_leaves_none(meshwright: Any, tmp_path: Path, changes: dict[str, str]) -> None:
    text = TOML
    for old, new in changes.items():
        text = text.replace(old, new)
    answer = _check(meshwright, tmp_path, text, *GPUS, name="run.toml")
    errors = [one for one in answer["findings"] if one["severity"] == "error"]
    assert len(errors) >= 4
    assert all(one["fix"] for one in errors)
    after = _check(meshwright, tmp_path, _pasted(text, answer["repair"]["overrides"]), *GPUS, name="run.toml")
    assert not [one for one in after["findings"] if one["severity"] == "error"]


def test_the_repair_of_a_script_leaves_no_error(meshwright: Any, tmp_path: Path) -> None:
    text = SCRIPT.replace("--nodes=24", "--nodes=12").replace("size 384", "size 7")
    text = text.replace("--bf16", "--bf16 --recompute-granularity fulll --lr-decay-style cosin")
    repair = _check(meshwright, tmp_path, text, *GPUS)["repair"]["overrides"]
    assert "#SBATCH --nodes=24" in repair
    assert "--lr-decay-style cosine" in repair
    assert not [one for one in repair if one.startswith(("layout.", "recompute."))]
    for one in repair:
        text = text.replace("--nodes=12", "--nodes=24") if one.startswith("#") else text
    flags = [one for one in repair if one.startswith("--")]
    removed = [one.removeprefix("without ") for one in repair if one.startswith("without ")]
    for one in removed:
        text = re.sub(rf"{one}( [^-\s]\S*)?", "", text)
    after = _check(meshwright, tmp_path, text.rstrip() + " " + " ".join(flags) + "\n", *GPUS)
    assert not [one for one in after["findings"] if one["severity"] == "error"]
