"""A lab's own 34B model: deadlines, mounts, RoPE bases, prices and comparisons."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from meshwright import compare
from meshwright.cli.run import run as run_command
from meshwright.planner.deadline import MAX_REFINED_COUNTS, refine_deadline

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 7168,
    "intermediate_size": 20480,
    "num_attention_heads": 56,
    "num_key_value_heads": 8,
    "num_hidden_layers": 56,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-05,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
CLUSTER = """name = "lab"
gpu = "H200"
nodes = 24
gpus_per_node = 8
network_gb_s_per_node = "3200 Gb/s"
"""
SCRIPT = """#!/bin/bash
#SBATCH --nodes=4
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=1
MORE
export CUDA_DEVICE_MAX_CONNECTIONS=1
MOUNTS=/lustre:/lustre,PLACES
srun --container-image=/lustre/images/train.sqsh --container-mounts=$MOUNTS torchrun --nnodes 4 --nproc-per-node 8 \\
  pretrain_gpt.py --use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 \\
  --num-attention-heads 32 --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm \\
  --disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights \\
  --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer --bf16 --seq-length 4096 \\
  --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 64 --train-iters 1000 --lr 3e-4 \\
  --tokenizer-type NullTokenizer --vocab-size 128256 --mock-data --save /lustre/ckpt --load /lustre/ckpt \\
  --save-interval 100 FLAGS
"""


def printed(*words: str) -> str:
    """Return what a command prints, errors included."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), contextlib.suppress(SystemExit):
        run_command(list(words))
    return out.getvalue()


