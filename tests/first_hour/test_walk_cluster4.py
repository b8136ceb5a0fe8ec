"""What a new user typed on a cluster of A100-40 nodes: jobs of other frameworks, odd GPU counts, logs and prices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.engine.schedules import learning_rate
from meshwright.recipes.types import Schedule

MEGATRON = (
    "torchrun --nproc-per-node 4 --nnodes 12 pretrain_gpt.py --num-layers 32 --hidden-size 4096 "
    "--ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8 --seq-length 4096 "
    "--swiglu --max-position-embeddings 4096 --position-embedding-type rope --rotary-base 500000 "
    "--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
    "--tensor-model-parallel-size 4 --sequence-parallel --use-distributed-optimizer --vocab-size 128256 "
    "--micro-batch-size 1 --global-batch-size 480 --train-iters 5000 --lr 3e-4 --min-lr 3e-5 --lr-warmup-iters 100 "
    "--bf16 --mock-data --save-interval 500 "
)
JOB = ("--to", "megatron-lm", "--gpus", "12x4xA100-80", "--framework-dir", "/opt/Megatron-LM", "--time", "4:00:00")


def _script(folder: Path, words: str, name: str = "run.sh") -> str:
    (folder / name).write_text(f"#!/bin/bash\n{MEGATRON}{words}\n")
    return str(folder / name)


def _flag(text: str, flag: str) -> str | None:
    words = text.split()
    return words[words.index(flag) + 1] if flag in words else None


@pytest.mark.parametrize(
    ("words", "save", "weights"),
    [
        ("--save /ckpt/run --load /ckpt/base --finetune", "/ckpt/run", "/ckpt/base"),
        ("--save /ckpt/run --load /ckpt/base", "/ckpt/run", "/ckpt/base"),
        ("--save /ckpt/run --load /ckpt/run", "/ckpt/run", None),
        ("--save /ckpt/run", "/ckpt/run", None),
        ("--save /ckpt/run --load /ckpt/run --finetune", "checkpoints/run", "/ckpt/run"),
        ("--save /ckpt/run --load /ckpt/run --pretrained-checkpoint /ckpt/base", "/ckpt/run", "/ckpt/base"),
    ],
)
def test_a_requeued_job_resumes_from_the_folder_of_the_file(
    meshwright: Any, tmp_path: Path, words: str, save: str, weights: str | None
) -> None:
    path = _script(tmp_path, words)
    answer = meshwright("launch", path, "--scheduler", "slurm", *JOB, "--write", str(tmp_path / "jobs"), "--json").json
    assert [Path(one).name for one in answer["written"]] == ["run.sbatch"]  # no second script that nobody calls
    text = (tmp_path / "jobs" / "run.sbatch").read_text()
    assert (_flag(text, "--save"), _flag(text, "--load")) == (save, save)
    assert _flag(text, "--pretrained-checkpoint") == weights
    assert "--finetune" not in text  # it would reset the step at every restart
    listed = [note for note in answer["notes"] if note.startswith("not kept")]
    assert any("load=/ckpt/base" in note for note in listed) == (words == "--save /ckpt/run --load /ckpt/base")
    assert not any("rotary_base" in note for note in listed)  # written again


def test_a_requeued_job_that_must_not_resume_is_refused(meshwright: Any, tmp_path: Path) -> None:
    path = _script(tmp_path, "--save /ckpt/run --load /ckpt/base --finetune")
    words = ("launch", path, "--scheduler", "slurm", *JOB, "--write", str(tmp_path / "jobs"), "checkpoint.resume=false")
    error = meshwright(*words, "--json")
    assert (error.code, error.json["error"]["field"]) == (2, "checkpoint.resume")
    assert meshwright(*words, "--no-requeue", "--json").code == 0
    assert "--load" not in (tmp_path / "jobs" / "run.sbatch").read_text().split()


def test_a_typed_folder_replaces_that_of_the_file(meshwright: Any, tmp_path: Path) -> None:
    path = _script(tmp_path, "--save /ckpt/run --load /ckpt/run")
    for words in ((), ("checkpoint.folder=/scratch/x",)):
        text = next(iter(meshwright("export", path, "--to", "megatron-lm", *words, "--json").json["files"].values()))
        assert f"--save {'/scratch/x' if words else '/ckpt/run'}\n" in text
    words = ("launch", path, "--scheduler", "slurm", *JOB, "--out", "/scratch/x", "--json")
    error = meshwright(*words).json["error"]
    assert any("checkpoint.folder=/scratch/x" in fix for fix in error["fix"])


TITAN = """
[model]
name = "llama3"
flavor = "8B"
[optimizer]
lr = 1e-5
[lr_scheduler]
warmup_steps = {warmup}
{schedule}
[training]
local_batch_size = 2
global_batch_size = 480
seq_len = 4096
steps = {steps}
dataset = "c4"
[parallelism]
tensor_parallel_degree = 4
[checkpoint]
enable = true
folder = "ckpt7"
"""


def _titan_rate(step: int, steps: int, warmup: int, ratio: float | None, style: str) -> float:
    """Return torchtitan's factor of the peak at a step from 0, with its rounding."""
    decay = steps - warmup if ratio is None else min(round(steps * ratio), steps - warmup)
    stable = warmup + steps + 1 - warmup - decay
    if step < warmup:
        return (step + 1) / warmup
    if step < stable:
        return 1.0
    progress = (step + 1 - stable) / decay
    return {"linear": 1 - progress, "sqrt": 1 - progress**0.5}[style]


