"""Validation keys of other tools, changes that an estimate makes by itself, and GPUs as the second value of a call."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.cli.run import run as run_command
from meshwright.recipes import apply, load

RECIPE = "qwen3_600m_sft_config"


def commanded(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Return the exit code of a command and what it prints."""
    with pytest.raises(SystemExit) as ended:
        run_command(list(words))
    found = capsys.readouterr()
    return int(ended.value.code or 0), found.out + found.err


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        (["validation.dataset=val.jsonl", "validation.every=20"], "data.validation=val.jsonl train.eval_every=20"),
        (["validation.data=val.jsonl"], "data.validation=val.jsonl"),
        (["validation.path=val.jsonl"], "data.validation=val.jsonl"),
        (["validation.file=val.jsonl"], "data.validation=val.jsonl"),
        (["eval.dataset=val.jsonl"], "data.validation=val.jsonl"),
        (["validation.dataset_path=val.jsonl"], "data.validation=val.jsonl"),
        (["data.eval_dataset=val.jsonl"], "data.validation=val.jsonl"),
        (["dataset.validation=val.jsonl"], "data.validation=val.jsonl"),
        (["eval_file=val.jsonl"], "data.validation=val.jsonl"),
        (["validation.split=0.1"], "data.validation_part=0.1"),
        (["validation.every=20"], "train.eval_every=20"),
        (["validation.patience=3"], "train.early_stop_patience=3"),
    ],
)
def test_validation_keys_of_other_tools_mean_the_validation(typed: list[str], fix: str) -> None:
    with pytest.raises(mw.InputError) as error:
        apply(load(RECIPE), typed)
    assert list(error.value.fix) == [fix]
    apply(load(RECIPE), fix.split())


@pytest.mark.parametrize("key", ["validation.seq_length", "validation.batch_size", "eval.global_batch_size"])
def test_a_validation_key_never_suggests_a_field_of_the_training(key: str) -> None:
    with pytest.raises(mw.InputError) as error:
        apply(load(RECIPE), [f"{key}=4"])
    assert not error.value.fix


def test_train_with_validation_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--tiny", "train.steps=3", "validation.dataset=val.jsonl", "validation.every=20"]
    code, printed = commanded(capsys, "train", RECIPE, *words)
    assert code
    assert "data.validation=val.jsonl train.eval_every=20" in printed
    code, printed = commanded(capsys, "evaluate", "run1", "--eval-data", "val.jsonl")
    assert code
    assert "write --dataset val.jsonl" in printed


def test_an_estimate_of_a_model_prints_what_differs_from_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    _, of_model = commanded(capsys, "estimate", "qwen3-0.6b", "--goal", "sft", "--gpus", "1xA10G")
    assert "Changed  kernels.compile False → True (layout)" in of_model
    of_recipe = ("estimate", RECIPE, "--gpus", "1xA10G")
    assert "Changed" not in commanded(capsys, *of_recipe)[1]
    _, typed = commanded(capsys, *of_recipe, "kernels.compile=true")
    assert "Changed" not in typed  # what the user typed is not repeated
    speed = next(line for line in typed.splitlines() if line.startswith("Speed"))
    assert speed in of_model


@pytest.mark.parametrize("function", [mw.check, mw.import_file])
def test_gpus_come_second(function: object) -> None:
    assert list(inspect.signature(function).parameters)[1] == "gpus"  # type: ignore[arg-type]


def test_check_takes_gpus_second() -> None:
    found = mw.check("qwen3_4b_sft_config", "1xA10G")
    assert found.cluster is not None
    assert str(found.cluster) == "1xA10G"
    assert str(found) == str(mw.check("qwen3_4b_sft_config", gpus="1xA10G"))


@pytest.mark.parametrize(
    ("name", "fix"), [("1xA10G", 'gpus="1xA10G"'), ("g5.xlarge", 'gpus="g5.xlarge"'), ("train.yaml", "without name")]
)
def test_a_file_name_is_refused_in_python(name: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (mw.check, mw.estimate, mw.plan):
        with pytest.raises(mw.InputError) as error:
            call("qwen3_4b_sft_config", name=name)
        assert (error.value.field, list(error.value.fix)) == ("name", [fix])
