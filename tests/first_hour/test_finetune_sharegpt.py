"""ShareGPT rows in exports, paths of a Start line, a Trainer's log."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

FSDP = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_use_orig_params: true
mixed_precision: bf16
num_machines: 1
num_processes: 2
"""
SCRIPT = """#!/bin/bash
accelerate launch --config_file fsdp.yaml {script} \\
  --model_name_or_path mistralai/Mistral-7B-Instruct-v0.3 \\
  --dataset_name {data} --eval_file=../eval.jsonl \\
  --per_device_train_batch_size 2 --gradient_accumulation_steps 2 \\
  --max_length 2048 --packing --use_peft --lora_r 16 --lora_alpha 32 --lora_target_modules all-linear \\
  --learning_rate 2.0e-4 --num_train_epochs 2 --bf16 --output_dir out
"""
GPUS = ("--gpus", "2xRTX4090")
MISTRAL = "mistralai/Mistral-7B-Instruct-v0.3"


@pytest.fixture
def cfg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the user's files; data are beside it."""
    turns = [{"from": "human", "value": "Review this."}, {"from": "gpt", "value": "Close the file."}]
    (tmp_path / "review.jsonl").write_text(f"{json.dumps({'conversations': turns})}\n" * 60)
    chat = [{"role": "user", "content": "Review this."}, {"role": "assistant", "content": "Close the file."}]
    (tmp_path / "chat.jsonl").write_text(f"{json.dumps({'messages': chat})}\n" * 60)
    (tmp_path / "eval.jsonl").write_text(f"{json.dumps({'messages': chat})}\n")
    folder = tmp_path / "cfg"
    (folder / "scripts").mkdir(parents=True)
    (folder / "scripts/sft.py").touch()
    (folder / "fsdp.yaml").write_text(FSDP)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    return folder


def write_script(name: str, script: str = "scripts/sft.py", data: str = "../review.jsonl") -> None:
    Path(name).write_text(SCRIPT.format(script=script, data=data))


def start_line(out: str) -> list[str]:
    [line] = [line for line in out.splitlines() if line.startswith("Start ")]
    return shlex.split(line)[1:]


def assert_has_messages(path: Path) -> None:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 60
    assert {tuple(one["role"] for one in row["messages"]) for row in rows} == {("user", "assistant")}


def test_sharegpt_rows_are_converted_for_automodel(cfg: Path, meshwright: Any) -> None:
    write_script("acc_run.sh")
    for typed in ((MISTRAL, "--goal", "lora", "data.dataset=../review.jsonl"), ("acc_run.sh",)):
        found = meshwright("export", *typed, "--to", "automodel", *GPUS, "--out", "am")
        assert "review.messages.jsonl: the rows of" in found.out
        [config] = (cfg / "am").glob("*.yaml")
        assert "path_or_dataset_id: review.messages.jsonl" in config.read_text()
        assert_has_messages(cfg / "am/review.messages.jsonl")
        config.unlink()
    typed = (MISTRAL, "--goal", "lora", "data.dataset=../chat.jsonl")
    meshwright("export", *typed, "--to", "automodel", *GPUS, "--out", "chat")
    assert [one.suffix for one in (cfg / "chat").iterdir()] == [".yaml"]


@pytest.mark.parametrize("data", ["../review.jsonl", "../chat.jsonl"])
def test_a_start_line_works_in_the_folder_that_it_names(cfg: Path, meshwright: Any, data: str) -> None:
    write_script("acc_run.sh", data=data)
    found = meshwright("export", "acc_run.sh", "--to", "accelerate", *GPUS, "--out", "acc")
    words = start_line(found.out)
    assert "cd" not in words, "the program is here: it starts where its relative paths are"
    values = [word.partition("=")[2] if word.startswith("--") else word for word in words]
    before = {(cfg / one).resolve() for one in ("scripts/sft.py", "../eval.jsonl")}
    assert before <= {(cfg / one).resolve() for one in values}
    assert "--dataset_name" not in words, "TRL passes it to load_dataset, which refuses a file"
    config = yaml.safe_load((cfg / words[words.index("--config") + 1]).read_text())
    named = cfg / config["datasets"][0]["data_files"]
    if data == "../review.jsonl":
        assert_has_messages(named)
    else:
        assert named.resolve() == (cfg / data).resolve()
    assert "not on this machine" not in found.out


