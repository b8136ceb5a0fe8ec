"""Commands that repeat what was typed, and files that contain what the answer says."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest


def test_the_printed_size_command_repeats_what_was_typed(meshwright: Any) -> None:
    typed = ("--seq", "16384", "layout.tp=2", "train.global_batch_size=64")
    Path("own.toml").write_text(
        'name = "own"\nmodel = "llama3-70b"\ngoal = "sft"\ncluster = "2xL40S"\n[data]\nseq_length = 16384\n'
    )
    for words in (
        ("recommend", "llama3-70b", "--goal", "sft", "--gpus", "2xL40S", *typed),
        ("estimate", "llama3-70b", "--goal", "sft", "--gpus", "2xL40S", *typed),
        ("check", "own.toml", *typed[2:]),
    ):
        found = [one.get("no_fix", "") for one in meshwright(*words, "--json").json["findings"]]
        command = re.search(r"\(meshwright (size .+) gives a count\)", " ".join(found))
        assert command, words
        printed = shlex.split(command[1])
        assert printed[printed.index("--goal") + 1] == "sft"
        assert printed[printed.index("--seq") + 1] == "16384"
        assert set(typed[2:]) <= set(printed), words
    assert "tp 2" in meshwright(*printed, "--max-gpus", "64").out  # the command runs as printed


def test_a_saved_recommendation_is_what_it_runs(meshwright: Any) -> None:
    lines = [{"prompt": f"What is {n} plus 1?", "response": f"The answer is {n + 1}. " * 9} for n in range(1000)]
    Path("qa.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ("recommend", "gemma3-1b", "--gpus", "8xA100-40", "--goal", "sft", "--dataset", "qa.jsonl")
    answer = meshwright(*words, "train.epochs=3", "--save", "saved.toml", "--json").json
    warmup = next(one["to"] for one in answer["changes"] if one["field"] == "schedule.warmup_steps")
    assert f"warmup_steps = {warmup}" in Path("saved.toml").read_text()
    left = {one["rule"] for one in meshwright("check", "saved.toml", "--gpus", "8xA100-40", "--json").json["findings"]}
    assert "learning_rate.warmup-too-long" not in left
    words = ("recommend", "llama3-8b", "--gpus", "8xH100", "--goal", "pretrain", "layout.tp=3", "--save", "three.toml")
    kept = meshwright(*words)  # a typed setting is not replaced by itself
    assert "note: wrote three.toml: it has your settings and the errors of this answer" in kept.err
    repair = meshwright(*words[:-2], "--json").json["repair"]["overrides"]
    assert f"the repair is not in it: {' '.join(repair)}" in kept.err


def test_a_layout_that_gathers_in_fp8_only_without_offload_is_recommended(meshwright: Any) -> None:
    assert meshwright("recommend", "deepseek_v3_pretrain_256gpu_b200_fp8cs_config").code == 0


def test_a_note_that_was_not_printed_is_printed_later(capsys: pytest.CaptureFixture[str]) -> None:
    from meshwright.notes import no_notes, note

    with no_notes():
        note("seen once")
    assert capsys.readouterr().err == ""
    note("seen once")
    note("seen once")
    assert capsys.readouterr().err == "note: seen once\n"


def test_a_file_without_a_length_is_said_to_train_for_the_default(meshwright: Any) -> None:
    config = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    Path("ds.json").write_text(json.dumps({**config, "bf16": {"enabled": True}}))
    words = ("--model", "qwen3-0.6b", "--gpus", "8xH100")
    text = "{} does not say how long it trains: a recipe then has 300,000 steps; write train.epochs=N or train.steps=N"
    assert meshwright("check", "ds.json", *words, "--json").json["notes"].count(text.format("ds.json")) == 1
    imported = meshwright("import", "ds.json", *words, "--goal", "sft", "--out", "own.toml", "--json").json
    assert [one["message"] for one in imported["assumed"]].count(text.format("ds.json")) == 1
    assert text.format("ds.json") not in imported["notes"]
    for length, said in (((), True), (("train.steps=9",), False), (("train.epochs=2",), False)):
        answer = meshwright("check", "own.toml", "--gpus", "8xH100", *length, "--json").json
        assert (text.format("own.toml") in answer.get("notes", [])) == said, length
    slurm = ("launch", "own.toml", "--scheduler", "slurm", "-t", "10:00", "--gpus", "8xH100")
    err = meshwright(*slurm).err
    assert text.format("own.toml") in err
    assert "trains on random tokens (data.dataset=mock)" in err


def test_a_slurm_job_that_offloads_gets_the_memory_of_the_node(meshwright: Any) -> None:
    words = (
        "launch",
        "llama3_8b_sft_config",
        "--scheduler",
        "slurm",
        "-t",
        "1:00:00",
        "--gpus",
        "8xH100",
        "--out",
        "runs/a",
    )
    for more, memory in (
        ((), None),
        (("layout.offload=optimizer",), "0"),
        (("layout.offload=activations",), "0"),
        (("layout.offload=optimizer", "--sbatch", "mem=500G"), "500G"),
    ):
        found = re.findall(r"#SBATCH --mem\S*=(\S+)", meshwright(*words, *more).out)
        assert found == ([memory] if memory else []), more


def test_tokenize_reads_csv_as_train_does(meshwright: Any) -> None:
    texts = ["hello world", "a comma, in a cell", "two\nlines", "last"]
    Path("t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    cells = ['"' + text + '"' for text in texts]
    Path("t.csv").write_text("id,text\n" + "".join(f"{n},{cell}\n" for n, cell in enumerate(cells)))
    Path("t.tsv").write_text("id\ttext\n" + "".join(f"{n}\t{cell}\n" for n, cell in enumerate(cells)))
    for name in ("t.jsonl", "t.csv", "t.tsv"):
        assert meshwright("tokenize", name, "--tokenizer", "bytes", "--out", f"{name}-tokens").code == 0
        for part in ("00000.tokens", "00000.ends"):
            assert Path(f"{name}-tokens", part).read_bytes() == Path("t.jsonl-tokens", part).read_bytes(), name
    other = meshwright("tokenize", "t.csv", "--tokenizer", "bytes", "--out", "other", "--column", "body")
    assert (other.code, "t.csv: has no 'body'; it has id, text" in other.err) == (2, True)
    Path("bad.csv").write_text("id,text\n1,one\n2,two,three\n3,three\n")
    words = ("tokenize", "bad.csv", "--tokenizer", "bytes", "--out", "bad")
    assert "bad.csv:3: the row does not have the header's 2 columns" in meshwright(*words).err
    assert "2 documents" in meshwright(*words, "--skip-bad-lines").out


STEP = (
    " [2026-11-10 12:00:10] iteration {step:8d}/    1000 | elapsed time per iteration (ms): 9000.0 | learning rate: "
    "3.0E-04 | global batch size:   128 | lm loss: 5.0E+00 | loss scale: 1.0 | grad norm: 0.9 |\n"
)


def rank_times(**timers: list[float]) -> str:
    """Return what Megatron's timers print with --timing-log-option all (megatron/core/timers.py)."""
    text = "times across ranks (ms):"
    for name, times in timers.items():
        text += f"\n  {name.replace('_', '-')}:"
        for rank, one in enumerate(times):
            text += f"\n     rank {rank:2d}: {one:.2f}"
    return f"{text}\n"


