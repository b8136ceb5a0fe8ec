"""SARIF: the parts of the 2.1.0 schema that code scanning needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.first_hour.test_check_in_ci import ALL, TITAN, write_ci

LEVELS = ("none", "note", "warning", "error")


def validate(log: dict[str, Any]) -> dict[str, Any]:
    """Return the one run of a SARIF log; raise AssertionError where the schema's essential parts are broken."""
    assert log["version"] == "2.1.0"
    assert log["$schema"].endswith("sarif-2.1.0.json")
    (run,) = log["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"] == "meshwright"
    ids = [rule["id"] for rule in driver["rules"]]
    assert len(ids) == len(set(ids))
    for rule in driver["rules"]:
        assert rule["shortDescription"]["text"]
        assert rule["fullDescription"]["text"]
        assert rule["help"]["text"]
        assert rule["defaultConfiguration"]["level"] in LEVELS
    for result in run["results"]:
        assert ids[result["ruleIndex"]] == result["ruleId"]
        assert result["level"] in LEVELS
        assert result["message"]["text"]
        for location in result["locations"]:
            validate_location(location)
        for one in result.get("suppressions", ()):
            assert one["kind"] in ("inSource", "external")
        assert all(isinstance(value, str) for value in result["partialFingerprints"].values())
    for invocation in run["invocations"]:
        assert isinstance(invocation["executionSuccessful"], bool)
        for note in invocation["toolExecutionNotifications"]:
            assert note["level"] in LEVELS
            assert note["message"]["text"]
    return run


def validate_location(location: dict[str, Any]) -> None:
    physical = location["physicalLocation"]
    artifact = physical["artifactLocation"]
    assert " " not in artifact["uri"]
    assert "\\" not in artifact["uri"]
    assert artifact["uri"].startswith("file://") or artifact["uriBaseId"] == "%SRCROOT%"
    if "region" in physical:
        assert physical["region"]["startLine"] >= 1


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_findings_have_rules_levels_and_lines(meshwright: Any) -> None:
    write_ci()
    answer = meshwright("check", "ci", "--format", "sarif")
    assert answer.code == 1
    run = validate(json.loads(answer.out))
    found = {
        (one["ruleId"], one["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]) for one in run["results"]
    }
    assert ("heads.attention", "ci/nested/titan.toml") in found
    lines = [one["locations"][0]["physicalLocation"].get("region") for one in run["results"]]
    assert {"startLine": 6} in lines


def test_accepted_findings_are_suppressed_results(meshwright: Any) -> None:
    write_ci(beside=f"  {ALL} measured")
    run = validate(json.loads(meshwright("check", "ci/nested/titan.toml", "--format", "sarif").out))
    kinds = {one["suppressions"][0]["kind"] for one in run["results"] if "suppressions" in one}
    assert kinds == {"inSource"}
    assert "measured" in {s["justification"] for one in run["results"] for s in one.get("suppressions", ())}


def test_an_unreadable_file_is_a_notification_and_exit_code_2(meshwright: Any) -> None:
    Path("broken file.toml").write_text("[model\n")
    answer = meshwright("check", "broken file.toml", "--format", "sarif")
    run = validate(json.loads(answer.out))
    (invocation,) = run["invocations"]
    assert (answer.code, invocation["executionSuccessful"], invocation["exitCode"]) == (2, False, 2)
    (note,) = invocation["toolExecutionNotifications"]
    assert note["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "broken%20file.toml"


def test_a_file_outside_the_working_folder_has_an_absolute_uri(
    meshwright: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("titan.toml").write_text(TITAN.format(above="", beside=""))
    (folder / "here").mkdir()
    monkeypatch.chdir(folder / "here")
    run = validate(json.loads(meshwright("check", "../titan.toml", "--format", "sarif").out))
    assert run["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"].startswith("file:///")


def test_a_recipe_by_name_has_no_location(meshwright: Any) -> None:
    words = ("check", "llama3_8b_pretrain_config", "--gpus", "8xH100", "layout.tp=3", "--format", "sarif")
    answer = meshwright(*words)
    run = validate(json.loads(answer.out))
    assert answer.code == 1
    assert run["results"]
    assert all(one["locations"] == [] for one in run["results"])
    assert meshwright(*words, "--json").code == 2  # two formats
