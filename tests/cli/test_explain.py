"""`meshwright explain`: rules, fields in any spelling, and findings as they are printed."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright import rules
from meshwright.recipes.types import recipe_fields


@pytest.mark.parametrize(
    "spelled", ["layout.tp", "tp", "tensor_model_parallel_size", "distributed.tp_size", "layout.tp=4"]
)
def test_a_field_in_any_frameworks_key(meshwright: Any, spelled: str) -> None:
    found = meshwright("explain", spelled, "--json").json
    assert (found["kind"], found["about"], found["field"]["key"]) == ("field", "layout.tp", "layout.tp")
    assert found["field"]["default"] == 1
    assert "heads.attention" in {rule["id"] for rule in found["rules"]}


def test_a_rule_tells_symptom_cause_and_fix(meshwright: Any) -> None:
    (rule,) = meshwright("explain", "heads.attention", "--json").json["rules"]
    assert rule["symptom"] == rules.RULES["heads.attention"].symptom
    assert rule["cause"]
    assert ["layout.tp"] in rule["fix"]
    assert all(key in recipe_fields() for fix in rule["fix"] for key in fix)
    assert "symptom" in meshwright("explain", "heads.attention").out


def test_a_finding_as_it_is_printed(meshwright: Any) -> None:
    lines = meshwright("check", "llama3_8b_pretrain_config", "--gpus", "8xH100", "layout.tp=3").out.splitlines()
    line = next(line for line in lines if "(heads.attention)" in line)
    assert meshwright("explain", line, "--json").json["about"] == "heads.attention"


@pytest.mark.parametrize("asked", ["speed.low-mfu", "warning speed.low-mfu steps 2–40", "MFU is 3% (speed.low-mfu)"])
def test_a_finding_of_the_doctor(meshwright: Any, asked: str) -> None:
    found = meshwright("explain", asked, "--json").json
    assert (found["kind"], found["about"]) == ("finding", "speed.low-mfu")
    assert "slower than its estimate" in found["meaning"]
    assert "slower than its estimate" in meshwright("explain", asked).out


def test_words_that_a_field_takes(meshwright: Any) -> None:
    assert meshwright("explain", "layout.recompute", "--json").json["field"]["choices"] == ["none", "selective", "full"]
    assert "Choices" in meshwright("explain", "layout.recompute").out


def test_a_rule_of_another_framework(meshwright: Any) -> None:
    assert meshwright("explain", "automodel.no-recipe", "--json").json["kind"] == "rule"


def test_an_unknown_name_is_reported_with_the_closest(meshwright: Any) -> None:
    answer = meshwright("explain", "layout.tpp", "--json")
    assert answer.code == 2
    assert "layout.tp" in answer.json["error"]["fix"]
    assert meshwright("explain", "", "--json").code == 2


def test_every_rule_and_every_field_can_be_explained() -> None:
    from meshwright import api

    for name in (*rules.RULES, *recipe_fields()):
        assert api.explain(name).about == name
