"""A twentieth walk through a fine-tuning: ShareGPT rows in exports, paths of a Start line, a Trainer's log."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

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
    values = [word.partition("=")[2] if word.startswith("--") else word for word in words]
    before = {(cfg / one).resolve() for one in ("scripts/sft.py", "../eval.jsonl")}
    assert before <= {(cfg / "acc" / one).resolve() for one in values}
    assert not [one for one in values if (cfg / one).exists() and not (cfg / "acc" / one).exists()]
    named = cfg / "acc" / words[words.index("--dataset_name") + 1]
    if data == "../review.jsonl":
        assert_has_messages(named)
    else:
        assert named.resolve() == (cfg / data).resolve()
    assert "not on this machine" not in found.out


def test_a_start_line_announces_a_script_that_is_not_here(cfg: Path, meshwright: Any) -> None:
    write_script("acc_run.sh", script="trl/scripts/sft.py")
    found = meshwright("export", "acc_run.sh", "--to", "accelerate", *GPUS, "--out", "acc")
    assert "trl/scripts/sft.py is not on this machine: write its full path in the command" in found.out
