"""Looking for a recipe by words, and the way to the throughput recipes."""

from __future__ import annotations

from typing import Any


def test_what_only_the_benchmarks_have_is_pointed_at(meshwright: Any) -> None:
    answer = meshwright("recipes", "gb200")
    assert answer.code == 1
    assert "add --benchmark" in answer.err
    assert meshwright("recipes", "gb200", "--benchmark").code == 0
    silent = meshwright("recipes", "gb200", "--json")
    assert silent.json["recipes"] == []
    assert meshwright("recipes", "no such thing zzz").err == ""


def test_words_of_a_query_speak_of_gpus_and_kinds(meshwright: Any) -> None:
    found = meshwright("recipes", "qwen3 moe 8xH100", "--json").json["recipes"]
    assert found
    assert {(r["gpus"], r["gpu"]) for r in found} == {(8, "H100")}
    assert all("qwen3" in r["name"] for r in found)