def test_doctor_names_the_slow_rank_of_megatrons_table_of_ranks(meshwright: Any) -> None:
    even, slow = [900.0 + rank for rank in range(16)], [900.0 + 600.0 * (rank == 13) for rank in range(16)]
    late_stage = [900.0 + 600.0 * (rank >= 8) for rank in range(16)]
    layout = "using world size: 16, data-parallel size: 4, context-parallel size: 1, tensor-model-parallel size: 2, "
    gpus = ("--gpus", "2x8xH100", "--json")
    for times, pipeline, message in (
        (even, 1, ""),
        (slow, 1, "rank 13 (GPU 5 of node 1) takes 1.67 times as long as the fastest for forward-compute"),
        (slow, 2, "rank 13 (GPU 5 of node 1) takes 1.67 times as long as the fastest for forward-compute"),
        (late_stage, 2, "the slowest rank takes 1.67 times as long as the fastest for forward-compute: unequal work"),
    ):
        table = rank_times(forward_compute=times, optimizer=[50.0] * 16)
        steps = "".join(STEP.format(step=step) + table for step in range(10, 200, 10))
        Path("mega.log").write_text(f"{layout}pipeline-model-parallel size: {pipeline}\n{steps}")
        recipe = ("--recipe", "llama3_8b_pretrain_config", "layout.tp=2", f"layout.pp={pipeline}")
        found = meshwright("doctor", "mega.log", *recipe, *gpus).json
        messages = [one["message"] for one in found["findings"] if one["rule"] == "speed.stragglers"]
        assert len(messages) == bool(message), messages
        assert not message or messages[0].startswith(message), messages


