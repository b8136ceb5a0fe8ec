"""DeepSpeed JSON that matches its command, ms-swift's defaults and presets."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from .mistakes import call

ON = ("--gpus", "2xRTX6000-Ada")
COMMAND = (
    "torchrun --nproc_per_node=2 run_clm.py --model_name_or_path Qwen/Qwen2.5-1.5B --train_file rows.jsonl "
    "--do_train --block_size 1024 --per_device_train_batch_size 4 --gradient_accumulation_steps 8 "
    "--learning_rate 2e-5 --num_train_epochs 3 --bf16 True --gradient_checkpointing --deepspeed ds.json "
    "--output_dir out\n"
)
SWIFT = """NPROC_PER_NODE=2 \\
swift sft \\
    --model Qwen/Qwen2.5-14B-Instruct \\
    --tuner_type lora \\
    --dataset rows.jsonl \\
    --torch_dtype bfloat16 \\
    --per_device_train_batch_size 4 \\
    --gradient_accumulation_steps 16 \\
    --max_length 1024 \\
"""
BEST = " --load_best_model_at_end true --output_dir output\n"
MICRO, STEPS, BATCH = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    row = json.dumps({"prompt": "Classify the ticket: my order is late.", "completion": " shipping"})
    for name in ("rows.jsonl", "val.jsonl"):
        (tmp_path / name).write_text(f"{row}\n" * 400)
    return tmp_path


def started_sizes(config: dict[str, Any], words: list[str], ranks: int) -> tuple[int, int, int]:
    """Return the batch, micro batch and accumulation that Accelerate passes on, as the Trainer fills them in."""
    micro = int(words[words.index("--per_device_train_batch_size") + 1])
    steps = int(words[words.index("--gradient_accumulation_steps") + 1])
    filled = {BATCH: ranks * micro * steps, MICRO: micro, STEPS: steps}
    config = {STEPS: 1, **config}  # Accelerate's DeepSpeedPlugin
    found = {key: filled[key] if config[key] == "auto" else config[key] for key in filled if key in config}
    assert found == {key: filled[key] for key in found}  # the Trainer refuses values that differ from its arguments
    return found.get(BATCH, filled[BATCH]), found[MICRO], found[STEPS]


@pytest.mark.parametrize(
    "sizes",
    [
        {STEPS: 8, BATCH: "auto", MICRO: 4},
        {STEPS: 8, BATCH: 64, MICRO: 4},
        {STEPS: "auto", BATCH: "auto", MICRO: "auto"},
        {STEPS: "auto", BATCH: 64, MICRO: "auto"},
        {STEPS: 8, BATCH: "auto", MICRO: "auto"},
        {STEPS: 8, MICRO: 4},
    ],
)
@pytest.mark.parametrize("change", [("layout.micro_batch_size=8",), ("train.global_batch_size=32",), ()])
def test_an_exported_json_has_the_sizes_of_its_command(here: Path, sizes: dict[str, Any], change: tuple[str]) -> None:
    config = {**sizes, "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3}}
    (here / "ds.json").write_text(json.dumps(config))
    (here / "run.sh").write_text(COMMAND)
    found = call("export", "run.sh", "--to", "deepspeed", *ON, "--out", "job", *change)
    assert found.code == 0, found.err
    words = shlex.split((here / "job/run.sh").read_text().splitlines()[-1])
    batch, micro, steps = started_sizes(json.loads((here / "job/ds_config.json").read_text()), words, 2)
    assert batch == micro * steps * 2 == (32 if "train.global_batch_size=32" in change else 64)
    assert micro == (8 if "layout.micro_batch_size=8" in change else 4)


def test_a_new_json_has_the_accumulation_that_accelerate_would_set_to_1(here: Path) -> None:
    words = ("--goal", "sft", "--dataset", "rows.jsonl", "layout.micro_batch_size=8", "train.global_batch_size=64")
    found = call("export", "mistral-7b", "--to", "deepspeed", *ON, *words, "--out", "job")
    assert found.code == 0, found.err
    config = json.loads((here / "job/ds_config.json").read_text())
    assert (config[BATCH], config[MICRO], config[STEPS]) == (64, 8, 4)


def errors(name: str) -> list[str]:
    return [one["message"] for one in call("check", name, *ON).json["findings"] if one["severity"] == "error"]


@pytest.mark.parametrize(
    "steps",
    [
        "--val_dataset val.jsonl --eval_steps 50 --save_steps 50",
        "--val_dataset val.jsonl --save_steps 70",  # evaluated as often as saved
        "--split_dataset_ratio 0.05 --save_strategy epoch",
        "--val_dataset val.jsonl --eval_strategy steps --eval_steps 50 --save_steps 100",
    ],
)
def test_evaluations_of_ms_swift_follow_its_saves(here: Path, steps: str) -> None:
    (here / "swift.sh").write_text(f"{SWIFT}    {steps}{BEST}")
    assert errors("swift.sh") == []


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("--val_dataset val.jsonl --eval_steps 50 --save_steps 70", "--save_steps 70 to be a multiple of --eval_steps"),
        ("--val_dataset val.jsonl --eval_strategy no --save_steps 70", "nothing is evaluated"),
        ("--eval_steps 50 --save_steps 50", "without val_dataset, split_dataset_ratio and eval_dataset"),
        ("--split_dataset_ratio 0.1 --streaming true --max_steps 9", "without val_dataset, split_dataset_ratio"),
    ],
)
def test_a_best_checkpoint_of_ms_swift_without_evaluations_is_an_error(here: Path, steps: str, message: str) -> None:
    (here / "swift.sh").write_text(f"{SWIFT}    {steps}{BEST}")
    (found,) = errors("swift.sh")
    assert message in found


def test_trl_evaluates_every_10_steps_by_default(here: Path) -> None:
    text = (
        "trl sft --model_name_or_path Qwen/Qwen2.5-7B --dataset_name trl-lib/Capybara --use_peft --eval_strategy steps "
    )
    (here / "trl.sh").write_text(f"{text}--save_steps 50 --load_best_model_at_end true --output_dir out\n")
    assert errors("trl.sh") == []
    (here / "trl.sh").write_text(f"{text}--save_steps 75 --load_best_model_at_end true --output_dir out\n")
    (found,) = errors("trl.sh")
    assert "--save_steps 75 to be a multiple of --eval_steps (not set: 10" in found


def test_evaluations_of_llama_factory_need_data(here: Path) -> None:
    text = "model_name_or_path: Qwen/Qwen2.5-7B\nstage: sft\ndo_train: true\nfinetuning_type: lora\ndataset: identity\n"
    text += "template: qwen\noutput_dir: out\nper_device_train_batch_size: 1\neval_strategy: steps\neval_steps: 10\n"
    (here / "lf.yaml").write_text(text)
    (found,) = errors("lf.yaml")
    assert "eval_strategy: steps needs eval_dataset or val_size" in found
    (here / "lf.yaml").write_text(f"{text}val_size: 0.1\n")
    assert errors("lf.yaml") == []


@pytest.mark.parametrize("preset", ["zero0", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload", "mine.json"])
def test_every_command_reads_a_preset_of_ms_swift_as_check_does(here: Path, preset: str) -> None:
    (here / "mine.json").write_text('{"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"}')
    (here / "swift.sh").write_text(f"{SWIFT}    --deepspeed {preset} --output_dir output\n")
    assert errors("swift.sh") == []
    for verb in ("recommend", "estimate"):
        found = call(verb, "swift.sh", *ON)
        assert found.code == 2
        assert "is a config of ms-swift, which only check reads" in found.err
        assert "meshwright recommend Qwen/Qwen2.5-14B-Instruct --goal peft --gpus 2xRTX6000-Ada" in found.err


def test_the_faster_layout_of_a_checked_command_is_a_command_that_runs(here: Path) -> None:
    steps = "--quant_bits 4 --quant_method bnb --bnb_4bit_compute_dtype float16 --num_train_epochs 3 --lora_rank 8 "
    steps += "--target_modules all-linear --packing true --attn_impl sdpa --deepspeed zero3 --val_dataset val.jsonl "
    steps += "--eval_steps 50 --save_steps 70"
    (here / "swift.sh").write_text(f"{SWIFT}    {steps}{BEST}")
    notes = [one for one in call("check", "swift.sh", *ON).json["notes"] if "meshwright recommend" in one]
    assert len(notes) == 1
    words = shlex.split(notes[0].partition(" s): meshwright ")[2])
    assert words[:2] == ["recommend", "Qwen/Qwen2.5-14B-Instruct"]
    found = call(*words)
    assert found.code == 0, found.err


def test_a_value_with_spaces_is_quoted_in_the_fix() -> None:
    found = call("recommend", "mistral-7b", "--gpu", "2xRTX 6000 Ada", "--goal", "lora", "--lr", "1e-4")
    assert "fix:   --gpus '2xRTX 6000 Ada' optimizer.lr=1e-4" in found.err
    found = call("size", "mistral-7b", "--gpus", "A100-80", "--goal", "lora", "--train-file", "my rows.jsonl")
    assert "--dataset 'my rows.jsonl'" in found.err


def test_a_budget_for_a_dataset_asks_for_epochs_and_not_for_tokens() -> None:
    words = ("size", "mistral-7b", "--gpus", "A100-80", "--goal", "lora", "--dataset", "rows.jsonl", "--price", "1.5")
    found = call(*words, "--budget", "150")
    assert "fix:   train.epochs=3\n" in found.err


def test_an_import_without_gpus_names_the_count_of_the_script(here: Path) -> None:
    (here / "ds.json").write_text('{"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto"}')
    (here / "run.sh").write_text(COMMAND)
    found = call("import", "run.sh")
    assert "run.sh starts 2 GPUs per node" in found.err
    assert "--gpus 2xH100" in found.err


@pytest.mark.parametrize(
    ("typed", "rule", "fix"),
    [
        ("--evaluation_strategy steps", "key.removed", ["--eval_strategy steps"]),
        ("--evalution_steps 50", "key.unknown", ["--eval_steps 50"]),
        ("--learning_rte 1e-5 ", "key.unknown", ["without --learning_rte"]),
        ("--save_step 50 --preprocessing_num_workers 4", "", []),  # argparse accepts the start of a name
    ],
)
def test_an_argument_that_the_trainer_does_not_have_is_reported(
    here: Path, typed: str, rule: str, fix: list[str]
) -> None:
    (here / "run.sh").write_text(COMMAND.replace("--deepspeed ds.json", typed))
    found = [one for one in call("check", "run.sh", *ON).json["findings"] if one["rule"].startswith("key.")]
    assert [(one["rule"], one["fix"]) for one in found] == ([(rule, fix)] if rule else [])