def answered(*words: str) -> dict[str, Any]:
    """Return the JSON of a command; progress of a slow machine is on stderr."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        run_command([*words, "--json"])
    answer: dict[str, Any] = json.loads(out.getvalue())
    return answer


def script(path: Path, places: str = "/a:/b", more: str = "", flags: str = "--log-interval 10") -> Path:
    """Write a user's batch script."""
    text = SCRIPT.replace("PLACES", places).replace("MORE", more).replace("FLAGS", flags)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with the lab's model and cluster."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab34b").mkdir()
    (tmp_path / "lab34b" / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    (tmp_path / "lab.toml").write_text(CLUSTER, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(("tokens", "days", "most"), [("1.5T", "46", 144), ("1.5T", "46", 150), ("1.2T", "38", 192)])
def test_size_finds_the_smallest_count_in_time_between_its_coarse_counts(tokens: str, days: str, most: int) -> None:
    words = ("lab34b", "--goal", "pretrain", "--gpus", "lab.toml", "--seq", "8k", "--tokens", tokens, "--days", days)
    answer = answered("size", *words, "train.global_batch_size=576", "--max-gpus", str(most))
    assert answer["in_time"]["gpus"] == 144
    assert answer["in_time"]["nodes"] == "18x8"
    assert max(answer["tried"]) == most // 8 * 8


def test_refining_a_deadline_tries_few_counts_and_those_that_divide_the_batch_first() -> None:
    asked: list[int] = []

    def days_on(count: int) -> float:
        asked.append(count)
        return 10_000 / count

    coarse = {count: 10_000 / count for count in (512, 1024, 2048)}
    tried = refine_deadline(coarse, 8.0, 8, 4096, 4096, days_on)
    assert len(tried) <= MAX_REFINED_COUNTS
    assert min(count for count in tried if 10_000 / count <= 8.0) <= 1280
    assert refine_deadline({}, 8.0, 8, 4096, 4096, days_on) == []


@pytest.mark.parametrize(
    ("place", "written"),
    [
        ("$PWD:/workspace", "${SLURM_SUBMIT_DIR:-$PWD}:/workspace"),
        ("$(pwd):/workspace", "${SLURM_SUBMIT_DIR:-$PWD}:/workspace"),
        ("${HOME}/.cache:/opt/cache:ro", "${HOME}/.cache:/opt/cache:ro"),
        ("/scratch/$USER", "/scratch/$USER:/scratch/$USER"),
        ("/data", "/data:/data"),
    ],
)
def test_launch_takes_the_mounts_that_it_advises(here: Path, place: str, written: str) -> None:
    script(here / "job.sbatch", place)
    words = ("launch", "job.sbatch", "--scheduler", "slurm", "--gpus", "4x8xH200")
    advice = re.search(r"container; (--image .*) keeps the container", printed(*words))
    assert advice is not None
    answer = printed(*words, *shlex.split(advice[1]))
    assert f"/lustre:/lustre,{written}" in answer
    assert "error:" not in answer


def test_a_mount_with_a_variable_is_refused_where_no_shell_expands_it(here: Path) -> None:
    script(here / "job.sbatch")
    words = ("job.sbatch", "--scheduler", "kubernetes", "--gpus", "4x8xH200", "--image", "a/b")
    assert "only a SLURM job expands" in printed("launch", *words, "--mount", "$PWD:/workspace")


def test_plan_prints_the_tokens_and_the_batch_and_the_positions_that_are_left(here: Path) -> None:
    words = ("lab34b", "--gpus", "lab.toml", "--goal", "pretrain")
    answer = printed("plan", *words)
    assert "4,096 tokens × 32 per step" in answer
    assert "lab34b has 8,192 positions: --seq 8192 trains on all of them" in answer
    longer = printed("plan", *words, "--seq", "8k")
    assert "8,192 tokens × 32 per step" in longer
    assert "positions" not in longer


def test_a_context_extension_with_its_own_rope_base_is_not_advised_another() -> None:
    words = ("recommend", "lab34b", "--gpus", "lab.toml", "--goal", "pretrain", "--seq", "128k")
    assert "usually with another RoPE base" in printed(*words)
    answer = printed(*words, "model.rope_theta=8000000")
    assert "with the RoPE base 8,000,000 that is set" in answer
    assert "another RoPE base" not in answer


@pytest.mark.parametrize(("price", "cost"), [('"2.4 EUR"', "2.4 EUR per GPU-hour"), ('"$2"', "2 USD per GPU-hour")])
def test_the_price_of_a_cluster_file_may_name_its_currency(here: Path, price: str, cost: str) -> None:
    (here / "lab.toml").write_text(f"{CLUSTER}price = {price}\n", encoding="utf-8")
    assert cost in printed("recommend", "llama3-8b", "--goal", "pretrain", "--gpus", "lab.toml", "--tokens", "1T")


@pytest.mark.parametrize("price", ['"cheap"', '"2.4 EUR"\ncurrency = "USD"'])
def test_a_wrong_price_of_a_cluster_file_names_the_currency(here: Path, price: str) -> None:
    (here / "lab.toml").write_text(f"{CLUSTER}price = {price}\n", encoding="utf-8")
    answer = printed("recommend", "llama3-8b", "--goal", "pretrain", "--gpus", "lab.toml", "--tokens", "1T")
    assert 'write price = 2.40 and currency = "EUR"' in answer


def test_compare_has_one_verdict_on_a_model_that_two_files_name_differently(here: Path) -> None:
    (here / "lab34b.toml").write_text(
        'name = "own"\nmodel = "llama3-8b"\ngoal = "pretrain"\ncluster = "4x8xH200"\nengine = "megatron"\n'
        "[data]\nseq_length = 4096\n[train]\nglobal_batch_size = 64\n[layout]\nstrategy = 'zero1'\ntp = 1\n",
        encoding="utf-8",
    )
    script(here / "job.sbatch")
    answer = printed("compare", "job.sbatch", "lab34b.toml", "--gpus", "4x8xH200")
    assert "not comparable" not in answer
    assert "Use " in answer


def test_compare_of_a_list_in_python_is_compare_of_its_targets() -> None:
    listed = compare(["llama3_8b_pretrain_config", "qwen3_8b_pretrain_config"], gpus="8xH200")  # type: ignore[arg-type]
    assert str(listed) == str(compare("llama3_8b_pretrain_config", "qwen3_8b_pretrain_config", gpus="8xH200"))


def test_rules_without_a_match_say_so_and_a_mistyped_id_is_corrected() -> None:
    assert "no rule matches" in printed("rules", "zebra")
    assert "did you mean heads.attention?" in printed("rules", "heads.atention")
    assert answered("rules", "zebra")["rules"] == []


@pytest.mark.parametrize("term", ["spare", "long context extension"])
def test_terms_of_a_report_are_explained(term: str) -> None:
    assert "error" not in printed("explain", term)


def test_a_patched_script_is_not_said_to_pad_the_vocabulary_as_an_exported_recipe_does(here: Path) -> None:
    script(here / "job.sbatch").write_text(script(here / "job.sbatch").read_text("utf-8").replace("128256", "50257"))
    words = ("export", "job.sbatch", "--to", "megatron-lm", "--gpus", "4x8xH200", "--out", "written", "layout.tp=4")
    assert "pads the vocabulary" not in printed(*words)


SIGNAL = "#SBATCH --signal=B:USR1@300"


@pytest.mark.parametrize(
    ("more", "flags", "found"),
    [
        (SIGNAL, "--exit-signal-handler", "has no trap for USR1"),
        (SIGNAL, "--log-interval 10", "has no trap for USR1"),
        (SIGNAL.replace("USR1", "10"), "--exit-signal-handler", "has no trap for USR1"),
        (SIGNAL.replace("B:", ""), "--exit-signal-handler", "saves on SIGTERM only"),
        (SIGNAL.replace("B:USR1", "TERM"), "--exit-signal-handler", ""),
        (SIGNAL.replace("B:", ""), "--log-interval 10", "without a checkpoint"),
        (f"{SIGNAL}\ntrap 'scancel --signal=TERM $SLURM_JOB_ID' SIGUSR1", "--exit-signal-handler", ""),
        (f"{SIGNAL}\nsource env.sh", "--exit-signal-handler", ""),
    ],
)
def test_check_reports_a_signal_that_saves_nothing(here: Path, more: str, flags: str, found: str) -> None:
    script(here / "job.sbatch", more=more, flags=flags)
    answer = answered("check", "job.sbatch", "--gpus", "4x8xH200")
    messages = [one for one in answer["findings"] if one["rule"] == "launch.signal"]
    assert bool(messages) == bool(found)
    assert all(found in one["message"] and one["line"] == 5 for one in messages)
    if found and "handler" in flags:
        assert messages[0]["fix"] == ["#SBATCH --signal=TERM@300"]
