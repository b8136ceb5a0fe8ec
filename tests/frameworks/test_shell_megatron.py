"""Realistic launch scripts: every value with its line."""

from __future__ import annotations

import time

from meshwright.frameworks.shell import LaunchCommand, find_launches, read_script
from meshwright.frameworks.types import SourcedValue

ARRAYS = """\
#!/bin/bash
# Pretrains a 7B model.
export CUDA_DEVICE_MAX_CONNECTIONS=1

GPUS_PER_NODE=8
NUM_NODES=${NUM_NODES:-2}
NODE_RANK=$SLURM_NODEID
WORLD_SIZE=$(($GPUS_PER_NODE * $NUM_NODES))
TP=2
PP=4

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --node_rank "$NODE_RANK"
    --master_addr $(hostname)
)
GPT_MODEL_ARGS=(
    --num-layers 32   # one per stage and chunk
    --hidden-size 4096
    # --num-attention-heads 16
    --num-attention-heads 32
    --seq-length 4096
)
MODEL_PARALLEL_ARGS=(
	--tensor-model-parallel-size ${TP}
	--pipeline-model-parallel-size $PP
)
if [ $TP -gt 1 ]; then
    MODEL_PARALLEL_ARGS+=(--sequence-parallel)
fi
if [[ "$USE_FP8" == "1" ]]; then
    MODEL_PARALLEL_ARGS+=(--fp8-format hybrid)
fi

torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py \\
    "${GPT_MODEL_ARGS[@]}" \\
    ${MODEL_PARALLEL_ARGS[@]} \\
    --global-batch-size $((WORLD_SIZE / (TP * PP) * 16)) \\
    --save "$1"
"""

STRINGS = """\
#!/bin/bash
GPUS_PER_NODE=4
DISTRIBUTED_ARGS="
    --nproc_per_node $GPUS_PER_NODE \\
    --nnodes 1 \\
    --master_port 6000
"

GPT_ARGS="
    --num-layers 24 \\
    --hidden-size 1024 \\

    --micro-batch-size 8
    --lr 0.00015 --bf16
"
DATA_ARGS="--data-path $DATA_PATH \\
    --split 949,50,1"

CUDA_VISIBLE_DEVICES=0,1,2,3 python -m torch.distributed.launch $DISTRIBUTED_ARGS pretrain_gpt.py \\
    $GPT_ARGS $DATA_ARGS \\
    --distributed-backend nccl
"""

SLURM = """\
#!/bin/bash
#SBATCH --job-name=llama
#SBATCH -N 4
#SBATCH --ntasks-per-node 1
#SBATCH --gres=gpu:h100:8
#SBATCH -t 24:00:00 -p gpu  # one day
##SBATCH --qos=high
#SBATCH --exclusive
set -euo pipefail
module load cuda/12.4
MASTER=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=1 --container-image=nvcr.io/x:25.01 \\
    bash -c "
    cd /workspace
    torchrun --nnodes=$SLURM_NNODES --nproc-per-node=$SLURM_GPUS_ON_NODE \\
        --rdzv-endpoint=$MASTER:29500 -m torchtitan.train \\
        --training.steps 100
"
#SBATCH --mem=0
"""

TORCHTITAN = """\
#!/usr/bin/bash
set -ex
# use envs as local overrides
NGPU=${NGPU:-"8"}
export LOG_RANK=${LOG_RANK:-0}
MODULE=${MODULE:-"llama3"}
CONFIG=${CONFIG:-llama3_debugmodel}
TRAIN_FILE=${TRAIN_FILE:-"torchtitan.train"}
if [ -n "${COMM_MODE:-}" ]; then
    echo "comm mode"
    python3 -m ${TRAIN_FILE} --module ${MODULE} --comm.mode=${COMM_MODE}
else
    PYTORCH_ALLOC_CONF="expandable_segments:True" \\
    torchrun --nproc_per_node=${NGPU} --rdzv_backend c10d --rdzv_endpoint="localhost:0" \\
    --local-ranks-filter ${LOG_RANK} --role rank --tee 3 \\
    -m ${TRAIN_FILE} --module ${MODULE} --config ${CONFIG} "$@"
fi
"""


def only(text: str) -> LaunchCommand:
    found = find_launches(read_script(text, "run.sh"))
    assert len(found) == 1
    return found[0]


def pairs(words: tuple[SourcedValue, ...]) -> list[tuple[object, int]]:
    return [(word.value, word.line) for word in words]


