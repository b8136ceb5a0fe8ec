"""One consumer card, a laptop to try on first, and a config of the trainer that was used before."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

import meshwright as library
from meshwright.api.continued_run import with_fitting_layout
from meshwright.api.run_comparison import not_all_runs
from meshwright.engine.epochs import with_validations
from meshwright.errors import InputError
from meshwright.recipes import load, overrides

CHAT = [{"role": "user", "content": "How do I cancel?"}, {"role": "assistant", "content": "Press cancel. " * 20}]
AXOLOTL = """\
base_model: Qwen/Qwen3-8B
load_in_4bit: true
adapter: qlora
lora_r: 32
lora_alpha: 16
datasets:
  - path: chats.jsonl
    type: chat_template
sequence_len: 4096
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 3
optimizer: paged_adamw_8bit
learning_rate: 0.0002
"""
LLAMA_FACTORY = """\
model_name_or_path: Qwen/Qwen3-8B
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 16
quantization_bit: 4
dataset: my_chats
template: qwen3
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "chats.jsonl").write_text("\n".join(json.dumps({"id": i, "messages": CHAT}) for i in range(400)))
    (tmp_path / "ax.yml").write_text(AXOLOTL)
    (tmp_path / "lf.yaml").write_text(LLAMA_FACTORY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        ("data.validation_part=5%", "data.validation_part=0.05"),
        ("data.validation_part=5", "data.validation_part=0.05"),
        ("val_set_size=5%", "val_set_size=0.05"),
        ("peft.dropout=10", "peft.dropout=0.1"),
    ],
)
def test_a_share_in_percent_has_the_share_as_its_fix(meshwright: Any, typed: str, fix: str) -> None:
    command = ("estimate", "qwen3_8b_peft_config", "--gpus", "1xH100", "data.dataset=mock")
    refused = meshwright(*command, typed)
    assert refused.code == 2
    assert f"fix:   {fix}\n" in refused.err
    assert meshwright(*command, fix).code == 0


def command_of(refused: Any) -> list[str]:
    assert refused.code == 2
    return shlex.split(refused.err.partition("fix:   meshwright ")[2])


def test_the_command_for_a_llama_factory_config_trains_with_its_defaults(meshwright: Any, here: Path) -> None:
    command = command_of(meshwright("recommend", "lf.yaml", "--gpus", "3090"))
    assert {"peft.alpha=32.0", "optimizer.weight_decay=0.0", "optimizer.beta2=0.999"} <= set(command)
    assert "schedule.warmup_steps=0" in command
    plan = meshwright(*command).out
    assert "peft.alpha 16.0 → 32.0 (contract)" in plan
    assert "optimizer.weight_decay 0.1 → 0.0 (contract)" in plan


def test_the_command_for_an_axolotl_config_keeps_what_was_typed_beside_it(meshwright: Any, here: Path) -> None:
    price = ("--price", "0.25", "--currency", "EUR")
    refused = meshwright("recommend", "ax.yml", "--gpus", "3090", "--epochs", "2", "--seq", "2k", *price)
    command = command_of(refused)
    assert {"data.truncation=drop", "--epochs", "--seq", "--price", "EUR", "lora_r=32"} <= set(command)
    assert not {"num_epochs=3", "sequence_len=4096"} & set(command)
    assert "the paging of optimizer=paged_adamw_8bit (" in refused.err
    answer = meshwright(*command)
    assert answer.code == 0, answer.err
    assert "2 epochs of chats.jsonl" in answer.out
    assert "EUR per GPU-hour" in answer.out
    own = command_of(meshwright("recommend", "ax.yml", "--gpus", "3090", "--dataset", "other.jsonl"))
    assert own.count("--dataset") == 1
    assert "chats.jsonl" not in own


def test_validation_data_that_is_named_is_used_a_few_times(capfd: pytest.CaptureFixture[str]) -> None:
    recipe = overrides.apply(load("qwen3_8b_peft_config"), ["data.validation_part=0.05", "train.steps=42"])
    assert with_validations(recipe, shown=True).train.eval_every == 8
    assert "train.eval_every 0 → 8: 6 validations in 42 steps; train.eval_every=0" in capfd.readouterr().err
    stated = overrides.apply(recipe, ["train.eval_every=20"])
    assert with_validations(stated, shown=False) is stated
    without = overrides.apply(recipe, ["data.validation_part=0"])
    assert with_validations(without, shown=False) is without


def test_a_run_of_two_replicas_continues_on_one_rank() -> None:
    fields = ["layout.strategy=fsdp2", "layout.dp_replicate=2", "layout.tp=1", "train.global_batch_size=8"]
    recipe = overrides.apply(load("qwen3_8b_peft_config"), [*fields, "layout.micro_batch_size=4"])
    assert with_fitting_layout(recipe, 1, ()).layout.dp_replicate == 1
    assert with_fitting_layout(recipe, 4, ()).layout.dp_replicate == 2
    assert with_fitting_layout(recipe, 4, ()).layout.micro_batch_size == 2
    assert with_fitting_layout(recipe, 1, ("layout.dp_replicate",)).layout.dp_replicate == 2