@pytest.mark.parametrize(("style", "ratio"), [("linear", 0.2), ("linear", 0.83), ("sqrt", 0.5), ("sqrt", None)])
def test_the_stable_phase_of_torchtitan_survives(
    meshwright: Any, tmp_path: Path, style: str, ratio: float | None
) -> None:
    steps, warmup = 1000, 60
    lines = f'decay_type = "{style}"' + (f"\ndecay_ratio = {ratio}" if ratio is not None else "")
    (tmp_path / "t.toml").write_text(TITAN.format(schedule=lines, steps=steps, warmup=warmup))
    path = str(tmp_path / "t.toml")
    recipe = meshwright("import", path, "--gpus", "12x4xA100-80", "--format", "json", "--json").json
    schedule = Schedule(**json.loads(recipe["text"])["schedule"])
    for step in range(warmup, steps, 7):
        ours = learning_rate(schedule, 1.0, steps, step)
        assert ours == pytest.approx(
            _titan_rate(step, steps, warmup, ratio, style), abs=0.01 if style != "sqrt" else 0.05
        )
    same = meshwright("export", path, "--to", "torchtitan", "--gpus", "12x4xA100-80", "--json").json
    text = same["files"]["config.toml"]
    assert f'decay_type = "{style}"' in text
    assert ratio is None or f"decay_ratio = {ratio}" in text
    assert 'folder = "ckpt7"' in text
    other = meshwright("export", path, "--to", "megatron-lm", "--gpus", "12x4xA100-80", "--json").json
    flags = next(iter(other["files"].values()))
    length = round(steps * ratio) if ratio is not None else steps - warmup
    assert f"--lr-wsd-decay-iters {length}\n" in flags
    assert f"--lr-wsd-decay-style {'minus_sqrt' if style == 'sqrt' else style}\n" in flags
    assert not [one for one in (*same["unmapped"], *other["unmapped"]) if one["field"].startswith("schedule")]
    assert [one["key"] for one in other["not_imported"] if one["key"].startswith("checkpoint")] == ["checkpoint.folder"]


@pytest.mark.parametrize("style", ["linear", "cosine", "minus_sqrt", "exponential", ""])
def test_the_stable_phase_of_megatron_survives(meshwright: Any, tmp_path: Path, style: str) -> None:
    words = f"--lr-decay-style WSD --lr-wsd-decay-iters 700 {'--lr-wsd-decay-style ' + style if style else ''}"
    path = _script(tmp_path, words)
    answer = meshwright("export", path, "--to", "megatron-lm", "--json").json
    text = next(iter(answer["files"].values()))
    assert f"--lr-wsd-decay-iters 700\n    --lr-wsd-decay-style {style or 'exponential'}\n" in text
    assert not [one for one in answer["not_imported"] if "wsd" in one["key"]]
    forge = meshwright("export", path, "--to", "kempnerforge", "--gpus", "12x4xA100-80", "--json").json
    if style in ("linear", "cosine"):
        assert "stable_steps = 4200" in next(iter(forge["files"].values()))
    else:  # it has no such shape
        assert "schedule.wsd_decay_style" in [one["field"] for one in forge["unmapped"]]