def test_megatron_with_arrays() -> None:
    run = only(ARRAYS)
    assert (run.launcher, run.program.value, run.is_module) == ("torchrun", "pretrain_gpt.py", False)
    assert pairs(run.args) == [
        ("--num-layers", 19),
        ("32", 19),
        ("--hidden-size", 20),
        ("4096", 20),
        ("--num-attention-heads", 22),
        ("32", 22),
        ("--seq-length", 23),
        ("4096", 23),
        ("--tensor-model-parallel-size", 26),
        ("2", 9),
        ("--pipeline-model-parallel-size", 27),
        ("4", 10),
        ("--sequence-parallel", 30),
        ("--global-batch-size", 39),
        ("32", 39),
        ("--save", 40),
        ("$1", 40),
    ]
    assert run.args[-1].unresolved == "the arguments of the script are unknown"
    assert run.nodes == SourcedValue(2, 6, "run.sh")
    assert run.gpus_per_node == SourcedValue(8, 5, "run.sh")
    assert run.gpu == ""
    assert run.env == {"CUDA_DEVICE_MAX_CONNECTIONS": SourcedValue("1", 3, "run.sh")}
    assert run.launcher_args["master-addr"].value == "$(hostname)"
    assert run.launcher_args["master-addr"].unresolved
    assert run.launcher_args["node-rank"] == SourcedValue(
        "$SLURM_NODEID", 7, "run.sh", "SLURM sets SLURM_NODEID when the job runs"
    )


def test_megatron_with_arrays_lists_unresolved_values() -> None:
    script = read_script(ARRAYS, "run.sh")
    assert [(one.what, one.line) for one in script.unresolved] == [
        ("$SLURM_NODEID", 7),
        ("$(hostname)", 16),
        ("$USE_FP8", 32),
        ('[[ "$USE_FP8" == "1" ]]', 32),
        ("$1", 40),
    ]
    assert script.variables["WORLD_SIZE"] == SourcedValue("16", 8, "run.sh")
    assert script.variables["MODEL_PARALLEL_ARGS"].value == [
        "--tensor-model-parallel-size",
        "2",
        "--pipeline-model-parallel-size",
        "4",
        "--sequence-parallel",
    ]


def test_megatron_with_strings() -> None:
    run = only(STRINGS)
    assert (run.launcher, run.program.value, run.is_module) == ("torchrun", "pretrain_gpt.py", False)
    assert pairs(run.args) == [
        ("--num-layers", 10),
        ("24", 10),
        ("--hidden-size", 11),
        ("1024", 11),
        ("--micro-batch-size", 13),
        ("8", 13),
        ("--lr", 14),
        ("0.00015", 14),
        ("--bf16", 14),
        ("--data-path", 16),
        ("$DATA_PATH", 16),
        ("--split", 17),
        ("949,50,1", 17),
        ("--distributed-backend", 21),
        ("nccl", 21),
    ]
    assert run.args[10].unresolved == "DATA_PATH is not set in the script"
    assert run.env == {"CUDA_VISIBLE_DEVICES": SourcedValue("0,1,2,3", 19, "run.sh")}
    assert run.nodes == SourcedValue(1, 5, "run.sh")
    assert run.gpus_per_node == SourcedValue(4, 2, "run.sh")


def test_slurm_with_srun_and_bash_c() -> None:
    script = read_script(SLURM, "job.sbatch")
    assert {name: (value.value, value.line) for name, value in script.sbatch.items()} == {
        "job-name": ("llama", 2),
        "nodes": ("4", 3),
        "ntasks-per-node": ("1", 4),
        "gres": ("gpu:h100:8", 5),
        "time": ("24:00:00", 6),
        "partition": ("gpu", 6),
        "exclusive": (True, 8),
    }
    (run,) = find_launches(script)
    assert (run.launcher, run.program, run.is_module) == (
        "torchrun",
        SourcedValue("torchtitan.train", 16, "job.sbatch"),
        True,
    )
    assert pairs(run.args) == [("--training.steps", 17), ("100", 17)]
    assert run.nodes == SourcedValue(4, 15, "job.sbatch")
    assert run.gpus_per_node == SourcedValue(8, 15, "job.sbatch")
    assert run.gpu == "h100"
    assert run.launcher_args["rdzv-endpoint"].unresolved
    late = [one for one in script.unresolved if one.line == 19]
    assert [one.reason for one in late] == ["sbatch ignores #SBATCH lines after the first command"]


def test_torchtitan_with_defaults_from_the_environment() -> None:
    run = only(TORCHTITAN)
    assert (run.launcher, run.program, run.is_module) == (
        "torchrun",
        SourcedValue("torchtitan.train", 8, "run.sh"),
        True,
    )
    assert pairs(run.args) == [("--module", 16), ("llama3", 6), ("--config", 16), ("llama3_debugmodel", 7), ("$@", 16)]
    assert run.gpus_per_node == SourcedValue(8, 14, "run.sh")
    assert {name: value.value for name, value in run.env.items()} == {
        "LOG_RANK": "0",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }
    assert run.launcher_args["tee"].value == "3"


def test_two_hundred_lines_parse_within_40_milliseconds() -> None:
    text = ARRAYS * 5
    assert text.count("\n") == 200
    times = []
    for _ in range(7):
        begun = time.process_time()
        find_launches(read_script(text, "run.sh"))
        times.append(time.process_time() - begun)
    assert min(times) < 0.04  # 0.01 on a fast machine