BAR = "\r 13%|█         | {0}/450 [{1:02d}:00<20:00,  5.00s/it]"
TRAINED = "".join(
    BAR.format(step, step // 12) + f"\n{{'loss': {2.2 - step / 100}, 'grad_norm': 1.1, 'learning_rate': 1e-4, "
    f"'epoch': {step / 150:.2f}}}\n" + BAR.format(step, step // 12)
    for step in range(12, 61, 12)
)
OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.27 GiB. GPU 0 has a total capacity of 23.69 GiB "
    "of which 5.91 GiB is free. Including non-PyTorch memory, this process has 17.77 GiB memory in use. Of the "
    "allocated memory 16.90 GiB is allocated by PyTorch, and 560.12 MiB is reserved by PyTorch but unallocated.\n"
)


def traceback(*functions: str) -> str:
    frames = "".join(f'  File "/x/transformers/trainer.py", line {i}, in {one}\n' for i, one in enumerate(functions))
    return f"\nTraceback (most recent call last):\n{frames}    logits = logits.float()\n{OUT_OF_MEMORY}"


def test_out_of_memory_in_validation_is_not_the_training_batch(meshwright: Any, here: Path) -> None:
    trained = ("train", "_inner_training_loop", "_maybe_log_save_evaluate", "evaluate", "evaluation_loop")
    Path("eval.log").write_text(TRAINED + traceback(*trained, "prediction_step", "compute_loss"))
    answer = meshwright("doctor", "eval.log", "--model", "qwen3-600m", "--gpus", "3090")
    assert "The allocation failed in validation, not in a training step, and the training steps before it" in answer.out
    assert "per_device_eval_batch_size is 8 unless it is set" in answer.out
    assert "1. per_device_eval_batch_size=1" in answer.out
    assert "layout.micro_batch_size=" not in answer.out
    Path("train.log").write_text(TRAINED + traceback("train", "training_step", "compute_loss"))
    assert "layout.micro_batch_size=1" in meshwright("doctor", "train.log").out


def test_the_step_time_of_a_log_that_keeps_every_48th_bar(meshwright: Any, here: Path) -> None:
    records = [f"{{'loss': {2 - step / 100}, 'grad_norm': 1.0, 'epoch': {step / 150:.2f}}}" for step in range(1, 121)]
    lines = [one if at % 48 else BAR.format(at, at // 12).strip() + "\n" + one for at, one in enumerate(records)]
    Path("few.log").write_text("\n".join(lines))
    figures = {one["name"]: one["measured"] for one in meshwright("doctor", "few.log", "--json").json["figures"]}
    assert figures.get("step time", 5) == 5


def test_one_command_corrects_roles_and_leaves_out_the_other_broken_rows(meshwright: Any, here: Path) -> None:
    rows = [json.dumps({"messages": CHAT})] * 9
    rows[2] = '{"messages": [{"role": "user", "content": "half a li'
    rows[4] = json.dumps({"messages": []})
    rows[6] = json.dumps({"messages": [CHAT[0], {"role": "chatbot", "content": "Press."}]})
    Path("bad.jsonl").write_text("\n".join(rows) + "\n")
    refused = meshwright("check", "bad.jsonl").out
    assert "has the unknown role chatbot; did you mean assistant?" in refused
    assert "then --dataset bad_roles.jsonl (leaves out 2 rows)" in refused
    subprocess.run(refused.partition("(data.rows)  ")[2].partition(", then")[0], shell=True, check=True)
    corrected = meshwright("check", "bad_roles.jsonl")
    assert corrected.code == 0, corrected.out
    assert "7 conversations" in corrected.out


def test_overrides_in_the_place_of_another_parameter_are_named(here: Path) -> None:
    with pytest.raises(InputError, match="is a list of overrides") as refused:
        library.recommend("qwen3-8b", "3090", "qlora", ["peft.rank=16"])  # type: ignore[arg-type]  # what was typed
    assert refused.value.fix == ("overrides=['peft.rank=16']",)


def test_a_run_is_compared_with_its_base_by_evaluate(here: Path) -> None:
    (here / "run").mkdir()
    (here / "run" / "metrics.jsonl").write_text('{"kind": "header"}\n')
    assert "meshwright evaluate run --base" in not_all_runs(["run", "tiny-qwen3"]).fix


PROGRAM = """\
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

bits = BitsAndBytesConfig(load_in_4bit=True)
model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.1-8B-Instruct", quantization_config=bits)
data = load_dataset("json", data_files="chats.jsonl")["train"].train_test_split(test_size=0.05)
args = SFTConfig(output_dir="out", per_device_train_batch_size=1, max_length=4096, eval_strategy="steps", eval_steps=50,
                 gradient_checkpointing=True, bf16=True)
SFTTrainer(model, args=args, train_dataset=data["train"], eval_dataset=data["test"],
           peft_config=LoraConfig(r=16, target_modules="all-linear")).train()
"""
EVALUATES = """\
cutoff_len: 8192
enable_liger_kernel: true
bf16: true
val_size: 0.1
eval_strategy: steps
eval_steps: 50
"""


@pytest.mark.parametrize(
    ("name", "text", "old", "new"),
    [
        ("train.py", PROGRAM, "eval_steps=50", "eval_steps=50, per_device_eval_batch_size=2"),
        ("full.yaml", LLAMA_FACTORY + EVALUATES, "eval_steps: 50", "eval_steps: 50\nper_device_eval_batch_size: 1"),
    ],
)
def test_check_knows_the_batch_of_the_trainers_validation(
    meshwright: Any, here: Path, name: str, text: str, old: str, new: str
) -> None:
    file = here / name
    file.write_text(text)
    found = meshwright("check", name, "--gpus", "3090").out
    assert "validation takes 8 samples of up to" in found
    assert "at a time (its default): their logits alone need" in found
    assert f"fix: {new.replace(old, '').strip(', ').strip()}" in found
    file.write_text(text.replace(old, new))
    assert "validation takes" not in meshwright("check", name, "--gpus", "3090").out
    file.write_text(text)
    assert "validation takes" not in meshwright("check", name, "--gpus", "1xH200").out
