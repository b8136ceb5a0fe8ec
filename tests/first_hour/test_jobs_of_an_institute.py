"""Jobs of an institute's cluster: restarts that begin anew, numbers that bash cannot compute, GPUs that nodes lack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

JOB = """#!/bin/bash
#SBATCH --nodes=24
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --time=24:00:00
#SBATCH --requeue
module load cuda/12.8
source /opt/miniconda3/etc/profile.d/conda.sh
conda activate megatron
export CUDA_DEVICE_MAX_CONNECTIONS=1
TRAIN_TOKENS=200000000000
TRAIN_SAMPLES=$(( TRAIN_TOKENS / 4096 ))
LR_WARMUP_SAMPLES=$(( TRAIN_SAMPLES / 100 ))
srun bash -c "torchrun --nproc_per_node 4 --nnodes 24 --rdzv-backend c10d --rdzv-endpoint $H:29500 \\
  pretrain_gpt.py --num-layers 40 --hidden-size 5120 --ffn-hidden-size 17408 --num-attention-heads 40 \\
  --group-query-attention --num-query-groups 8 --kv-channels 128 --qk-layernorm --seq-length 4096 \\
  --max-position-embeddings 4096 --position-embedding-type rope --rotary-base 1000000 --normalization RMSNorm \\
  --norm-epsilon 1e-6 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights \\
  --attention-dropout 0 --hidden-dropout 0 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 \\
  --sequence-parallel --use-distributed-optimizer --micro-batch-size 1 --global-batch-size 384 \\
  --train-samples $TRAIN_SAMPLES --lr-decay-samples $TRAIN_SAMPLES --lr-warmup-samples $LR_WARMUP_SAMPLES \\
  --lr 3e-5 --min-lr 3e-6 --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0 --bf16 \\
  --data-path /data/own_text_document --tokenizer-type HuggingFaceTokenizer --tokenizer-model Qwen/Qwen3-14B \\
  --make-vocab-size-divisible-by 1187 --split 99,1,0 --load /ckpt/base --save /ckpt/cpt --save-interval 100 \\
  --save-retain-interval 2000 --finetune --no-load-optim --no-load-rng"
