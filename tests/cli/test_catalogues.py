"""Listing and printing: recipes, models, GPUs, rules, help and completion."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

COMMANDS = ("recommend", "recipes", "recipe", "check", "models", "gpus", "rules")


def test_recipes_lists_every_published_name(meshwright: Any) -> None:
    published = (Path(__file__).parents[1] / "recipes" / "published_names.txt").read_text().split()
    assert len(published) == 201
    listed = {r["name"] for r in meshwright("recipes", "--json").json["recipes"]}
    assert set(published) <= listed


def test_recipes_by_words_goal_family_and_fuzzy(meshwright: Any) -> None:
    found = meshwright("recipes", "llama3", "--goal", "sft", "--json").json["recipes"]
    assert {r["name"] for r in found} >= {"llama3_8b_sft_config", "llama3_70b_sft_config"}
    assert {r["goal"] for r in found} == {"sft"}
    assert meshwright("recipes", "lama3 70b", "--json").json["recipes"]
    benchmarks = meshwright("recipes", "--benchmark", "--json").json["recipes"]
    assert all(r["benchmark"] for r in benchmarks)
    assert {r["gpu"] for r in benchmarks} >= {"H100", "B200", "B300", "GB200", "GB300", "R100"}


@pytest.mark.parametrize("format", ["toml", "yaml", "json", "python"])
def test_a_printed_recipe_can_be_read_back(meshwright: Any, tmp_path: Path, format: str) -> None:
    text = meshwright("recipe", "llama3_70b_sft_config", "layout.tp=8", "--format", format).out
    if format == "python":
        assert "tp=8" in text
        return
    path = tmp_path / f"mine.{format}"
    path.write_text(text)
    again = meshwright("recipe", str(path), "--json").json["recipe"]
    assert again == meshwright("recipe", "llama3_70b_sft_config", "layout.tp=8", "--json").json["recipe"]


def test_models_gpus_rules(meshwright: Any) -> None:
    models = {m["name"]: m for m in meshwright("models", "--json").json["models"]}
    assert models["llama3_8b"]["parameters"]["total"] == 8_030_261_248
    assert {m["name"] for m in meshwright("models", "qwen3 vl", "--json").json["models"]} == {
        *("qwen3_vl_2b", "qwen3_vl_4b", "qwen3_vl_8b", "qwen3_vl_32b", "qwen3_vl_30b_a3b", "qwen3_vl_235b_a22b")
    }
    assert [m["name"] for m in meshwright("models", "Llama 3.1 405B", "--json").json["models"]] == ["llama31_405b"]
    gpus = {g["name"]: g for g in meshwright("gpus", "--json").json["gpus"]}
    assert gpus["H100"]["peak_tflops_dense"]["bf16"] == pytest.approx(989, abs=1)
    rules = meshwright("rules", "--json").json["rules"]
    assert len(rules) >= 80
    assert all(r["symptom"] and r["cause"] for r in rules)
    assert len({r["pitfall"] for r in meshwright("rules", "--pitfalls", "--json").json["rules"]}) >= 11


@pytest.mark.parametrize(
    "words",
    [
        ("recipes",),
        ("models",),
        ("gpus",),
        ("rules",),
        ("recipe", "llama3_8b_sft_config"),
        ("check", "llama3_8b_sft_config"),
    ],
)
def test_text_output(meshwright: Any, words: tuple[str, ...]) -> None:
    answer = meshwright(*words)
    assert answer.code == 0
    assert len(answer.out.splitlines()) > 3


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples(meshwright: Any, command: str) -> None:
    answer = meshwright(command, "--help")
    assert answer.code == 0
    assert "Examples:" in answer.out
    assert "--json" in answer.out


def test_shell_completion_offers_names() -> None:
    env = os.environ | {
        "_MESHWRIGHT_COMPLETE": "bash_complete",
        "COMP_WORDS": "meshwright recommend llama3_",
        "COMP_CWORD": "2",
    }
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv[0]='meshwright'; from meshwright.cli import main; main()"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "plain,llama3_8b" in done.stdout.split()


def test_nothing_heavy_is_imported() -> None:
    code = "import sys, meshwright.api; print([m for m in ('torch', 'transformers', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    light = subprocess.run(
        [sys.executable, "-c", "import meshwright, sys; print('numpy' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert light.stdout.strip() == "False"
