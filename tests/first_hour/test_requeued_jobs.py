"""Requeued jobs of other frameworks, odd GPU counts, logs and prices."""

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
    assert "--lr-wsd-decay-iters 700\n" in text
    assert (f"--lr-wsd-decay-style {style}\n" in text) if style else ("wsd-decay-style" not in text)
    assert not [one for one in answer["not_imported"] if "wsd" in one["key"]]
    forge = meshwright("export", path, "--to", "kempnerforge", "--gpus", "12x4xA100-80", "--json").json
    assert "stable_steps = 4200" in next(iter(forge["files"].values()))
    lost = [one["field"] for one in forge["unmapped"] if one["field"].startswith("schedule")]
    assert lost == ([] if style in ("linear", "cosine") else ["schedule.wsd_decay_style"])  # it has no such shape


@pytest.mark.parametrize("gpus", ["6x4xA100-40", "12x4xA100-40"])
def test_an_odd_count_gets_the_lever_that_fits(meshwright: Any, gpus: str) -> None:
    answer = meshwright("recommend", "llama-3.3-70b", "--gpus", gpus, "--goal", "sft", "--seq", "16k", "--json")
    assert answer.code == 0
    assert answer.json["layout"]["offload"] == "optimizer"
    assert [one["field"] for one in answer.json["changes"] if one["kind"] == "contract"] == ["data.seq_length"]


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [f"{n}x4xA100-40" for n in range(1, 25)] + [f"{n}x6xL40S" for n in range(1, 13)])
def test_no_repair_of_layout_kind_is_left_to_the_user(gpus: str) -> None:
    from meshwright import MeshwrightError, recommend

    for model, goal in (("llama-3.3-70b", "sft"), ("qwen3-32b", "pretrain"), ("mixtral-8x7b", "sft")):
        try:
            plan = recommend(model, gpus=gpus, goal=goal, seq="16k")
        except MeshwrightError:  # no layout divides the count
            continue
        assert plan.ok or plan.repair is None or plan.repair.contract, (model, plan.repair)


SPIKE = """\
[rank0]:[titan] 2026-11-16 10:00:00,100 - root - INFO - Starting job: cpt
[rank0]:[titan] 2026-11-16 10:00:02,100 - root - INFO - Building 2-D device mesh with ['dp_shard', 'tp'], [12, 4]
[rank0]:[titan] 2026-11-16 10:00:04,100 - root - INFO - CUDA capacity: NVIDIA A100-SXM4-40GB with 39.39GiB memory
[rank0]:[titan] 2026-11-16 10:00:05,100 - root - INFO - Model qwen3 14B size: 14,768,307,200 total parameters
[rank0]:[titan] 2026-11-16 10:00:06,100 - root - INFO - Trainer is initialized with local batch size 2, global batch \
size 504, gradient accumulation steps 21, sequence length 4096, total steps 100000 (warmup 600)
"""
STEP = (
    "[rank0]:[titan] 2026-11-16 {h:02d}:{m:02d}:00,000 - root - INFO - step: {step:2d}  loss: {loss:7.4f}  "
    "grad_norm: {norm:7.4f}  memory: 18.20GiB(46.21%)  tps: 380  tflops: 33.8  mfu: 10.83%\n"
)


def _log(folder: Path, spike: bool) -> str:
    rows = (
        STEP.format(
            h=10 + i // 60,
            m=i % 60,
            step=10 * i,
            loss=5.6 if spike and i == 60 else 2.07 + 0.004 * ((7 * i) % 5),
            norm=0.6,
        )
        for i in range(1, 100)
    )
    (folder / "titan.log").write_text(SPIKE + "".join(rows))
    return str(folder / "titan.log")


def test_doctor_names_no_learning_rate_that_the_log_does_not_state(meshwright: Any, tmp_path: Path) -> None:
    path = _log(tmp_path, spike=True)

    def remedies(*words: str) -> list[Any]:
        answer = meshwright("doctor", path, "--gpus", "12x4xA100-40", *words, "--json").json
        (found,) = (one for one in answer["findings"] if one["rule"] == "loss.spikes")
        return [one for one in found["remedies"] if "learning rate" in str(one["try"]) or "optimizer.lr" in str(one)]

    (unknown,) = remedies()
    assert unknown["try"] == ["half of the learning rate that ran and of its minimum"]
    (stated,) = remedies("optimizer.lr=1e-5")
    assert (stated["try"], stated["there"]) == (["optimizer.lr=5e-06"], ["optimizer.lr = 5e-06"])
    (both,) = remedies("optimizer.lr=1e-5", "schedule.min_lr=1e-6")
    assert both["try"] == ["optimizer.lr=5e-06", "schedule.min_lr=5e-07"]


def test_a_low_loss_that_stays_is_normal_in_continued_pretraining(meshwright: Any, tmp_path: Path) -> None:
    answer = meshwright("doctor", _log(tmp_path, spike=False), "--gpus", "12x4xA100-40", "--json").json
    assert "loss.flat" not in [one["rule"] for one in answer["findings"]]


def test_types_without_a_price_have_no_cost(meshwright: Any) -> None:
    asked = ("size", "llama3-8b", "--gpu", "A100-40,H200", "--goal", "pretrain", "--tokens", "100B", "--max-gpus", "2")
    answer = meshwright(*asked, "--price", "H200=3.10", "--json").json
    own, priced = answer["compared"]
    assert (own["price"], own["cheapest"], priced["price"]) == (None, None, 3.1)
    assert priced["cheapest"]["cost"] > 0
    assert any("A100-40" in note for note in answer["notes"])
    error = meshwright(*asked, "--price", "L40S=1", "--json").json["error"]
    assert error["fix"][0] == "--price A100-40=PRICE,H200=PRICE"  # all at once, no invented price
    free = meshwright(*asked, "--price", "0", "--json").json["compared"][0]["cheapest"]
    assert free["gpu_hours"] == min(one["gpu_hours"] for one in answer["sizes"] if one["fits"])


