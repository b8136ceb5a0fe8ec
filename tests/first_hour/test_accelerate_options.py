"""Fixes of a command of `accelerate launch` are its options where the command has no config."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

LAUNCH = "accelerate launch --num_processes 4 --mixed_precision bf16"
PROGRAM = "train.py --model_name_or_path meta-llama/Meta-Llama-3-8B --per_device_train_batch_size 4 --output_dir out"
SOURCE = """\
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
Trainer(model=AutoModelForCausalLM.from_pretrained("meta-llama/Meta-Llama-3-8B"), args=args).train()
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SOURCE.replace('"meta-llama/Meta-Llama-3-8B"', "args.model_name_or_path"))


def findings(meshwright: Any, command: str) -> dict[str, list[str]]:
    Path("run.sh").write_text(f"{command}\n")
    found = meshwright("check", "run.sh", "--gpus", "8xH100", "--json").json["findings"]
    return {one["rule"]: one["fix"] for one in found}


def test_the_fixes_of_a_command_without_a_config_work_as_its_options(meshwright: Any) -> None:
    found = findings(meshwright, f"{LAUNCH} {PROGRAM}")
    assert found["accelerate.processes"] == ["accelerate launch --num_processes 8"]
    options = found["memory.state"]
    assert options[0].startswith("accelerate launch --use_fsdp --fsdp_version 2 ")
    program = PROGRAM.replace("--per_device_train_batch_size 4", " ".join(options[1:]))
    command = options[0].replace("accelerate launch", LAUNCH.replace("4", "8"))
    assert not findings(meshwright, f"{command} {program}")


def test_what_a_config_sets_is_a_line_of_it(meshwright: Any) -> None:
    Path("acc.yaml").write_text("num_processes: 4\ndistributed_type: FSDP\n")
    found = findings(meshwright, f"accelerate launch --config_file acc.yaml {PROGRAM}")
    assert found["accelerate.processes"] == ["num_processes: 8"]
    found = findings(meshwright, f"{LAUNCH} --config_file acc.yaml {PROGRAM}")
    assert found["accelerate.processes"] == ["accelerate launch --num_processes 8"]
    assert not any(word.startswith("--") for word in shlex.split(" ".join(found["accelerate.no-wrap-policy"])))
