"""Commands that start more processes than the given GPUs, or split them into degrees that do not divide them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

DEEPSPEED = "deepspeed {options} train.py --deepspeed ds.json --per_device_train_batch_size 4 --output_dir out\n"
TORCHTITAN = "NGPU=8 CONFIG_FILE=./llama3_8b.toml ./run_train.sh --parallelism.tensor_parallel_degree={tp}\n"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(json.dumps({"train_batch_size": "auto", "zero_optimization": {"stage": 3}}))


def errors(meshwright: Any, text: str, gpus: str, rule: str) -> list[dict[str, Any]]:
    Path("run.sh").write_text(text)
    found = meshwright("check", "run.sh", "--gpus", gpus, "--json").json["findings"]
    return [one for one in found if one["rule"] == rule and one["severity"] == "error"]


@pytest.mark.parametrize(
    ("options", "gpus", "fix", "fits"),
    [
        ("--num_nodes 2 --num_gpus 8", "8xH100", ["deepspeed --num_nodes 1"], "2x8xH100"),
        ("--num_nodes 2", "8xH100", ["deepspeed --num_nodes 1"], "2x8xH100"),
        ("--num_gpus 8", "4xH100", ["deepspeed --num_gpus 4"], "8xH100"),
    ],
)
def test_more_processes_of_deepspeed_than_gpus(
    meshwright: Any, options: str, gpus: str, fix: list[str], fits: str
) -> None:
    text = DEEPSPEED.format(options=options)
    (error,) = errors(meshwright, text, gpus, "launch.gpus")
    assert error["fix"] == fix
    name, number = fix[0].removeprefix("deepspeed ").split()
    before = f"{name} {options.split(name)[1].split()[0]}"
    assert not errors(meshwright, text.replace(before, f"{name} {number}"), gpus, "launch.gpus")
    assert not errors(meshwright, text, fits, "launch.gpus")


def test_a_degree_that_divides_nothing_is_what_the_fix_changes(meshwright: Any) -> None:
    (error,) = errors(meshwright, TORCHTITAN.format(tp=3), "8xH100", "torchtitan.sequence-parts")
    assert error["fix"] == ["--parallelism.tensor_parallel_degree=2"]
    assert errors(meshwright, TORCHTITAN.format(tp=3), "8xH100", "topology.world")  # the model is not known here
    for rule in ("torchtitan.sequence-parts", "topology.world"):
        assert not errors(meshwright, TORCHTITAN.format(tp=2), "8xH100", rule)


def test_a_batch_of_deepspeed_names_the_one_that_keeps_its_sizes(meshwright: Any) -> None:
    sizes = {"train_batch_size": 100, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}
    for batch, wrong in ((100, True), (128, False)):
        Path("ds.json").write_text(json.dumps({**sizes, "train_batch_size": batch}))
        found = meshwright("check", "ds.json", "--gpus", "8xH100", "--json").json["findings"]
        broken = [one["message"] for one in found if one["rule"] == "deepspeed.batch-arithmetic"]
        assert [('"train_batch_size": 128 keeps both sizes' in one) for one in broken] == [True] * wrong