"""
WEIGHTS = "--load /ckpt/base --save /ckpt/cpt"
STATE = "--finetune --no-load-optim --no-load-rng"
GPUS = ("--gpus", "24x4xA100-40", "--json")


def check(meshwright: Any, tmp_path: Path, text: str, *words: str) -> dict[str, Any]:
    (tmp_path / "job.sbatch").write_text(text)
    found: dict[str, Any] = meshwright("check", str(tmp_path / "job.sbatch"), *(words or GPUS)).json
    return found


def finding(answer: dict[str, Any], rule: str) -> dict[str, Any] | None:
    return next((one for one in answer["findings"] if one["rule"] == rule), None)


def test_a_job_that_loads_the_initial_weights_at_every_start_is_reported(meshwright: Any, tmp_path: Path) -> None:
    one = finding(check(meshwright, tmp_path, JOB), "saving.not-resumed")
    assert one is not None
    assert f"begins at step 0 with its weights ({STATE}); the job has --requeue" in one["message"]
    set_, removed = one["fix"][:2], one["fix"][2:]
    assert set_ == ["--load /ckpt/cpt", "--pretrained-checkpoint /ckpt/base"]
    assert " ".join(one.removeprefix("without ") for one in removed) == STATE
    fixed = JOB.replace(WEIGHTS, f"{' '.join(set_)} --save /ckpt/cpt").replace(STATE, "")
    answer = check(meshwright, tmp_path, fixed)
    assert answer["ok"]
    assert finding(answer, "saving.not-resumed") is None
    once = JOB.replace("#SBATCH --requeue\n", "").replace("24:00:00", "60-00:00:00")
    assert finding(check(meshwright, tmp_path, once), "saving.not-resumed") is None


@pytest.mark.parametrize(
    ("old", "new", "fix"),
    [
        ("TRAIN_TOKENS=200000000000", "TRAIN_TOKENS=200B", "TRAIN_TOKENS=200000000000"),
        ("TRAIN_TOKENS=200000000000", "TRAIN_TOKENS=200e9", "TRAIN_TOKENS=200000000000"),
        (
            "TRAIN_SAMPLES / 100 ))",
            "TRAIN_SAMPLES * 0.01 ))",
            "$(( TRAIN_SAMPLES * 1 / 100 )) in place of $(( TRAIN_SAMPLES * 0.01 ))",
        ),
        ("TRAIN_TOKENS / 4096", "TRAIN_TOKENS / 04096", "$(( TRAIN_TOKENS / 4096 )) in place of"),
        ("TRAIN_TOKENS / 4096", "TRAIN_TOKENS / 4096.5", ""),
        ("TRAIN_TOKENS / 4096", "TRAIN_TOKENS / 16#1000", None),
        ("TRAIN_TOKENS / 4096", "TRAIN_TOKENS / 0x1000", None),
    ],
)
def test_numbers_that_bash_cannot_compute_are_errors(
    meshwright: Any, tmp_path: Path, old: str, new: str, fix: str | None
) -> None:
    answer = check(meshwright, tmp_path, JOB.replace(old, new))
    one = finding(answer, "launch.arithmetic")
    assert (one is None) == answer["ok"] == (fix is None)
    if one is None:
        return
    assert "".join(one["fix"]).startswith(fix or "")
    assert bool(one["fix"]) == bool(fix)
    assert not any("not set in the script" in each["reason"] for each in answer["unresolved"])
    assert meshwright("explain", "launch.arithmetic").code == 0


def test_what_sets_up_conda_does_not_set_variables_of_cuda(meshwright: Any, tmp_path: Path) -> None:
    text = JOB.replace("export CUDA_DEVICE_MAX_CONNECTIONS=1\n", "")
    assert finding(check(meshwright, tmp_path, text), "megatron-lm.max-connections") is not None
    sourced = text.replace("/opt/miniconda3/etc/profile.d/conda.sh", "cluster_env.sh")
    assert finding(check(meshwright, tmp_path, sourced), "megatron-lm.max-connections") is None


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"--gpus-per-node=4": "--gres=gpu:8"}, ["#SBATCH --gres=gpu:4"]),
        ({"--gpus-per-node=4": "--gres=gpu:a100:8"}, ["#SBATCH --gres=gpu:a100:4"]),
        ({"--gpus-per-node=4": "--gpus-per-node=8"}, ["#SBATCH --gpus-per-node=4"]),
        (
            {"--gpus-per-node=4": "--gpus-per-node=8", "--nproc_per_node 4": "--nproc_per_node 8"},
            ["#SBATCH --gpus-per-node=4", "torchrun --nproc-per-node 4"],
        ),
    ],
)
def test_more_gpus_than_the_nodes_have_are_an_error(
    meshwright: Any, tmp_path: Path, changes: dict[str, str], fix: list[str]
) -> None:
    text = JOB
    for old, new in changes.items():
        text = text.replace(old, new)
    (tmp_path / "uni.toml").write_text('gpu = "A100-40"\nnodes = 24\ngpus_per_node = 4\n')
    one = finding(check(meshwright, tmp_path, text, "--gpus", str(tmp_path / "uni.toml"), "--json"), "launch.gpus")
    assert one is not None
    assert (one["severity"], one["fix"]) == ("error", fix)
    idle = finding(check(meshwright, tmp_path, text, "--gpus", "A100-40", "--json"), "launch.gpus")
    assert idle is None  # a type alone says nothing about nodes


def test_another_type_of_gpu_than_the_job_requests_is_noted(meshwright: Any, tmp_path: Path) -> None:
    text = JOB.replace("--gpus-per-node=4", "--gres=gpu:h200:4")
    (note,) = (one for one in check(meshwright, tmp_path, text)["notes"] if "requests another GPU" in one)
    assert "--gres=gpu:h200:4" in note
    for same in ("gpu:a100:4", "gpu:4"):
        answer = check(meshwright, tmp_path, text.replace("gpu:h200:4", same))
        assert not [one for one in answer["notes"] if "requests another GPU" in one]


TITAN = """
[model]
name = "qwen3"
flavor = "14B"
[optimizer]
lr = 3e-5
[lr_scheduler]
warmup_steps = 2000
decay_ratio = 0.9
decay_type = "cosine"
[training]
local_batch_size = 4
global_batch_size = {batch}
seq_len = 4096
steps = {steps}
dataset = "c4"
[parallelism]
data_parallel_replicate_degree = 3
data_parallel_shard_degree = 8
tensor_parallel_degree = 2
[checkpoint]
enable = true
interval = 500
[compile]
enable = true
[activation_checkpoint]
mode = "selective"
"""


@pytest.mark.parametrize(
    ("batch", "steps", "rule", "fix"),
    [
        (4194336, 47684, "ranges.batch-in-tokens", ["training.global_batch_size = 1056"]),
        (1056, 200_000_000_000, "ranges.steps-in-tokens", ["training.steps = 46239"]),
    ],
)
def test_a_batch_or_steps_in_tokens_are_errors(
    meshwright: Any, tmp_path: Path, batch: int, steps: int, rule: str, fix: list[str]
) -> None:
    path = tmp_path / "titan.toml"
    path.write_text(TITAN.format(batch=batch, steps=steps))
    answer = meshwright("check", str(path), "--gpus", "6x8xH200", "--json").json
    assert [(one["rule"], one["fix"]) for one in answer["findings"] if one["severity"] == "error"] == [(rule, fix)]
    path.write_text(TITAN.format(batch=1056, steps=47684))
    assert meshwright("check", str(path), "--gpus", "6x8xH200", "--json").json["ok"]


def test_a_batch_in_tokens_that_no_ranks_divide_is_repaired_to_samples(meshwright: Any, tmp_path: Path) -> None:
    path = tmp_path / "titan.toml"
    path.write_text(TITAN.format(batch=4194304, steps=47684))
    answer = meshwright("check", str(path), "--gpus", "6x8xH200", "--json").json
    assert "training.global_batch_size = 1056" in answer["repair"]["overrides"]


def test_a_plan_with_a_batch_in_tokens_says_so(meshwright: Any) -> None:
    typed = ("qwen3-14b", "--goal", "pretrain", "train.global_batch_size=4194304", "--json")
    plan = meshwright("recommend", *typed, "--gpus", "8xH100").json
    assert [one["rule"] for one in plan["findings"] if one["severity"] == "error"] == ["ranges.batch-in-tokens"]
    assert plan["repair"]["overrides"] == ["train.global_batch_size=1024"]
    sizes = meshwright("size", *typed, "--gpu", "H100", "--max-gpus", "8").json
    assert any("ranges.batch-in-tokens" in note for note in sizes["notes"])


def test_a_written_job_loads_the_state_of_its_own_checkpoints(meshwright: Any, tmp_path: Path) -> None:
    (tmp_path / "job.sbatch").write_text(JOB)
    words = ("launch", str(tmp_path / "job.sbatch"), "--scheduler", "slurm", "--gpus", "24x4xA100-40", "--json")
    answer = meshwright(*words, "--time", "1-00:00:00").json
    text = next(iter(answer["files"].values()))
    assert "--pretrained-checkpoint /ckpt/base" in text
    assert not [flag for flag in STATE.split() if flag in text]
    assert any("no_load_optim" in note for note in answer["notes"])  # listed as not kept
    own = JOB.replace(WEIGHTS, "--load /ckpt/cpt --save /ckpt/cpt").replace("--finetune ", "")
    (tmp_path / "job.sbatch").write_text(own)  # a run that goes on without its optimizer state: a choice of the user
    text = next(iter(meshwright(*words, "--time", "1-00:00:00").json["files"].values()))
    assert "--no-load-optim" in text


@pytest.mark.parametrize(("mounts", "lost"), [(["--mount", "claim:/lustre"], False), ([], True)])
def test_checkpoints_below_a_mounted_output_folder_are_not_lost(
    meshwright: Any, tmp_path: Path, mounts: list[str], lost: bool
) -> None:
    path = tmp_path / "titan.toml"
    path.write_text('[job]\ndump_folder = "/lustre/runs/q14"\n' + TITAN.format(batch=1056, steps=47684))
    words = ("--scheduler", "kubernetes", "--gpus", "6x8xH200", "--image", "nvcr.io/nvidia/pytorch:25.06-py3")
    notes = meshwright("launch", str(path), *words, *mounts, "--json").json["notes"]
    found = [note for note in notes if "are lost" in note]
    assert bool(found) == lost
    assert not lost or "/lustre/runs/q14/checkpoint" in found[0]


def test_data_at_an_address_is_an_error_before_the_job_is_written(meshwright: Any, tmp_path: Path) -> None:
    model = ("qwen3-14b", "--goal", "cpt", "--gpus", "8xB200", "--dataset", "s3://bucket/fineweb")
    refused = meshwright("launch", *model, "--scheduler", "skypilot")
    assert refused.code == 1
    assert "is an address, not a file or folder: copy its files" in refused.err
    error = meshwright(
        "train", "llama3_8b_pretrain_config", "--tiny", "--dataset", "s3://bucket/x", "--out", str(tmp_path)
    )
    assert error.code == 2
    assert "is an address" in error.err


def test_a_new_machine_needs_an_image_or_a_setup(meshwright: Any) -> None:
    job = ("launch", "qwen3_600m_sft_config", "--scheduler", "skypilot", "--gpus", "8xB200", "--json")
    for words, noted in (((), True), (("--setup", "pip install ."), False), (("--image", "team/train:1"), False)):
        notes = meshwright(*job, *words).json["notes"]
        assert any("new machines have no meshwright" in note for note in notes) == noted
