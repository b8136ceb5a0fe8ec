"""Commands and files of ms-swift that train with Megatron-LM: `megatron sft`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.frameworks import check, content_of, framework_of

COMMAND = """\
NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-30B-A3B --dataset alpaca.jsonl --tuner_type full --max_length 8192 \\
    --micro_batch_size 1 --global_batch_size 16 --train_iters 1000 --lr 1e-5 --lr_warmup_fraction 0.05 \\
    --pipeline_model_parallel_size 2 \\
    --expert_model_parallel_size 8 \\
    --recompute_granularity full --recompute_method uniform --recompute_num_layers 1 --output_dir out
"""
FILE = """\
model: Qwen/Qwen3-30B-A3B
dataset: alpaca.jsonl
tuner_type: full
max_length: 8192
micro_batch_size: 1
global_batch_size: 16
train_iters: 1000
pipeline_model_parallel_size: 2
expert_model_parallel_size: 8
recompute_granularity: full
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def checked(meshwright: Any, text: str, gpus: str = "8xH100", name: str = "swift.sh") -> Any:
    Path(name).write_text(text)
    return meshwright("check", name, "--gpus", gpus, "--json").json


@pytest.mark.parametrize(("name", "text", "line"), [("swift.sh", COMMAND, 4), ("swift.yaml", FILE, 9)])
def test_a_layout_that_needs_more_gpus_is_an_error_whose_fix_works(
    meshwright: Any, name: str, text: str, line: int
) -> None:
    found = checked(meshwright, text, name=name)
    (error,) = (one for one in found["findings"] if one["severity"] == "error")
    assert (error["rule"], error["field"], error["line"]) == (
        "topology.expert-mesh",
        "expert_model_parallel_size",
        line,
    )
    assert found["framework"] == "ms-swift"
    shell = name.endswith(".sh")
    assert not [one for one in error["fix"] if one.startswith("--") is not shell]
    fixed = text.replace("expert_model_parallel_size 8", " ".join(error["fix"]).removeprefix("--"))
    fixed = "\n".join([text.replace("expert_model_parallel_size: 8\n", ""), *error["fix"]]) if not shell else fixed
    assert not [one for one in checked(meshwright, fixed, name=name)["findings"] if one["severity"] == "error"]


def test_batch_and_length_are_read(meshwright: Any) -> None:
    text = COMMAND.replace("--pipeline_model_parallel_size 2 \\\n", "\\\n")
    found = checked(meshwright, text.replace("--global_batch_size 16", "--global_batch_size 12"))
    (error,) = (one for one in found["findings"] if one["severity"] == "error")
    assert (error["rule"], error["field"]) == ("batch.divides", "micro_batch_size")
    found = checked(meshwright, text, "8xH200")
    assert not found["findings"]
    assert not [one for one in found["notes"] if "names no length" in one or "sets the batch size" in one]
    assert found["estimate"]["memory_gib"]["total"] > 40


def test_its_own_defaults_are_those_of_its_parser() -> None:
    text = "NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-8B --dataset a.jsonl --max_length 4096 --train_iters 9\n"
    content = content_of(text, "swift.sh", "shell")
    framework = framework_of(content, front_ends=True)
    assert framework is not None
    recipe = check(framework, content, gpus="8xH100").recipe
    assert (recipe.train.global_batch_size, recipe.train.steps, recipe.optimizer.lr) == (16, 9, 1e-5)
    assert (recipe.layout.micro_batch_size, recipe.layout.strategy, recipe.layout.recompute) == (
        1,
        "zero1",
        "selective",
    )


def test_megatron_bridges_rules_on_adapters_are_not_those_of_swift(meshwright: Any) -> None:
    text = (
        "NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-Next-80B-A3B-Instruct --tuner_type lora \\\n"
        " --dataset a.jsonl --tensor_model_parallel_size 2 \\\n"
        " --expert_model_parallel_size 4 --sequence_parallel true --max_length 4096 \\\n"
        " --micro_batch_size 1 --global_batch_size 4 --recompute_granularity full --recompute_method uniform \\\n"
        " --recompute_num_layers 1 --packing true --num_train_epochs 1\n"
    )
    assert "peft.qwen3-next" not in {one["rule"] for one in checked(meshwright, text)["findings"]}