def test_a_start_line_announces_a_script_that_is_not_here(cfg: Path, meshwright: Any) -> None:
    write_script("acc_run.sh", script="trl/scripts/sft.py")
    found = meshwright("export", "acc_run.sh", "--to", "accelerate", *GPUS, "--out", "acc")
    assert "trl/scripts/sft.py is not on this machine: write its full path in the command" in found.out


TRAINER_LOG = """***** Running training *****
  Num examples = 1,080
  Num Epochs = 3
  Instantaneous batch size per device = 8
  Total train batch size (w. parallel, distributed & accumulation) = {batch}
  Gradient Accumulation steps = 4
  Total optimization steps = 102
  Number of trainable parameters = {trainable}
  0%|          | 0/102 [00:00<?, ?it/s]{{'loss': 1.8123, 'grad_norm': 0.71, 'learning_rate': 2e-05, 'epoch': 0.03}}
  1%|          | 1/102 [00:09<15:10,  9.02s/it]
Traceback (most recent call last):
  File "/opt/conda/lib/python3.11/site-packages/transformers/trainer.py", line 3736, in training_step
    self.accelerator.backward(loss, **kwargs)
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.64 GiB. GPU 0 has a total capacity of 23.69 GiB of \
which 1.93 GiB is free. Including non-PyTorch memory, this process has 21.74 GiB memory in use.
"""


def write_log(batch: int = 32, trainable: str = "40,370,176") -> None:
    Path("oom.log").write_text(TRAINER_LOG.format(batch=batch, trainable=trainable))


@pytest.mark.parametrize("named", ["qwen25_7b_peft_config", "Qwen2.5-7B"])
def test_the_doctor_prices_the_batch_and_the_adapters_of_a_trainer_log(cfg: Path, meshwright: Any, named: str) -> None:
    write_log()
    typed = ("oom.log", "--recipe", named, "--gpus", "1xRTX3090", "data.seq_length=1024")
    found = json.loads(meshwright("doctor", *typed, "--json").out)
    assert found["recipe"] == "qwen25_7b_peft_config"
    [oom] = found["findings"]
    assert "does not fit" in oom["message"]
    assert oom["remedies"][0]["try"] == ["layout.micro_batch_size=1"]
    assumed = "the log states 40,370,176 trainable parameters of 7.62B: adapters are assumed"
    assert any(assumed in note for note in found["notes"]) == (named == "Qwen2.5-7B")
    assert not any("contradicts" in note for note in found["notes"])


def test_all_parameters_in_a_log_are_no_adapters_and_its_batch_states_the_ranks(cfg: Path, meshwright: Any) -> None:
    write_log(batch=128, trainable="1,903,904,128")  # of one of four FSDP shards
    typed = ("doctor", "oom.log", "--recipe", "Qwen2.5-7B", "--goal", "sft")
    assert "the log is from a multiple of 4 GPUs (dp × cp = 4)" in meshwright(*typed, "--gpus", "2xRTX3090").err
    full = meshwright("doctor", "oom.log", "--recipe", "Qwen2.5-7B", "--gpus", "4xRTX3090").out
    assert "adapters" not in full
    write_log()
    split = meshwright(*typed, "--gpus", "4xRTX3090").out
    assert "the log's batch sizes are those of 1 rank (dp × cp), so tp × pp is 4 on 4 GPUs" in split


PROGRAM = """from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
args = TrainingArguments(output_dir="out", per_device_train_batch_size=4, learning_rate=1e-4, bf16=True)
Trainer(model=model, args=args, train_dataset=rows()).train()
"""


def test_a_note_that_asks_for_an_override_goes_once_it_is_typed(cfg: Path, meshwright: Any) -> None:
    Path("finetune.py").write_text(PROGRAM)
    asked = ("DATA is a placeholder", "the command names no length")
    before = meshwright("check", "finetune.py", "--gpus", "1xL4").out
    assert [text for text in asked if text in before] == [*asked]
    typed = ("data.dataset=../chat.jsonl", "train.epochs=2")
    after = meshwright("check", "finetune.py", "--gpus", "1xL4", *typed).out
    assert not [text for text in asked if text in after]
