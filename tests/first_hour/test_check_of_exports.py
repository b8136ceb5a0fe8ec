"""`check` of the files that `export` wrote: each is recognised as its framework's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.choices import FRAMEWORKS
from meshwright.recipes.capabilities import FRAMEWORK_GOALS

GOALS = ("pretrain", "sft", "peft")
RECIPES = {goal: f"llama3_8b_{goal}_config" for goal in GOALS}


@pytest.mark.parametrize("to", FRAMEWORKS)
def test_every_file_of_an_export_is_recognised(meshwright: Any, to: str) -> None:
    recipe = RECIPES[FRAMEWORK_GOALS.get(to, GOALS)[-1]]
    words = ("data.dataset=org/rows", "data.tokenizer=org/tokenizer", "checkpoint.pretrained=org/model")
    wrote = meshwright("export", recipe, "--to", to, "--gpus", "8xH100", "--out", "out", *words)
    assert wrote.code == 0, wrote
    files = [path for path in sorted(Path("out").iterdir()) if path.name != "README.md"]
    assert files
    for path in files:
        found = meshwright("check", str(path), "--gpus", "8xH100")
        assert f" with {to}: " in found.out, (path.name, found)
