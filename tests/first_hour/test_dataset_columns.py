"""Misspelt columns, fixes that work when typed, and files typed where a recipe belongs."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import msgspec

from meshwright.api.run_comparison import differences
from meshwright.recipes.types import Peft, Recipe

MISSPELT = "instruction,input,ouput\nAdd the numbers.,25 and 49,The sum is 74.\n"
OTHER = "question,ctx,reply\nAdd the numbers.,25 and 49,The sum is 74.\n"
SHOUTED = "Instruction,Output\nAdd the numbers.,The sum is 74.\n"
UNCLEAR = "instruction,input,foo\nAdd the numbers.,25 and 49,The sum is 74.\n"


def test_the_fix_for_unknown_columns_trains_on_the_answer_and_works_when_typed(meshwright: Any) -> None:
    for text, response, extra, meant in (
        (MISSPELT, "ouput", "input", "ouput: did you mean output?"),
        (OTHER, "reply", "ctx", ""),
        (SHOUTED, "Output", "", "Output: did you mean output?"),
        (UNCLEAR, "foo", "input", ""),
    ):
        Path("rows.csv").write_text(text)
        finding = meshwright("check", "rows.csv", "--json").json["findings"][0]
        assert meant in finding["message"]
        columns = shlex.split(finding["no_fix"])
        assert f"data.columns.response={response}" in columns
        assert [one for one in columns if ".input=" in one] == ([f"data.columns.input={extra}"] if extra else [])
        checked = meshwright("check", "rows.csv", *columns)
        assert "1 conversation (" in checked.out
        assert "not used" not in checked.out
    refused = meshwright("check", "rows.csv", "layout.tp=2")
    assert refused.code == 2
    assert "meshwright check RECIPE --gpus 1xH100 data.dataset=rows.csv layout.tp=2" in refused.err
    assert "input after it" in meshwright("explain", "data.columns").out


def test_a_dataset_typed_as_the_recipe_is_named_as_one(meshwright: Any) -> None:
    Path("rows.csv").write_text(MISSPELT)
    Path("rows.json").write_text(json.dumps([{"prompt": "a", "response": "b"}]))
    for verb in ("samples", "train", "estimate"):
        for name in ("rows.csv", "rows.json"):
            refused = meshwright(verb, name)
            if verb == "samples":
                assert "is a dataset: name the model too" in refused.err
                assert f"meshwright samples {name} --model" in refused.err
            else:
                assert "is a dataset, not a recipe" in refused.err
                assert f"RECIPE data.dataset={name}" in refused.err


def test_check_takes_another_model_for_a_recipe_as_train_does(meshwright: Any) -> None:
    words = ("qwen25_3b_peft_config", "--model", "llama32_3b", "--gpus", "2x4090", "--json")
    checked, estimated = (meshwright(verb, *words).json for verb in ("check", "estimate"))
    assert checked["estimate"]["memory_gib"] == estimated["estimate"]["memory_gib"]


def test_a_layout_that_fits_is_recommended_over_one_that_may_not_if_it_costs_little(meshwright: Any) -> None:
    words = ("recommend", "llama3-8b", "--gpus", "4x4090", "--goal", "peft")
    plan = meshwright(*words, "--json").json
    assert not [one for one in plan["findings"] if one["rule"] == "memory.tight"]
    assert "fits" in next(line for line in meshwright(*words).out.splitlines() if "GiB per GPU" in line)
    (faster,) = [one for one in plan["suggestions"] if one["title"] == "a faster layout"]
    assert "may not fit" in faster["why"]
    other = meshwright(*words, *faster["overrides"], "--json").json
    assert other["estimate"]["step_s"] < plan["estimate"]["step_s"] <= 1.1 * other["estimate"]["step_s"]


def test_a_trainer_state_on_one_line_is_a_log(meshwright: Any) -> None:
    history = [{"epoch": n / 100, "loss": 2.5, "grad_norm": 1.2, "learning_rate": 2e-5, "step": n} for n in range(900)]
    state = {"global_step": 899, "max_steps": 900, "log_history": history}
    Path("indented.json").write_text(json.dumps(state, indent=2))
    Path("one_line.json").write_text(json.dumps(state, separators=(",", ":")))
    indented, one_line = (meshwright("doctor", name) for name in ("indented.json", "one_line.json"))
    assert "no training found" not in one_line.err
    assert one_line.out.replace("one_line", "indented") == indented.out


def test_fields_of_an_adapter_do_not_apply_to_a_full_run() -> None:
    full = Recipe(name="full", model="llama32_1b", goal="sft", cluster="1xH100")
    adapter = msgspec.structs.replace(full, name="adapter", goal="peft", peft=Peft(rank=8))
    found = {one.field: one.values for one in differences([full, adapter])}
    assert found["peft.rank"] == ["n/a", 8]
    assert not [one for one in differences([full, full]) if one.field.startswith("peft.")]


def test_the_column_of_texts_by_its_other_names(meshwright: Any) -> None:
    assert "write --column body" in meshwright("tokenize", "a.jsonl", "--text-column", "body", "--out", "t").err
    assert "write data.columns.text=body" in meshwright("train", "llama3_8b_pretrain", "--text_column", "body").err