def test_size_answers_a_deadline(meshwright: Any) -> None:
    asked = ("size", "llama3-8b", "--gpu", "H100", "--goal", "pretrain", "--tokens", "100B", "--max-gpus", "4")
    answer = meshwright(*asked, "--days", "60", "--json")
    fitting = [one for one in answer.json["sizes"] if one["fits"] and one["days"] <= 60]
    assert (answer.code, answer.json["in_time"]["gpus"]) == (0, min(one["gpus"] for one in fitting))
    assert max(answer.json["tried"]) == 4
    late = meshwright(*asked, "--days", "0.1", "--json")
    assert (late.code, late.json["in_time"]) == (1, None)
    assert meshwright(*asked[:6], "--max-gpus", "4", "--days", "10", "--json").code == 0  # the tokens of ten days


def test_steps_that_are_the_tokens_rounded_down_stay(meshwright: Any, tmp_path: Path) -> None:
    """A file whose samples are 100B tokens was "a new experiment" of one more step."""
    path, steps = tmp_path / "own.toml", 100 * 10**9 // (512 * 8192)
    for count, fields in ((steps, []), (steps - 1, ["train.steps"])):
        path.write_text(
            meshwright("recipe", "llama3_8b_pretrain_config", f"train.steps={count}", "--format", "toml").out
        )
        answer = meshwright("recommend", str(path), "--gpus", "8xH100", "--tokens", "100B", "--json").json
        assert [one["field"] for one in answer["changes"] if one["kind"] == "contract"] == fields


def test_a_plan_names_the_gpus_of_a_cluster_file_not_its_path(meshwright: Any, tmp_path: Path) -> None:
    cluster, recipe = tmp_path / "ours.toml", tmp_path / "own.toml"
    cluster.write_text('gpu = "H100"\nnodes = 2\ngpus_per_node = 8\n')
    recipe.write_text(f'name = "own"\nmodel = "llama3_8b"\ngoal = "pretrain"\ncluster = "{cluster}"\n')
    answer = meshwright("recommend", str(recipe), "--json")
    assert answer.json["recipe"]["made_for"] == "2x8xH100"


def test_a_rack_is_72_gpus(meshwright: Any) -> None:
    for text in ("GB200-NVL72", "1xGB200-NVL72"):
        answer = meshwright("estimate", "llama3_8b_pretrain_config", "--gpus", text, "layout.tp=2", "--json").json
        assert answer["question"]["gpus"] == "18x4xGB200"
        assert any("rack of 72 GPUs" in one["message"] for one in answer["question"]["assumed"])
    assert "72 GPUs" in meshwright("explain", "NVL72").out


def test_size_takes_one_node_from_the_name_of_a_rack_or_system(meshwright: Any) -> None:
    for text, node in (("GB200 NVL72", 4), ("DGX H100", 8)):
        asked = ("size", "llama3-8b", "--gpu", text, "--goal", "pretrain", "--max-gpus", "8", "--json")
        answer = meshwright(*asked).json
        assert answer["node"] == node
        assert not [one for one in answer["assumed"] if "rack" in one["message"]]


def test_a_wrong_key_of_a_cluster_file_suggests_no_other_gpu(meshwright: Any, tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text('gpu = "A100-40"\nnetwork = 3\n')
    words = ("size", "llama3-8b", "--gpu", str(tmp_path / "site.toml"), "--goal", "pretrain", "--json")
    error = meshwright(*words).json["error"]
    assert "did you mean network_gb_s" in error["message"]
    assert not error.get("fix")


def test_export_notes_data_that_the_framework_cannot_read(meshwright: Any, tmp_path: Path) -> None:
    path = _script(tmp_path, "")
    Path(path).write_text(Path(path).read_text().replace("--mock-data", "--data-path /data/mix_text_document"))
    titan = meshwright("export", path, "--to", "torchtitan", "--json").json["notes"]
    assert any("/data/mix_text_document" in note and ".idx" in note for note in titan)
    mock = meshwright("export", _script(tmp_path, "", "mock.sh"), "--to", "megatron-lm", "--json").json["notes"]
    assert any("random tokens for 5,000 iterations" in note for note in mock)


def test_a_plan_in_python_has_its_budget() -> None:
    from meshwright import recommend

    found = recommend("llama3-8b", gpus="8xH100", goal="pretrain", tokens="100B", price=2).budget
    assert found is not None
    assert found.cost == pytest.approx(2 * found.gpu_hours)
    assert recommend("llama3-8b", gpus="8xH100", goal="pretrain").budget is None


def test_a_slow_layout_leads_to_plan(meshwright: Any) -> None:
    slow = (
        "estimate",
        "llama3_8b_pretrain_config",
        "--gpus",
        "8x8xH100",
        "layout.tp=8",
        "layout.pp=8",
        "layout.sp=true",
    )
    shown = meshwright(*slow).out
    assert "meshwright plan llama3_8b_pretrain_config --gpus 8x8xH100 searches layouts" in " ".join(shown.split())
    assert "searches layouts" not in meshwright("estimate", "llama3_8b_pretrain_config").out
