"""Scripts and logs of 13B and 70B runs: repair, dry-run, compare, diagnose."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from tests.first_hour.test_pasted_repairs import pasted

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


TITAN_70B = {
    "model": {"name": "llama3", "flavor": "70B"},
    "optimizer": {"name": "AdamW", "lr": 2e-5},
    "lr_scheduler": {"warmup_steps": 200},
    "training": {"local_batch_size": 1, "global_batch_size": 500, "seq_len": 8192, "steps": 9537, "dataset": "c4"},
    "parallelism": {"tensor_parallel_degree": 16, "enable_async_tensor_parallel": True},
    "activation_checkpoint": {"mode": "full"},
    "compile": {"enable": False, "components": ["model", "loss"]},
}


@pytest.mark.parametrize(("batch", "contract"), [(500, False), (499, True)])  # 499 is prime: one replica, far slower
def test_a_repair_of_the_layout_keeps_a_batch_that_another_layout_can_split(
    meshwright: Any, tmp_path: Path, batch: int, contract: bool
) -> None:
    settings = {table: dict(values) for table, values in TITAN_70B.items()}
    settings["training"]["global_batch_size"] = batch
    file = tmp_path / "titan.toml"
    file.write_text(tomlkit.dumps(settings))
    repair = meshwright("check", str(file), "--gpus", "16x8xH100", "--json").json["repair"]
    assert repair["contract"] is contract, repair
    for text in repair["overrides"]:
        table, key = text.partition(" = ")[0].split(".")
        settings[table][key] = tomlkit.parse(f"value = {text.partition(' = ')[2]}")["value"]
    file.write_text(tomlkit.dumps(settings))
    assert (settings["training"]["global_batch_size"] == batch) is not contract
    assert meshwright("check", str(file), "--gpus", "16x8xH100").code == 0


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


def test_what_a_plan_says_about_the_files_own_layout_and_about_long_sequences(
    meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    env, seq, more, _ = SCRIPTS["p1000.sh"]
    Path("p1000.sh").write_text(MEGATRON.format(env=env, seq=seq, more=more))
    original = meshwright("recommend", "p1000.sh", "--gpus", "16x8xH100").out.partition("Original")[2].splitlines()[0]
    assert original.endswith("breaks a rule of this engine")
    assert "does not fit" not in original
    words = ("recommend", "llama2-13b", "--goal", "pretrain", "--gpus", "16x8xH100", "--seq", "32k")
    longer = meshwright(*words).out
    assert "data.seq_length=32768 is more than the 4,096 positions of llama2_13b" in longer
    assert "the plan's" in longer.partition("keep the tokens per step")[2].splitlines()[0]


def test_unknown_names_and_several_clusters_say_what_to_type(meshwright: Any) -> None:
    plan = ("recommend", "llama2-13b", "--goal", "pretrain")
    assert "layout.micro_batch_size=1" in meshwright(*plan, "--gpus", "8xH100", "layout.mbs=1").err
    assert "micro_batch_size=1" in meshwright(*plan, "--gpus", "8xH100", "MBS=1").err
    assert "did you mean layout.micro_batch_size?" in meshwright("explain", "mbs").err
    for gpus in ("16x8xH100,8x8xB200", "16x8xH100+8x8xB200"):
        found = meshwright(*plan, "--gpus", gpus)
        assert (found.code, "names 2 clusters" in found.err) == (2, True)
        assert "--gpu H100,B200" in found.err
        assert "fix:   16x8xH100 | 8x8xB200" in found.err


def test_targets_of_different_models_have_no_winner(meshwright: Any) -> None:
    found = meshwright("compare", "llama3_8b_pretrain_config", "llama3_70b_pretrain_config", "--gpus", "8x8xH100")
    assert "None is chosen, as they train different models" in found.out
    assert "% longer" not in found.out


def test_steps_that_megatron_counts_are_not_called_log_lines(meshwright: Any, tmp_path: Path) -> None:
    line = (
        " [2026-11-10 12:00:10] iteration {:8d}/    1000 | elapsed time per iteration (ms): 9000.0 | learning rate: "
        "3.0E-04 | global batch size:   128 | {}loss scale: 1.0 | grad norm: {} | number of skipped iterations:   0 | "
        "number of nan iterations: {:3d} |\n"
    )
    steps = [line.format(step, "lm loss: 5.0E+00 | ", 0.9, 0) for step in range(10, 130, 10)]
    (tmp_path / "nan.log").write_text("".join((*steps, line.format(130, "", "nan", 10))))
    found = meshwright("doctor", str(tmp_path / "nan.log")).out
    assert "in 10 steps overall" in found, found
