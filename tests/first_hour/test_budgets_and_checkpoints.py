"""Token budgets, checkpoints that fill the disk, and advice that holds when it is followed."""

from __future__ import annotations

import json
import tomllib
from math import ceil
from pathlib import Path
from typing import Any

import pytest

CLUSTER = """\
gpu = "A100-80"
nodes = 40
gpus_per_node = 4
memory_gib = 64
hbm_gb_s = 1640
network_gb_s_per_node = "800 Gb/s"
"""
OLMO2 = {
    "architectures": ["Olmo2ForCausalLM"],
    "model_type": "olmo2",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-06,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
    "vocab_size": 100352,
}

TITAN = """\
[model]
name = "llama3"
flavor = "8B"
[training]
dataset = "c4"
local_batch_size = 1
global_batch_size = 512
seq_len = 8192
steps = 10000
[activation_checkpoint]
mode = "selective"
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("leo1.toml").write_text(CLUSTER)
    Path("olmo2").mkdir()
    Path("olmo2/config.json").write_text(json.dumps(OLMO2))
    return tmp_path


def values(overrides: list[str]) -> dict[str, str]:
    return dict(one.split("=", 1) for one in overrides)


OLMO_WORDS = ("recommend", "olmo2/config.json", "--gpus", "leo1.toml", "--goal", "pretrain")


@pytest.mark.parametrize("budget", [("--tokens", "2T"), ("--days", "100")])
def test_steps_follow_the_batch_wherever_it_is_changed(meshwright: Any, budget: tuple[str, str]) -> None:
    answer = meshwright(*OLMO_WORDS, *budget, "--save", "r.toml", "--json").json
    repair = values(answer["repair"]["overrides"])
    saved = tomllib.loads(Path("r.toml").read_text())["train"]
    assert repair["train.global_batch_size"] == str(saved["global_batch_size"])
    assert repair["train.steps"] == str(saved["steps"])
    assert f"train.steps={saved['steps']} " in answer["commands"]["meshwright"]
    changed = [one["overrides"] for one in answer["suggestions"]]
    changed += [one["fix"] for one in answer["findings"] if "fix" in one]
    changed += [answer["repair"]["overrides"]]
    batches = [values(one) for one in changed if any("global_batch_size" in word for word in one)]
    assert len(batches) >= (1 if budget[0] == "--tokens" else 2)
    for one in batches:
        assert "train.steps" in one  # of days, its own speed decides
        if budget[0] == "--tokens":
            assert int(one["train.steps"]) == ceil(2e12 / (int(one["train.global_batch_size"]) * 4096))


def test_an_option_with_shorter_samples_trains_the_requested_tokens(meshwright: Any) -> None:
    words = ("recommend", "llama3-8b", "--goal", "peft", "--gpus", "1xRTX4090", "--seq", "65536", "--tokens", "1B")
    answer = meshwright(*words, "--json").json
    options = [values(one["overrides"]) | {"command": one["command"]} for one in answer["options"]]
    shorter = [one for one in options if "data.seq_length" in one]
    assert shorter
    for one in shorter:
        assert int(one["train.steps"]) == ceil(1e9 / (8 * int(one["data.seq_length"])))
        assert one["command"].count("train.steps=") == 1
        assert f"train.steps={one['train.steps']}" in one["command"]


TORCHTITAN = """\
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 8192
steps = 100000
[checkpoint]
enable = true
interval = {interval}
"""


def rules_of(answer: Any) -> dict[str, Any]:
    return {one["rule"]: one for one in answer.json["findings"]}


@pytest.mark.parametrize(
    ("interval", "rule"), [(200000, "only-at-the-end"), (100001, "only-at-the-end"), (100000, "rarely")]
)
def test_an_interval_beyond_the_last_step_is_reported(meshwright: Any, interval: int, rule: str) -> None:
    Path("tt.toml").write_text(TORCHTITAN.format(interval=interval))
    found = rules_of(meshwright("check", "tt.toml", "--gpus", "leo1.toml", "--json"))[f"saving.{rule}"]
    (fix,) = found["fix"]
    Path("tt.toml").write_text(TORCHTITAN.format(interval=fix.split(" = ")[1]))
    assert meshwright("check", "tt.toml", "--gpus", "leo1.toml", "--json").json["findings"] == []


OLMO_RECIPE = """\
name = "olmo"
model = "olmo2/config.json"
goal = "pretrain"
cluster = "leo1.toml"
[train]
global_batch_size = 960
steps = 508627
[schedule]
warmup_steps = 2000
[layout]
micro_batch_size = 2
defer_grad_sync = false
[kernels]
compile = true
"""


@pytest.mark.parametrize(("every", "rule"), [(600000, "only-at-the-end"), (0, "only-at-the-end"), (400000, "rarely")])
def test_a_recipe_that_saves_too_late_is_reported(meshwright: Any, every: int, rule: str) -> None:
    Path("olmo.toml").write_text(OLMO_RECIPE)
    words = ("check", "olmo.toml", "--gpus", "leo1.toml", "--json")
    found = rules_of(meshwright(*words, f"checkpoint.save_every={every}"))[f"saving.{rule}"]
    assert meshwright(*words, *found["fix"]).json["findings"] == []
    assert meshwright(*words).json["findings"] == []
    Path("olmo.toml").write_text(f"{OLMO_RECIPE}[checkpoint]\nsave_every = {every}\n")
    stated = rules_of(meshwright(*words))[f"saving.{rule}"]
    assert (stated["file"], stated["line"], stated["fix"]) == ("olmo.toml", 16, found["fix"])


MEGATRON = """\
#!/bin/bash
#SBATCH --nodes=40
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
{job}
export CUDA_DEVICE_MAX_CONNECTIONS=1
MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
CHECKPOINT_PATH=/scratch/ckpt/qwen3_moe
MODEL_ARGS=(
    --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --moe-ffn-hidden-size 768
    --num-attention-heads 32 --group-query-attention --num-query-groups 4 --kv-channels 128 --qk-layernorm
    --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rope --rotary-base 1000000
    --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0
    --num-experts 128 --moe-router-topk 8 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3
    --moe-token-dispatcher-type alltoall --moe-grouped-gemm --moe-expert-capacity-factor 1.0
    --moe-router-pre-softmax --overlap-param-gather --overlap-grad-reduce
)
TRAINING_ARGS=(
    --micro-batch-size 1 --global-batch-size 1000 --lr 3e-4 --min-lr 3e-05 --train-iters 240000
    --lr-warmup-iters 2000 --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0 --adam-beta1 0.9
    --adam-beta2 0.95 --bf16 --recompute-granularity selective
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --expert-model-parallel-size 4
    --sequence-parallel --use-distributed-optimizer
    --data-path /data/dclm_text_document --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model /models/Qwen3-30B-A3B --split 99,1,0
    --log-interval 1 --eval-interval 1000 --eval-iters 10 --log-throughput
)
srun torchrun --nproc_per_node 4 --nnodes $SLURM_NNODES --rdzv_backend c10d --rdzv_endpoint $MASTER_ADDR:6000 \\
    pretrain_gpt.py ${{MODEL_ARGS[@]}} ${{TRAINING_ARGS[@]}} {saving}
