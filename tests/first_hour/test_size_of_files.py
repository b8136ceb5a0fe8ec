"""size with a recipe or a file: it names the command that sizes the model, with the file's batch and samples."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from tests.first_hour.test_continued_pretraining_of_files import CLM, MEGATRON, TITAN, written


def command_for(meshwright: Any, *typed: str) -> str:
    """Return the command that size names for what was typed, which is not refused."""
    answer = meshwright("size", *typed)
    assert answer.code == 2
    assert "size takes a model" in answer.err
    fix = str(answer.err.partition("fix:")[2].strip())
    assert meshwright(*shlex.split(fix)[1:], "--max-gpus", "16").code == 0, fix
    return fix


def test_a_recipe_is_sized_by_its_model(meshwright: Any) -> None:
    fix = command_for(meshwright, "llama3_8b_pretrain_config", "--goal", "pretrain", "--gpu", "H100", "--tokens", "1T")
    assert fix == (
        "meshwright size llama3_8b --goal pretrain --gpu H100 --seq 8192 --tokens 1T train.global_batch_size=512"
    )


def test_a_script_keeps_its_engine_and_batch(meshwright: Any, tmp_path: Path) -> None:
    file = written(tmp_path, "run.sh", MEGATRON.format(weights=""))
    fix = command_for(meshwright, file, "--goal", "pretrain", "--gpus", "H100,A100", "--days", "30", "--price", "2.2")
    assert "--gpu H100,A100 --seq 8192 --engine megatron --price 2.2 --days 30 train.global_batch_size=128" in fix


def test_a_file_without_gpus_is_read_on_the_gpu(meshwright: Any, tmp_path: Path) -> None:
    file = written(tmp_path, "titan.toml", TITAN)
    assert "--engine torchtitan train.global_batch_size=64" in command_for(
        meshwright, file, "--goal", "pretrain", "--gpu", "H100"
    )


def test_a_file_without_a_goal_needs_one_first(meshwright: Any, tmp_path: Path) -> None:
    assert "--goal required" in meshwright("size", written(tmp_path, "run.sh", CLM), "--gpu", "H100").err
