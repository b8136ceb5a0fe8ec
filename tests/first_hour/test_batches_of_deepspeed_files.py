"""A batch that the ranks cannot divide: every command names the file, the line and the fix that check has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

CONFIG = """{
  "bf16": {"enabled": "auto"},
  "zero_optimization": {"stage": 2},
  "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
  "train_batch_size": 1000, "train_micro_batch_size_per_gpu": "auto"
}
"""
COMMAND = """deepspeed --num_nodes 8 --num_gpus 8 run_clm.py --deepspeed ds.json --block_size 4096 \\
  --model_name_or_path meta-llama/Llama-2-7b-hf --per_device_train_batch_size 4 --gradient_accumulation_steps 4 \\
  --learning_rate 3e-4 --bf16 --gradient_checkpointing --max_steps 1000 --output_dir /shared/run"""
GPUS = ("--gpus", "8x8xH100")
LAUNCH = ("launch", "train.sh", "--scheduler", "slurm", "--write", "job")
EXPORT = ("export", "train.sh", "--to", "deepspeed")
FIX = '"train_batch_size": 1024'


@pytest.fixture
def files() -> None:
    Path("ds.json").write_text(CONFIG)
    Path("train.sh").write_text(COMMAND)


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("words", [LAUNCH, EXPORT])
def test_a_job_has_the_finding_and_the_fix_of_check(meshwright: Any, words: tuple[str, ...]) -> None:
    found = meshwright(*words, *GPUS)
    assert found.code == 2
    assert "ds.json:5 train_batch_size=1000 is not micro batch 4 × accumulation 4 × 64 data-parallel" in found.err
    assert f"fix:   in ds.json: {FIX}" in found.err
    assert "layout." not in found.err
    Path("ds.json").write_text(CONFIG.replace('"train_batch_size": 1000', FIX))
    assert meshwright(*words, *GPUS).code == 0


@pytest.mark.usefixtures("files")
def test_a_typed_batch_is_the_users_not_the_files(meshwright: Any) -> None:
    found = meshwright("export", "train.sh", "--to", "deepspeed", *GPUS, "train.global_batch_size=1001")
    assert "train.global_batch_size=1001: is not a multiple of 256" in found.err
    assert "ds.json" not in found.err


@pytest.mark.parametrize("typed", [(), ("layout.micro_batch_size=4",)])
def test_no_integers_in_place_of_auto_make_a_batch_that_the_ranks_do_not_divide(
    meshwright: Any, typed: tuple[str, ...]
) -> None:
    Path("ds.json").write_text(CONFIG)
    words = ("--model", "llama2-7b", *typed)
    found = meshwright("check", "ds.json", *GPUS, *words)
    assert found.code == 1
    assert "train_batch_size=1000 is not a multiple of " in found.out
    assert f"fix: {FIX}" in found.out
    assert meshwright("check", "ds.json", "--gpus", "5x8xH100", *words[:2]).code == 0  # 25 for every rank
    Path("ds.json").write_text(CONFIG.replace('"train_batch_size": 1000', FIX))
    assert meshwright("check", "ds.json", *GPUS, *words).code == 0
