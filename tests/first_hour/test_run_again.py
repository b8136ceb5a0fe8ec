"""A run that is stopped, resumed, merged or tried without GPUs: what the command line says then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from meshwright.engine.build_trainer import _resumes_unchanged
from meshwright.engine.faults import restart_command
from meshwright.engine.post_training.convert import _dtype_of_base
from meshwright.engine.run_spec import RankSpec, RunSpec
from meshwright.recipes import index
from meshwright.recipes import overrides as override
from meshwright.recipes.case import Case

RECIPE = "qwen3_4b_peft_config"


@pytest.mark.parametrize(
    ("typed", "printed"),
    [
        ("meshwright train run1", "meshwright train run1"),
        ("meshwright train ./run1/ layout.micro_batch_size=1", "meshwright train ./run1/ layout.micro_batch_size=1"),
        ("meshwright train x.toml --out run1", "meshwright train x.toml --out run1"),
        ("meshwright train x.toml", "meshwright train x.toml --out run1"),
    ],
)
def test_the_command_that_resumes_names_its_folder_once(typed: str, printed: str) -> None:
    assert restart_command(typed.split(), "run1", "alone") == (printed,)


def test_epochs_of_the_user_are_no_repeated_data_when_the_run_resumes(tmp_path: Path) -> None:
    recipe = override.apply(index.load(RECIPE), ["train.steps=90"])
    spec = RankSpec(recipe, {}, Case.__new__(Case), str(tmp_path), RunSpec())
    header = {"kind": "header", "settings": msgspec.to_builtins(recipe)}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(header, separators=(",", ":")) + "\n")
    assert not _resumes_unchanged(spec)  # no checkpoint yet
    (tmp_path / "checkpoints" / "step-00000010").mkdir(parents=True)
    assert _resumes_unchanged(spec)
    longer = override.apply(recipe, ["train.steps=900"])
    assert not _resumes_unchanged(msgspec.structs.replace(spec, recipe=longer))


@pytest.mark.parametrize(
    ("config", "compute", "written"),
    [
        ({"dtype": "bfloat16"}, "fp32", "bf16"),
        ({"torch_dtype": "bfloat16"}, "fp32", "bf16"),
        ({"torch_dtype": "bfloat16"}, "bf16", None),
        ({}, "fp32", None),
    ],
)
def test_a_merged_model_has_the_dtype_of_its_base(
    tmp_path: Path, config: dict[str, str], compute: str, written: str | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **config}))
    recipe = override.apply(index.load(RECIPE), [f"precision.compute={compute}"])
    assert _dtype_of_base(tmp_path, recipe) == written


def test_train_dry_run_names_the_command_that_does_it(meshwright: Any) -> None:
    typed = ("train", "qwen3-4b", "--goal", "lora", "--dry-run", "--nproc", "2", "--dataset", "x.jsonl", "layout.tp=2")
    error = meshwright(*typed, "--json").json["error"]
    assert error["fix"] == ["meshwright dryrun qwen3-4b --goal lora layout.tp=2 --json"]
    assert "dryrun" in meshwright("train", RECIPE, "--simulate").err


def test_compiling_a_run_of_a_few_steps_does_not_pay(meshwright: Any) -> None:
    typed = ("recommend", "qwen3-4b", "--goal", "lora", "--gpus", "1xRTX6000Ada", "--json")
    notes = [
        [note for note in meshwright(*typed, "--tokens", tokens).json["budget"]["notes"] if "kernels.compile" in note]
        for tokens in ("200k", "1B")
    ]
    assert len(notes[0]) == 1
    assert "kernels.compile=false starts at once" in notes[0][0]
    assert notes[1] == []