def test_no_two_plans_read_the_same(meshwright: Any) -> None:
    for model, gpus, goal in (("llama3-70b", "8xH100", "pretrain"), ("llama3-70b", "8xH100", "sft")):
        out = meshwright("plan", model, "--gpus", gpus, "--goal", goal).out
        rows = [re.split(r" {2,}", line)[1] for line in out.splitlines() if re.match(r"\d+ +fsdp2", line)]
        assert len(rows) == len(set(rows)) == 5, rows


def test_a_training_started_by_bridges_script_gets_the_repair_of_its_command(meshwright: Any) -> None:
    arguments = (
        "--recipe qwen3_235b_a22b_sft_config --dataset squad model.tensor_model_parallel_size=4 "
        "model.pipeline_model_parallel_size=8 model.expert_model_parallel_size=16 train.global_batch_size=32 "
        "train.micro_batch_size=2 model.sequence_parallel=false optimizer.learning_rate=5e-6 dataset.seq_length=2048\n"
    )
    repairs = []
    for start in (
        "torchrun --nproc-per-node=8 --nnodes=8 scripts/training/run_recipe.py",
        "bash train.sh --nodes 8 --gpus-per-node 8",
        "./scripts/training/train.sh",
    ):
        Path("bridge.sh").write_text(f"{start} {arguments}")
        repairs.append(meshwright("check", "bridge.sh", "--gpus", "8x8xH200", "--json").json["repair"]["overrides"])
    assert "without optimizer.learning_rate" in repairs[0]
    assert repairs[0] == repairs[1] == repairs[2]


TRAINER = (
    "torchrun --nproc_per_node 8 run_clm.py --model_name_or_path meta-llama/Llama-3.1-8B --dataset_name wikitext "
    "--block_size 4096 --per_device_train_batch_size 1 --do_train --output_dir out --bf16 --tag a"
)
BRIDGE = "torchrun --nproc-per-node=8 scripts/training/run_recipe.py --recipe llama3_8b_sft_config --dataset squad"
SWIFT = "swift sft --model Qwen/Qwen2.5-7B-Instruct --tuner_type lora --dataset AI-ModelScope/alpaca-gpt4-data-zh"


@pytest.mark.parametrize(
    ("start", "first", "last", "note"),
    [
        (TRAINER, "--learning_rate 1e-5", "--learning_rate 2e-5", "--learning_rate is given twice: the last value"),
        (TRAINER, "--learning_rate=1e-5", "--learning_rate 2e-5", "counts, 2e-5 (run.sh:3), not 1e-5 (run.sh:2)"),
        (SWIFT, "--learning_rate 1e-5", "--learning_rate 2e-5", "counts, 2e-5 (run.sh:3), not 1e-5 (run.sh:2)"),
        (BRIDGE, "train.micro_batch_size=1", "train.micro_batch_size=2", "counts, 2 (run.sh:3), not 1 (run.sh:2)"),
        (TRAINER, "--learning_rate 1e-5", "--learning_rate 1e-5", ""),
        (TRAINER, "--bf16", "--bf16 true", ""),
        (TRAINER, "--learning_rate 1e-5", "--learning_rate $LR", ""),  # known only when it runs
        (TRAINER, "--learning_rate 1e-5", "--tag b", ""),  # an option of the user's program, which may collect them
    ],
)
def test_an_option_that_is_given_twice_is_noted(meshwright: Any, start: str, first: str, last: str, note: str) -> None:
    Path("run.sh").write_text(f"{start} \\\n  {first} \\\n  {last}\n")
    answer = meshwright("check", "run.sh", "--gpus", "8xH100", "--json").json
    notes = [one for one in answer["notes"] if " is given " in one]
    assert len(notes) == bool(note)
    assert all(note in one for one in notes)


def test_a_program_without_options_has_none_twice(meshwright: Any) -> None:
    Path("fsdp.yaml").write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\n")
    Path("train.py").write_text("from transformers import TrainingArguments\nargs = TrainingArguments('out')\n")
    Path("run.sh").write_text("accelerate launch --config_file fsdp.yaml --num_processes 8 train.py\n")
    assert "findings" in meshwright("check", "run.sh", "--gpus", "8xH100", "--json").json


def test_a_flag_of_megatron_that_is_given_three_times_is_one_finding(meshwright: Any) -> None:
    Path("run.sh").write_text("torchrun pretrain_gpt.py --num-layers 32 --lr 1e-4 \\\n  --lr 2e-4 \\\n  --lr 3e-4\n")
    answer = meshwright("check", "run.sh", "--json").json
    (found,) = (one for one in answer["findings"] if one["rule"] == "value.replaced")
    assert found["message"] == "--lr 1e-4 and --lr 2e-4 (line 2) are overridden by a later --lr 3e-4 (line 3)"
    assert not [one for one in answer["notes"] if " is given " in one]
