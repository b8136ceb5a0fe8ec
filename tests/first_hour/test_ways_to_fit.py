"""Errors of memory that no setting of a file resolves say with figures what does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

SWIFT = (
    "NPROC_PER_NODE={gpus} swift sft --model {model} --dataset a.jsonl --tuner_type full --max_length {length} "
    "--per_device_train_batch_size 1 --learning_rate 1e-5 --torch_dtype bfloat16 --output_dir out "
    "--use_liger_kernel true --deepspeed {zero}\n"
)
SMALL, LARGE = "Qwen/Qwen2.5-1.5B", "meta-llama/Meta-Llama-3-70B"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def errors(meshwright: Any, gpus: str, model: str, length: int, zero: str, *options: str) -> list[dict[str, Any]]:
    count = gpus.split("x")[0]
    Path("swift.sh").write_text(SWIFT.format(gpus=count, model=model, length=length, zero=zero))
    found = meshwright("check", "swift.sh", "--gpus", gpus, *options, "--json").json["findings"]
    return [one for one in found if one["severity"] == "error"]


@pytest.mark.parametrize("zero", ["zero2", "zero3"])
def test_zero_without_offload_is_offered_stage_3_with_offload(meshwright: Any, zero: str) -> None:
    (error,) = errors(meshwright, "8xH100", LARGE, 2048, zero)
    assert error["fix"] == ["--deepspeed zero3_offload"]
    assert not errors(meshwright, "8xH100", LARGE, 2048, "zero3_offload")


def test_more_gpus_and_shorter_samples_are_named_with_their_memory_and_fit(meshwright: Any) -> None:
    (error,) = errors(meshwright, "1x4090", SMALL, 262144, "zero3_offload")
    assert not error["fix"]
    (length,) = re.findall(r"([\d,]+) tokens per sample \(\d+ GiB per GPU\)", error["no_fix"])
    assert not errors(meshwright, "1x4090", SMALL, int(length.replace(",", "")), "zero3_offload")


def test_what_nothing_makes_fit_names_the_command_that_counts_gpus(meshwright: Any) -> None:
    (error,) = errors(meshwright, "1x4090", LARGE, 131072, "zero3")
    assert "meshwright size" in error["no_fix"]
