"""Files of other trainers: warmups by default, padding, and steps of packed texts."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from meshwright.recipes import overrides
from meshwright.recipes.padding import padding_of
from meshwright.recipes.types import Recipe

DATASETS = "nemo_automodel.components.datasets.llm.column_mapped_text_instruction_dataset"
AUTOMODEL = f"""\
recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {{global_batch_size: 64, local_batch_size: 4, num_epochs: 3}}
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: Qwen/Qwen2.5-1.5B-Instruct
  torch_dtype: bf16
peft: {{_target_: nemo_automodel.components._peft.lora.PeftConfig, match_all_linear: true, dim: 16, alpha: 32}}
distributed: {{strategy: fsdp2, tp_size: 1, cp_size: 1}}
dataset:
  _target_: {DATASETS}.ColumnMappedTextInstructionDataset
  path_or_dataset_id: tickets.jsonl
  column_mapping: {{question: prompt, answer: completion}}
packed_sequence: {{packed_sequence_size: 0}}
dataloader:
  _target_: torchdata.stateful_dataloader.StatefulDataLoader
  collate_fn: nemo_automodel.components.datasets.utils.default_collater
optimizer: {{_target_: torch.optim.Adam, lr: 1.0e-4, weight_decay: 0}}
lr_scheduler: {{lr_decay_style: cosine, min_lr: 1.0e-6}}
"""
AXOLOTL = """\
base_model: Qwen/Qwen2.5-1.5B-Instruct
datasets: [{path: tickets.jsonl, type: alpaca}]
adapter: lora
lora_r: 16
lora_alpha: 32
sequence_len: 2048
micro_batch_size: 4
gradient_accumulation_steps: 8
num_epochs: 3
learning_rate: 0.0001
optimizer: adamw_torch
bf16: true
"""
TOO_LONG = "learning_rate.warmup-too-long"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    draw = random.Random(0)
    rows = [{"prompt": "p" * int(draw.lognormvariate(6, 0.8)), "completion": "refund"} for _ in range(2000)]
    Path("tickets.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("am.yaml").write_text(AUTOMODEL)


@pytest.mark.parametrize("verb", ["check", "recommend", "estimate"])
def test_automodels_default_warmup_is_a_tenth_of_the_counted_steps(meshwright: Any, verb: str) -> None:
    answer = meshwright(verb, "am.yaml", "--gpus", "2xRTX6000Ada")
    assert TOO_LONG not in answer.out
    if verb != "check":  # 2,000 rows, 64 per step, 3 epochs: 94 steps
        assert "schedule.warmup_steps=9, 10 % (at most 1,000) of the 94 steps counted in the data" in answer.out


@pytest.mark.parametrize(("typed", "warmup"), [("train.steps=200", 20), ("train.steps=90000", 1000)])
def test_automodels_default_warmup_follows_typed_steps(meshwright: Any, typed: str, warmup: int) -> None:
    out = meshwright("import", "am.yaml", "--gpus", "2xRTX6000Ada", typed).out
    assert f"warmup_steps = {warmup}\n" in f"{out}\n"


def test_a_stated_warmup_is_still_found_too_long(meshwright: Any) -> None:
    Path("am.yaml").write_text(AUTOMODEL.replace("lr_decay_style", "lr_warmup_steps: 1000, lr_decay_style"))
    assert TOO_LONG in meshwright("check", "am.yaml", "--gpus", "2xRTX6000Ada").out


@pytest.mark.parametrize(("line", "is_too_long"), [("", False), ("warmup_ratio: 0.7\n", True)])
def test_axolotls_warmup_is_a_share_of_the_counted_steps(meshwright: Any, line: str, is_too_long: bool) -> None:
    Path("ax.yaml").write_text(AXOLOTL + line)
    assert (TOO_LONG in meshwright("check", "ax.yaml", "--gpus", "2xRTX6000Ada").out) is is_too_long


def test_automodel_pads_to_the_longest_of_a_micro_batch(meshwright: Any) -> None:
    def tokens(*changes: str) -> float:
        found = meshwright("estimate", "am.yaml", "--gpus", "2xRTX6000Ada", *changes, "--json").json
        return float(found["budget"]["tokens"])

    own = 3 * Path("tickets.jsonl").stat().st_size / 4
    assert tokens("layout.micro_batch_size=1") == pytest.approx(own, rel=0.05)
    assert 1.2 * own < tokens("layout.micro_batch_size=2") < tokens("layout.micro_batch_size=4") < 94 * 64 * 2048
    out = meshwright("recommend", "am.yaml", "--gpus", "2xRTX6000Ada", "layout.micro_batch_size=1").out
    assert "not padded in micro batches of one sample" in out
    assert "padded to 2,048" not in out
    assert "pack the samples" not in out


def test_automodel_pads_to_the_length_if_the_dataset_says_so(meshwright: Any) -> None:
    Path("am.yaml").write_text(AUTOMODEL.replace("  path_or", "  seq_length: 512\n  padding: max_length\n  path_or"))
    out = meshwright("estimate", "am.yaml", "--gpus", "2xRTX6000Ada").out
    assert "padded to 512)" in out


@pytest.mark.parametrize(
    ("engine", "changes", "padded"),
    [
        ("meshwright", (), "seq_length"),
        ("meshwright", ("data.group_by_length=true",), "step"),
        ("automodel", (), "micro_batch"),
        ("automodel", ("data.pad_to_max_length=true",), "seq_length"),
        ("fsdp1", (), "micro_batch"),
        ("deepspeed", (), "micro_batch"),
        ("deepspeed", ("data.packing=true",), "packed"),
        ("megatron", (), "micro_batch"),
        ("megatron", ("layout.pp=2",), "seq_length"),
        ("torchtitan", (), "seq_length"),
    ],
)
def test_every_engine_pads_as_its_collator_does(engine: Any, changes: tuple[str, ...], padded: str) -> None:
    blank = Recipe(name="", model="", goal="sft", cluster="8xH100")
    assert padding_of(overrides.apply(blank, changes), engine).to == padded


RUN_CLM = (
    "torchrun --nproc_per_node=2 run_clm.py --model_name_or_path Qwen/Qwen2.5-1.5B --train_file tickets.jsonl "
    "--validation_file tickets.jsonl --do_train --block_size 1024 --per_device_train_batch_size 4 --learning_rate 1e-5 "
    "--num_train_epochs 3 --bf16 --gradient_checkpointing --output_dir out"
)


def blocks() -> int:
    """Return the blocks of 1,024 tokens that the rows fill, at 4 bytes per token."""
    return round(Path("tickets.jsonl").stat().st_size / 4 / 1024)


def test_run_clm_trains_on_full_blocks(meshwright: Any) -> None:
    Path("run.sh").write_text(RUN_CLM)
    found = meshwright("estimate", "run.sh", "--gpus", "2xRTX6000Ada", "--json").json["budget"]
    assert found["steps"] == pytest.approx(3 * blocks() / 8, rel=0.08)
    assert found["tokens_per_step"] == 8 * 1024
    out = meshwright("recommend", "run.sh", "--gpus", "2xRTX6000Ada").out
    assert "packed samples" in out
    assert "pack the samples" not in out
    assert "Findings none" in meshwright("check", "run.sh", "--gpus", "2xRTX6000Ada").out


def test_blocks_attend_to_each_other_with_every_kernel(meshwright: Any) -> None:
    Path("run.sh").write_text(f"{RUN_CLM} --attn_implementation eager")
    assert "data.packing-attention" not in meshwright("check", "run.sh", "--gpus", "2xRTX6000Ada").out


def test_other_programs_of_the_trainer_pad_to_the_longest(meshwright: Any) -> None:
    Path("run.sh").write_text(RUN_CLM.replace("run_clm.py", "finetune.py").replace("block_size", "model_max_length"))
    out = meshwright("estimate", "run.sh", "--gpus", "2xRTX6000Ada").out
    assert "padded to the longest of a micro batch" in out


def test_a_repaired_save_is_not_later_than_the_stated_one(meshwright: Any) -> None:
    best = "--eval_strategy steps --do_eval --eval_steps 50 --save_steps 75 --load_best_model_at_end"
    Path("run.sh").write_text(f"{RUN_CLM} {best}")
    out = meshwright("check", "run.sh", "--gpus", "2xRTX6000Ada").out
    assert "--save_steps 50" in out
    assert "--save_steps 100" not in out


@pytest.mark.parametrize(
    ("scheduler", "stated", "is_unused"),
    [
        ("WarmupLR", "cosine", True),
        ("WarmupLR", "constant_with_warmup", False),
        ("WarmupDecayLR", "linear", False),
        ("WarmupDecayLR", "cosine", True),
        ("WarmupCosineLR", "cosine", False),
    ],
)
def test_a_scheduler_of_deepspeed_replaces_the_trainers(
    meshwright: Any, scheduler: str, stated: str, is_unused: bool
) -> None:
    auto = {"warmup_num_steps": "auto"} | ({} if scheduler == "WarmupLR" else {"total_num_steps": "auto"})
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "scheduler": {"type": scheduler, "params": auto},
    }
    Path("ds.json").write_text(json.dumps(config, indent=1))
    Path("run.sh").write_text(f"{RUN_CLM} --deepspeed ds.json --lr_scheduler_type {stated} --warmup_ratio 0.03")
    out = meshwright("check", "run.sh", "--gpus", "2xRTX6000Ada").out
    assert (f"--lr_scheduler_type {stated} has no effect: the scheduler {scheduler} in ds.json:" in out) is is_unused


@pytest.mark.parametrize(
    ("end", "is_unused"), [('"min_lr": 3e-5', False), ('"min_lr_rate": 0.1', False), ('"min_lr": 6e-5', True)]
)
def test_a_cosine_that_ends_where_deepspeeds_does_is_the_same_schedule(
    meshwright: Any, end: str, is_unused: bool
) -> None:
    """The exported arguments of a pretraining had the warning."""
    params = {"warmup_num_steps": "auto", "total_num_steps": "auto", "cos_min_ratio": 0.1}
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "zero_optimization": {"stage": 2},
        "scheduler": {"type": "WarmupCosineLR", "params": params},
    }
    Path("ds.json").write_text(json.dumps(config, indent=1))
    schedule = f"--learning_rate 3e-4 --lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{{{end}}}'"
    Path("run.sh").write_text(f"{RUN_CLM} --deepspeed ds.json {schedule} --warmup_steps 100 --max_steps 1000")
    out = meshwright("check", "run.sh", "--gpus", "2xRTX6000Ada").out
    assert ("cosine_with_min_lr has no effect" in out) is is_unused
    assert ("ends at 0.1 of the learning rate" in out) is is_unused


def test_check_has_the_memory_of_run_clm_without_recomputation(meshwright: Any) -> None:
    Path("run.sh").write_text(RUN_CLM.replace(" --gradient_checkpointing", ""))
    out = meshwright("check", "run.sh", "--gpus", "2xL40S").out
    assert "Memory   " in out
    assert "memory is checked if you pass" not in out


def test_a_run_shorter_than_its_interval_saves_at_the_end(meshwright: Any) -> None:
    words = ("--goal", "lora", "data.dataset=tickets.jsonl", "--seq", "1024", "train.epochs=3", "--max-gpus", "2")
    out = meshwright("size", "Qwen2.5-1.5B-Instruct", "--gpus", "A100-80", *words).out
    assert "a checkpoint only at the end is best" in out
    assert "the recipe saves every" not in out


def test_no_larger_batch_is_suggested_for_few_rows(meshwright: Any) -> None:
    words = ("--goal", "lora", "--dataset", "tickets.jsonl")
    out = meshwright("recommend", "mistral-7b", "--gpus", "2xRTX6000Ada", *words).out
    suggested = out.partition("Consider")[2].partition("\nRun ")[0]
    batches = [int(one) for one in re.findall(r"train.global_batch_size=(\d+)", suggested)]
    assert all(one < 128 for one in batches)