"""


def megatron(saving: str, job: str = "") -> str:
    Path("moe.sh").write_text(MEGATRON.format(saving=saving, job=job))
    return "moe.sh"


SAVE = "--save $CHECKPOINT_PATH --load $CHECKPOINT_PATH"


@pytest.mark.parametrize("saving", [f"{SAVE} --save-interval 5000", f"{SAVE} --save-interval 500000", ""])
def test_the_fix_of_an_interval_does_not_fill_the_disk(meshwright: Any, saving: str) -> None:
    words = ("--gpus", "leo1.toml", "--json")
    (found,) = meshwright("check", megatron(saving), *words).json["findings"]
    fix = " ".join(found["fix"])
    assert "--save-retain-interval" in fix
    kept = "--save $CHECKPOINT_PATH --load $CHECKPOINT_PATH" if saving else ""
    assert meshwright("check", megatron(f"{kept} {fix}"), *words).json["findings"] == []


def test_checkpoints_that_fill_the_disk_are_reported(meshwright: Any) -> None:
    words, saving = ("--gpus", "leo1.toml", "--json"), f"{SAVE} --save-interval 276"
    found = rules_of(meshwright("check", megatron(saving), *words))["saving.fills-disk"]
    assert "870 checkpoints" in found["message"]
    assert "339 TiB" in found["message"]
    fixed = megatron(f"{saving} {' '.join(found['fix'])}")
    assert meshwright("check", fixed, *words).json["findings"] == []
    assert meshwright("explain", "saving.fills-disk").code == 0
    Path("olmo.toml").write_text(OLMO_RECIPE)
    words = ("check", "olmo.toml", *words, "checkpoint.save_every=100")
    for own in ("checkpoint.keep=1000000", "checkpoint.milestone_every=100"):
        found = rules_of(meshwright(*words, own))["saving.fills-disk"]
        assert meshwright(*words, *found["fix"]).json["findings"] == []


@pytest.mark.parametrize(
    ("job", "load", "why"),
    [
        ("#SBATCH --requeue", "", "the job has --requeue"),
        ("#SBATCH --requeue", "--load /other", "the job has --requeue"),
        ("#SBATCH --time=24:00:00", "", "a job ends after 24"),
        ("#SBATCH --time=1-12", "", "a job ends after 36"),
        ("#SBATCH -t 90", "", "a job ends after 1.5"),
        ("#SBATCH --time=60-00:00:00", "", ""),
        ("", "", ""),
        ("#SBATCH --requeue", "--load $CHECKPOINT_PATH", ""),
        ("#SBATCH --no-requeue", "", ""),
    ],
)
def test_a_job_that_is_started_again_and_does_not_resume_is_reported(
    meshwright: Any, job: str, load: str, why: str
) -> None:
    words = ("--gpus", "leo1.toml", "--json")
    saving = "--save $CHECKPOINT_PATH --save-interval 250 --save-retain-interval 5000"
    found = rules_of(meshwright("check", megatron(f"{saving} {load}", job), *words))
    if not why:
        assert "saving.not-resumed" not in found
        return
    one = found["saving.not-resumed"]
    assert why in one["message"]
    assert one["fix"] == ["--load /scratch/ckpt/qwen3_moe"]
    fixed = megatron(f"{saving} {one['fix'][0]}", job)
    assert "saving.not-resumed" not in rules_of(meshwright("check", fixed, *words))


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "llama3-8b", "deepseek-v3"])
def test_all_fixes_of_an_answer_can_be_followed_together(meshwright: Any, model: str) -> None:
    words = ("recommend", model, "--gpus", "leo1.toml", "--goal", "pretrain", "--tokens", "1T", "--seq", "4k", "--json")
    first = meshwright(*words).json["findings"]
    fixes = dict.fromkeys(word for one in first for word in one.get("fix", ()))
    assert len({word.partition("=")[0] for word in fixes}) == len(fixes)
    after = rules_of(meshwright(*words, *fixes))
    assert not after.keys() & {one["rule"] for one in first if one.get("fix")}


def test_advice_does_not_undo_what_was_typed(meshwright: Any) -> None:
    words = ("recommend", "qwen3-30b-a3b", "--gpus", "leo1.toml", "--goal", "pretrain", "precision.reduce=bf16")
    found = meshwright(*words, "--json").json["findings"]
    assert not any("precision.reduce=fp32" in one.get("fix", ()) for one in found)


def test_a_budget_names_one_batch_and_a_usual_rate(meshwright: Any) -> None:
    answer = meshwright(*OLMO_WORDS, "--tokens", "2T", "--json").json
    (note,) = [one for one in answer["budget"]["notes"] if "is small for" in one]
    assert "lr 0.0003 stays" in note
    assert "scale the batch" not in [one["title"] for one in answer["suggestions"]]
    scaled = [one for one in meshwright(*OLMO_WORDS, "--json").json["suggestions"] if one["title"] == "scale the batch"]
    for one in scaled:
        assert not [word for word in one["overrides"] if word.startswith("optimizer.lr=")]
        assert "with sqrt scaling, is too high" in one["why"]


def test_the_time_of_a_checkpoint_is_that_of_the_gpus_asked_for(meshwright: Any) -> None:
    words = ("size", "olmo2/config.json", "--gpu", "leo1.toml", "--goal", "pretrain", "--tokens", "2T")
    for asked, gpus in (((), 160), (("--days", "40"), 160)):
        [line] = [one for one in meshwright(*words, *asked).out.splitlines() if "a checkpoint takes" in one]
        assert f" on {gpus} GPUs" in line


def test_a_published_layout_that_cannot_run_is_not_offered(meshwright: Any) -> None:
    Path("t.toml").write_text(TITAN)
    found = meshwright("recommend", "t.toml", "--gpus", "24x8xH100")
    assert "breaks a rule of this engine" in found.out
    assert "to plan with it" not in found.out
    usual = meshwright("recommend", "t.toml", "--gpus", "32x8xH100").out
    assert "Original" not in usual or "to plan with it: layout.strategy=fsdp2" in usual
