"""A fine-tuning on a CPU says before step 1 how long it takes, and that its batch is large for the data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.api.dataset_length import few_updates
from meshwright.clusters import cluster
from meshwright.engine import cpu_speed
from meshwright.engine import train as engine_train
from meshwright.engine.cpu_speed import product_rate, step_time_note
from meshwright.errors import InputError
from meshwright.models import find
from meshwright.recipes.case import Case
from meshwright.recipes.index import load
from meshwright.recipes.overrides import apply

RECIPE = "qwen3_600m_sft_config"
SMALL = ("data.packing=false", "data.seq_length=256", "train.epochs=3", "data.tokenizer=bytes")


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    found = [json.dumps({"prompt": f"what is {n}?", "response": f"it is {n}"}) for n in range(256)]
    Path("qa.jsonl").write_text("\n".join(found))
    return "qa.jsonl"


def case_of(*changes: str) -> Case:
    recipe = apply(load(RECIPE), changes)
    return Case(recipe, find(recipe.model), cluster("1xH100"), engine="meshwright")


def test_the_time_of_a_step_and_of_the_run_are_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_speed, "product_rate", lambda compute: 100e9)
    monkeypatch.setattr(cpu_speed, "cores", lambda: 2)
    monkeypatch.setattr(cpu_speed, "_threads", lambda: 2)
    case = case_of(*SMALL, "train.global_batch_size=128")
    text = step_time_note(case, 6)
    assert text.startswith(
        "on this CPU, step 1 takes about 32.0 minutes, 6 steps about 3.20 hours: 120 TFLOP per step of 128"
    )
    assert "32" in step_time_note(case_of(*SMALL, "train.global_batch_size=8"), 16).partition("16 steps")[2]
    assert step_time_note(case, 0) == ""
    monkeypatch.setattr(cpu_speed, "product_rate", lambda compute: 1e15)
    assert step_time_note(case, 6) == ""


def test_the_rate_is_measured_quickly() -> None:
    assert 1e8 < product_rate("fp32") < 1e14


def test_train_and_check_name_the_batch_that_recommend_suggests(
    rows: str, meshwright: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = [RECIPE, "--dataset", rows, *SMALL, "train.global_batch_size=128"]
    advised, why = "train.global_batch_size=8", "128 samples per step leave only 6 updates in 3 epochs of qa.jsonl"

    def started(*_: Any) -> None:
        raise InputError("started")

    monkeypatch.setattr(engine_train, "train", started)
    trained = meshwright("train", *typed)
    assert f"note: {why}, 8 leave 96; more updates, each in less time: {advised} (data.few-updates)" in trained.err
    checked = meshwright("check", *typed, "--gpus", "1xH100")
    assert f"{why}, 8 leave 96 (data.few-updates)  fix: {advised}" in checked.out.replace("\n         ", " ")
    recommended = meshwright("recommend", *typed, "--gpus", "1xH100")
    assert f"{advised}  {why}" in recommended.out
    assert "few-updates" not in meshwright("train", *typed, advised).err
    Path("run/checkpoints/step-3").mkdir(parents=True)
    assert "few-updates" not in meshwright("train", *typed, "--out", "run").err


def test_no_advice_where_the_rule_warns_or_there_are_enough_updates(rows: str) -> None:
    batches = {batch: apply(load(RECIPE), [f"data.dataset={rows}", *SMALL, f"train.global_batch_size={batch}"])
               for batch in (512, 64, 8)}  # fmt: skip
    assert [bool(few_updates(recipe, 1)) for recipe in batches.values()] == [False, True, False]
