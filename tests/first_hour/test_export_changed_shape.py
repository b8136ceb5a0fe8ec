"""A recipe with another architecture: every export writes the changed size, or says that the program builds it."""

from __future__ import annotations

import pytest

from meshwright import frameworks, recipes
from meshwright.clusters import cluster
from meshwright.errors import InputError
from meshwright.frameworks.export_recipe import write
from meshwright.recipes import overrides
from meshwright.recipes.case import model_of

CHANGES = {
    "qwen3_8b_pretrain_config": "architecture.layers=40",
    "qwen3_30b_a3b_pretrain_config": "architecture.hidden=3072",
    "llama3_8b_pretrain_config": "architecture.layers=40",
    "deepseek_v2_lite_pretrain_config": "architecture.layers=30",
}
FRAMEWORKS = ("torchtitan", "megatron-lm", "megatron-bridge", "automodel", "deepspeed", "accelerate")
ONE = ("layout.ep=1", "layout.tp=1", "layout.sp=false")


@pytest.mark.parametrize("to", FRAMEWORKS)
@pytest.mark.parametrize("name", CHANGES)
def test_the_changed_size_is_in_the_files(name: str, to: str) -> None:
    change = CHANGES[name]
    recipe = overrides.apply(recipes.load(name), (change, *(ONE if to == "accelerate" else ())))
    if to == "torchtitan" and name.startswith("deepseek"):
        with pytest.raises(InputError, match="torchtitan has no model of this shape"):
            write(frameworks.framework(to), recipe, model_of(recipe), cluster("8x8xH100"))
        return
    found = write(frameworks.framework(to), recipe, model_of(recipe), cluster("8x8xH100"))
    field, size = change.split(".")[1].split("=")
    text = "\n".join(found.files.values())
    assert any(f"{sign}{size}" in text for sign in ("=", " ")), text
    if to in ("deepspeed", "accelerate"):
        assert any(f"{field}={size}: your program builds it" in note for note in found.notes), found.notes
